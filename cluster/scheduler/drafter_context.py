"""Tracks whether the drafter is available and of which running requests it has the context K/V.

Drafting for a request needs the drafter's K and V of all its computed tokens. They are missing if

* the drafter was replaced, or its process restarted: it has no earlier context;
* they were not written for a while (`ContextWriteGate`).

In both cases running requests decode without drafts, newly admitted ones get no cached page that lacks the
context, and `drafter_context_refill.py` chooses running requests to recompute. Used by `scheduler.py`;
changes the request queues and their pages, decides no rows.
"""

from __future__ import annotations

from ..step.executor import DrafterHealth
from ..step.limits import SchedulerConfig
from ..step.scheduler_output import IntArray, SchedulerOutput, StepTimings
from ..step.sequence import WAITING, Sequence
from .drafter_context_refill import DrafterContextRefill
from .request_queues import RequestQueues
from .step_controller import StepController

_IDLE_STEPS = 384  # steps without useful drafts until writes stop; by then a retry has failed
_IDLE_STEPS_AFTER_TRIAL = 96  # the same after resuming for a trial
_REST_STEPS, _MAX_REST_STEPS = 1024, 8192  # steps without writes until a trial may resume them; doubles
_WORTH_STOPPING = 1 / 64  # fraction of the steps' seconds spent on writes


class ContextWriteGate:
    """Stops writing the drafter's context K/V while drafts have gained nothing for long.

    The context is written with every row, whether or not it is drafted for. That costs a part of every step
    and gains nothing while drafting is off. Pages filled while writes are stopped are marked. Resuming costs
    the recomputation of at least one request, so a mere trial waits until enough steps have been saved, and
    twice as many after each unsuccessful trial. Writes that take next to no time are never stopped.

    Args:
        may_stop: whether writes take the target's time. Those of a drafter with its own device do not.

    Attributes:
        on: whether the next step writes.
        wanted: draft length that was chosen when writes resumed; 0 once drafts are possible.
    """

    def __init__(self, *, may_stop: bool) -> None:
        self._may_stop = may_stop
        self.on = True
        self.wanted = 0
        self._steps = 0  # since drafts were useful; while off, since writes stopped
        self._idle_steps, self._rest_steps = _IDLE_STEPS, _REST_STEPS
        self._write_s = self._total_s = 0.0  # of these steps, while on

    @property
    def should_stop(self) -> bool:
        if not self._may_stop or not self.on or self._steps < self._idle_steps:
            return False
        return 0.0 < _WORTH_STOPPING * self._total_s <= self._write_s

    def stop(self) -> None:
        self.on, self.wanted, self._steps = False, 0, 0

    def may_resume_for(self, *, trial: bool) -> bool:
        """Return whether chosen drafts, for a trial or because they pay, justify resuming writes."""
        return not self.on and (not trial or self._steps >= self._rest_steps)

    def resume(self, wanted: int = 0) -> None:
        self.on, self.wanted = True, wanted
        self._rest_steps = min(2 * self._rest_steps, _MAX_REST_STEPS)
        self._wait(_IDLE_STEPS_AFTER_TRIAL)

    def scheduled(self, *, useful: bool) -> None:
        """Record a step; `useful`: it drafts, and not only for a trial."""
        if useful:
            self._rest_steps = _REST_STEPS
            self._wait(_IDLE_STEPS)
        else:
            self._steps += 1

    def completed(self, timings: StepTimings) -> None:
        self._write_s += timings.inject_s
        self._total_s += timings.total_s

    def _wait(self, idle_steps: int) -> None:
        self._steps, self._idle_steps = 0, idle_steps
        self._write_s = self._total_s = 0.0


