"""Chooses between one batch and two halves that alternate between drafter and target.

An executor with a drafter on its own device (`ExecutorInfo.halves`) can draft for one half of the requests
while it verifies the other:

    whole     draft all -> verify all -> ..               n requests every D(n) + V(n) seconds
    halves    verify A  | verify B  | verify A            n / 2 requests every max(D(n / 2), V(n / 2)) seconds
              draft B   | draft A   | draft B

Halves lose if a pass over half of the rows takes as long as one over all, as on most GPUs. So batches stay
whole unless halves were measured to produce more tokens per second. The other mode is tried occasionally,
less often after each failure; halves only if free drafts would gain.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from statistics import median
from typing import NamedTuple

from ..speculation.draft_trimming import BETTER
from ..speculation.loss_budget import RETRY_STEPS, Backoff
from ..speculation.step_cost_model import load_class
from ..step.scheduler_output import StepTimings

_NUM_RATES = 6  # steps whose median rate is compared
_IGNORED_STEPS = 2  # ignored steps of a sequence of halves, since drafts of the first one were not overlapped
_TRIAL_STEPS = 2 * RETRY_STEPS  # until a trial if the rate has changed; else twice as many, and so on
_CHANGED = 1.33  # factor by which the rate changes, up or down, if costs or texts do


class BatchMode(NamedTuple):
    """The mode in which a step was planned."""

    is_half: bool
    load: int  # class of the number of running requests
    is_settled: bool  # the preceding steps were planned in the same mode


def _rates() -> deque[float]:
    return deque(maxlen=_NUM_RATES)


@dataclass(slots=True)
class _LoadState:
    """Measurements for one class of load."""

    uses_two_batches: bool = False  # the faster mode, as far as known
    # tokens per second of the last whole steps, and of the last halves
    rates: tuple[deque[float], deque[float]] = field(default_factory=lambda: (_rates(), _rates()))
    max_gain: float = 0.0  # bound of the gain of halves, from the last whole step's seconds
    since_trial: int = 0
    trial_rate: float = 0.0  # the faster mode's at the last trial; 0 before it
    is_trial: bool = False
    backoff: Backoff = field(default_factory=lambda: Backoff(2 * _TRIAL_STEPS))


class TwoBatchOverlap:
    """Chooses between whole steps and halves for one engine, by number of running requests."""

    def __init__(self) -> None:
        self._states: dict[int, _LoadState] = {}
        self._num_alike = 0  # consecutive plans in the same mode
        self._was_half = False

    def choose(self, num_requests: int) -> bool:
        """Return whether the next step has half of the running requests."""
        if num_requests < 2:
            return False
        state = self._state(load_class(num_requests))
        return state.uses_two_batches != state.is_trial

    def plan(self, num_requests: int, *, is_half: bool) -> BatchMode:
        """Record that a step was planned in this mode."""
        self._num_alike = self._num_alike + 1 if is_half == self._was_half else 0
        self._was_half = is_half
        return BatchMode(is_half, load_class(num_requests), not is_half or self._num_alike >= _IGNORED_STEPS)

    def observe(self, mode: BatchMode, num_tokens: float, seconds: float, timings: StepTimings) -> None:
        """Learn from a step that took `seconds`; such steps produce `num_tokens` on average."""
        if not mode.is_settled or seconds <= 0:
            return
        state = self._state(mode.load)
        state.rates[mode.is_half].append(num_tokens / seconds)
        if not mode.is_half and timings.total_s > 0:
            state.max_gain = timings.total_s / max(timings.draft_s, timings.total_s - timings.draft_s)
        state.since_trial += 1
        present, other = state.rates[state.uses_two_batches], state.rates[not state.uses_two_batches]
        if not state.is_trial:
            may_pay = state.uses_two_batches or state.max_gain > BETTER
            state.is_trial = may_pay and len(present) == _NUM_RATES and self._is_due(state, median(present))
            if state.is_trial:
                other.clear()
        elif len(other) == _NUM_RATES:
            state.is_trial = False
            if median(other) > BETTER * median(present):
                state.uses_two_batches = not state.uses_two_batches
                state.backoff.reset()
            elif state.trial_rate:
                state.backoff.fail()
            state.since_trial, state.trial_rate = 0, max(median(other), median(present))

    def _is_due(self, state: _LoadState, rate: float) -> bool:
        if not state.trial_rate:
            return True
        has_changed = max(rate / state.trial_rate, state.trial_rate / rate) > _CHANGED
        return state.since_trial > (_TRIAL_STEPS if has_changed else state.backoff.steps)

    def _state(self, load: int) -> _LoadState:
        """Return the state of this load; a new one starts from the nearest one."""
        if load not in self._states:
            nearest = min(self._states, key=lambda other: abs(other - load), default=load)
            self._states[load] = _LoadState(nearest != load and self._states[nearest].uses_two_batches)
        return self._states[load]
