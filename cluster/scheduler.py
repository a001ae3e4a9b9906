"""Decides what each step computes: who runs, how many rows each gets, which pages, and what came of it.

There is no prefill phase and no decode phase: every running sequence has known tokens of which some are not
computed yet, and a step lets it catch up. A sequence that lacks only its newest token (the anchor) may add
drafts behind it.

`schedule`, execute, `commit`; the next plans may be made while some are in flight. How many tokens those
bring is not known then: pages (`page_books.py`) are taken for the most and given back for the least, and
where a sequence stands is left to the workers. Whoever leaves (ended, aborted, preempted: `roster.py`) leaves
at once: what is in flight for it is dropped on arrival, and as steps run in order, its pages are written by
their next owner later. Called by `engine.py` alone; knows neither a clock nor an executor. The order of
serving is the roster's: background work comes behind all others, who plan as if it were not there. It gets
rows in what they leave (`pace.py` says how much) or pauses with slot and pages.

Shape legend: R requests in the step, W = 1 + largest number of drafts.
"""

from __future__ import annotations

import math
from collections import deque

import numpy as np

from .background_share import NOTHING
from .executor import DrafterHealth
from .limits import SchedulerConfig
from .outcome import SequenceUpdate, StepOutcome, make_updates, read_result
from .pace import Flight, Pace
from .plan import AdmittedRequest, IntArray, SchedulerOutput, StepResult
from .refill import Refill
from .roster import Roster
from .row_shares import decoding_alike, share, within
from .sequence import Sequence


