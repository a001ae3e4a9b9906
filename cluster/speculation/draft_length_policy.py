"""Chooses the draft length of each step, for the most expected tokens per second; 0 is plain decoding.

    expected tokens    from the survival probabilities of recent blocks (`acceptance_model.py`)
    expected seconds   of the drafter's pass, and of the rest by number of rows (`step_cost_model.py`)

Drafts may be trimmed once their margins are known (`draft_trimming.py`). An estimate takes this into account:
it sorts the drafts of many recent blocks by probability, and finds the best number of them to verify.

The estimates are made in a *review*, every few steps at first and later every two hundred; in between the
choice is kept. A review

* changes the length if another is clearly better and its cost is known;
* schedules a *trial* of a length with a cost that may be much lower than predicted (the bound of one standard
  deviation), if the loss is covered by the budget (`loss_budget.py`);
* while no drafts are made, schedules a trial every 64 to 1024 steps anyway, because texts change.

No token depends on the choice. Without a clock (simulated executors) all drafts are made. Used by
`step_controller.py`; does not access sequences.

Legend: R decoding requests, K most drafts of a request, N blocks, S drafts that are verified.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

from ..step.scheduler_output import BoolArray, FloatArray, IntArray, SchedulerOutput, Trim
from .acceptance_model import NO_MARGIN, NUM_SAMPLES, AcceptanceModel
from .draft_lengths import draft_lengths, load_class
from .draft_trimming import trimmed
from .loss_budget import LossBudget
from .step_cost_model import StepCostModel, StepLoad
from .step_time_regression import Doubles

_BETTER = 1.02  # rate ratio to change the length; estimates differ by about a percent
_MUCH_BETTER = 1.05  # ratio of expected gain to that at the last retry, to retry at once
_KNOWN = 2.5  # a cost is known if the ratio of its bounds is at most this
_MIN_REVIEW_STEPS, _MAX_REVIEW_STEPS = 8, 192  # a review's distance: half of the steps so far, within these
_TRIAL_STEPS = 3
_RETRY_STEPS, _MAX_RETRY_STEPS = 64, 1024  # steps without drafts until a retry; doubles each time
_RETRY_LENGTH = 3  # minimum draft length of a retry: one draft says little about the text
_MIN_LOSS = 0.01  # assumed minimum loss of a trial step, as a fraction of a plain step
_WORTH_TRIMMING = 1.05  # ratio to the rate without trimming, since trimming itself takes time
_NUM_BLOCKS = 64  # over all requests, for comparing lengths
_USUAL_CONTEXT = 256.0  # tokens


class DecodeBatch(NamedTuple):
    """The decoding requests of a step.

    Attributes:
        slots_R: slot of each request.
        limits_R: most drafts of each request.
        weights_R: weight of each request (`request_weights.py`).
    """

    slots_R: IntArray
    limits_R: IntArray
    weights_R: FloatArray


class DraftChoice(NamedTuple):
    """The drafting decision for a step. Worth is expected tokens, each times its request's weight.

    Attributes:
        num_drafts_R: number of drafts of each request.
        length: the maximum of them.
        is_trial: the step is made to measure; all drafts are verified.
        rate: expected worth per second at the chosen length; 0 while nothing is known.
        worth: expected worth of such a step; 0 while nothing is known.
        plain_s: expected seconds of a step without drafts; 0 while nothing is known.
        trims: whether drafts are trimmed once their margins are known.
        num_verified: expected number of drafts worth verifying, over all requests.
    """

    num_drafts_R: IntArray
    length: int
    is_trial: bool = False
    rate: float = 0.0
    worth: float = 0.0
    plain_s: float = 0.0
    trims: bool = True
    num_verified: int = 0


class LengthEstimate(NamedTuple):
    """Estimate for steps with one draft length: worth per second and per step, seconds, drafts verified."""

    rate: float
    worth: float
    seconds: float
    num_verified: int = 0
    trims: bool = False


_UNKNOWN = LengthEstimate(0.0, 0.0, 0.0)


@dataclass(slots=True)
class _LoadState:
    """The decisions for one class of load.

    Attributes:
        length, estimate, plain_s: the present length, its estimate, and the seconds of a plain step.
        has_plain: whether a step without drafts was made at this load, or at the one that it was copied from.
        steps, review_at: steps at this load, and the step of the next review.
        trial_length, trial_steps: length and remaining steps of the trial in progress; 0 steps: none.
        trials: by length, number of trials, and the first step at which another is allowed.
    """

    length: int = 0
    estimate: LengthEstimate = _UNKNOWN
    plain_s: float = 0.0
    has_plain: bool = False
    steps: int = 0
    review_at: int = 0
    trial_length: int = 0
    trial_steps: int = 0
    trials: dict[int, tuple[int, int]] = field(default_factory=dict[int, tuple[int, int]])


class DraftLengthPolicy:
    """Chooses the draft lengths of one engine's steps.

    Args:
        max_drafts: K.
        max_rows: maximum rows of a step.
        acceptance: acceptance model of the drafter.
        costs: costs of the steps planned by this policy.
        like: policy for the engine's other steps, which gives the initial lengths.
    """

    def __init__(
        self,
        max_drafts: int,
        max_rows: int,
        acceptance: AcceptanceModel,
        costs: StepCostModel,
        like: DraftLengthPolicy | None = None,
    ) -> None:
        self._max_drafts, self._max_rows = max_drafts, max_rows
        self._acceptance, self.costs = acceptance, costs
        self._lengths = draft_lengths(max_drafts)
        self._states: dict[int, _LoadState] = {}
        self._like = like
        self._budget = LossBudget()
        self._num_steps = self._num_ended = 0
        self._num_plain, self._retry_after = 0, _RETRY_STEPS  # steps without drafts, and until a retry
        self._retry_gain = math.inf  # ratio of expected to plain worth at the last retry
        self._paused_until = 0
        self._declines_S = np.zeros(acceptance.num_slots, dtype=np.bool_)  # requests whose drafts do not pay
        self.reports_margins = True
        self._last_trim: tuple[object, FloatArray, Trim] | None = None  # (inputs, seconds by rows, result)

    def replace_drafter(self) -> None:
        """Review at once, because the drafter was replaced."""
        self._retry_after, self._paused_until = _RETRY_STEPS, 0
        self._review_soon()

    def retry_soon(self) -> None:
        """Try drafts in the next step if the budget covers it."""
        self._num_plain = max(self._num_plain, self._retry_after)
        self._review_soon()

    def _review_soon(self) -> None:
        for state in self._states.values():
            state.review_at = 0

    def pays(self) -> bool:
        """Return whether a single request would get drafts, by present estimates."""
        batch = DecodeBatch(
            np.zeros(1, np.int32), np.array([self._max_drafts], np.int32), np.ones(1, np.float32)
        )
        estimates = self._estimate(batch, StepLoad(1, 0, _USUAL_CONTEXT), self._possible(1))
        return max(each.rate for each in estimates.values()) > _BETTER * estimates[0].rate

    # Planning.

    def choose(self, batch: DecodeBatch, load: StepLoad) -> DraftChoice:
        if not self.costs.has_measurements:
            length = self._max_drafts if self._num_ended else 0
            return DraftChoice(np.minimum(batch.limits_R, length), length)
        state = self._state(len(batch.slots_R))
        state.steps += 1
        self._num_steps += 1
        if not state.trial_steps and state.steps >= state.review_at and batch.limits_R.any():
            self._review(state, batch, load)
        if is_trial := state.trial_steps > 0:
            state.trial_steps -= 1
            state.review_at = state.steps + 1
        length = state.trial_length if is_trial else state.length
        self._num_plain = 0 if length else self._num_plain + 1
        state.has_plain = state.has_plain or not length
        rate, worth, _, num_verified, trims = state.estimate
        drafts_R = np.minimum(batch.limits_R, length)
        if length and not is_trial and (declines_R := self._declines_S[batch.slots_R]).any():
            is_retry_R = (state.steps + 7 * batch.slots_R) % _RETRY_STEPS == 0
            drafts_R = np.where(declines_R & ~is_retry_R, 0, drafts_R)
        choice = DraftChoice(
            drafts_R, length, is_trial, rate, worth, state.plain_s, trims and not is_trial, num_verified
        )
        if length and choice.trims and not self.reports_margins:
            choice = choice._replace(num_drafts_R=self._trimmed_by_request(choice, batch, load))
        return choice

    def _state(self, num_requests: int) -> _LoadState:
        """Return the state of this class of load; a new one starts from the nearest one."""
        load = load_class(num_requests)
        if load not in self._states:
            states = self._states or (self._like._states if self._like else {})
            nearest = min(states, key=lambda other: abs(other - load), default=None)
            self._states[load] = _LoadState()
            if nearest is not None:
                old = states[nearest]
                self._states[load] = replace(old, steps=old.steps // 2, review_at=0, trial_steps=0, trials={})
        return self._states[load]

    def _trimmed_by_request(self, choice: DraftChoice, batch: DecodeBatch, load: StepLoad) -> IntArray:
        """Return each request's number of drafts expected to pay, if no margins are reported."""
        num_rows = load.prompt_rows + len(batch.slots_R)
        trim = self._trim(
            choice, batch.slots_R, batch.weights_R, load, num_rows + int(choice.num_drafts_R.sum())
        )
        margins_RK = np.full((len(batch.slots_R), choice.length), NO_MARGIN, dtype=np.float32)
        return trimmed(margins_RK, choice.num_drafts_R, num_rows, trim)

    # Review.

    def _review(self, state: _LoadState, batch: DecodeBatch, load: StepLoad) -> None:
        """Choose the best known length, and schedule a trial if one is due."""
        state.review_at = state.steps + min(max(state.steps // 2, _MIN_REVIEW_STEPS), _MAX_REVIEW_STEPS)
        self._acceptance.update()
        self.costs.changed()
        load = load._replace(prompt_rows=0)  # prompt rows per token do not depend on the length
        lengths = self._possible(len(batch.slots_R))
        least_s, most_s = (
            dict(zip(lengths, bounds.tolist(), strict=True)) for bounds in self.costs.bounds_s(load, lengths)
        )
        is_measured = state.has_plain or self.costs.were_loaded
        if not is_measured or most_s[0] > _KNOWN * least_s[0]:
            state.trial_length, state.trial_steps = 0, 1
            return
        estimates = self._estimate(batch, load, lengths)
        own_worth, state.plain_s = estimates[0].worth, estimates[0].seconds
        self._budget.begin(state.plain_s)
        self._settle(state, estimates, [
            length
            for length in lengths
            if most_s[length] <= _KNOWN * least_s[length]
            or self._budget.num_covered(most_s[length] - state.plain_s, 1)
        ])  # fmt: skip
        self._declines_S[batch.slots_R] = self._declines(state, batch, load)
        if self._num_steps < self._paused_until:
            return
        # The largest loss of a trial, compared with the present rate, is if no draft is accepted.
        losses_s = {
            length: max(most_s[length] - own_worth / state.estimate.rate, _MIN_LOSS * state.plain_s)
            for length in lengths
            if length != state.length
        }
        length = self._worth_trying(state, estimates, least_s, losses_s)
        if length is None and not state.length and losses_s:
            length = self._worth_retrying(estimates, own_worth)
        if length is not None:
            most = _TRIAL_STEPS if self.costs.has_measured_drafts else 1
            state.trial_length = length
            state.trial_steps = self._budget.num_covered(losses_s[length], most)
            num_trials = state.trials.get(length, (0, 0))[0]
            wait = min(_MIN_REVIEW_STEPS << num_trials, _MAX_RETRY_STEPS)
            state.trials[length] = num_trials + 1, state.steps + wait

    def _possible(self, num_requests: int) -> list[int]:
        most = max(self._max_rows // num_requests - 1, 0)
        return [length for length in self._lengths if length <= most]

    def _settle(self, state: _LoadState, estimates: dict[int, LengthEstimate], known: Iterable[int]) -> None:
        """Keep the length, or change to a better one with a known cost."""
        length = state.length if state.length in estimates else 0
        best = max({0, length, *known}, key=lambda each: estimates[each].rate)
        if estimates[best].rate > _BETTER * estimates[length].rate:
            length = best
            state.review_at = min(state.review_at, state.steps + _MIN_REVIEW_STEPS)
        if self._num_steps < self._paused_until:
            length = 0
        elif length and self._num_steps > self._paused_until + _MAX_RETRY_STEPS:
            self._retry_after = _RETRY_STEPS  # drafts have paid for long
        state.length, state.estimate = length, estimates[length]

    def _declines(self, state: _LoadState, batch: DecodeBatch, load: StepLoad) -> BoolArray:
        """Return the mask of requests that do not pay for their part of the drafter's pass, [R]."""
        count, length, rate = len(batch.slots_R), state.length, state.estimate.rate
        if count < 2 or not length:
            return np.zeros(count, dtype=np.bool_)
        half_s, whole_s = (
            self.costs.draft_s(load.context, part * (length + 1), part) for part in (count // 2, count)
        )
        draft_s = (whole_s - half_s) / (count - count // 2)
        rest_s = self.costs.rest_s(load, count * length)
        worths_RK = self._acceptance.means(batch.slots_R)[:, :length] * batch.weights_R[:, None]
        gains_RK = np.maximum(worths_RK - rate * (rest_s[-1] - rest_s[0]) / (count * length), 0.0)
        return gains_RK.sum(axis=1) < rate * draft_s

    def _worth_trying(
        self,
        state: _LoadState,
        estimates: dict[int, LengthEstimate],
        least_s: dict[int, float],
        losses_s: dict[int, float],
    ) -> int | None:
        """Return the length with the best ratio of possible gain to covered possible loss, or None."""
        best, found = 0.0, None
        for length, loss_s in losses_s.items():
            most_rate = estimates[length].worth / least_s[length]
            gain = (most_rate - state.estimate.rate) / loss_s
            is_clear = most_rate > _BETTER * state.estimate.rate
            # Without drafts, lengths already tried are left to the retries.
            may_try = length not in state.trials or (state.length and state.steps >= state.trials[length][1])
            if is_clear and may_try and gain > best and self._budget.num_covered(loss_s, 1):
                best, found = gain, length
        return found

    def _worth_retrying(self, estimates: dict[int, LengthEstimate], own_worth: float) -> int | None:
        """Return a length to try after long without drafts or for a higher expected gain, or None."""
        lengths = [each for each in estimates if each >= _RETRY_LENGTH] or [max(estimates)]
        length = max(lengths, key=lambda each: estimates[each].rate)
        gain = estimates[length].worth / own_worth
        went_well = gain > _MUCH_BETTER * self._retry_gain
        if not went_well and self._num_plain < self._retry_after:
            return None
        self._retry_after = _RETRY_STEPS if went_well else min(2 * self._retry_after, _MAX_RETRY_STEPS)
        self._retry_gain = gain
        return length

    def _estimate(self, batch: DecodeBatch, load: StepLoad, lengths: list[int]) -> dict[int, LengthEstimate]:
        """Estimate steps with these draft lengths (ascending) from recent blocks of some requests."""
        num_requests = len(batch.slots_R)
        num_some = min(num_requests, _NUM_BLOCKS)
        some = np.arange(num_some) * num_requests // num_some
        count = min(_NUM_BLOCKS // num_some, NUM_SAMPLES)
        longest = lengths[-1]
        survivals_TRK = self._acceptance.samples(batch.slots_R[some], count)[:, :, :longest]
        possible_RK = np.arange(longest) < batch.limits_R[some][:, None]
        worths_TRK = survivals_TRK * (batch.weights_R[some][:, None] * possible_RK)
        worths_NK = worths_TRK.reshape(-1, longest)
        own_worth = float(batch.weights_R.sum())  # worth of the tokens of plain decoding
        rest_s_S = self.costs.rest_s(load, num_requests * longest)
        plain_s = float(rest_s_S[0])
        estimates = {0: LengthEstimate(own_worth / plain_s, own_worth, plain_s)}
        for length in lengths[1:]:
            draft_s = self.costs.draft_s(load.context, num_requests * (length + 1), num_requests)
            seconds_S = rest_s_S[: num_requests * length + 1] + draft_s
            estimates[length] = _estimate_trimmed(worths_NK[:, :length], num_requests, own_worth, seconds_S)
        return estimates

    # Trimming.

    def trim(
        self, choice: DraftChoice, plan: SchedulerOutput, load: StepLoad, weights_R: FloatArray
    ) -> Trim | None:
        """Return how the drafts of this plan are trimmed; None if all are verified."""
        if not choice.trims or choice.rate <= 0.0 or not self.reports_margins or not plan.num_draft_tokens:
            return None
        return self._trim(choice, plan.slots, weights_R, load, plan.num_batched_tokens)

    def _trim(
        self, choice: DraftChoice, slots_R: IntArray, weights_R: FloatArray, load: StepLoad, num_rows: int
    ) -> Trim:
        seconds_N = self.costs.seconds_by_rows(load, num_rows)
        made_of = slots_R.tobytes(), weights_R.tobytes(), self._acceptance.version, choice.rate, load[:2]
        if self._last_trim is None or self._last_trim[0] != made_of or self._last_trim[1] is not seconds_N:
            curves = self._acceptance.bias_K, self._acceptance.slope_K, self._acceptance.offsets(slots_R)
            if self.costs.has_fixed_sizes:
                rows = load.num_requests + choice.num_verified
                rows = load.prompt_rows + int(self.costs.padded(np.array([rows]))[0])
                trim = Trim(*curves, weights_R, np.zeros(0, np.float32), rows)
            else:
                trim = Trim(*curves, weights_R, seconds_N, rate=choice.rate)
            self._last_trim = made_of, seconds_N, trim  # most steps are like the previous one
        return self._last_trim[2]

    # Learning.

    def observe(
        self,
        load: StepLoad,
        num_drafts: int,
        draft_rows: int,
        draft_s: float,
        rest_s: float,
        num_drafting: int,
    ) -> None:
        """Record the seconds of a step; see `StepCostModel.observe`."""
        self._num_ended += 1
        self.costs.observe(load, num_drafts, draft_rows, draft_s, rest_s, num_drafting)

    def account(
        self, choice: DraftChoice, own_worth: float, worth: float, seconds: float, num_steps: int
    ) -> None:
        """Update the loss budget for a step with decoding requests only.

        Args:
            own_worth: worth of one token of each request, as in a plain step.
            worth: worth of the tokens that the step produced.
            seconds: duration of the step.
            num_steps: number of similar steps that this one represents.
        """
        self._budget.earn(num_steps * seconds, max(choice.plain_s, seconds))
        if choice.rate <= 0.0 or own_worth <= 0.0:
            return
        if choice.is_trial:
            self._budget.pay(seconds - worth / choice.rate)
        elif choice.length:
            plain_s = worth / own_worth * choice.plain_s
            if self._budget.settle(seconds, choice.worth / choice.rate, choice.plain_s, plain_s):
                self._pause()

    def _pause(self) -> None:
        """Pause drafting for some steps, longer each time, whatever is predicted."""
        self._paused_until = self._num_steps + self._retry_after
        self._retry_after = min(2 * self._retry_after, _MAX_RETRY_STEPS)
        for state in self._states.values():
            state.length, state.trial_steps, state.review_at = 0, 0, 0


def _estimate_trimmed(
    worths_NK: FloatArray, num_requests: int, own_worth: float, seconds_S: Doubles
) -> LengthEstimate:
    """Estimate a step with drafts like those of these blocks, of which the best number is verified.

    Args:
        worths_NK: survival probability times weight, of each draft of each block.
        own_worth: worth of the tokens produced without any draft.
        seconds_S: seconds of the step with 0, 1, .., R x K drafts verified.
    """
    falling_M = np.sort(worths_NK, axis=None)[::-1]
    worth_M = np.concatenate(([0.0], np.cumsum(falling_M, dtype=np.float64)))
    # The step verifies the same fraction of its drafts as is taken from the blocks.
    places_S = np.arange(len(seconds_S)) * len(worths_NK) // num_requests
    worth_S = own_worth + worth_M[places_S] * (num_requests / len(worths_NK))
    rates_S = worth_S / seconds_S
    count = int(np.argmax(rates_S))
    trims = bool(rates_S[count] > _WORTH_TRIMMING * rates_S[-1])
    if not trims:
        count = len(seconds_S) - 1
    return LengthEstimate(float(rates_S[count]), float(worth_S[count]), float(seconds_S[count]), count, trims)
