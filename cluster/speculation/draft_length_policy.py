"""Chooses the draft length of each step, for the most expected tokens per second; 0 is plain decoding.

    expected tokens    from the survival probabilities of recent blocks (`acceptance_model.py`)
    expected seconds   of the drafter's pass, and of the rest by number of rows (`step_cost_model.py`)

Drafts may be trimmed once their margins are known (`draft_trimming.py`). An estimate takes this into account:
it sorts the drafts of recent blocks by probability, and finds the best number of them to verify. Estimates
are made in a *review*, every 8 steps at first and later every 64; in between the choice is kept. A review

* changes the length if another is clearly better;
* schedules a *trial*, up to three steps with a length that may cost much less than predicted (one
  standard deviation), if the loss is covered by the budget (`LossBudget`);
* while no drafts are made, schedules a trial every 64 to 1024 steps anyway, because texts change.

No token depends on the choice. Without a clock (simulated executors) all drafts are made.

Legend: R decoding requests, K most drafts of a request, N blocks, S drafts that are verified.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import cycle
from typing import NamedTuple

import numpy as np

from ..step.scheduler_output import FloatArray, IntArray, SchedulerOutput, StepResult, TreeShape, Trim
from .acceptance_model import NO_MARGIN, NUM_BLOCKS, AcceptanceModel
from .draft_trimming import BETTER, TRIM_S, LengthEstimate, drafts_to_verify, estimate_trimmed
from .loss_budget import MAX_BACKOFF, RETRY_STEPS, Backoff, LossBudget
from .step_cost_model import MAX_GROWTH, MIN_S, StepCostModel, StepLoad
from .tree_policy import TreeGains

# Most of a plain step's prediction over its lower bound that counts as measured. Not tuned; without a limit
# the worst H200 cell falls from 0.94 to 0.69 of the best (docs/measurements.md).
_KNOWN = 2.5
_REVIEW_STEPS = 8  # between reviews at first, and between trials of a length; 16: 0.996 of the speed
_TRIAL_STEPS = 3  # at most, as far as the loss is covered; 1 failed on whole grids (docs/measurements.md)


def draft_lengths(max_drafts: int) -> tuple[int, ...]:
    """Return the draft lengths that are considered: 0, 1, 3, 5, 7, 11, 15, 23, .. and `max_drafts`.

    Including its known token, a request then has 1, 2, 4, 6, 8, 12, 16, 24, .. rows; a GPU has graphs for
    these.
    """
    rows = {1, *(base << n for base in (2, 6) for n in range(max_drafts.bit_length()))}
    return tuple(sorted({*(count - 1 for count in rows if count <= max_drafts), max_drafts}))


class DecodeBatch(NamedTuple):
    """The decoding requests of a step."""

    slots_R: IntArray
    limits_R: IntArray  # most drafts of each
    weights_R: FloatArray  # see `RequestWeights`


_UNKNOWN = LengthEstimate()


class DraftChoice(NamedTuple):
    """The draft lengths of a step."""

    num_drafts_R: IntArray
    length: int  # the maximum of them
    is_trial: bool = False  # the step is made to measure; all drafts are verified
    is_tree: bool = True  # drafts may form trees
    estimate: LengthEstimate = _UNKNOWN  # for the best known length
    plain_s: float = 0.0  # expected seconds of a step without drafts; 0 while nothing is known
    shape: TreeShape | None = None  # the drafts are nodes of trees as deep as `length`; None: chains
    is_review: bool = False  # the policy was reviewed, which takes the host's time
    is_change: bool = False  # the step before had another length, so caches are cold


@dataclass(slots=True)
class _LoadState:
    """The decisions for one class of load."""

    length: int = 0
    estimate: LengthEstimate = _UNKNOWN
    plain_s: float = 0.0
    has_plain: bool = False  # a step without drafts was made
    steps: int = 0
    review_at: int = 0  # step of the next review
    trial_length: int = 0
    trial_steps: int = 0  # remaining ones of the trial in progress
    # by length: when it may be tried again, and the steps between trials
    trials: dict[int, tuple[int, int]] = field(default_factory=dict[int, tuple[int, int]])
    trees: TreeGains = field(default_factory=TreeGains)


class DraftLengthPolicy:
    """Chooses the draft lengths of one engine's steps, of at most `max_rows` rows and K drafts.

    Args:
        branches: whether drafts may form trees.
    """

    def __init__(
        self,
        max_drafts: int,
        max_rows: int,
        acceptance: AcceptanceModel,
        costs: StepCostModel,
        *,
        branches: bool,
    ) -> None:
        self._max_drafts, self._max_rows = max_drafts, max_rows
        self._acceptance, self._costs = acceptance, costs
        self._lengths = draft_lengths(max_drafts)
        self._states: dict[tuple[bool, int], _LoadState] = {}  # by kind and class of load
        self._budget = LossBudget()
        self._branches = branches
        self._num_steps = self._num_plain = 0  # steps, and those since the last drafts
        self._last_length = 0
        self._retry = Backoff()
        self._retry_gain = math.inf  # ratio of expected to plain worth at the last retry
        self._paused_until = 0
        self._measured: Iterator[int] | None = None  # the lengths of the warm-up
        self.reports_margins = True  # whether the drafter does

    def begin_warm_up(self) -> None:
        """Make steps of every draft length in turn, to measure them."""
        self._measured = cycle(self._lengths)

    def retry_soon(self) -> None:
        """Try drafts in the next step and soon again; they have become possible, or the drafter is new."""
        self._retry.reset()
        self._paused_until, self._num_plain = 0, max(self._num_plain, self._retry.steps)
        for state in self._states.values():
            state.review_at = 0

    def would_draft(self) -> bool:
        """Return whether a single request would get drafts, by present estimates."""
        limits_R = np.array([self._max_drafts], np.int32)
        batch = DecodeBatch(np.zeros(1, np.int32), limits_R, np.ones(1, np.float32))
        estimates = self._estimate(batch, StepLoad(1, 0, 0.0), self._possible(1))
        return max(each.rate for each in estimates.values()) > BETTER * estimates[0].rate

    # Planning.

    def choose(self, batch: DecodeBatch, load: StepLoad) -> DraftChoice:
        """Return the number of drafts of each decoding request in the next step.

        In this order: lengths that are being measured, then the most drafts until a step was measured. After
        that a review chooses a length now and then, and trials of another one follow it.
        """
        if self._measured is not None:
            length = next(self._measured)
            return DraftChoice(np.minimum(batch.limits_R, length), length, is_trial=True)
        if not self._costs.has_measurements:
            length = self._max_drafts if self._num_steps else 0
            self._num_steps += 1
            return DraftChoice(np.minimum(batch.limits_R, length), length)
        state = self._state(load)
        state.steps += 1
        self._num_steps += 1
        is_review = not state.trial_steps and state.steps >= state.review_at and batch.limits_R.any()
        if is_review:
            self._review(state, batch, load)
        length = state.length
        if is_trial := state.trial_steps > 0:
            length, state.review_at = state.trial_length, state.steps + 1
            state.trial_steps -= 1
        is_change, self._last_length = length != self._last_length, length
        self._num_plain = 0 if length else self._num_plain + 1
        state.has_plain = state.has_plain or not length
        drafts_R = np.minimum(batch.limits_R, length)
        if length and not is_trial and state.estimate.trims and not self.reports_margins:
            drafts_R = self._trimmed_by_request(drafts_R, state.estimate, batch, load)
        is_tree = self._branches and length > 0 and not is_trial and state.trees.choose()
        how = (length, is_trial, is_tree, state.estimate, state.plain_s)
        return DraftChoice(drafts_R, *how, is_review=bool(is_review), is_change=is_change)

    def _state(self, load: StepLoad) -> _LoadState:
        """Return the state of this class of load."""
        key = load.is_half, load.size
        return self._states.setdefault(key, _LoadState())

    def _trimmed_by_request(
        self, drafts_R: IntArray, estimate: LengthEstimate, batch: DecodeBatch, load: StepLoad
    ) -> IntArray:
        """Return each request's number of drafts expected to pay, if no margins are reported."""
        num_rows = int(load.prompt_rows) + len(batch.slots_R)
        trim = self._trim(estimate, batch.slots_R, batch.weights_R, load, num_rows + int(drafts_R.sum()))
        margins_RK = np.full((len(drafts_R), self._max_drafts), NO_MARGIN, dtype=np.float32)
        return drafts_to_verify(margins_RK, drafts_R, num_rows, trim)

    # Review.

    def _review(self, state: _LoadState, batch: DecodeBatch, load: StepLoad) -> None:
        """Choose the best known length, and schedule a trial if one is due."""
        usual = min(max(state.steps // 2, _REVIEW_STEPS), RETRY_STEPS)
        state.review_at = state.steps + usual
        self._acceptance.update()
        self._costs.changed()
        load = load._replace(prompt_rows=0)  # prompt rows per token do not depend on the length
        lengths = self._possible(len(batch.slots_R))
        mean_s, min_s = (
            dict(zip(lengths, bounds.tolist(), strict=True)) for bounds in self._costs.bounds_s(load, lengths)
        )
        is_measured = state.has_plain and mean_s[0] <= _KNOWN * min_s[0]
        # With costs from before the first request, a single one drafts at once.
        if not (is_measured or (self._costs.known_at_start and len(batch.slots_R) == 1)):
            state.trial_length, state.trial_steps = 0, 1
            return
        estimates = self._estimate(batch, load, lengths)
        plain = estimates[0]
        state.plain_s = plain.seconds
        self._budget.begin(plain.seconds)
        self._update_length(state, estimates)
        if self._num_steps < self._paused_until:
            return
        # The largest loss of a trial, compared with the present rate, is if no draft is accepted.
        losses_s = {
            length: max(mean_s[length] - plain.worth / state.estimate.rate, MIN_S)
            for length in lengths
            if length != state.length
        }
        balance_s = self._budget.balance_s
        covered_s = {length: loss_s for length, loss_s in losses_s.items() if loss_s <= balance_s}
        length = self._worth_trying(state, estimates, min_s, covered_s)
        if length is None and not state.length and losses_s:
            length = self._worth_retrying(estimates)
        if length in covered_s:
            state.trial_length = length
            maximum = _TRIAL_STEPS if self._costs.has_measured_drafts else 1
            state.trial_steps = min(maximum, int(balance_s / covered_s[length]))
            _, wait = state.trials.get(length, (0, _REVIEW_STEPS))
            state.trials[length] = state.steps + wait, min(2 * wait, MAX_BACKOFF * RETRY_STEPS)

    def _possible(self, num_requests: int) -> list[int]:
        most_rows = min(self._max_rows, MAX_GROWTH * self._costs.most_rows)
        return [length for length in self._lengths if length <= max(most_rows // num_requests - 1, 0)]

    def _update_length(self, state: _LoadState, estimates: dict[int, LengthEstimate]) -> None:
        """Keep the length, or change to a better one."""
        length = state.length if state.length in estimates else 0
        best = max(estimates, key=lambda each: estimates[each].rate)
        if estimates[best].rate > (BETTER if best else 1.0) * estimates[length].rate:
            length = best
            state.review_at = min(state.review_at, state.steps + _REVIEW_STEPS)
        if self._num_steps < self._paused_until:
            length = 0
        elif length and self._num_steps > self._paused_until + MAX_BACKOFF * RETRY_STEPS:
            self._retry.reset()  # drafts have paid for long
        state.length, state.estimate = length, estimates[length]

    def _worth_trying(
        self,
        state: _LoadState,
        estimates: dict[int, LengthEstimate],
        min_s: dict[int, float],
        losses_s: dict[int, float],
    ) -> int | None:
        """Return the length with the best ratio of possible gain to possible loss, or None."""
        rate = state.estimate.rate
        max_rates = {length: estimates[length].worth / min_s[length] for length in losses_s}
        possible = [
            length
            for length, max_rate in max_rates.items()
            if max_rate > BETTER * rate and state.steps >= state.trials.get(length, (0, 0))[0]
        ]
        return max(possible, key=lambda each: (max_rates[each] - rate) / losses_s[each], default=None)

    def _worth_retrying(self, estimates: dict[int, LengthEstimate]) -> int | None:
        """Return a length to try after long without drafts or for a higher expected gain, or None."""
        lengths = list(estimates)[2:] or [max(estimates)]  # one draft alone says little about the text
        length = max(lengths, key=lambda each: estimates[each].rate)
        gain = estimates[length].worth / estimates[0].worth
        went_well = gain > BETTER * self._retry_gain
        if went_well:
            self._retry.reset()
        elif self._num_plain < self._retry.steps:
            return None
        else:
            self._retry.fail()
        self._retry_gain = gain
        return length

    def _estimate(self, batch: DecodeBatch, load: StepLoad, lengths: list[int]) -> dict[int, LengthEstimate]:
        """Estimate steps with these ascending lengths from recent blocks of some requests."""
        num_requests = len(batch.slots_R)
        num_some = min(num_requests, NUM_BLOCKS)
        some = np.arange(num_some) * num_requests // num_some
        longest = lengths[-1]
        survivals_TRK = self._acceptance.samples(batch.slots_R[some], NUM_BLOCKS // num_some)[:, :, :longest]
        possible_RK = np.arange(longest) < batch.limits_R[some][:, None]
        worths_TRK = survivals_TRK * (batch.weights_R[some][:, None] * possible_RK)
        # Not -1 for N: K is 0 where so many requests leave no room for drafts.
        worths_NK = worths_TRK.reshape(len(worths_TRK) * num_some, longest)
        own_worth = float(batch.weights_R.sum())  # worth of the tokens of plain decoding
        non_draft_s_S = self._costs.non_draft_s(load, num_requests * longest)
        trim_s = 0.0 if self._costs.has_fixed_sizes else TRIM_S
        of_trees = self._state(load).trees.factor
        estimates = dict[int, LengthEstimate]()
        for length, draft_s in zip(lengths, self._costs.draft_s(load, lengths), strict=True):
            seconds_S = non_draft_s_S[: num_requests * length + 1] + draft_s
            chains = estimate_trimmed(worths_NK[:, :length], num_requests, own_worth, seconds_S, trim_s)
            gain = of_trees if length else 1.0
            estimates[length] = chains._replace(rate=chains.rate * gain, worth=chains.worth * gain)
        return estimates

    # Trimming.

    def trim(
        self, choice: DraftChoice, plan: SchedulerOutput, load: StepLoad, weights_R: FloatArray
    ) -> Trim | None:
        """Return how the drafts of this plan are trimmed; None if all are verified."""
        # A tree has more nodes than are worth verifying.
        trims = (choice.estimate.trims or choice.shape is not None) and not choice.is_trial
        if not trims or not self.reports_margins or not plan.num_draft_tokens:
            return None
        trim = self._trim(choice.estimate, plan.slots, weights_R, load, plan.num_batched_tokens)
        if choice.shape is None or trim.num_rows is None:
            return trim
        # The rows of fixed sizes are chosen before trees are grown: as many as would have been best before.
        nodes = self._state(load).trees.num_nodes or choice.estimate.num_verified
        rows = int(load.prompt_rows) + int(self._costs.padded(int(load.num_requests) + round(nodes)))
        seconds_N = self._costs.seconds_by_rows(load, plan.num_batched_tokens)
        return replace(trim, num_rows=rows, seconds_N=seconds_N, rate=choice.estimate.rate)

    def _trim(
        self,
        estimate: LengthEstimate,
        slots_R: IntArray,
        weights_R: FloatArray,
        load: StepLoad,
        num_rows: int,
    ) -> Trim:
        curves = self._acceptance.bias_K, self._acceptance.slope_K, self._acceptance.offsets(slots_R)
        if not self._costs.has_fixed_sizes:
            return Trim(*curves, weights_R, self._costs.seconds_by_rows(load, num_rows), rate=estimate.rate)
        rows = int(self._costs.padded(int(load.num_requests) + estimate.num_verified))
        return Trim(*curves, weights_R, np.zeros(0, np.float32), int(load.prompt_rows) + rows)

    # Learning.

    def observe_shaped(self, choice: DraftChoice, load: StepLoad, result: StepResult) -> None:
        """Learn from a step that was to grow trees."""
        if (gain := result.tree_gain) is not None:
            trees = self._state(load).trees
            trees.observe(gain, choice.estimate.worth / trees.factor, choice.estimate.rate)

    def on_drafter_replaced(self) -> None:
        """Forget the gain of trees, and try drafts soon."""
        for state in self._states.values():
            state.trees = TreeGains()
        self.retry_soon()

    def update_budget(
        self, choice: DraftChoice, own_worth: float, worth: float, seconds: float, num_steps: int
    ) -> None:
        """Update the loss budget for a step with decoding requests only.

        Args:
            own_worth: worth of one token of each request, as in a plain step.
            worth: worth of the tokens that the step produced.
            seconds: duration of the step.
            num_steps: number of similar steps that this one represents.
        """
        if not choice.estimate.rate or own_worth <= 0.0:
            return
        self._budget.earn(num_steps * seconds, max(choice.plain_s, seconds))
        if choice.is_trial:  # at most half of the balance, so that an interruption ends no trials
            lost_s = seconds - worth / choice.estimate.rate
            self._budget.balance_s -= min(lost_s, self._budget.balance_s / 2)
        elif choice.length:
            must_review, must_pause = self._budget.record_step(
                seconds - worth / own_worth * choice.plain_s, choice.plain_s
            )
            if must_review:
                for state in self._states.values():
                    state.review_at = 0
            if not must_pause:
                return
            # Pause drafting for some steps, longer each time, whatever is predicted.
            self._paused_until = self._num_steps + self._retry.steps
            self._retry.fail()
            for state in self._states.values():
                state.length, state.trial_steps, state.review_at = 0, 0, 0
