"""Detects a step that takes far longer than similar ones: a worker is stopped, or its device hangs.

The thread that runs steps reports when a call of the executor begins and ends; another thread of the same
process ticks. Only time observed tick by tick counts: while the whole process is suspended (SIGSTOP of its
group, a sleeping laptop) none does. Libraries compile and capture in the first steps of a kind, so these may
take at least a minute, and the expected time is derived from kinds already seen. While none was seen, only a
process known to be stopped counts as a stall. Pure.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ..step.scheduler_output import AdmittedRequest, SchedulerOutput

FLOOR_S = 20.0  # seconds before which no step is too long
FACTOR = 100.0  # multiple of the slowest similar step
COMPILING_S = 60.0  # minimum if libraries may compile or capture in the step
TICK_S = 0.5
_MIN_STEPS = 2  # steps of a kind before one is judged
# steps not judged after a request used a new feature, whose kernels are compiled on demand
_WARM_UP_STEPS = 32
_DECAY = 0.5  # of a kind's slowest step, per later step, so that a hiccup is forgotten


class _Kind(NamedTuple):
    """Properties that roughly determine a step's seconds: sizes by powers of two."""

    rows: int
    requests: int
    drafts: bool
    prompts: bool


@dataclass(slots=True)
class _KindStats:
    count: int = 0
    slowest_s: float = 0.0


@dataclass(slots=True, eq=False)
class _InFlightStep:
    kind: _Kind
    seconds: float = 0.0


@dataclass(frozen=True, slots=True, eq=False)
class _Call:
    """A call of the executor that has not returned; `limit_s` is None if it is not judged."""

    limit_s: float | None


@dataclass(frozen=True, slots=True)
class Stall:
    """A step that does not end, after `waited_s`; `suspects` are processes known to be stopped."""

    waited_s: float
    limit_s: float
    suspects: tuple[str, ...]

    @property
    def reason(self) -> str:
        text = f"a step has not ended after {self.waited_s:.0f} s (limit {self.limit_s:.0f} s)"
        stopped = ", ".join(self.suspects)
        return f"{text}; stopped by a signal or a debugger: {stopped}" if stopped else text


class StepWatchdog:
    """Watches the steps of one engine. `check` is called by another thread than the rest.

    No step shorter than `floor_s` is a stall; others are if they take `factor` times the slowest recent one
    of their kind.
    """

    def __init__(self, floor_s: float = FLOOR_S, factor: float = FACTOR) -> None:
        self.floor_s, self._factor = floor_s, factor
        self._flights: deque[_InFlightStep] = deque()
        self._seen: dict[_Kind, _KindStats] = {}
        self._features: dict[tuple[bool, ...], int] = {}
        self._warm_up_steps_left = 0
        self._call: _Call | None = None  # replaced atomically, as another thread reads it
        # Used by the ticking thread.
        self._watched: _Call | None = None
        self._waited_s = self._ticked_s = 0.0

    def before_submit(self, plan: SchedulerOutput) -> None:
        for request in plan.admitted:
            self._check_features(request)
        flight = _InFlightStep(_kind_of(plan))
        self._flights.append(flight)
        self._call = _Call(self._limit_s(flight.kind))

    def after_submit(self, seconds: float) -> None:
        self._flights[-1].seconds += seconds
        self._call = None

    def before_collect(self) -> None:
        self._call = _Call(self._limit_s(self._flights[0].kind))

    def after_collect(self, seconds: float) -> None:
        flight = self._flights.popleft()
        seen = self._seen.setdefault(flight.kind, _KindStats())
        seen.count += 1
        seen.slowest_s = max(flight.seconds + seconds, _DECAY * seen.slowest_s)
        self._warm_up_steps_left = max(self._warm_up_steps_left - 1, 0)
        self._call = None

    def reset(self) -> None:
        self._seen = {}

    def check(self, now_s: float, stopped: Callable[[], Sequence[str]]) -> Stall | None:
        """Check the call in progress, every TICK_S; `stopped` is called once `floor_s` is reached."""
        call, passed_s = self._call, now_s - self._ticked_s
        self._ticked_s = now_s
        if call is None or call is not self._watched:
            self._watched, self._waited_s = call, 0.0
            return None
        self._waited_s += min(passed_s, 2 * TICK_S)  # a longer gap means that this process was suspended
        if self._waited_s < self.floor_s:
            return None
        if suspects := stopped():
            return Stall(self._waited_s, self.floor_s, tuple(suspects))
        if call.limit_s is not None and self._waited_s >= call.limit_s:
            return Stall(self._waited_s, call.limit_s, ())
        return None

    def _limit_s(self, kind: _Kind) -> float | None:
        like = self._seen.get(kind)
        if like is not None and like.count >= _MIN_STEPS and not self._warm_up_steps_left:
            return max(self.floor_s, self._factor * like.slowest_s)
        known = {each: seen.slowest_s for each, seen in self._seen.items() if seen.count >= _MIN_STEPS}
        if not known:
            return None
        expected_s = min(slowest_s * _times_rows(kind, each) for each, slowest_s in known.items())
        return max(self.floor_s, COMPILING_S, self._factor * expected_s)

    def _check_features(self, request: AdmittedRequest) -> None:
        """Judge no step for a while after a request with a new combination of features."""
        sampling = request.sampling
        features = (
            *(sampling.rules is not None, sampling.grammar is not None, sampling.temperature > 0.0),
            *(sampling.logprobs is not None, sampling.prompt_logprobs is not None),
        )
        count = self._features.get(features, 0)
        if count < _MIN_STEPS:
            self._features[features] = count + 1
            self._warm_up_steps_left = _WARM_UP_STEPS


def _times_rows(kind: _Kind, known: _Kind) -> int:
    """Return the ratio of rows to those of a known kind, at least 1, which bounds the time ratio."""
    return 1 << max(kind.rows - known.rows, 0)


def _kind_of(plan: SchedulerOutput) -> _Kind:
    rows, requests, drafts = plan.num_batched_tokens, plan.num_requests, plan.num_draft_tokens
    return _Kind(rows.bit_length(), requests.bit_length(), drafts > 0, rows - drafts > requests)
