"""Decides what each step computes: who runs, how many rows each gets, which pages, and what came of it.

There is no prefill phase and no decode phase: every running sequence has known tokens of which some are not
computed yet, and a step lets it catch up. A sequence that lacks only its newest token (the anchor) may add
drafts behind it.

    waiting ──admit: slot, prefix hits, pages──▶ running ──stop, length, abort──▶ gone
       ▲                                            │
       └─────── preempt: the last in rank loses slot and pages, keeps its tokens

`schedule`, execute, `commit`; the next plans may be made while some are in flight. How many tokens those
bring is not known then: pages (`page_books.py`) are taken for the most and given back for the least, and
where a sequence stands is left to the workers. Whoever leaves (ended, aborted, preempted) leaves at once:
what is in flight for it is dropped on arrival, and as steps run in order, its pages are written by their next
owner later. Called by `engine.py` alone; knows neither a clock nor an executor. The order of serving is
`Sequence.rank`: by arrival, or by priority and then arrival; background work behind all others, who plan as
if it were not there. It gets rows in what they leave (`pace.py` says how much) or pauses with slot and pages.

Shape legend: R requests in the step, W = 1 + largest number of drafts.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import deque
from operator import attrgetter

import numpy as np

from .background_share import NOTHING
from .counters import Counters
from .executor import DrafterHealth
from .limits import SchedulerConfig
from .outcome import SequenceUpdate, StepOutcome, make_updates, read_result
from .pace import Flight, Pace
from .page_books import PageBooks
from .plan import AdmittedRequest, IntArray, SchedulerOutput, StepResult
from .prefix_cache import PrefixHit
from .refill import Refill
from .request import FinishReason, Request
from .row_shares import decoding_alike, share, within
from .sequence import WAITING, Sequence, SlotTable

_by_rank = attrgetter("rank")


class Scheduler:
    """See the module's text. Requests are expected to be valid and to fit (`engine.py` checks them)."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self.books = PageBooks(config)
        self.table = SlotTable(config.num_slots, config.max_model_len, config.vocab_size)
        self.counters = Counters(config.num_speculative_tokens)
        self._pace = Pace(config)
        self.drafter = DrafterHealth()
        self._refill = Refill(config.max_rows, chunks=config.enable_chunked_prefill)
        self.running: list[Sequence] = []  # by rank
        self.waiting: list[Sequence] = []  # by rank
        self._sequences: dict[str, Sequence] = {}
        self._num_added = 0
        self._num_steps = 0
        self._online_s = -math.inf  # when the last step with online requests was planned
        self._in_flight: deque[Flight] = deque()
        self._halved = False  # whether the plan in the making is for half of the requests, by turns
        self._admitted: list[AdmittedRequest] = []  # of the plan in the making

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._sequences

    @property
    def has_background(self) -> bool:
        return any(queue and queue[-1].request.background for queue in (self.running, self.waiting))

    @property
    def num_online_running(self) -> int:
        return _num_online(self.running)

    @property
    def num_online_waiting(self) -> int:
        return _num_online(self.waiting)

    # Requests come and go.

    def add(self, request: Request) -> None:
        self._num_added += 1
        priority = request.priority if self.config.by_priority else 0
        rank = (int(request.background), priority, self._num_added)
        sequence = Sequence.of(request, rank, self.config.max_length, self.config.eos_token_ids)
        self._sequences[request.request_id] = sequence
        insort(self.waiting, sequence, key=_by_rank)

    def abort(self, request_id: str, reason: FinishReason) -> bool:
        """End a request; False if it is not here (any more). No update follows."""
        sequence = self._sequences.pop(request_id, None)
        if sequence is None:
            return False
        self.counters.finished[reason] += 1
        if sequence.slot == WAITING:
            self.waiting.remove(sequence)
        else:
            self.running.remove(sequence)
            self._release(sequence)
        return True

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
        self.books.forget([sequence.slot for sequence in self.running])
        self.table.max_drafts_S[:] = 0
        self._refill.begin(self.running)

    def _refill_next(self) -> None:
        """Take somebody out to be computed anew, if that costs nobody a place: it enters in this plan."""
        background = not self.num_online_running
        num_drafts = self._pace.last_drafts(background=background)
        sequence = self._refill.next(self.table, num_drafts, len(self.running) - 1, background=background)
        if sequence is None or (self.waiting and self.waiting[0].rank < sequence.rank):
            return
        num_tokens = int(self.table.num_tokens_S[sequence.slot])
        if self.books.has_room_to_enter(self.books.cache.no_hit, num_tokens, self._num_before(sequence)):
            self.running.remove(sequence)
            self._release(sequence)
            insort(self.waiting, sequence, key=_by_rank)
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
        if self.has_background:
            slots_B, rows_B = self._plan_background(slots_R, rows_R, now_s)
            slots_R, rows_R = np.append(slots_R, slots_B), np.append(rows_R, rows_B)
        if len(slots_R) == 0:
            return None
        plan = self._make_plan(slots_R, rows_R.astype(np.int32))
        self.table.depart(plan)
        num_running = self.num_online_running or len(self.running)
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
        num_running = self.num_online_running or len(self.running)
        self._halved = self.drafter.ready and self._pace.in_halves(num_running)
        return len(self._in_flight) < (2 if self._halved else 1)

    def _plan_online(self, now_s: float) -> tuple[IntArray, IntArray]:
        """Slots and rows of all requests that are not background work."""
        slots_R, budget = self._going_on(self.running[: self.num_online_running]), self.config.max_rows
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
        if online is None and (len(online_R) or (self._halved and self.num_online_running)):
            return online_R[:0], online_R[:0]
        slots_R = self._going_on(self.running[self.num_online_running :])
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
            last = self.running[-1]
            if not last.request.background or last.slot == slots_R[-1]:
                break
            self._preempt(last)
        else:
            return len(slots_R)
        num_left, others = len(slots_R), self._others(slots_R) if self._halved else []
        for index in books.lacking(slots_R, first_R + rows_R):
            slot, first, rows = int(slots_R[index]), int(first_R[index]), int(rows_R[index])
            while index < num_left and not books.has_room(slot, first + 1):
                last = self.table.sequences[int(slots_R[num_left - 1])]
                if others and others[-1].rank > last.rank:
                    last = others.pop()
                else:
                    num_left -= 1
                self._preempt(last)
            if index >= num_left:
                break
            rows_R[index] = books.grow_some(slot, first + rows) - first
        return num_left

    def _others(self, slots_R: IntArray) -> list[Sequence]:
        """By rank, those that run and have no turn in this plan."""
        chosen = set(slots_R.tolist())
        return [sequence for sequence in self.running if sequence.slot not in chosen]

    def _preempt(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self._release(sequence)
        insort(self.waiting, sequence, key=_by_rank)
        self.counters.preemptions += 1

    def _with_newcomers(
        self, slots_R: IntArray, rows_R: IntArray, budget: int, now_s: float, *, background: bool
    ) -> tuple[IntArray, IntArray]:
        """Let waiting sequences in, strictly by rank, while there are slots, rows and pages."""
        num_before, rows = len(self._admitted), list[int]()
        while self.waiting and budget > 0 and self.waiting[0].request.background == background:
            sequence = self.waiting[0]
            if not (self.table.has_free_slot or self._may_preempt_for(sequence)):
                break
            hit, num_tokens = self.books.find_prefix(sequence), len(sequence.token_ids)
            left = num_tokens - hit.num_pages * self.config.page_size
            if not self.config.enable_chunked_prefill and budget < left <= self.config.max_rows:
                break
            if not self._make_room(sequence, hit):
                break
            self._enter(self.waiting.pop(0), hit, now_s)
            if sequence is self._refill.current:
                self.counters.drafter_refilled_tokens += left
                num_drafts = self._pace.last_drafts(background=background)
                left = min(left, self._refill.rows(num_drafts, len(slots_R)))
            rows.append(min(left, budget))
            budget -= rows[-1]
        slots = [admitted.slot for admitted in self._admitted[num_before:]]
        more = np.array([slots, rows], dtype=np.int32)
        return np.append(slots_R, more[0]), np.append(rows_R, more[1])

    def _make_room(self, sequence: Sequence, hit: PrefixHit) -> bool:
        """Whether a sequence can enter, perhaps in the place of background work."""
        num_tokens = len(sequence.token_ids)
        while not (
            self.table.has_free_slot
            and self.books.has_room_to_enter(hit, num_tokens, self._num_before(sequence))
        ):
            if not self._may_preempt_for(sequence):
                return False
            self._preempt(self.running[-1])
        return True

    def _num_before(self, sequence: Sequence) -> int:
        """Running sequences that it must leave room to grow."""
        return len(self.running) if sequence.request.background else self.num_online_running

    def _may_preempt_for(self, sequence: Sequence) -> bool:
        """Whether the last of those that run is background work, and this one is not."""
        running = self.running
        return bool(running) and running[-1].request.background and not sequence.request.background

    def _enter(self, sequence: Sequence, hit: PrefixHit, now_s: float) -> None:
        """From waiting to running."""
        table, num_cached = self.table, hit.num_pages * self.config.page_size
        max_drafts = sequence.request.most_drafts(self.config.num_speculative_tokens)
        slot = table.enter(sequence, num_cached, max_drafts)
        self.books.enter(slot, hit, len(sequence.token_ids))
        insort(self.running, sequence, key=_by_rank)
        self._admitted.append(
            AdmittedRequest(slot, sequence.request.request_id, table.known_tokens(slot), sequence.sampling)
        )
        if sequence.num_cached_tokens is None:
            num_prompt_tokens = len(sequence.request.prompt_token_ids)
            sequence.num_cached_tokens = min(num_cached, num_prompt_tokens)
            sequence.queue_s = now_s - sequence.request.arrival_s
            self.counters.count_first_entry(num_prompt_tokens, sequence.num_cached_tokens)

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
        self._append_tokens(outcome)
        self.books.remember_full_pages(self.table, outcome.slots)
        self.counters.count_step(outcome.num_out, outcome.num_drafts, outcome.num_accepted)
        self._pace.learn(flight, outcome, result.timings, now_s, shares=self.has_background)
        updates = make_updates(self.table, outcome)
        self._dismiss(updates)
        return updates

    def _append_tokens(self, outcome: StepOutcome) -> None:
        table, slots_R, token_ids_RW = self.table, outcome.slots, outcome.token_ids
        columns_W = np.arange(token_ids_RW.shape[1], dtype=np.int32)
        rows, columns = np.nonzero(columns_W < outcome.num_out[:, None])
        places = table.num_tokens_S[slots_R[rows]] + columns
        table.token_ids_SL[slots_R[rows], places] = token_ids_RW[rows, columns]
        table.num_tokens_S[slots_R] += outcome.num_out
        table.num_computed_S[slots_R] = outcome.num_computed

    def _dismiss(self, updates: list[SequenceUpdate]) -> None:
        """Let go of the sequences that ended."""
        ended: list[Sequence] = []
        for update in updates:
            if update.finish_reason is not None:
                ended.append(self._sequences.pop(update.request_id))
                self.counters.finished[update.finish_reason] += 1
        for sequence in ended:
            self._release(sequence)
        if ended:
            self.running = [sequence for sequence in self.running if sequence.slot != WAITING]

    def _release(self, sequence: Sequence) -> None:
        """Free a sequence's slot and pages."""
        for flight in self._in_flight:
            flight.staying_R[flight.plan.slots == sequence.slot] = False
        self._refill.leave(sequence.slot)
        self.books.leave(sequence.slot)
        self.table.leave(sequence)

    def check_invariants(self) -> None:
        """No page, slot or token is lost or doubled; nobody writes where another reads."""
        self.books.check_invariants(self.table)
        self.table.check_invariants()
        for queue in (self.running, self.waiting):
            assert queue == sorted(queue, key=_by_rank), "a queue is out of order"
        assert {q.slot for q in self.running} == self.table.sequences.keys(), "a slot has no running sequence"
        assert all(q.slot == WAITING for q in self.waiting), "a waiting sequence has a slot"
        alive = [q.request.request_id for q in (*self.running, *self.waiting)]
        assert sorted(alive) == sorted(self._sequences), "a request is lost or doubled"


def _num_online(queue: list[Sequence]) -> int:
    """How many of a queue are not background work: those before it."""
    if not queue or not queue[-1].request.background:
        return len(queue)
    return bisect_left(queue, (1,), key=_by_rank)
