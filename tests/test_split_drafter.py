"""A split drafter that the device drives, beside its target: both are threads here, and speak through queues.

One of them runs at a time, for Triton's interpreter is not made for two.
"""

from __future__ import annotations

import queue
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from manta.actors.targets.loading.plan import plan_load
from manta.actors.targets.loading.rank import Checkpoints, start_runner
from manta.actors.targets.model.parallel import SingleRank
from manta.actors.targets.runners.device import DeviceRunner
from manta.actors.workers.device_drafter import DeviceDrafter
from manta.actors.workers.process_group import ProcessGroups
from manta.actors.workers.split_drafter import RemoteDrafts, start_drafter, tell_num_pages
from manta.cluster.plan import SchedulerOutput, StepResult
from steps import GREEDY, Steps, open_runner, settings


class Wire:
    """A group of two ranks, as one of them sees it; what is said is kept in `said`."""

    world_size = 2
    device = torch.device("cpu")

    def __init__(self, rank: int, mail: queue.Queue[torch.Tensor], turn: threading.Lock) -> None:
        self.rank, self._mail, self._turn = rank, mail, turn
        self.said: list[torch.Tensor] = []

    def broadcast(self, tensor: torch.Tensor, source: int = 0) -> torch.Tensor:
        if self.rank == source:
            self.said.append(tensor.clone())
            self._mail.put(self.said[-1])
            return tensor
        self._turn.release()
        try:
            heard = self._mail.get(timeout=60)
        finally:
            self._turn.acquire()
        assert heard.shape == tensor.shape and heard.dtype is tensor.dtype, "both know what is said"
        return tensor.copy_(heard)


class Pair:
    """Target and drafter, loaded as their workers load them."""

    def __init__(self, target: Path, spec: dict[str, object], **small: object) -> None:
        spec = {**spec, "placement": "split"}
        config = settings(target, attention_backend="triton", speculative_config=spec, **small)
        self._turn, self._pool = threading.Lock(), ThreadPoolExecutor(1)
        joint, link = queue.Queue[torch.Tensor](), queue.Queue[torch.Tensor]()
        mine, theirs = (
            ProcessGroups(*(Wire(rank, mail, self._turn) if mail else None for mail in (joint, None, link)))
            for rank in (0, 1)
        )
        self.drafts = theirs.joint.said
        drafter = self._pool.submit(self._in_turn, start_drafter, config, theirs)
        with self._turn:
            self.target, self.info = start_runner(
                plan_load(config),
                Checkpoints(),
                SingleRank(),
                remote_drafts=lambda plan, backend: RemoteDrafts(plan, backend, mine),
            )
            tell_num_pages(self.info.num_pages, mine)
        self.drafter = drafter.result(timeout=60)

    def execute(self, plan: SchedulerOutput) -> StepResult:
        step = self._pool.submit(self._in_turn, self._draft, plan)
        with self._turn:
            result = self.target.execute(plan)
        step.result(timeout=60)
        return result

    def close(self) -> None:
        self._pool.shutdown()

    def _draft(self, plan: SchedulerOutput) -> None:
        self.drafter.submit(plan)
        assert self.drafter.is_ready()
        self.drafter.collect()

    def _in_turn(self, work, *args):
        with self._turn:
            return work(*args)


def test_a_drafter_split_off_drafts_what_a_colocated_one_drafts(tiny_qwen3: Path, tiny_drafter: Path) -> None:
    """Prompts in chunks, decoding beside a prompt, ragged drafts, filters; nobody says where slots stand."""
    spec: dict[str, object] = {"model": str(tiny_drafter), "num_speculative_tokens": 3, "adaptive": False}
    small = {"max_num_seqs": 2, "max_model_len": 48}
    host, _ = open_runner(tiny_qwen3, attention_backend="torch", speculative_config=spec, **small)
    expected: list[list[int]] = []
    propose = host.drafts.propose

    def listen(*args: object) -> torch.Tensor:
        drafts_RK = propose(*args)
        expected.append(drafts_RK[drafts_RK >= 0].tolist())
        return drafts_RK

    host.drafts.propose = listen
    pair = Pair(tiny_qwen3, spec, **small, async_scheduling=True)
    assert isinstance(pair.target, DeviceRunner) and isinstance(pair.drafter, DeviceDrafter)
    assert pair.info.max_in_flight == pair.drafter.max_in_flight == 2
    steps, known = Steps(2, 48), np.array([3, 6])  # tokens of each
    narrow = replace(GREEDY, temperature=1.0, top_k=4, seed=9)
    enter = [steps.admit(0, [5, 6, 7]), steps.admit(1, [9, 8, 9, 8, 9, 8], narrow)]

    def run(computed: np.ndarray | list[int], rows: list[int], drafts: list[int], **how: Any) -> None:
        plan = steps.plan([0, 1], computed, rows, drafts, **how)
        theirs = host.execute(plan)
        unknown = np.where(plan.num_drafts > 0, np.int32(-1), plan.num_computed)
        mine = pair.execute(replace(plan, num_computed=unknown))
        assert mine.token_ids.tolist() == theirs.token_ids.tolist()
        known[:] += mine.num_tokens

    run([0, 0], [3, 4], [0, 0], admitted=enter, samples=[True, False])
    run([3, 4], [4, 2], [3, 0])
    run(known - 1, [2, 3], [1, 2])
    alone, both = (drafts_N.tolist() for drafts_N in pair.drafts)  # a block's first row drafts nothing
    assert [alone[1:4], both[1:2] + both[3:5]] == expected[1:]
    pair.close()
