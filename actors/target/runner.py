"""One decoding step on one target rank: draft, verify, accept, inject.

Decides nothing (the plan does) and keeps nothing but what it is made of: model, pages, request states, and a
source of drafts. Ranks run the same steps on the same plans; what they choose is rank 0's, by broadcast.
Called by `executor.InProcessExecutor` and `target/worker.py`.

    plan ─▶ apply ─▶ drafts [R, K] ─▶ rows [N] ─▶ target ─┬─▶ hidden [X] ─▶ equal-noise choice ─▶ accept
                         ▲                                └─▶ taps [N, m] ─▶ inject ─┐
                         └─────────────── drafter's context K/V, in pages ◀──────────┘

Legend: N rows, X sampled rows, R requests, K most drafts, W = K + 1, m taps, H hidden.
"""

from __future__ import annotations

import time
from collections import deque
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from ...cluster.plan import SchedulerOutput, StepResult, StepTimings
from ...drafter.kv_cache import PagedKVCache
from ...drafter.propose import Proposer
from ...drafter.sampling import sample_rows
from ...drafter.states import RequestStates, StepRows
from ...drafter.verification import accept
from .decoder import Decoder
from .parallel import Communicator


class Runner(Protocol):
    """A loaded rank: `StepRunner`, or `device_runner.DeviceRunner`. Steps run in the order of submission."""

    @property
    def model(self) -> Decoder: ...

    @property
    def cache(self) -> PagedKVCache: ...

    def submit(self, plan: SchedulerOutput) -> None:
        """Start a step."""
        ...

    def is_ready(self) -> bool:
        """Whether the oldest step submitted has ended."""
        ...

    def collect(self) -> StepResult:
        """The oldest step's result; waits for it."""
        ...

    def execute(self, plan: SchedulerOutput) -> StepResult:
        """Run one step to its end; nothing else may be under way."""
        ...

    def prepare(self) -> None:
        """Make ready for requests, once every kind of step has run."""
        ...


class DraftSource(Protocol):
    """Where drafts come from, and where the target's features go; on every rank."""

    def propose(self, plan: SchedulerOutput, states: RequestStates) -> Tensor:
        """Drafts [R, K] int64, the same on all ranks; -1 where there is none. K = 0 if nobody drafts."""
        ...

    def inject(self, taps_NmH: Tensor, rows: StepRows, token_ids_RW: Tensor, num_tokens_R: Tensor) -> None:
        """Take in what the target computed and which tokens stood; called in every step."""
        ...


class LocalDrafts:
    """A drafter beside the target. Every rank has it whole; embedding and head are the target's, split."""

    def __init__(self, proposer: Proposer, communicator: Communicator) -> None:
        self._proposer = proposer
        self._communicator = communicator

    def propose(self, plan: SchedulerOutput, states: RequestStates) -> Tensor:
        drafts_RK = self._proposer.propose(plan, states)
        return self._communicator.broadcast(drafts_RK) if drafts_RK.shape[1] else drafts_RK

    def inject(self, taps_NmH: Tensor, rows: StepRows, token_ids_RW: Tensor, num_tokens_R: Tensor) -> None:
        self._proposer.inject(taps_NmH, rows)


class StepRunner:
    """A loaded rank.

    Args:
        states: this rank's mirror of the running requests.
        drafts: None decodes plainly, and nothing is tapped.
    """

    def __init__(
        self,
        model: Decoder,
        cache: PagedKVCache,
        states: RequestStates,
        drafts: DraftSource | None,
        communicator: Communicator,
    ) -> None:
        self.model = model
        self.cache = cache
        self.states = states
        self.drafts = drafts
        self._communicator = communicator
        self._results: deque[StepResult] = deque()

    def prepare(self) -> None:
        """Nothing is left to do."""

    def submit(self, plan: SchedulerOutput) -> None:
        """Run one step; its result waits to be collected."""
        self._results.append(self.execute(plan))

    def is_ready(self) -> bool:
        """Whether `collect` would not wait: never, once a step was submitted."""
        return bool(self._results)

    def collect(self) -> StepResult:
        """The result of the oldest step submitted."""
        return self._results.popleft()

    @torch.inference_mode()
    def execute(self, plan: SchedulerOutput) -> StepResult:
        """Run one step to its end."""
        clock = Clock(self.model.device)
        self.states.apply(plan)
        drafts_RK = self._propose(plan)
        clock.mark()
        rows = self.states.rows(plan)
        hidden_NH, taps_NmH = self.model.forward(rows.token_ids_N, rows, self.cache)
        all_sampled = len(rows.sampled_X) == len(hidden_NH)
        hidden_XH = hidden_NH if all_sampled else hidden_NH.index_select(0, rows.sampled_X)
        clock.mark()
        token_ids_RW, num_tokens_R = self._choose(hidden_XH, rows, drafts_RK)
        self.states.append(plan, token_ids_RW, num_tokens_R)
        clock.mark()
        if self.drafts is not None:
            assert taps_NmH is not None, "a target with a drafter taps"
            self.drafts.inject(taps_NmH, rows, token_ids_RW, num_tokens_R)
        clock.mark()
        return StepResult(
            plan.step,
            token_ids=token_ids_RW.cpu().numpy().astype(np.int32),
            num_tokens=num_tokens_R.cpu().numpy().astype(np.int32),
            timings=StepTimings(*clock.seconds()),
        )

    def _propose(self, plan: SchedulerOutput) -> Tensor:
        """Ask for drafts and put them behind the known tokens."""
        if self.drafts is None:
            assert not plan.num_drafts.any(), "drafts were planned, but there is no drafter"
            return torch.empty(plan.num_requests, 0, dtype=torch.int64, device=self.model.device)
        drafts_RK = self.drafts.propose(plan, self.states)
        self.states.place_drafts(plan, drafts_RK)
        return drafts_RK

    def _choose(self, hidden_XH: Tensor, rows: StepRows, drafts_RK: Tensor) -> tuple[Tensor, Tensor]:
        """Each sampled row's token, and how far the drafts agree with them."""
        if len(hidden_XH) == 0:
            return accept(rows.sampled_X, rows.counts_R, drafts_RK)
        sampled_X = sample_rows(self.model.logits(hidden_XH), rows.sampling)
        return accept(self._communicator.broadcast(sampled_X), rows.counts_R, drafts_RK)


class Clock:
    """Times between marks; on a GPU by events, which are read once the results are on the host."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._times: list[float] = []
        self._events: list[torch.cuda.Event] = []
        self.mark()

    def mark(self) -> None:
        if not self._on_gpu:
            self._times.append(time.perf_counter())
            return
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self._events.append(event)

    def seconds(self) -> list[float]:
        """Between consecutive marks."""
        if not self._on_gpu:
            return [after - before for before, after in zip(self._times, self._times[1:], strict=False)]
        self._events[-1].synchronize()
        pairs = zip(self._events, self._events[1:], strict=False)
        return [before.elapsed_time(after) / 1000 for before, after in pairs]
