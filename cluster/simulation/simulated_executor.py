"""An executor that computes nothing: tokens are hashes, acceptance and cost follow given curves.

Drafts come from `simulated_drafts.py`; trims are applied, and reduce the cost. The token at (seed, position)
is a pure function, as with real workers, so a scheduler that let drafts, batches or preemptions change the
output would be caught. Part of the product for tests and capacity questions at any scale. Its steps take the
seconds of their cost on its own clock, which is virtual unless the caller passes the machine's.

Shape legend: R requests in the step, W = 1 + largest number of drafts, S slots.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ..speculation.draft_trimming import TRIM_S, drafts_to_verify
from ..step.clock import EngineClock, VirtualClock
from ..step.executor import DrafterHealth, ExecutorInfo
from ..step.scheduler_output import (
    AdmittedRequest,
    IntArray,
    SchedulerOutput,
    SlotSampling,
    StepResult,
    StepTimings,
)
from .simulated_drafts import Hashes, SimulatedDrafts, noise
from .simulated_trees import SimulatedTrees, simulate_trees

_TOKENS = 0  # stream of noise, different from those of `simulated_drafts.py`
_NO_DRAFTER = -1


@dataclass(frozen=True, slots=True)
class LinearCost:
    """Seconds of a step: a fixed time (to read the weights), or the time of its rows if that is more."""

    verify_floor_s: float = 0.0
    verify_row_s: float = 0.0
    draft_floor_s: float = 0.0
    draft_row_s: float = 0.0
    inject_row_s: float = 0.0

    def __call__(self, plan: SchedulerOutput) -> StepTimings:
        rows = int(plan.block_drafts.sum() + np.count_nonzero(plan.num_drafts))
        draft_s = max(self.draft_floor_s, rows * self.draft_row_s) if rows else 0.0
        verify_s = max(self.verify_floor_s, plan.num_batched_tokens * self.verify_row_s)
        inject_s = plan.num_batched_tokens * self.inject_row_s if plan.writes_context else 0.0
        return StepTimings(draft_s=draft_s, verify_s=verify_s, inject_s=inject_s)


class SimulatedExecutor:
    """Simulates an executor, see the module's docstring.

    Args:
        info: facts of the simulated model.
        survival: survival[i] is the probability that drafts 0..i are all accepted; 0 beyond its end.
        cost: seconds of a step's parts in sequence; called with the plan for drafting, and with the trimmed
            plan for the rest.
        hardness: hardness of a request's text, by its id: acceptance probabilities are raised to this power.
        grow_s: seconds to grow the draft tree of a request.
        clock: a virtual clock by default; with `MACHINE_CLOCK` steps take the seconds of their cost.
    """

    def __init__(
        self,
        info: ExecutorInfo,
        survival: Sequence[float] = (),
        cost: Callable[[SchedulerOutput], StepTimings] = LinearCost(),
        hardness: Callable[[str], float] = lambda request_id: 1.0,
        grow_s: float = 0.0,
        clock: EngineClock | None = None,
    ) -> None:
        self._info = info
        self._clock = VirtualClock() if clock is None else clock
        self._drafts = SimulatedDrafts(survival)
        self._hardness = hardness
        self._grow_s = grow_s
        self._cost = cost
        self._times = SimulatedStepTimes(drafts_concurrently=info.halves)
        self._seeds_S = np.zeros(0, dtype=np.uint64)
        self._hardness_S = np.zeros(0)
        self._computed_S = np.zeros(0, dtype=np.int32)
        # the generation whose drafter has the whole context of the slot's sequence
        self._drafters_S = np.zeros(0, dtype=np.int32)
        self._sampling: dict[int, SlotSampling] = {}
        self._results: deque[StepResult] = deque()
        self._drafter = DrafterHealth()
        self._closed = False

    @property
    def info(self) -> ExecutorInfo:
        return self._info

    @property
    def clock(self) -> EngineClock:
        return self._clock

    @property
    def drafter_health(self) -> DrafterHealth:
        return self._drafter

    def lose_drafter(self) -> None:
        self._drafter = replace(self._drafter, ready=False)

    def start_drafter(self) -> None:
        """Start a new drafter, which has no context of anything computed so far."""
        self._drafter = DrafterHealth(ready=True, generation=self._drafter.generation + 1)

    def submit(self, plan: SchedulerOutput) -> None:
        assert not self._closed, "the executor is closed"
        assert len(self._results) < self._info.max_in_flight, "more steps in flight than were allowed"
        self._results.append(self._run(plan))

    def collect(self) -> StepResult:
        self._clock.wait_until(self._clock() + self._times.end())
        return self._results.popleft()

    def first_positions(self, plan: SchedulerOutput) -> IntArray:
        return np.where(plan.num_computed < 0, self._computed_S[plan.slots], plan.num_computed)

    def _run(self, plan: SchedulerOutput) -> StepResult:
        """Return a step's result: each accepted draft is the token that plain decoding has at its position.

        Drafts are accepted only where the current drafter has the context of all earlier steps.
        """
        for request in plan.admitted:
            self._admit(request)
        seeds_R = self._seeds_S[plan.slots]
        begin_R = self.first_positions(plan) + plan.num_rows - plan.num_drafts
        if not self._drafter.ready:
            self._drafters_S[plan.slots] = _NO_DRAFTER
        hardness_R = self._hardness_S[plan.slots]
        block = (seeds_R, begin_R, plan.block_drafts, hardness_R)
        margins_RK, accepted_RK = self._drafts.propose(*block)
        trees, verified_R, accepted_R = None, plan.num_drafts, accepted_RK.sum(axis=1)
        if plan.tree is not None and margins_RK.size:
            log_chance_RK, uniform_RK = self._drafts.chances(*block)
            trees = simulate_trees(plan, np.exp(log_chance_RK), uniform_RK, self._grow_s)
            verified_R, accepted_R = trees.num_verified_R, trees.num_accepted_R
        elif plan.trim is not None and margins_RK.size:
            num_other_rows = plan.num_batched_tokens - plan.num_draft_tokens
            verified_R = drafts_to_verify(margins_RK, plan.num_drafts, num_other_rows, plan.trim)
        in_context_R = self._drafters_S[plan.slots] == self._drafter.generation
        accepted_R = np.where(in_context_R, np.minimum(accepted_R, verified_R), 0)
        if not plan.writes_context:
            self._drafters_S[plan.slots] = _NO_DRAFTER
        num_tokens_R = np.where(plan.samples, 1 + accepted_R, 0)
        columns_W = np.arange(1 + int(plan.num_drafts.max()), dtype=np.int32)
        positions_RW = begin_R[:, None] + columns_W
        token_ids_RW = _tokens(seeds_R[:, None], positions_RW, self._info.vocab_size)
        self._avoid_early_stops(plan.slots, positions_RW, token_ids_RW)
        token_ids_RW[columns_W >= num_tokens_R[:, None]] = -1
        self._computed_S[plan.slots] = begin_R + np.maximum(num_tokens_R - 1, 0)
        return StepResult(
            plan.step,
            token_ids_RW,
            num_tokens_R.astype(np.int32),
            self._times.begin(plan, self._costs(plan, verified_R, trees)),
            num_drafts=verified_R,
            margins=margins_RK,
            trees=None if trees is None else trees.outcome,
            tree_gain=None if trees is None else trees.gain,
        )

    def _costs(
        self, plan: SchedulerOutput, verified_R: IntArray, trees: SimulatedTrees | None
    ) -> StepTimings:
        untrimmed = self._cost(plan)
        if plan.trim is None and trees is None:
            return untrimmed
        trimmed_plan = replace(
            plan, num_rows=plan.num_rows - plan.num_drafts + verified_R, num_drafts=verified_R
        )
        trimmed, shape_s = self._cost(trimmed_plan), 0.0
        if trees is not None:
            shape_s = trees.grow_s
        elif plan.is_trimmed_by_host:
            shape_s = TRIM_S
        return replace(trimmed, draft_s=untrimmed.draft_s, verify_s=trimmed.verify_s + shape_s)

    def check_health(self) -> None:
        """Do nothing: it is always healthy."""

    def close(self) -> None:
        self._closed = True

    def _admit(self, request: AdmittedRequest) -> None:
        missing = request.slot + 1 - len(self._seeds_S)
        self._seeds_S = np.append(self._seeds_S, np.zeros(max(missing, 0), dtype=np.uint64))
        self._hardness_S = np.append(self._hardness_S, np.zeros(max(missing, 0)))
        self._computed_S = np.append(self._computed_S, np.zeros(max(missing, 0), dtype=np.int32))
        self._drafters_S = np.append(self._drafters_S, np.zeros(max(missing, 0), dtype=np.int32))
        self._drafters_S[request.slot] = self._drafter.generation
        self._hardness_S[request.slot] = self._hardness(request.request_id)
        self._seeds_S[request.slot] = request.sampling.seed % 2**64
        self._sampling[request.slot] = request.sampling

    def _avoid_early_stops(self, slots_R: IntArray, positions_RW: IntArray, token_ids_RW: IntArray) -> None:
        for row, slot in enumerate(slots_R.tolist()):
            sampling = self._sampling[slot]
            if positions_RW[row, 0] < sampling.min_length and sampling.stop_token_ids:
                early = positions_RW[row] < sampling.min_length
                token_ids_RW[row, early] = [
                    _next_allowed(token, sampling.stop_token_ids, self._info.vocab_size)
                    for token in token_ids_RW[row, early].tolist()
                ]


def simulated_tokens(sampling: SlotSampling, begin: int, count: int, vocab_size: int) -> list[int]:
    positions = np.arange(begin, begin + count, dtype=np.int32)
    tokens = _tokens(np.full(count, sampling.seed % 2**64, dtype=np.uint64), positions, vocab_size).tolist()
    return [
        _next_allowed(token, sampling.stop_token_ids, vocab_size) if position < sampling.min_length else token
        for position, token in enumerate(tokens, start=begin)
    ]


def _next_allowed(token: int, forbidden: tuple[int, ...], vocab_size: int) -> int:
    assert len(forbidden) < vocab_size, "every token is forbidden"
    while token in forbidden:
        token = (token + 1) % vocab_size
    return token


def _tokens(seeds: Hashes, positions: IntArray, vocab_size: int) -> IntArray:
    return (noise(seeds, positions, _TOKENS) % np.uint64(vocab_size)).astype(np.int32)


class SimulatedStepTimes:
    """Simulates the time of one executor; `drafts_concurrently`: drafter and target run concurrently."""

    def __init__(self, *, drafts_concurrently: bool) -> None:
        self._concurrent = drafts_concurrently
        self._target_s = self._drafter_s = 0.0  # seconds until they are idle
        self._in_flight: deque[tuple[float, IntArray]] = deque()  # end time and slots of each step

    def begin(self, plan: SchedulerOutput, costs: StepTimings) -> StepTimings:
        """Submit a step; return its times as seen by the target, where drafting is the wait for drafts."""
        is_disjoint = not any(np.isin(plan.slots, slots).any() for _, slots in self._in_flight)
        begin_s = (
            self._drafter_s if self._concurrent and is_disjoint else max(self._drafter_s, self._target_s)
        )
        self._drafter_s = begin_s + costs.draft_s
        waited_s = max(self._drafter_s - self._target_s, 0.0) if costs.draft_s else 0.0
        timings = replace(costs, draft_s=waited_s)
        self._target_s += timings.total_s
        self._in_flight.append((self._target_s, plan.slots))
        return timings

    def end(self) -> float:
        wait_s, _ = self._in_flight.popleft()
        self._target_s -= wait_s
        self._drafter_s = max(self._drafter_s - wait_s, 0.0)
        self._in_flight = deque((end_s - wait_s, slots) for end_s, slots in self._in_flight)
        return wait_s