class Scheduler:
    """See the module's text. Requests are expected to be valid and to fit (`engine.py` checks them)."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self.roster = Roster(config, self._forget_slot)
        self.books, self.table = self.roster.books, self.roster.table
        self.counters = self.roster.counters
        self._pace = Pace(config)
        self.drafter = DrafterHealth()
        self._refill = Refill(config.max_rows, chunks=config.enable_chunked_prefill)
        self._num_steps = 0
        self._online_s = -math.inf  # when the last step with online requests was planned
        self._in_flight: deque[Flight] = deque()
        self._halved = False  # whether the plan in the making is for half of the requests, by turns
        self._admitted: list[AdmittedRequest] = []  # of the plan in the making

    # A drafter goes and comes.

    def drafter_is(self, health: DrafterHealth) -> None:
        """How the executor's drafter is, told before every plan."""
        before, self.drafter = self.drafter, health
        if health == before:
            return
        is_new = health.generation != before.generation
        if before.ready and (is_new or not health.ready):
            self.counters.drafter_losses += 1
        if is_new:
            self._forget_context()

    def _forget_context(self) -> None:
        """The drafter knows nothing of what is computed: who runs decodes plainly from here on, and nobody
        who comes is given a page of it. Who enters again, for whatever reason, is as good as new."""
        self.books.forget([sequence.slot for sequence in self.roster.running])
        self.table.max_drafts_S[:] = 0
        self._refill.begin(self.roster.running)

    def _refill_next(self) -> None:
        """Take somebody out to be computed anew, if that costs nobody a place: it enters in this plan."""
        roster = self.roster
        background, num_others = not roster.num_online_running, len(roster.running) - 1
        num_drafts = self._pace.last_drafts(background=background)
        sequence = self._refill.next(self.table, num_drafts, num_others, background=background)
        if sequence is None or (roster.waiting and roster.waiting[0].rank < sequence.rank):
            return
        num_tokens = int(self.table.num_tokens_S[sequence.slot])
        if self.books.has_room_to_enter(self.books.cache.no_hit, num_tokens, roster.num_before(sequence)):
            roster.send_back(sequence)
            self._refill.current = sequence

    # A step is planned.

    def schedule(self, now_s: float) -> SchedulerOutput | None:
        """Plan the next step; None if there is nothing to do before one in flight ends. `now_s` is for the
        record of times."""
        self._admitted = []
        if self.config.halves and not self._take_turns():
            return None
        if self.drafter.ready:
            self._refill_next()
        slots_R, rows_R = self._plan_online(now_s)
        num_online = len(slots_R)
        if num_online:
            self._online_s = now_s
        if self.roster.has_background:
            slots_B, rows_B = self._plan_background(slots_R, rows_R, now_s)
            slots_R, rows_R = np.append(slots_R, slots_B), np.append(rows_R, rows_B)
        if len(slots_R) == 0:
            return None
        plan = self._make_plan(slots_R, rows_R.astype(np.int32))
        self.table.depart(plan)
        num_running = self.roster.num_online_running or len(self.roster.running)
        flight = self._pace.depart(plan, now_s, num_online, num_running, halved=self._halved)
        self._in_flight.append(flight)
        self._num_steps += 1
        return plan

    @property
    def num_in_flight(self) -> int:
        """Plans that are not committed yet."""
        return len(self._in_flight)

    def _take_turns(self) -> bool:
        """Settle whether half of the requests or all go into the next plan, and whether it is time for it.

        Plans in flight have no request in common then, or else there is one at a time.
        """
        num_running = self.roster.num_online_running or len(self.roster.running)
        self._halved = self.drafter.ready and self._pace.in_halves(num_running)
        return len(self._in_flight) < (2 if self._halved else 1)

    def _plan_online(self, now_s: float) -> tuple[IntArray, IntArray]:
        """Slots and rows of all requests that are not background work."""
        slots_R, budget = (
            self._going_on(self.roster.running[: self.roster.num_online_running]),
            self.config.max_rows,
        )
        rows_R = slots_R
        if len(slots_R):
            num_tokens_R, known_R = self.table.most_tokens(slots_R), self.table.known_rows(slots_R)
            num_drafts = self._num_drafts(int((known_R == 1).sum()))
            rows_R = share(self._wanted_rows(slots_R, num_tokens_R, known_R, num_drafts), budget)
            num_kept = self._cover_rows(slots_R, num_tokens_R - known_R, rows_R)
            slots_R, rows_R = slots_R[:num_kept], rows_R[:num_kept]
        return self._with_newcomers(slots_R, rows_R, budget - int(rows_R.sum()), now_s, background=False)

    def _plan_background(
        self, online_R: IntArray, online_rows_R: IntArray, now_s: float
    ) -> tuple[IntArray, IntArray]:
        """Slots and rows of background work beside these. Who gets none pauses where it stands."""
        online = decoding_alike(online_rows_R, self.table.known_rows(online_R))
        if online is None and (len(online_R) or (self._halved and self.roster.num_online_running)):
            return online_R[:0], online_R[:0]
        slots_R = self._going_on(self.roster.running[self.roster.num_online_running :])
        num_tokens_R, known_R = self.table.most_tokens(slots_R), self.table.known_rows(slots_R)
        num_decoding, budget = int((known_R == 1).sum()), self.config.max_rows - int(online_rows_R.sum())
        if online is None:
            portion = self._pace.alone(num_decoding, now_s - self._online_s)
            num_drafts = self._num_drafts(min(num_decoding, portion.num_decoding), background=True)
        else:
            num_drafts, portion = online[1], self._pace.beside(online, num_decoding)
            if portion == NOTHING:
                return online_R[:0], online_R[:0]
        wanted_R = self._wanted_rows(slots_R, num_tokens_R, known_R, num_drafts)
        wanted_R = within(portion, wanted_R, known_R)
        joining = np.flatnonzero(wanted_R)[:budget]
        slots_R, known_R, rows_R = slots_R[joining], known_R[joining], share(wanted_R[joining], budget)
        num_kept = self._cover_rows(slots_R, num_tokens_R[joining] - known_R, rows_R)
        slots_R, known_R, rows_R = slots_R[:num_kept], known_R[:num_kept], rows_R[:num_kept]
        left = portion.prompt_rows - int(rows_R[known_R > 1].sum())
        return self._with_newcomers(
            slots_R, rows_R, min(left, budget - int(rows_R.sum())), now_s, background=True
        )

    def _going_on(self, sequences: list[Sequence]) -> IntArray:
        """Slots of those that may need another step; of half of them, if they take turns."""
        slots_R = np.fromiter((q.slot for q in sequences), np.int32, len(sequences))
        slots_R = slots_R[self.table.go_on(slots_R)]
        if not self._halved:
            return slots_R
        return slots_R[self.table.is_idle(slots_R)][: (len(slots_R) + 1) // 2]

    def _num_drafts(self, num_decoding: int, *, background: bool = False) -> int:
        """Drafts of each of so many requests that decode."""
        if not self.drafter.ready:
            return 0
        return self._pace.drafts(num_decoding, background=background, halved=self._halved)

    def _wanted_rows(
        self, slots_R: IntArray, num_tokens_R: IntArray, known_R: IntArray, num_drafts: int
    ) -> IntArray:
        """Rows that each sequence can use."""
        table = self.table
        # A step with k drafts brings up to k + 1 tokens.
        drafts_R = np.minimum(table.max_drafts_S[slots_R], table.max_length_S[slots_R] - num_tokens_R - 1)
        if self.books.has_windows:
            # A window's pages stay until drafts in flight are judged: those reach one step's rows ahead.
            drafts_R = np.minimum(drafts_R, self.config.max_rows - 1 - table.ahead_drafts_S[slots_R])
        wanted_R = np.where(known_R == 1, 1 + np.minimum(drafts_R, num_drafts), known_R)
        if (refilled := self._refill.current) is None:
            return wanted_R
        most = self._refill.rows(num_drafts, len(slots_R) - 1)
        return np.where(slots_R == refilled.slot, np.minimum(wanted_R, most), wanted_R)

    def _cover_rows(self, slots_R: IntArray, first_R: IntArray, rows_R: IntArray) -> int:
        """Take the pages of all rows, from position `first_R` on, in rank order; returns how many of the
        sequences still run.

        For too few pages in any pool background work behind all of them is preempted. Then rows are cut (in
        place), so drafts go first; for the first row others are preempted. A prompt lacks pages only in
        groups with a window, which it passes through.
        """
        books = self.books
        books.give_back(slots_R, self.table.least_computed(slots_R))
        while not books.grow(slots_R, first_R + rows_R):
            last = self.roster.running[-1]
            if not last.request.background or last.slot == slots_R[-1]:
                break
            self.roster.preempt(last)
        else:
            return len(slots_R)
        num_left, others = len(slots_R), self.roster.others(slots_R) if self._halved else []
        for index in books.lacking(slots_R, first_R + rows_R):
            slot, first, rows = int(slots_R[index]), int(first_R[index]), int(rows_R[index])
            while index < num_left and not books.has_room(slot, first + 1):
                last = self.table.sequences[int(slots_R[num_left - 1])]
                if others and others[-1].rank > last.rank:
                    last = others.pop()
                else:
                    num_left -= 1
                self.roster.preempt(last)
            if index >= num_left:
                break
            rows_R[index] = books.grow_some(slot, first + rows) - first
        return num_left

    def _with_newcomers(
        self, slots_R: IntArray, rows_R: IntArray, budget: int, now_s: float, *, background: bool
    ) -> tuple[IntArray, IntArray]:
        """Let waiting sequences in, strictly by rank, while there are slots, rows and pages."""
        roster, num_before, rows = self.roster, len(self._admitted), list[int]()
        while roster.waiting and budget > 0 and roster.waiting[0].request.background == background:
            sequence = roster.waiting[0]
            if not (self.table.has_free_slot or roster.may_preempt_for(sequence)):
                break
            hit, num_tokens = self.books.find_prefix(sequence), len(sequence.token_ids)
            left = num_tokens - hit.num_pages * self.config.page_size
            if not self.config.enable_chunked_prefill and budget < left <= self.config.max_rows:
                break
            if not roster.make_room(sequence, hit):
                break
            self._admitted.append(roster.enter(hit, now_s))
            if sequence is self._refill.current:
                self.counters.drafter_refilled_tokens += left
                num_drafts = self._pace.last_drafts(background=background)
                left = min(left, self._refill.rows(num_drafts, len(slots_R)))
            rows.append(min(left, budget))
            budget -= rows[-1]
        slots = [admitted.slot for admitted in self._admitted[num_before:]]
        more = np.array([slots, rows], dtype=np.int32)
        return np.append(slots_R, more[0]), np.append(rows_R, more[1])

    def _make_plan(self, slots_R: IntArray, rows_R: IntArray) -> SchedulerOutput:
        table, left_R = self.table, self.table.known_rows(slots_R)
        known_R = np.minimum(rows_R, left_R)
        entries = self.books.take_new_entries()
        return SchedulerOutput(
            step=self._num_steps,
            admitted=tuple(self._admitted),
            page_groups=entries.groups,
            page_slots=entries.slots,
            page_indices=entries.indices,
            page_ids=entries.pages,
            slots=slots_R,
            num_computed=np.where(
                table.ahead_samples_S[slots_R] > 0, np.int32(-1), table.least_computed(slots_R)
            ),
            num_rows=rows_R,
            num_drafts=rows_R - known_R,
            samples=known_R == left_R,
        )

    # A step is committed.

    def commit(self, result: StepResult, now_s: float) -> list[SequenceUpdate]:
        """Take in what came of the oldest plan in flight. Updates are only for requests that got tokens."""
        assert self._in_flight, "a result without a plan"
        flight = self._in_flight.popleft()
        outcome = read_result(self.table, flight.plan, flight.staying_R, result)
        self.table.arrive(outcome.slots, outcome.num_rows, outcome.num_drafts, outcome.samples)
        self._take_prompt_logprobs(outcome)
        self._append_tokens(outcome)
        self.books.remember_full_pages(self.table, outcome.slots)
        self.counters.count_step(outcome.num_out, outcome.num_drafts, outcome.num_accepted)
        self._pace.learn(flight, outcome, result.timings, now_s, shares=self.roster.has_background)
        updates = make_updates(self.table, outcome)
        self.roster.dismiss(updates)
        return updates

    def _take_prompt_logprobs(self, outcome: StepOutcome) -> None:
        """Before what is computed steps on: rows begin where it stands."""
        for slot, rows in outcome.prompt_logprobs.items():
            first = int(self.table.num_computed_S[slot])
            self.table.sequences[slot].take_prompt_logprobs(first, rows)

    def _append_tokens(self, outcome: StepOutcome) -> None:
        table, slots_R, token_ids_RW = self.table, outcome.slots, outcome.token_ids
        columns_W = np.arange(token_ids_RW.shape[1], dtype=np.int32)
        rows, columns = np.nonzero(columns_W < outcome.num_out[:, None])
        places = table.num_tokens_S[slots_R[rows]] + columns
        table.token_ids_SL[slots_R[rows], places] = token_ids_RW[rows, columns]
        table.num_tokens_S[slots_R] += outcome.num_out
        table.num_computed_S[slots_R] = outcome.num_computed

    def _forget_slot(self, slot: int) -> None:
        """Who has it leaves."""
        for flight in self._in_flight:
            flight.staying_R[flight.plan.slots == slot] = False
        self._refill.leave(slot)
