"""Chooses between one batch and two halves that alternate between drafter and target.

An executor with a drafter on its own device (`ExecutorInfo.halves`) can draft for one half of the requests
while it verifies the other:

    whole     draft all -> verify all -> ..               n requests every D(n) + V(n) seconds
    halves    verify A  | verify B  | verify A            n / 2 requests every max(D(n / 2), V(n / 2)) seconds
              draft B   | draft A   | draft B

Halves pay if drafting takes about as long as verifying, or if verifying takes time in proportion to its rows.
They lose up to half if a pass over half of the rows takes as long as one over all, as on most GPUs. So
batches stay whole unless halves were measured to produce more tokens per second. The other mode is tried
occasionally, less often after each failure, and halves are not tried if even free drafts would gain nothing.
Used by `step_controller.py`; does not access sequences.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from statistics import median
from typing import NamedTuple

from ..speculation.draft_lengths import load_class
from ..step.scheduler_output import StepTimings

_NUM_RATES, _MIN_RATES = 8, 6  # steps whose median rate is compared, and their minimum number
_FIRST_HALVES = 2  # ignored steps of a sequence of halves, since drafts of the first one were not overlapped
_BETTER = 1.02  # rate ratio to change the mode
_FIRST_TRIAL, _NEXT_TRIAL, _MAX_TRIAL = 32, 256, 4096  # steps until a trial; doubles with each failure
# After this many steps a trial is due if the rate has changed by this factor, up or down, since the last
# trial.
_CHANGED_TRIAL, _CHANGED = 128, 1.33


class BatchMode(NamedTuple):
    """The mode in which a step was planned.

    Attributes:
        is_half: it has one half of the requests.
        load: class of the number of running requests.
        is_settled: the preceding steps were planned in the same mode.
    """

    is_half: bool
    load: int
    is_settled: bool


@dataclass(slots=True)
class _LoadState:
    """Measurements for one class of load.

    Attributes:
        uses_halves: the faster mode, as far as known.
        rates: tokens per second of the last whole steps, and of the last halves.
        max_gain: upper bound of the gain of halves over whole steps, from the last whole step's seconds.
        trial_in, interval: steps until the next trial, and between trials.
        trial_rate: rate of the faster mode at the last trial.
        is_trial: the slower mode is being tried.
    """

    uses_halves: bool = False
    rates: tuple[deque[float], deque[float]] = field(
        default_factory=lambda: (deque[float](maxlen=_NUM_RATES), deque[float](maxlen=_NUM_RATES))
    )
    max_gain: float = 0.0
    trial_in: int = 0
    interval: int = _NEXT_TRIAL
    trial_rate: float = 0.0
    is_trial: bool = False


class BatchHalves:
    """Chooses the mode of one engine, by number of running requests."""

    def __init__(self) -> None:
        self._states: dict[int, _LoadState] = {}
        self._num_alike = 0  # consecutive plans in the same mode
        self._was_half = False

    def choose(self, num_requests: int) -> bool:
        """Return whether the next step has half of the running requests."""
        if num_requests < 2:
            return False
        state = self._state(load_class(num_requests))
        return state.uses_halves != state.is_trial

    def plan(self, num_requests: int, *, is_half: bool) -> BatchMode:
        """Record that a step was planned in this mode."""
        self._num_alike = self._num_alike + 1 if is_half == self._was_half else 0
        self._was_half = is_half
        return BatchMode(is_half, load_class(num_requests), not is_half or self._num_alike >= _FIRST_HALVES)

    def observe(self, turn: BatchMode, num_tokens: float, seconds: float, timings: StepTimings) -> None:
        """Learn from a step in which all requests decoded with the same draft length.

        Args:
            num_tokens: average number of tokens that such a step produces.
            seconds: since the previous step ended, or since it was planned if that was later.
        """
        if not turn.is_settled or seconds <= 0:
            return
        state = self._state(turn.load)
        state.rates[turn.is_half].append(num_tokens / seconds)
        if not turn.is_half and timings.total_s > 0:
            verify_s = timings.total_s - timings.draft_s
            state.max_gain = timings.total_s / max(timings.draft_s, verify_s)
        present, other = state.rates[state.uses_halves], state.rates[not state.uses_halves]
        if state.is_trial:
            if len(other) >= _MIN_RATES:
                self._end_trial(state, median(other) / median(present))
            return
        state.trial_in -= 1
        may_pay = state.uses_halves or state.max_gain > _BETTER
        if len(present) < _MIN_RATES or not may_pay:
            return
        ratio = median(present) / state.trial_rate if state.trial_rate else 1.0
        has_changed = max(ratio, 1 / ratio) > _CHANGED
        if state.trial_in < 0 or (has_changed and state.trial_in < state.interval - _CHANGED_TRIAL):
            state.is_trial = True
            other.clear()

    def _state(self, load: int) -> _LoadState:
        """Return the state of this load; a new one starts from the nearest one."""
        if load not in self._states:
            nearest = min(self._states, key=lambda other: abs(other - load), default=None)
            self._states[load] = _LoadState()
            if nearest is not None:
                old = self._states[nearest]
                self._states[load] = _LoadState(old.uses_halves, trial_in=_FIRST_TRIAL)
        return self._states[load]

    def _end_trial(self, state: _LoadState, ratio: float) -> None:
        state.is_trial = False
        if ratio > _BETTER:
            state.uses_halves, state.interval = not state.uses_halves, _NEXT_TRIAL
        else:
            state.interval = min(2 * state.interval, _MAX_TRIAL)
        state.trial_in, state.trial_rate = state.interval, median(state.rates[state.uses_halves])
