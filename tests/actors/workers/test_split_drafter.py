"""A split drafter that the device drives, beside its target: two threads here, that speak as processes do."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from devices import watch_launches
from manta.actors.targets.loading.load_plan import LoadPlan, plan_load
from manta.actors.targets.loading.rank_loader import Checkpoints, start_runner
from manta.actors.targets.model.tensor_parallel import SingleRank
from manta.actors.workers.drafter import drafter_client as drafter_link
from manta.actors.workers.drafter.drafter_protocol import Hello
from manta.actors.workers.drafter.drafter_server import DrafterServer
from manta.actors.workers.drafter.drafter_session import DrafterSession, LoadedDrafter
from manta.actors.workers.drafter.gpu_drafter_session import GpuDrafterSession
from manta.actors.workers.drafter.remote_drafter import DrafterOfOtherDevice, SplitRunner
from manta.actors.workers.shm.endpoint import SpinWaiter
from manta.cluster.step.scheduler_output import SchedulerOutput, StepResult, Trim
from manta.drafter.compute.backend import Backend
from manta.drafter.step.inputs.proposals import Proposals
from steps import GREEDY, Steps, open_runner, settings
from tiny import make_tiny_drafter


class Listener(GpuDrafterSession):
    """A seat; its drafts are kept in `said`."""

    said: list[torch.Tensor]

    def draft(self, plan: SchedulerOutput) -> tuple[torch.Tensor, torch.Tensor]:
        drafts, margins = super().draft(plan)
        self.said.append(drafts.clone())
        return drafts, margins


class Pair:
    """Target and drafter, loaded as their workers load them; they speak over a real link."""

    def __init__(self, target: Path, spec: dict[str, object], **small: object) -> None:
        spec = {**spec, "placement": "split"}
        config = settings(target, **{"attention_backend": "triton", **small, "speculative_config": spec})
        plan = plan_load(config)
        drafter = LoadedDrafter(plan)
        self.drafts: list[torch.Tensor] = []

        def seat(hello: Hello) -> DrafterSession:
            made = drafter.seat(plan, hello.num_pages)
            if isinstance(made, GpuDrafterSession):
                made.__class__, made.said = Listener, self.drafts
            return made

        self.server = DrafterServer(seat)
        remotes: list[DrafterOfOtherDevice] = []

        def remote(plan: LoadPlan, backend: Backend) -> DrafterOfOtherDevice:
            remotes.append(DrafterOfOtherDevice(plan, backend, SingleRank()))
            return remotes[-1]

        runner, self.info = start_runner(plan, Checkpoints(), SingleRank(), remote_drafts=remote)
        self.remote, self.runner = remotes[-1], SplitRunner(runner, remotes[-1], plan)
        self._thread = threading.Thread(target=self.server.serve, args=[0.1])
        self.remote.connect(self.server.address, "target", self.info, SpinWaiter(0.0))
        self._thread.start()
        self.remote.wait_for_seat()

    def execute(self, plan: SchedulerOutput) -> StepResult:
        self.runner.submit(plan)
        result = self.runner.collect()
        self.settle()
        return result

    def settle(self) -> None:
        """Until the drafter has taken in what it was told."""
        link = self.remote.link
        assert link is not None

        def done() -> bool:
            link.hear()
            return link.is_lost or not link.num_open

        deadline = time.monotonic() + 60
        while not done():
            assert time.monotonic() < deadline
            time.sleep(1e-3)

    def close(self) -> None:
        self.remote.disconnect()
        self._thread.join(timeout=10)
        assert not self._thread.is_alive(), "it ends when nobody needs it"


@pytest.fixture(autouse=True)
def one_launch_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's interpreter is not made for two threads, and slow."""
    turn = threading.Lock()

    def launch_alone(name: str, arguments: object, launch: Callable[[], object]) -> object:
        with turn:
            return launch()

    watch_launches(monkeypatch, launch_alone)
    monkeypatch.setattr(drafter_link, "LEAST_WAIT_S", 60.0)
    monkeypatch.setattr(drafter_link, "MOST_WAIT_S", 60.0)


