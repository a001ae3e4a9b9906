"""A flight recorder of the last requests, step by step, to explain why a request took long.

It is always on, so it must be almost free: a step is one row of arrays for all its requests (microseconds,
whatever their number), and a request's own numbers are extracted when it leaves its slot. It is bounded to
the last steps and the last requests, and holds neither tokens nor text. `cluster/scheduler/request_queues.py`
and `cluster/scheduler/scheduler.py` report events. `cluster/engine/engine_core.py` reads from any thread:
readers copy what the engine's thread only appends to. `request_timeline.py` defines what readers get.

Shape legend: N recorded steps, R requests in a step, S slots, C counts of a request in a step, T times.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np

from ..request.request import FinishReason, Request
from ..step.step_outcome import CompletedStep
from .acceptance_slices import BlockGroup, Dimension, context_label
from .request_timeline import COUNTS, TIMES, Reason, RequestTimeline, SlotInterval, SlotSteps, Why

_MAX_CELLS = 1 << 18  # steps x slots
_MIN_STEPS, _MAX_STEPS = 256, 4096
_MAX_ENDED = 4096  # requests
_MAX_ENDED_STEPS = 1 << 17  # steps of ended requests, about 11 MB in total


class StepRingBuffer:
    """A ring buffer of the last committed steps of all requests; `last` is the newest step, or -1."""

    def __init__(self, num_slots: int) -> None:
        self.num_steps = min(max(_MAX_CELLS // num_slots, _MIN_STEPS), _MAX_STEPS)
        self._counts_NCS = np.zeros((self.num_steps, len(COUNTS), num_slots), dtype=np.int32)
        self._times_NT = np.zeros((self.num_steps, len(TIMES)))
        self.last = -1

    def write(self, step: CompletedStep) -> None:
        """Record a committed step; requests that have left are not in its outcome."""
        plan, outcome, timings = step.plan, step.outcome, step.result.timings
        row = plan.step % self.num_steps
        counts_CS = self._counts_NCS[row]
        counts_CS.fill(0)
        # A single assignment, as each costs a microsecond.
        counts_CS[:, outcome.slots] = (
            *(outcome.num_known, outcome.num_planned, outcome.num_drafts),
            *(outcome.num_accepted, outcome.num_out),
        )
        self._times_NT[row] = (
            *(step.planned_s, step.ended_s),
            *(timings.draft_s, timings.verify_s, timings.sample_s, timings.inject_s),
            *(plan.num_requests, plan.num_batched_tokens),
        )
        self.last = plan.step

    def of(self, slot: int, first: int, last: int) -> SlotSteps:
        """Return what a slot had of the steps from `first` to `last`, as far as they are recorded."""
        begin = max(first, self.last - self.num_steps + 1)
        rows_N = np.arange(begin, last + 1) % self.num_steps
        counts_NC = self._counts_NCS[rows_N, :, slot]
        took_part_N = counts_NC[:, 0] > 0  # at least one row of a known token
        return SlotSteps(counts_NC[took_part_N], self._times_NT[rows_N[took_part_N]], begin - first)


class QueueWaits:
    """Seconds for which the head of a queue could not enter, by reason; the rest waits for the same."""

    def __init__(self) -> None:
        self._totals: dict[Reason, float] = {}
        self.reason: Reason | None = None
        self._since_s = 0.0

    def on_blocked(self, reason: Reason, now_s: float) -> None:
        self.reason, self._since_s = reason, now_s

    def add_elapsed(self, now_s: float) -> None:
        if self.reason is not None:
            self._totals[self.reason] = self._totals.get(self.reason, 0.0) + now_s - self._since_s
            self.reason = None

    def until(self, now_s: float) -> Mapping[Reason, float]:
        totals = dict(self._totals)
        if self.reason is not None:
            totals[self.reason] = totals.get(self.reason, 0.0) + max(now_s - self._since_s, 0.0)
        return totals


@dataclass(slots=True)
class _OpenInterval:
    """A request's time in a slot; open while `released_s` is None."""

    slot: int
    first_step: int
    admitted_s: float
    num_cached: int
    num_read: int
    waited: Mapping[Reason, float]
    released_s: float | None = None
    why: Why | None = None
    steps: SlotSteps | None = None


