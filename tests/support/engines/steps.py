"""Plans made by hand for tests below the scheduler, over scattered pages, for one runner."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import numpy as np
import pytest
from manta.actors.targets.loading import warmup
from manta.actors.targets.loading.rank_loader import load_runner
from manta.actors.targets.runners.cpu_runner import CpuModelRunner
from manta.cluster.config import EngineConfig
from manta.cluster.step.executor import ExecutorInfo
from manta.cluster.step.scheduler_output import AdmittedRequest, SchedulerOutput, SlotSampling, StateEntry

GREEDY = SlotSampling(0.0, 0, 1.0, 0.0, 0, 0, ())


@contextmanager
def short_warm_up() -> Iterator[None]:
    """Load runners without warm-up.

    Its dummy steps take the interpreter longer than the steps of a test. They run on a GPU, in the whole
    grid, and in tests that load a runner otherwise.
    """
    with pytest.MonkeyPatch.context() as patch:
        if os.environ.get("MANTA_TEST_DEVICE") != "cuda" and os.environ.get("MANTA_GRID") != "whole":
            patch.setattr(warmup, "_sampling_variants", lambda *_: [])
        yield


def settings(target: Path, drafter: Path | None = None, **changes: object) -> EngineConfig:
    """A small config in fp32, on one thread, with all drafts in every step."""
    spec = {"speculative_config": {"model": str(drafter), "adaptive": False}} if drafter else {}
    small = {"max_num_seqs": 4, "max_model_len": 128, "num_threads": 1}
    fixed = {"model": str(target), "dtype": "float32", "skip_tokenizer_init": True}
    return EngineConfig.from_dict({**fixed, **small, **spec, **changes})


def open_runner(
    target: Path, drafter: Path | None = None, **changes: object
) -> tuple[CpuModelRunner, ExecutorInfo]:
    runner, info = load_runner(settings(target, drafter, **changes))
    return cast(CpuModelRunner, runner), info  # on a GPU, a runner with the same attributes


@dataclass
class Steps:
    """Plans one after the other; slot s has pages s, s + stride, s + 2 stride, ... (never consecutive).

    Every page group has such pages for all slots, after those of the groups before it.
    """

    num_slots: int
    max_model_len: int = 128
    page_size: int = 16
    num_groups: int = 1
    _count: int = field(default=0, init=False)

    def admit(self, slot: int, tokens: Sequence[int], sampling: SlotSampling = GREEDY) -> AdmittedRequest:
        """Add the state with its slot's number, if there are states."""
        state = StateEntry(slot, None, 0)
        return AdmittedRequest(slot, f"r{slot}", np.array(tokens, np.int32), sampling, state)

    def plan(
        self,
        slots: Sequence[int],
        computed: Sequence[int],
        rows: Sequence[int],
        drafts: Sequence[int] | None = None,
        *,
        admitted: Sequence[AdmittedRequest] = (),
        samples: Sequence[bool] | None = None,
    ) -> SchedulerOutput:
        pages = -(-self.max_model_len // self.page_size)
        entries = [
            (group, request.slot, i, request.slot + (i + group * pages) * self.num_slots)
            for group in range(self.num_groups)
            for request in admitted
            for i in range(pages)
        ]
        groups, owners, indices, ids = np.array(entries, np.int32).reshape(-1, 4).T.copy()
        self._count += 1
        return SchedulerOutput(
            step=self._count,
            admitted=tuple(admitted),
            page_groups=groups,
            page_slots=owners,
            page_indices=indices,
            page_ids=ids,
            slots=np.array(slots, np.int32),
            num_computed=np.array(computed, np.int32),
            num_rows=np.array(rows, np.int32),
            num_drafts=np.array([0] * len(slots) if drafts is None else drafts, np.int32),
            samples=np.array([True] * len(slots) if samples is None else samples),
        )
