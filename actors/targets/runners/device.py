"""Steps on a GPU: submitted without waiting, decoding steps as CUDA graphs; outcomes are collected later.

The twin of `host.py` (the CPU's, and a split drafter's), of the same meaning. A step in which everybody
decodes is a replay: its integers go into the graph's buffer, its outcome comes back on a side stream. A step
with prompts in it is launched kernel by kernel. Neither waits for the step before, nor for the host.

    submit(plan): admissions, pages ─▶ [integers ─▶ draft ─▶ verify ─▶ sample ─▶ inject] ─▶ outcome ─▶ host
    collect():    wait for that copy

Legend: R requests, D those that draft, W = 1 + most drafts.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ....cluster.plan import SchedulerOutput, StepResult, StepTimings
from ....drafter.compute.kv_cache import PagedKVCache
from ....drafter.step.device.rows import StepRequests, pack
from ..model.decoder import Decoder
from .graphs import GraphKey, StepGraphs
from .iteration import DeviceModels, Iteration
from .runner import Clock


@dataclass(frozen=True, slots=True)
class _Pending:
    """A step under way: where its outcome will be, and how to know."""

    plan: SchedulerOutput
    outcome: Tensor
    copied: torch.cuda.Event | None
    clock: Clock


class DeviceRunner:
    """A loaded rank.

    Args:
        models: what it is made of.
        num_drafts: most drafts of a request.
        graph_sizes: numbers of requests for which decoding steps are captured; none on a CPU, where tests
            run the same kernels in Triton's interpreter.
    """

    def __init__(self, models: DeviceModels, num_drafts: int, graph_sizes: Sequence[int] = ()) -> None:
        self.models = models
        self._num_drafts = num_drafts
        self._device = models.target.device
        self._pending: deque[_Pending] = deque()
        self._graphs = StepGraphs(models, num_drafts, graph_sizes)
        self._copies = torch.cuda.Stream(self._device) if self._device.type == "cuda" else None

    @property
    def model(self) -> Decoder:
        return self.models.target

    @property
    def cache(self) -> PagedKVCache:
        return self.models.cache

    @torch.inference_mode()
    def prepare(self) -> None:
        """Capture the graphs."""
        self._graphs.capture()

    @torch.inference_mode()
    def submit(self, plan: SchedulerOutput) -> None:
        """Launch a step."""
        clock = Clock(self._device)
        self.models.states.apply(plan)
        key = self._graph_key(plan)
        outcome = self._run(plan, clock) if key is None else self._graphs.replay(key, plan, clock)
        self._pending.append(self._bring_home(plan, outcome, clock))

    def is_ready(self) -> bool:
        """Whether `collect` would not wait."""
        copied = self._pending[0].copied
        return copied is None or copied.query()

    def collect(self) -> StepResult:
        """The outcome of the oldest step."""
        step = self._pending.popleft()
        if step.copied is not None:
            step.copied.synchronize()
        plan, width = step.plan, 1 + int(step.plan.num_drafts.max(initial=0))
        outcome = step.outcome.numpy()[: plan.num_requests]
        return StepResult(
            plan.step,
            token_ids=outcome[:, :width].copy(),
            num_tokens=outcome[:, -1].copy(),
            timings=StepTimings(*step.clock.seconds()),
        )

    def execute(self, plan: SchedulerOutput) -> StepResult:
        """Run one step to its end."""
        self.submit(plan)
        return self.collect()

    def _graph_key(self, plan: SchedulerOutput) -> GraphKey | None:
        """The graph that this step replays, if everybody decodes and there is one."""
        decodes = bool((plan.num_rows == plan.num_drafts + 1).all() and plan.samples.all())
        if not decodes:
            return None
        drafts, filters = bool(plan.num_drafts.any()), self.models.states.filters(plan)
        return self._graphs.find(plan.num_requests, drafts, filters)

    def _run(self, plan: SchedulerOutput, clock: Clock) -> Tensor:
        """Kernel by kernel."""
        who = np.flatnonzero(plan.num_drafts)
        drafting = None
        if len(who):
            rows_D = plan.num_drafts[who] + 1
            drafting = self._requests(plan.slots[who], rows_D, plan.num_drafts[who], plan.samples[who])
        requests = self._requests(plan.slots, plan.num_rows, plan.num_drafts, plan.samples)
        counts = np.where(plan.samples, 1 + plan.num_drafts, 0)
        ends = np.cumsum(plan.num_rows)
        sampled = [np.arange(end - count, end) for end, count in zip(ends, counts, strict=True)]
        sampled_X = torch.from_numpy(np.concatenate(sampled).astype(np.int64)).to(self._device)
        step = Iteration(self.models, drafting, requests, sampled_X, self.models.states.filters(plan))
        for part in step.parts:
            part()
            clock.mark()
        return step.outcome

    def _requests(
        self, slots: np.ndarray, rows: np.ndarray, drafts: np.ndarray, samples: np.ndarray
    ) -> StepRequests:
        values = torch.from_numpy(pack(slots, rows, drafts, samples, len(slots))).to(self._device)
        return StepRequests.over(values, len(slots), int(rows.sum()), int(rows.max()), int(drafts.max()))

    def _bring_home(self, plan: SchedulerOutput, outcome: Tensor, clock: Clock) -> _Pending:
        """Copy the outcome to the host beside the next step's work."""
        if self._copies is None:
            return _Pending(plan, outcome, None, clock)
        on_host = torch.empty(outcome.shape, dtype=outcome.dtype, pin_memory=True)
        main = torch.cuda.current_stream(self._device)
        self._copies.wait_stream(main)
        with torch.cuda.stream(self._copies):
            on_host.copy_(outcome, non_blocking=True)
            copied = torch.cuda.Event()
            copied.record()
        main.wait_event(copied)  # a replay writes the outcome where the last one did
        outcome.record_stream(self._copies)
        return _Pending(plan, on_host, copied, clock)