@pytest.mark.parametrize("second", [False, True], ids=["DFlash", "DFlash2"])
def test_a_drafter_split_off_drafts_what_a_colocated_one_drafts(
    tiny_qwen3: Path, tiny_drafter: Path, tmp_path: Path, second: bool
) -> None:
    """Prompts in chunks, decoding beside a prompt, drafts that are ragged or cut, filters; nobody says where
    slots stand."""
    drafter = make_tiny_drafter(tmp_path, second=True) if second else tiny_drafter
    spec: dict[str, object] = {"model": str(drafter), "num_speculative_tokens": 3, "adaptive": False}
    small = {"max_num_seqs": 2, "max_model_len": 48}
    host, _ = open_runner(tiny_qwen3, attention_backend="torch", speculative_config=spec, **small)
    expected: list[list[int]] = []
    propose = host.drafts.propose

    def listen(*args: object) -> Proposals:
        drafts_RK = (proposals := propose(*args)).drafts_RK
        expected.append(drafts_RK[drafts_RK >= 0].tolist())
        return proposals

    host.drafts.propose = listen
    pair = Pair(tiny_qwen3, spec, **small)
    assert pair.info.halves and pair.info.max_in_flight == 2
    steps, known = Steps(2, 48), np.array([3, 6])  # tokens of each
    narrow = replace(GREEDY, temperature=1.0, top_k=4, seed=9)
    enter = [steps.admit(0, [5, 6, 7]), steps.admit(1, [9, 8, 9, 8, 9, 8], narrow)]

    def run(
        computed: np.ndarray | list[int],
        rows: list[int],
        drafts: list[int],
        *,
        late: bool = False,
        trim: Trim | None = None,
        **how: Any,
    ) -> None:
        plan = replace(steps.plan([0, 1], computed, rows, drafts, **how), trim=trim)
        theirs = host.execute(plan)
        unknown = np.where(plan.num_drafts > 0, np.int32(-1), plan.num_computed)
        mine = pair.execute(replace(plan, num_computed=unknown))
        for got, count, best in zip(mine.token_ids, mine.num_tokens, theirs.token_ids, strict=True):
            assert got[:count].tolist() == best[:count].tolist()
        assert late or mine.num_tokens.tolist() == theirs.num_tokens.tolist()
        if trim is not None:
            assert mine.num_drafts is not None and theirs.num_drafts is not None
            assert mine.num_drafts.tolist() == theirs.num_drafts.tolist() and mine.num_drafts.sum() == 2
        if any(drafts) and not late:
            assert mine.margins is not None and theirs.margins is not None
            np.testing.assert_allclose(mine.margins, theirs.margins, rtol=1e-3, atol=1e-3)
        known[:] += mine.num_tokens

    run([0, 0], [3, 4], [0, 0], admitted=enter, samples=[True, False])
    run([3, 4], [4, 2], [3, 0])
    even_K, ones_R = np.full(3, 0.5, np.float32), np.ones(2, np.float32)
    trim = Trim(even_K, even_K, 0 * ones_R, ones_R, np.empty(0, np.float32), num_rows=4)
    run(known - 1, [2, 3], [1, 2], trim=trim)
    link = pair.remote.link
    assert link is not None
    link.drafts = lambda step, shape: None  # too late: both sides judge zeros in their place
    run(known - 1, [3, 2], [2, 1], late=True)
    del link.drafts
    run(known - 1, [2, 3], [1, 2])
    alone, both, _, again = (
        drafts_N.tolist() for drafts_N in pair.drafts
    )  # a block's first row drafts nothing
    assert [alone[1:4], both[1:2] + both[3:5]] == expected[1:3]
    assert again[1:2] + again[3:5] == expected[4]
    pair.close()
