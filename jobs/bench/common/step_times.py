"""Times decoding steps over synthetic contexts, by part.

A context is not computed: requests are admitted as after a prefix-cache hit that covers all but the last
token, with pages full of noise. They are admitted again before every measured step, so that each step starts
at the same length and the workers know the positions, as when the scheduler runs ahead. Called by
`jobs/bench/step_cost.py`.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from ....actors.system.host_resources import free_ram_bytes
from ....actors.targets.loading.load_plan import LoadPlan
from ....actors.targets.loading.memory_budget import page_bytes
from ....actors.targets.loading.rank_loader import start_runner
from ....actors.targets.runners.runner_interface import Runner
from ....cluster.errors import ConfigError
from ....cluster.step.dummy_steps import dummy_step
from ....cluster.step.scheduler_output import SchedulerOutput
from .idle_check import Idleness, Watch
from .random_weights import PairShape, RandomModels

WARM_UP_STEPS = 3
TURN_STEPS = 5  # steps per turn; the first one (cold caches) is not counted
MEMORY_SHARE = 0.9  # of free memory for weights and pages; the rest for activations
PARTS = ("draft", "verify", "sample", "inject")


@dataclass(frozen=True, slots=True)
class StepPoint:
    batch: int
    context: int


@dataclass(frozen=True, slots=True)
class StepMedians:
    """Medians over equal steps, in seconds; `step_s` is wall time, `host_s` the rest that no part covers."""

    parts_s: dict[str, float]
    host_s: float
    step_s: float


@dataclass(frozen=True, slots=True)
class PointSteps:
    """Times at one point: steps with all drafts, steps with none, and whether the machine was idle."""

    drafting: StepMedians
    plain: StepMedians
    idleness: Idleness


class Memory:
    def __init__(self, plan: LoadPlan, shape: PairShape) -> None:
        self._page_size, self._num_drafts = plan.page_size, plan.num_speculative_tokens
        on_gpu = plan.device.type == "cuda"
        free = torch.cuda.mem_get_info(plan.device)[0] if on_gpu else free_ram_bytes()
        left = int(free * MEMORY_SHARE) - shape.num_params() * plan.dtype.itemsize
        # The synthetic requests hold every page of every group, and all pools have the same number of pages.
        pools = [group.pool for group in plan.pages.groups]
        self._most_groups = max(pools.count(pool) for pool in pools)
        self._most_pages = left // sum(page_bytes(plan))

    def pages_per_request(self, context: int) -> int:
        """Return the pages per group for the context, the last known token and its drafts."""
        return -(-(context + 1 + self._num_drafts) // self._page_size)

    def num_pages(self, point: StepPoint) -> int:
        return point.batch * self.pages_per_request(point.context) * self._most_groups

    def fits(self, point: StepPoint) -> bool:
        return self.num_pages(point) <= self._most_pages


def measure_points(
    points: Sequence[StepPoint], plan: LoadPlan, memory: Memory, steps: int
) -> dict[StepPoint, PointSteps]:
    """Measure steps with all drafts and with none at every point."""
    if not points:
        raise ConfigError(
            "model: its weights and the pages of a single point do not fit into memory. Reduce --model, "
            "--batch or --context.",
            param="model",
        )
    num_pages = max(memory.num_pages(point) for point in points)
    plan = replace(plan, config=replace(plan.config, num_pages=num_pages))
    _say(f"making weights of {plan.config.model} on {plan.device.type}")
    runner, _ = start_runner(plan, RandomModels())
    with torch.inference_mode():
        runner.cache.kv.normal_()
    found: dict[StepPoint, PointSteps] = {}
    for point in points:
        _say(f"batch {point.batch}, context {point.context}")
        admission = _admission(point, memory.pages_per_request(point.context), plan)
        watch = Watch()
        with watch.open():
            drafting, plain = _take_turns(runner, admission, plan.num_speculative_tokens, steps)
        found[point] = PointSteps(drafting, plain, watch.found)
    return found


def _take_turns(
    runner: Runner, admission: SchedulerOutput, num_drafts: int, steps: int
) -> tuple[StepMedians, StepMedians]:
    batch = len(admission.slots)
    plans = [dummy_step(*_decoding(batch, -1, drafts)) for drafts in (num_drafts, 0)]
    kinds = [_Steps(runner, admission, plan) for plan in plans]
    for kind in kinds:
        kind.run(WARM_UP_STEPS, counted=False)
    for begin in range(0, steps, TURN_STEPS):
        for kind in kinds if begin // TURN_STEPS % 2 == 0 else kinds[::-1]:
            kind.run(1, counted=False)
            kind.run(min(TURN_STEPS, steps - begin))
    drafting, plain = (kind.measured() for kind in kinds)
    return drafting, plain


class _Steps:
    def __init__(self, runner: Runner, admission: SchedulerOutput, step: SchedulerOutput) -> None:
        self._runner, self._admission, self._step = runner, admission, step
        self._parts: dict[str, list[float]] = {part: [] for part in PARTS}
        self._walls: list[float] = []

    def run(self, count: int, *, counted: bool = True) -> None:
        for _ in range(count):
            self._runner.execute(self._admission)
            begin_s = time.perf_counter()
            timings = self._runner.execute(self._step).timings
            wall_s = time.perf_counter() - begin_s
            if counted:
                self._walls.append(wall_s)
                for part, seconds in self._parts.items():
                    seconds.append(getattr(timings, f"{part}_s"))

    def measured(self) -> StepMedians:
        gaps = [wall - sum(parts) for wall, *parts in zip(self._walls, *self._parts.values(), strict=True)]
        medians = {part: statistics.median(seconds) for part, seconds in self._parts.items()}
        return StepMedians(medians, statistics.median(gaps), statistics.median(self._walls))


def _admission(point: StepPoint, pages_per_request: int, load: LoadPlan) -> SchedulerOutput:
    """Return requests with one token less than the context (the step adds it) and pages in random order."""
    random = np.random.default_rng(0)
    assert load.config.num_pages is not None, "pages were counted for the points"
    tokens = random.integers(0, load.target.vocab_size, (point.batch, point.context), dtype=np.int32)
    scattered = random.permutation(load.config.num_pages)
    return dummy_step(
        *_decoding(point.batch, point.context - 1, 0),
        prompts=list(tokens),
        num_pages=[pages_per_request] * point.batch,
        groups=load.pages.groups,
        page_order=scattered.astype(np.int32),
    )


def _decoding(batch: int, num_computed: int, num_drafts: int) -> tuple[list[int], list[int], list[int]]:
    """Return computed tokens (-1: the workers know), rows and drafts of `batch` equal requests."""
    return [num_computed] * batch, [num_drafts + 1] * batch, [num_drafts] * batch


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
