"""A target and a drafter of its own process, both driven by threads of this one."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from manta.actors.targets.loading.rank_loader import Checkpoints, start_runner
from manta.actors.targets.loading.resolved_config import ResolvedConfig, resolve_config
from manta.actors.targets.model.tensor_parallel import SingleRank
from manta.actors.workers.drafter.drafter_protocol import Hello
from manta.actors.workers.drafter.drafter_server import DrafterServer
from manta.actors.workers.drafter.drafter_session import DrafterSession, LoadedDrafter
from manta.actors.workers.drafter.gpu_drafter_session import GpuDrafterSession
from manta.actors.workers.drafter.remote_drafter import RemoteDrafterSource, SplitRunner
from manta.actors.workers.shm.endpoint import SpinWaiter
from manta.cluster.step.scheduler_output import SchedulerOutput, StepResult
from manta.drafter.compute.backend import Backend

from support.engines.steps import settings, short_warm_up


class Listener(GpuDrafterSession):
    """A drafter session that records its drafts in `said`."""

    said: list[torch.Tensor]

    def draft(self, plan: SchedulerOutput, *, has_grammars: bool = False) -> Sequence[torch.Tensor]:
        drafts, *others = super().draft(plan, has_grammars=has_grammars)
        self.said.append(drafts.clone())
        return drafts, *others


class Pair:
    """Target and drafter, loaded as their workers load them; they communicate over a real link."""

    def __init__(self, target: Path, spec: dict[str, object], **small: object) -> None:
        spec = {**spec, "placement": "split"}
        config = settings(target, **{"attention_backend": "triton", **small, "speculative_config": spec})
        resolved = resolve_config(config)
        drafter = LoadedDrafter(resolved)
        self.drafts: list[torch.Tensor] = []

        def seat(hello: Hello) -> DrafterSession:
            made = drafter.make_session(resolved, hello.num_pages)
            if isinstance(made, GpuDrafterSession):
                made.__class__ = Listener
                assert isinstance(made, Listener)
                made.said = self.drafts
            return made

        self.server = DrafterServer(seat)
        remotes: list[RemoteDrafterSource] = []

        def remote(resolved: ResolvedConfig, backend: Backend) -> RemoteDrafterSource:
            remotes.append(RemoteDrafterSource(resolved, backend, SingleRank()))
            return remotes[-1]

        with short_warm_up():
            runner, self.info = start_runner(resolved, Checkpoints(), SingleRank(), remote_drafts=remote)
        self.remote, self.runner = remotes[-1], SplitRunner(runner, remotes[-1], resolved)
        self._thread = threading.Thread(target=self.server.serve, args=[0.1], daemon=True)
        self.remote.connect(self.server.address, "target", self.info, SpinWaiter(0.0))
        self._thread.start()
        self.remote.wait_for_session()

    def execute(self, plan: SchedulerOutput) -> StepResult:
        self.runner.submit(plan)
        result = self.runner.collect()
        self.settle()
        return result

    def settle(self) -> None:
        """Wait until the drafter has processed what it was sent."""
        link = self.remote.link
        assert link is not None

        def done() -> bool:
            link.receive()
            return link.is_lost or not link.num_open

        deadline = time.monotonic() + 300
        while not done():
            assert time.monotonic() < deadline
            time.sleep(1e-3)

    def close(self) -> None:
        self.remote.disconnect()
        self._thread.join(timeout=600)
        assert not self._thread.is_alive(), "it ends when nobody needs it"