@dataclass(slots=True)
class _OpenTimeline:
    """A request so far. `queued_s` and `waits` are those at its arrival, or when it last lost its slot."""

    request_id: str
    client_id: str | None
    owner: str | None
    arrival_s: float
    num_prompt_tokens: int
    num_resumed: int
    max_tokens: int | None
    priority: int
    background: bool
    max_draft_tokens: int | None
    temperature: float
    has_grammar: bool
    waits: Mapping[Reason, float]
    intervals: list[_OpenInterval] = field(default_factory=list[_OpenInterval])
    ended_s: float | None = None
    finish_reason: FinishReason | None = None

    @property
    def num_steps(self) -> int:
        return sum(len(interval.steps.counts_NC) for interval in self.intervals if interval.steps is not None)

    def matches_name(self, name: str) -> bool:
        """Return whether this is the request's name in the engine, that of its response, or the client's."""
        request_id = self.request_id
        return name in (self.client_id, request_id) or (
            request_id.startswith(name) and request_id[len(name)] in "-."
        )


class FlightRecorder:
    def __init__(self, num_slots: int) -> None:
        self._ring = StepRingBuffer(num_slots)
        self._live_requests: dict[str, _OpenTimeline] = {}
        self._ended: deque[_OpenTimeline] = deque()
        self._num_ended_steps = 0
        self._waits = {background: QueueWaits() for background in (False, True)}
        self._step, self._now_s = 0, 0.0  # of the plan being made, or of the last one

    # Called by the request queues and the scheduler.

    def on_arrival(self, request: Request) -> None:
        self._live_requests[request.request_id] = _OpenTimeline(
            request.request_id,
            request.client_id,
            request.owner,
            request.arrival_s,
            len(request.prompt_token_ids),
            len(request.output_token_ids),
            request.params.max_tokens,
            request.priority,
            request.background,
            request.max_draft_tokens,
            0.0 if request.params.greedy else request.params.temperature,
            request.params.grammar is not None,
            self._waits[request.background].until(request.arrival_s),
        )

    def on_planning(self, step: int, now_s: float) -> None:
        self._step, self._now_s = step, now_s
        for waits in self._waits.values():
            if waits.reason is not None:
                waits.add_elapsed(now_s)

    def on_blocked(self, reason: Reason, *, background: bool) -> None:
        self._waits[background].on_blocked(reason, self._now_s)

    def on_admitted(self, request_id: str, slot: int, num_cached: int, num_read: int) -> None:
        """Record that a request runs from this plan on, with `num_cached` tokens already computed.

        Of these, `num_read` were read from a tier below the cache.
        """
        timeline = self._live_requests[request_id]
        waits_before = timeline.waits
        totals = self._waits[timeline.background].until(self._now_s)
        waited: dict[Reason, float] = {
            reason: s - waits_before.get(reason, 0.0)
            for reason, s in totals.items()
            if s > waits_before.get(reason, 0.0)
        }
        timeline.intervals.append(_OpenInterval(slot, self._step, self._now_s, num_cached, num_read, waited))

    def observe(self, step: CompletedStep) -> None:
        """Record a committed step, before its ended requests are reported."""
        self._now_s = step.ended_s
        self._ring.write(step)

    def on_slot_lost(self, request_id: str, why: Why) -> None:
        """Record that a request goes back from running to waiting."""
        timeline = self._live_requests[request_id]
        self._close(timeline, why)
        timeline.waits = self._waits[timeline.background].until(self._now_s)

    def on_finished(self, request_id: str, reason: FinishReason) -> None:
        """Record that a request leaves for good, running or waiting."""
        timeline = self._live_requests[request_id]
        self._close(timeline, "ended")
        timeline.ended_s, timeline.finish_reason = self._now_s, reason
        self._ended.append(timeline)
        del self._live_requests[request_id]
        self._num_ended_steps += timeline.num_steps
        while len(self._ended) > _MAX_ENDED or self._num_ended_steps > _MAX_ENDED_STEPS:
            self._num_ended_steps -= self._ended.popleft().num_steps

    def forget_ended(self) -> None:
        """Forget the ended requests, which were those of a warm-up."""
        self._ended.clear()
        self._num_ended_steps = 0

    def _close(self, timeline: _OpenTimeline, why: Why) -> None:
        """End the current slot interval, if any; very long requests only keep their last steps."""
        if not timeline.intervals or timeline.intervals[-1].released_s is not None:
            return
        interval = timeline.intervals[-1]
        interval.steps = self._ring.of(interval.slot, interval.first_step, self._ring.last)
        interval.released_s, interval.why = self._now_s, why
        while len(timeline.intervals) > 1 and timeline.num_steps > _MAX_STEPS:
            timeline.intervals.pop(0)

    # Called from any thread.

    def timelines(self, name: str) -> list[RequestTimeline]:
        """Return the requests with this name, oldest first; one HTTP request may have several."""
        known = [*self._ended.copy(), *self._live_requests.copy().values()]
        return [self._to_timeline(timeline) for timeline in known if timeline.matches_name(name)]

    def block_groups(self, is_visible: Callable[[str | None], bool]) -> list[BlockGroup]:
        """Return the verified blocks of recorded requests; `is_visible` gets a request's owner."""
        known = [*self._ended.copy(), *self._live_requests.copy().values()]
        return [
            group
            for timeline in known
            if timeline.max_draft_tokens != 0 and is_visible(timeline.owner)
            for group in self._blocks_of(timeline)
        ]

    def _blocks_of(self, timeline: _OpenTimeline) -> list[BlockGroup]:
        """Return a request's blocks by context length. Steps that are not recorded any more are left out."""
        found: list[BlockGroup] = []
        num_tokens = timeline.num_prompt_tokens + timeline.num_resumed
        for interval in timeline.intervals.copy():
            steps = interval.steps or self._ring.of(interval.slot, interval.first_step, self._ring.last)
            labels: dict[Dimension, str] = {
                "temperature": f"{timeline.temperature:g}",
                "grammar": "yes" if timeline.has_grammar else "no",
                "prefix_cache": "hit" if interval.num_cached else "no",
            }
            if timeline.owner is not None:
                labels["tenant"] = timeline.owner
            by_context: dict[str, Counter[tuple[int, int]]] = {}
            for _, _, num_verified, num_accepted, num_out in steps.counts_NC.tolist():
                if num_verified:
                    blocks = by_context.setdefault(context_label(num_tokens), Counter())
                    blocks[num_verified, num_accepted] += 1
                num_tokens += num_out
            found += [
                BlockGroup(timeline.request_id, {**labels, "context": label}, blocks)
                for label, blocks in by_context.items()
            ]
        return found

    def _to_timeline(self, timeline: _OpenTimeline) -> RequestTimeline:
        return RequestTimeline(
            request_id=timeline.request_id,
            client_id=timeline.client_id,
            owner=timeline.owner,
            arrival_s=timeline.arrival_s,
            num_prompt_tokens=timeline.num_prompt_tokens,
            num_resumed=timeline.num_resumed,
            max_tokens=timeline.max_tokens,
            priority=timeline.priority,
            background=timeline.background,
            max_draft_tokens=timeline.max_draft_tokens,
            intervals=tuple(map(self._to_interval, timeline.intervals)),
            ended_s=timeline.ended_s,
            finish_reason=timeline.finish_reason,
        )

    def _to_interval(self, interval: _OpenInterval) -> SlotInterval:
        steps = interval.steps or self._ring.of(interval.slot, interval.first_step, self._ring.last)
        return SlotInterval(
            admitted_s=interval.admitted_s,
            num_cached=interval.num_cached,
            num_read=interval.num_read,
            waited=interval.waited,
            released_s=interval.released_s,
            why=interval.why,
            num_forgotten=max(steps.num_forgotten, 0),
            steps=tuple(steps.steps()),
        )
