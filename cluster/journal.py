"""What happened to the last requests, step by step: for whoever asks why one took so long.

Always on, so it must cost next to nothing: a step is one row of arrays for all its requests (microseconds,
however many there are), and a request's own numbers are picked out when it leaves its slot. All is bounded:
the last steps, the last requests. No token and no text is kept. Told by `roster.py` and `scheduler.py`, which
own what happens; read by `engine.py`, from any thread: readers copy what the engine's thread only adds to.
`lives.py` says what readers get.

Shape legend: N steps that are kept, R requests in a step, S slots, C counts of a request in a step, T times.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from .lives import COUNTS, TIMES, Life, Reason, SlotSteps, Stay, Why
from .outcome import StepOutcome
from .plan import SchedulerOutput, StepTimings
from .request import FinishReason, Request

_MOST_CELLS = 1 << 18  # steps x slots
_LEAST_STEPS, _MOST_STEPS = 256, 4096
_MOST_ENDED = 4096  # requests
_MOST_ENDED_STEPS = 1 << 17  # of theirs, together: about 11 MB


class StepRing:
    """The last steps as they were committed, whoever they were for.

    Args:
        num_slots: of the scheduler.

    Attributes:
        last: number of the newest step; -1 before the first. Steps are committed in their order.
    """

    def __init__(self, num_slots: int) -> None:
        self.num_steps = min(max(_MOST_CELLS // num_slots, _LEAST_STEPS), _MOST_STEPS)
        self._counts_NCS = np.zeros((self.num_steps, len(COUNTS), num_slots), dtype=np.int32)
        self._times_NT = np.zeros((self.num_steps, len(TIMES)))
        self.last = -1

    def write(
        self,
        plan: SchedulerOutput,
        planned_s: float,
        outcome: StepOutcome,
        timings: StepTimings,
        now_s: float,
    ) -> None:
        """A step is committed; who has left meanwhile is not in its outcome."""
        row = plan.step % self.num_steps
        counts_CS = self._counts_NCS[row]
        counts_CS.fill(0)
        # One assignment: each would cost a microsecond.
        counts_CS[:, outcome.slots] = (
            *(outcome.num_known, outcome.num_planned, outcome.num_drafts),
            *(outcome.num_accepted, outcome.num_out),
        )
        self._times_NT[row] = (
            *(planned_s, now_s, timings.draft_s, timings.verify_s, timings.sample_s, timings.inject_s),
            *(plan.num_requests, plan.num_batched_tokens),
        )
        self.last = plan.step

    def of(self, slot: int, first: int, last: int) -> SlotSteps:
        """What a slot had of the steps from `first` to `last`, as far as they are kept."""
        begin = max(first, self.last - self.num_steps + 1)
        rows_N = np.arange(begin, last + 1) % self.num_steps
        counts_NC = self._counts_NCS[rows_N, :, slot]
        took_part_N = counts_NC[:, 0] > 0  # a row of a known token at the least
        return SlotSteps(counts_NC[took_part_N], self._times_NT[rows_N[took_part_N]], begin - first)


class Waits:
    """For how long the first of a queue was kept from entering, by what: who is behind waits for the same."""

    def __init__(self) -> None:
        self._totals: dict[Reason, float] = {}
        self._held: Reason | None = None
        self._since_s = 0.0

    def hold(self, reason: Reason, now_s: float) -> None:
        """It does not enter the plan that is being made."""
        self._held, self._since_s = reason, now_s

    def settle(self, now_s: float) -> None:
        """The next plan is being made."""
        if self._held is not None:
            self._totals[self._held] = self._totals.get(self._held, 0.0) + now_s - self._since_s
            self._held = None

    def until(self, now_s: float) -> Mapping[Reason, float]:
        """The totals of a moment."""
        totals = dict(self._totals)
        if self._held is not None:
            totals[self._held] = totals.get(self._held, 0.0) + max(now_s - self._since_s, 0.0)
        return totals


@dataclass(slots=True)
class _Stay:
    """A request in a slot; open as long as `left_s` is None."""

    slot: int
    first_step: int
    entered_s: float
    num_cached: int
    waited: Mapping[Reason, float]
    left_s: float | None = None
    why: Why | None = None
    steps: SlotSteps | None = None


@dataclass(slots=True)
class _Life:
    """A request so far. `queued_s` and `waits` are of its arrival, or of when it last lost its slot."""

    request_id: str
    client_id: str | None
    owner: str | None
    arrival_s: float
    num_prompt_tokens: int
    num_begun: int
    max_tokens: int | None
    priority: int
    background: bool
    max_draft_tokens: int | None
    waits: Mapping[Reason, float]
    stays: list[_Stay] = field(default_factory=list[_Stay])
    ended_s: float | None = None
    finish_reason: FinishReason | None = None

    @property
    def num_steps(self) -> int:
        return sum(len(stay.steps.counts_NC) for stay in self.stays if stay.steps is not None)

    def goes_by(self, name: str) -> bool:
        """Whether this is the engine's name for it, that of the response it is a part of, or the client's."""
        own = self.request_id
        return name in (self.client_id, own) or (own.startswith(name) and own[len(name)] in "-.")


class Journal:
    """Of one scheduler.

    Args:
        num_slots: most requests that run at once.
    """

    def __init__(self, num_slots: int) -> None:
        self._ring = StepRing(num_slots)
        self._living: dict[str, _Life] = {}
        self._ended: deque[_Life] = deque()
        self._num_ended_steps = 0
        self._waits = {background: Waits() for background in (False, True)}
        self._step, self._now_s = 0, 0.0  # of the plan in the making, or of the last one

    # Told by the roster and the scheduler.

    def arrived(self, request: Request) -> None:
        """A request waits."""
        self._living[request.request_id] = _Life(
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
            self._waits[request.background].until(request.arrival_s),
        )

    def planning(self, step: int, now_s: float) -> None:
        """A plan is being made."""
        self._step, self._now_s = step, now_s
        for waits in self._waits.values():
            waits.settle(now_s)

    def held(self, reason: Reason, *, background: bool) -> None:
        """The first of those that wait does not enter it."""
        self._waits[background].hold(reason, self._now_s)

    def entered(self, request_id: str, slot: int, num_cached: int) -> None:
        """A request runs from this plan on, with so many tokens computed already."""
        life = self._living[request_id]
        before = life.waits
        totals = self._waits[life.background].until(self._now_s)
        waited: dict[Reason, float] = {
            why: s - before.get(why, 0.0) for why, s in totals.items() if s > before.get(why, 0.0)
        }
        life.stays.append(_Stay(slot, self._step, self._now_s, num_cached, waited))

    def stepped(
        self,
        plan: SchedulerOutput,
        planned_s: float,
        outcome: StepOutcome,
        timings: StepTimings,
        now_s: float,
    ) -> None:
        """A step is committed; before those it ends are told to have left."""
        self._now_s = now_s
        self._ring.write(plan, planned_s, outcome, timings, now_s)

    def lost_slot(self, request_id: str, why: Why) -> None:
        """A request goes back from running to waiting."""
        life = self._living[request_id]
        self._close(life, why)
        life.waits = self._waits[life.background].until(self._now_s)

    def ended(self, request_id: str, reason: FinishReason) -> None:
        """A request leaves for good, from wherever it is."""
        life = self._living[request_id]
        self._close(life, "ended")
        life.ended_s, life.finish_reason = self._now_s, reason
        self._ended.append(life)
        del self._living[request_id]
        self._num_ended_steps += life.num_steps
        while len(self._ended) > _MOST_ENDED or self._num_ended_steps > _MOST_ENDED_STEPS:
            self._num_ended_steps -= self._ended.popleft().num_steps

    def _close(self, life: _Life, why: Why) -> None:
        """Its stay in a slot is over, if it has one; of a very long life the last steps stay."""
        if not life.stays or life.stays[-1].left_s is not None:
            return
        stay = life.stays[-1]
        stay.steps = self._ring.of(stay.slot, stay.first_step, self._ring.last)
        stay.left_s, stay.why = self._now_s, why
        while len(life.stays) > 1 and life.num_steps > _MOST_STEPS:
            life.stays.pop(0)

    # Asked from any thread.

    def lives(self, name: str) -> list[Life]:
        """The requests of this name, oldest first: of one HTTP request there may be several."""
        known = [*self._ended.copy(), *self._living.copy().values()]
        return [self._told(life) for life in known if life.goes_by(name)]

    def _told(self, life: _Life) -> Life:
        return Life(
            request_id=life.request_id,
            client_id=life.client_id,
            owner=life.owner,
            arrival_s=life.arrival_s,
            num_prompt_tokens=life.num_prompt_tokens,
            num_begun=life.num_begun,
            max_tokens=life.max_tokens,
            priority=life.priority,
            background=life.background,
            max_draft_tokens=life.max_draft_tokens,
            stays=tuple(map(self._stay_told, life.stays)),
            ended_s=life.ended_s,
            finish_reason=life.finish_reason,
        )

    def _stay_told(self, stay: _Stay) -> Stay:
        steps = stay.steps or self._ring.of(stay.slot, stay.first_step, self._ring.last)
        return Stay(
            entered_s=stay.entered_s,
            num_cached=stay.num_cached,
            waited=stay.waited,
            left_s=stay.left_s,
            why=stay.why,
            num_forgotten=max(steps.num_forgotten, 0),
            steps=tuple(steps.told()),
        )
