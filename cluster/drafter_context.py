"""What the drafter knows of those who run: whether it is there, whether it is told, who has to enter anew.

Drafts of a request need the drafter's K and V of all that was computed for it. They are missing where a
drafter took another's place, and where they were not written for a while (`context_writes.py`). Either way
who runs decodes plainly from there on, nobody who comes is given a page without them, and `refill.py` says
who is computed anew. Used by `scheduler.py` alone; changes the roster and its books, decides no rows.
"""

from __future__ import annotations

from .context_writes import ContextWrites
from .executor import DrafterHealth
from .limits import SchedulerConfig
from .pace import Pace
from .plan import IntArray, SchedulerOutput, StepTimings
from .refill import Refill
from .roster import Roster
from .sequence import WAITING, Sequence


class DrafterContext:
    """Of one engine.

    Attributes:
        health: how the executor's drafter is.
    """

    def __init__(self, config: SchedulerConfig, roster: Roster, pace: Pace) -> None:
        self._roster, self._pace = roster, pace
        self.health = DrafterHealth()
        self.refill = Refill(config.max_rows, chunks=config.enable_chunked_prefill)
        self._writes = ContextWrites(may_stop=config.num_speculative_tokens > 0 and not config.halves)
        self._before_trial: list[Sequence] = []  # who ran when it began

    @property
    def is_written(self) -> bool:
        """Whether the drafter gets what the next step computes."""
        return self._writes.on

    @property
    def drafts(self) -> bool:
        """Whether anybody may draft."""
        return self.health.ready and self._writes.on

    def drafter_is(self, health: DrafterHealth) -> None:
        """Told before every plan."""
        before, self.health = self.health, health
        if health == before:
            return
        is_new = health.generation != before.generation
        if before.ready and (is_new or not health.ready):
            self._roster.counters.drafter_losses += 1
        if is_new:
            self._forget()
            self._writes.resume()
            self._pace.renew_drafter()

    def begin_trial(self) -> None:
        """A candidate gets what is computed from here on, as the drafter does. Who runs keeps that drafter;
        nobody who comes is given a page that the candidate lacks."""
        self._before_trial = list(self._roster.running)
        if self._writes.on:
            self._roster.books.forget([sequence.slot for sequence in self._before_trial])
        else:
            self._forget()
            self._writes.resume()

    def end_trial(self, *, promoted: bool) -> None:
        """The candidate has gone, or taken the drafter's place: then it lacks those who ran before it."""
        before, self._before_trial = self._before_trial, []
        if promoted:
            self._draft_for_none_of([each for each in before if each.slot != WAITING])
            self._pace.renew_drafter()

    def settle(self) -> None:
        """Before a plan: write or do not, and take somebody out who enters in it, to be computed anew."""
        if self._writes.should_stop:
            self._stop()
        elif not self._writes.on:
            self._resume_if_asked()
        if self.drafts:
            self._refill_next()

    def last_drafts(self, *, background: bool) -> int:
        """How long blocks are, or are to be once somebody may draft."""
        return self._pace.last_drafts(background=background) or self._writes.wanted

    def may_draft(self, limits_R: IntArray) -> None:
        """So many drafts those who decode may have: what was waited for can be tried."""
        if self._writes.wanted and limits_R.any():
            self._writes.wanted = 0
            self._pace.try_soon()

    def planned(self, plan: SchedulerOutput, *, trial: bool) -> None:
        self._writes.planned(brings=not trial and plan.num_draft_tokens > 0)

    def ended(self, plan: SchedulerOutput, timings: StepTimings) -> None:
        """A step, after so many seconds."""
        self._writes.ended(timings)
        if not plan.writes_context:
            self._roster.counters.drafter_unwritten_tokens += plan.num_batched_tokens

    def _forget(self, *, marked: bool = False) -> None:
        """The drafter knows nothing of what is computed. Who enters again, for whatever reason, is as good
        as new.

        Args:
            marked: of pages it lacks those alone that the cache has marked, and the shortest of those who run
                is to be computed anew in any case.
        """
        running, table = self._roster.running, self._roster.table
        self._roster.books.forget([sequence.slot for sequence in running], marked=marked)
        lengths = (int(table.num_tokens_S[q.slot]) for q in running if q.request.max_draft_tokens != 0)
        self._draft_for_none_of(running, min(lengths, default=0) if marked else 0)

    def _draft_for_none_of(self, running: list[Sequence], num_tokens: int = 0) -> None:
        """Until they are computed anew; who has no more than so many tokens is not too long for that."""
        self._roster.table.max_drafts_S[[sequence.slot for sequence in running]] = 0
        self.refill.begin(running, num_tokens)

    def _stop(self) -> None:
        """Nobody drafts from here on; how many drafts are wished for goes on being chosen."""
        self._writes.stop()
        self._roster.books.cache.mark()
        self.refill.begin(())
        self._roster.counters.drafter_rests += 1

    def _resume_if_asked(self) -> None:
        """If drafts were chosen, which nobody got."""
        for background in (False, True):
            choice = self._pace.last_choice(background=background)
            if choice.num_drafts_R.any() and self._writes.may_resume_for(trial=choice.trial):
                self._forget(marked=True)
                return self._writes.resume(choice.length)

    def _refill_next(self) -> None:
        """Take somebody out to be computed anew, if that costs nobody a place: it enters in this plan."""
        roster = self._roster
        background, num_others = not roster.num_online_running, len(roster.running) - 1
        num_drafts = self.last_drafts(background=background)
        sequence = self.refill.next(roster.table, num_drafts, num_others, background=background)
        if sequence is None or (roster.waiting and roster.waiting[0].rank < sequence.rank):
            return
        num_tokens = int(roster.table.num_tokens_S[sequence.slot])
        if roster.books.has_room_to_enter(roster.books.cache.no_hit, num_tokens, roster.num_before(sequence)):
            roster.send_back(sequence, "refilled")
            self.refill.current = sequence