class DrafterContext:
    """The state of the drafter's context for one engine's requests.

    Attributes:
        health: state of the executor's drafter.
        refill: chooses requests to recompute.
    """

    def __init__(self, config: SchedulerConfig, roster: RequestQueues, controller: StepController) -> None:
        self._roster, self._controller = roster, controller
        self.health = DrafterHealth()
        self.refill = DrafterContextRefill(config.max_rows, chunks=config.enable_chunked_prefill)
        self._writes = ContextWriteGate(may_stop=config.num_speculative_tokens > 0 and not config.halves)
        self._before_trial: list[Sequence] = []  # requests running when a candidate's trial began

    @property
    def is_written(self) -> bool:
        """Whether the next step writes the drafter's context."""
        return self._writes.on

    @property
    def can_draft(self) -> bool:
        """Whether requests with context may draft."""
        return self.health.ready and self._writes.on

    def update_health(self, health: DrafterHealth) -> None:
        """Update the drafter's state; called before every plan."""
        before, self.health = self.health, health
        if health == before:
            return
        is_new = health.generation != before.generation
        if before.ready and (is_new or not health.ready):
            self._roster.counters.drafter_losses += 1
        if is_new:
            self._forget()
            self._writes.resume()
            self._controller.replace_drafter()

    def begin_trial(self) -> None:
        """Write a candidate drafter's context too from now on.

        Running requests keep the present drafter; new ones get no cached page that the candidate lacks.
        """
        self._before_trial = list(self._roster.running)
        if self._writes.on:
            self._roster.books.forget([sequence.slot for sequence in self._before_trial])
        else:
            self._forget()
            self._writes.resume()

    def end_trial(self, *, promoted: bool) -> None:
        """End the trial. A promoted candidate lacks the context of requests older than the trial."""
        before, self._before_trial = self._before_trial, []
        if promoted:
            self._draft_for_none_of([each for each in before if each.slot != WAITING])
            self._controller.replace_drafter()

    def prepare(self) -> None:
        """Prepare a plan: stop or resume writes, and preempt a request that will be recomputed in it."""
        if self._writes.should_stop:
            self._stop()
        elif not self._writes.on:
            self._resume_if_chosen()
        if self.can_draft:
            self._refill_next()

    def draft_length(self, *, background: bool) -> int:
        """Return the last draft length, or the one that is wanted once drafts are possible."""
        return self._controller.last_choice(background=background).length or self._writes.wanted

    def note_limits(self, limits_R: IntArray) -> None:
        """Make the controller retry drafts once the limits allow a decoding request to draft again."""
        if self._writes.wanted and limits_R.any():
            self._writes.wanted = 0
            self._controller.retry_soon()

    def scheduled(self, plan: SchedulerOutput, *, is_trial: bool) -> None:
        self._writes.scheduled(useful=not is_trial and plan.num_draft_tokens > 0)

    def completed(self, plan: SchedulerOutput, timings: StepTimings) -> None:
        self._writes.completed(timings)
        if not plan.writes_context:
            self._roster.counters.drafter_unwritten_tokens += plan.num_batched_tokens

    def _forget(self, *, marked: bool = False) -> None:
        """Drop the context of everything computed.

        Args:
            marked: only the cache's marked pages lack it, and the shortest running request is recomputed
                whatever its length.
        """
        running, table = self._roster.running, self._roster.table
        self._roster.books.forget([sequence.slot for sequence in running], marked=marked)
        lengths = (int(table.num_tokens_S[q.slot]) for q in running if q.request.max_draft_tokens != 0)
        self._draft_for_none_of(running, min(lengths, default=0) if marked else 0)

    def _draft_for_none_of(self, running: list[Sequence], num_tokens: int = 0) -> None:
        """Disable drafts for these until they are recomputed; none up to `num_tokens` is too long."""
        self._roster.table.max_drafts_S[[sequence.slot for sequence in running]] = 0
        self.refill.begin(running, num_tokens)

    def _stop(self) -> None:
        """Stop writes. No request drafts from now on; draft lengths are chosen as before."""
        self._writes.stop()
        self._roster.books.cache.mark()
        self.refill.begin(())
        self._roster.counters.drafter_rests += 1

    def _resume_if_chosen(self) -> None:
        """Resume writes if drafts were chosen but could not be made."""
        for background in (False, True):
            choice = self._controller.last_choice(background=background)
            if choice.num_drafts_R.any() and self._writes.may_resume_for(trial=choice.is_trial):
                self._forget(marked=True)
                return self._writes.resume(choice.length)

    def _refill_next(self) -> None:
        """Preempt the next request to recompute, if it can be readmitted in this plan."""
        roster = self._roster
        background, num_others = not roster.num_online_running, len(roster.running) - 1
        num_drafts = self.draft_length(background=background)
        sequence = self.refill.next(roster.table, num_drafts, num_others, background=background)
        if sequence is None or (roster.waiting and roster.waiting[0].rank < sequence.rank):
            return
        num_tokens = int(roster.table.num_tokens_S[sequence.slot])
        if roster.books.has_room_to_enter(roster.books.cache.no_hit, num_tokens, roster.num_before(sequence)):
            roster.send_back(sequence, "refilled")
            self.refill.current = sequence
