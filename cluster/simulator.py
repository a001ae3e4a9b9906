"""An executor that computes nothing: tokens from a hash, acceptance and cost from set curves.

Drafts are `simulated_drafts.py`'s; a plan that trims them is obeyed, and costs what is left of it.

The token at (seed, position) is a pure function, as the real workers' is: output cannot depend on drafts,
batches or preemptions, and whoever lets it is caught. Ships with the product, for tests
and questions of capacity at any scale. Time passes only where the caller wants it to: hand in
`VirtualClock.advance`, or `time.sleep`.

Shape legend: R requests in the step, W = 1 + largest number of drafts, S slots.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from .executor import DrafterHealth, ExecutorInfo
from .plan import AdmittedRequest, IntArray, SchedulerOutput, SlotSampling, StepResult, StepTimings
from .simulated_drafts import Hashes, SimulatedDrafts, noise
from .simulated_time import StepTimes
from .speculation.draft_trimming import trimmed

_TOKENS = 0  # stream of noise, apart from those of `simulated_drafts.py`
_NO_DRAFTER = -1


class VirtualClock:
    """Seconds that pass only when told to. Give the object itself to `Engine` as its clock."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s

    def advance(self, seconds: float) -> None:
        self.now_s += seconds


@dataclass(frozen=True, slots=True)
class LinearCost:
    """Seconds of a step: a floor (reading the weights) or what the rows cost, whichever is more.

    Attributes:
        verify_floor_s, verify_row_s: of the target's pass.
        draft_floor_s, draft_row_s: of the drafter's pass; nothing in a step without drafts.
        inject_row_s: of what the drafter gets.
    """

    verify_floor_s: float = 0.0
    verify_row_s: float = 0.0
    draft_floor_s: float = 0.0
    draft_row_s: float = 0.0
    inject_row_s: float = 0.0

    def __call__(self, plan: SchedulerOutput) -> StepTimings:
        rows = plan.num_draft_tokens + int(np.count_nonzero(plan.num_drafts))
        draft_s = max(self.draft_floor_s, rows * self.draft_row_s) if rows else 0.0
        verify_s = max(self.verify_floor_s, plan.num_batched_tokens * self.verify_row_s)
        inject_s = plan.num_batched_tokens * self.inject_row_s if plan.writes_context else 0.0
        return StepTimings(draft_s=draft_s, verify_s=verify_s, inject_s=inject_s)


class SimulatedExecutor:
    """See the module's text.

    Args:
        info: the facts of the model that is imitated.
        survival: survival[i] is how likely drafts 0..i are all accepted; 0 beyond its end.
        cost: seconds of a step, its parts one after the other; asked for the drafting with the plan, and for
            the rest with what is left of the plan when it has been trimmed.
        spend: is told how long a step has to be waited for, e.g. `VirtualClock.advance`.
        hardness: of a request's text, by its id: chances of its drafts are raised to this power.
    """

    def __init__(
        self,
        info: ExecutorInfo,
        survival: Sequence[float] = (),
        cost: Callable[[SchedulerOutput], StepTimings] = LinearCost(),
        spend: Callable[[float], None] = lambda seconds: None,
        hardness: Callable[[str], float] = lambda request_id: 1.0,
    ) -> None:
        self._info = info
        self._drafts = SimulatedDrafts(survival)
        self._hardness = hardness
        self._cost = cost
        self._spend = spend
        self._times = StepTimes(beside=info.halves)
        self._seeds_S = np.zeros(0, dtype=np.uint64)
        self._hardness_S = np.zeros(0)
        self._computed_S = np.zeros(0, dtype=np.int32)
        self._drafters_S = np.zeros(0, dtype=np.int32)  # the generation that has seen all of a sequence
        self._sampling: dict[int, SlotSampling] = {}
        self._results: deque[StepResult] = deque()
        self._drafter = DrafterHealth()
        self._closed = False

    @property
    def info(self) -> ExecutorInfo:
        return self._info

    @property
    def drafter_health(self) -> DrafterHealth:
        return self._drafter

    def lose_drafter(self) -> None:
        """From now on no draft is accepted."""
        self._drafter = replace(self._drafter, ready=False)

    def start_drafter(self) -> None:
        """A new one, in the place of whichever there is; it has no context of what was computed so far."""
        self._drafter = DrafterHealth(ready=True, generation=self._drafter.generation + 1)

    def submit(self, plan: SchedulerOutput) -> None:
        assert not self._closed, "the executor is closed"
        assert len(self._results) < self._info.max_in_flight, "more steps in flight than were allowed"
        self._results.append(self._run(plan))

    def collect(self) -> StepResult:
        self._spend(self._times.end())
        return self._results.popleft()

    def first_positions(self, plan: SchedulerOutput) -> IntArray:
        """Of each request's first row [R], where the plan could not know it too. After its admissions."""
        return np.where(plan.num_computed < 0, self._computed_S[plan.slots], plan.num_computed)

    def _run(self, plan: SchedulerOutput) -> StepResult:
        for request in plan.admitted:
            self._admit(request)
        seeds_R = self._seeds_S[plan.slots]
        begin_R = self.first_positions(plan) + plan.num_rows - plan.num_drafts
        if not self._drafter.ready:
            self._drafters_S[plan.slots] = _NO_DRAFTER
        hardness_R = self._hardness_S[plan.slots]
        margins_RK, stands_RK = self._drafts.propose(seeds_R, begin_R, plan.num_drafts, hardness_R)
        verified_R = plan.num_drafts
        if plan.trim is not None and margins_RK.size:
            num_other_rows = plan.num_batched_tokens - plan.num_draft_tokens
            verified_R = trimmed(margins_RK, plan.num_drafts, num_other_rows, plan.trim)
        in_context_R = self._drafters_S[plan.slots] == self._drafter.generation
        accepted_R = np.where(in_context_R, np.minimum(stands_RK.sum(axis=1), verified_R), 0)
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
            self._times.begin(plan, self._costs(plan, verified_R)),
            num_drafts=verified_R,
            margins=margins_RK,
        )

    def _costs(self, plan: SchedulerOutput, verified_R: IntArray) -> StepTimings:
        """Of a step in which so many of its drafts are verified."""
        whole = self._cost(plan)
        if plan.trim is None:
            return whole
        cut = replace(plan, num_rows=plan.num_rows - plan.num_drafts + verified_R, num_drafts=verified_R)
        return replace(self._cost(cut), draft_s=whole.draft_s)

    def check_health(self) -> None:
        """Arithmetic does not fall ill."""

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
    """The tokens at positions begin .. begin + count - 1, whoever computes them."""
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
