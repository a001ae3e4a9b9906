"""Decides what each step computes: which requests run, with how many rows and which pages; commits results.

There is no prefill phase and no decode phase: every running sequence has known tokens of which some are not
computed yet, and a step computes some of them. A sequence that lacks only its newest token (the anchor) may
add drafts after it.

The order is `schedule`, execute, `commit`; later plans may be made while earlier steps are in flight. Their
tokens are not known yet: pages (`cluster/kv_cache/kv_cache_manager.py`) are allocated for the maximum and
freed for the minimum, and the workers determine positions. A request that ends, is aborted or is preempted
(`request_queues.py`) leaves at once: its results in flight are dropped, and because steps run in order, the
next owner of its pages writes them later. Called by `cluster/engine/engine_core.py` only; uses neither a
clock nor an executor.

Requests are served in the order of the queues. Background work comes last, and other requests are planned as
if it did not exist. It gets the rows that they leave (as many as `step_controller.py` allows), or pauses with
slot and pages.

Shape legend: R requests in the step, W = 1 + largest number of drafts.
"""

from __future__ import annotations

import math
from collections import deque

import numpy as np

from ..records.flight_recorder import FlightRecorder
from ..records.request_timeline import Reason
from ..speculation.step_cost_model import StepLoad
from ..step.limits import SchedulerConfig
from ..step.scheduler_output import AdmittedRequest, IntArray, SchedulerOutput, StepResult
from ..step.sequence import Sequence
from ..step.step_outcome import CompletedStep, SequenceUpdate, make_updates, read_result
from .background_budget import NOTHING, BackgroundWork
from .drafter_context import DrafterContext
from .request_queues import RequestQueues
from .scheduler_stats import Counters
from .step_controller import ScheduledStep, StepController


class Scheduler:
    """Plans and commits the steps of one engine. Its `EngineCore` has validated the requests.

    Attributes:
        flight_recorder, counters: observers, which get every completed step (`CompletedStep`).
        controller: chooses drafts; others only read it.
        drafter: the state of the drafter and of its context.
        in_flight: plans that are not committed yet, oldest first.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self.flight_recorder = FlightRecorder(config.num_slots)
        self.queues = RequestQueues(config, self._forget_slot, self.flight_recorder)
        self.kv_cache_manager, self.table = self.queues.kv_cache_manager, self.queues.table
        self.counters = self.queues.counters
        self.controller = StepController(config)
        self.drafter = DrafterContext(config, self.queues, self.controller)
        self._num_steps = 0
        self._online_s = -math.inf  # when the last step with online requests was planned
        self.in_flight: deque[ScheduledStep] = deque()
        # whether the plan being made is for one of two alternating halves of the requests
        self._in_two_batches = False
        self._admitted: list[AdmittedRequest] = []  # of the plan being made

    def end_warm_up(self) -> None:
        """Forget the requests so far, except for the step times."""
        self.queues.counters = self.counters = Counters(self.config.num_speculative_tokens)
        self.controller.end_warm_up()
        self.flight_recorder.forget_ended()

    # Planning.

    def schedule(self, now_s: float) -> SchedulerOutput | None:
        """Plan the next step; None if nothing can be done before one in flight ends.

        Args:
            now_s: time for the records.
        """
        self._admitted = []
        self.flight_recorder.on_planning(self._num_steps, now_s)
        self.kv_cache_manager.times.now_s = now_s
        self.queues.tier.read_ahead(self.queues.waiting, len(self.queues.running), now_s)
        if self.config.halves and not self._prepare_two_batches():
            return None
        self.drafter.prepare()
        slots_R, rows_R = self._plan_online(now_s)
        num_online = len(slots_R)
        if num_online:
            self._online_s = now_s
        if self.queues.has_background:
            slots_B, rows_B = self._plan_background(slots_R, rows_R, now_s)
            slots_R, rows_R = np.append(slots_R, slots_B), np.append(rows_R, rows_B)
        if len(slots_R) == 0:
            return None
        plan = self._make_plan(slots_R, rows_R.astype(np.int32))
        self.table.on_scheduled(plan)
        step = self.controller.on_scheduled(
            plan,
            self._context(slots_R),
            now_s,
            num_online,
            self.queues.num_online_running or len(self.queues.running),
            is_half=self._in_two_batches,
            drafter_ready=self.drafter.health.ready,
        )
        self.in_flight.append(step)
        self.drafter.on_scheduled(plan, is_trial=step.choice.is_trial)
        self._num_steps += 1
        return step.plan

    def _prepare_two_batches(self) -> bool:
        """Decide between half of the requests and all for the next plan; return whether it may be made now.

        With halves, two plans without a common request may be in flight, else only one.
        """
        num_running = self.queues.num_online_running or len(self.queues.running)
        self._in_two_batches = self.drafter.health.ready and self.controller.uses_two_batches(num_running)
        return len(self.in_flight) < (2 if self._in_two_batches else 1)

    def _plan_online(self, now_s: float) -> tuple[IntArray, IntArray]:
        """Return slots and rows of all requests that are not background work.

        Next to decoding requests, prompts get no more rows than `StepController.prefill_rows`; those that get
        none are left out of this step.
        """
        slots_R = self._unfinished_slots(self.queues.running[: self.queues.num_online_running])
        rows_R, budget, prompt_budget = slots_R, self.config.max_rows, self.config.max_rows
        if len(slots_R):
            num_tokens_R, known_R = self.table.max_tokens(slots_R), self.table.pending_tokens(slots_R)
            limits_R = self._limits(slots_R, num_tokens_R)
            drafts_R = self._drafts(slots_R, known_R, limits_R, now_s)
            # A decoding request knows one token that is not computed yet, a prompt several.
            wanted_R, num_prompts = self._wanted_rows(slots_R, known_R, drafts_R), int((known_R > 1).sum())
            if num_prompts < len(slots_R) and (num_prompts or self.queues.waiting):
                prompt_budget = self.controller.prefill_rows()
            if num_prompts and prompt_budget < budget:
                wanted_R = BackgroundWork(len(slots_R), prompt_budget).limit_rows(wanted_R, known_R)
                included = np.flatnonzero(wanted_R)  # prompts beyond the budget wait for the next step
                slots_R, num_tokens_R, known_R, wanted_R = (
                    array_R[included] for array_R in (slots_R, num_tokens_R, known_R, wanted_R)
                )
            rows_R = split_rows(wanted_R, budget)
            # Preemption takes from the end: those that are served last.
            num_kept = self._allocate_rows(slots_R, num_tokens_R - known_R, rows_R)
            slots_R, rows_R = slots_R[:num_kept], rows_R[:num_kept]
            prompt_budget -= int(rows_R[known_R[:num_kept] > 1].sum())
        budget = min(budget - int(rows_R.sum()), prompt_budget)
        if not self.queues.waiting:
            return slots_R, rows_R
        return self._admit_waiting(slots_R, rows_R, budget, now_s, background=False)

    def _plan_background(
        self, online_R: IntArray, online_rows_R: IntArray, now_s: float
    ) -> tuple[IntArray, IntArray]:
        """Return slots and rows of background work in addition to these online requests.

        Requests that get no rows pause, keeping slot and pages.
        """
        num_online = len(online_R)
        decode = bool(num_online) and bool((self.table.pending_tokens(online_R) == 1).all())
        if not decode and (num_online or (self._in_two_batches and self.queues.num_online_running)):
            return online_R[:0], online_R[:0]
        slots_R = self._unfinished_slots(self.queues.running[self.queues.num_online_running :])
        num_tokens_R, known_R = self.table.max_tokens(slots_R), self.table.pending_tokens(slots_R)
        num_decoding, budget = int((known_R == 1).sum()), self.config.max_rows - int(online_rows_R.sum())
        limits_R = self._limits(slots_R, num_tokens_R)
        if not decode:
            work = self.controller.background_without_online(num_decoding, now_s - self._online_s)
            fits_R = (known_R != 1) | (np.cumsum(known_R == 1) <= work.num_decoding)
            chosen = np.flatnonzero(fits_R)
            drafts_R = np.zeros_like(known_R)
            drafts_R[chosen] = self._drafts(
                slots_R[chosen], known_R[chosen], limits_R[chosen], now_s, background=True
            )
        else:
            length = int(online_rows_R.max()) - 1
            drafts_R, work = (
                np.minimum(limits_R, length),
                self.controller.background_with_online((num_online, length), num_decoding),
            )
            if work == NOTHING:
                return online_R[:0], online_R[:0]
        wanted_R = work.limit_rows(self._wanted_rows(slots_R, known_R, drafts_R), known_R)
        joining = np.flatnonzero(wanted_R)[:budget]
        slots_R, known_R, rows_R = slots_R[joining], known_R[joining], split_rows(wanted_R[joining], budget)
        num_kept = self._allocate_rows(slots_R, num_tokens_R[joining] - known_R, rows_R)
        slots_R, known_R, rows_R = slots_R[:num_kept], known_R[:num_kept], rows_R[:num_kept]
        left = work.prompt_rows - int(rows_R[known_R > 1].sum())
        return self._admit_waiting(
            slots_R, rows_R, min(left, budget - int(rows_R.sum())), now_s, background=True
        )

    def _unfinished_slots(self, sequences: list[Sequence]) -> IntArray:
        """Return slots of sequences that may need another step; with halves, those of one half."""
        slots_R = np.fromiter((q.slot for q in sequences), np.int32, len(sequences))
        slots_R = slots_R[self.table.unfinished(slots_R)]
        if not self._in_two_batches:
            return slots_R
        return slots_R[self.table.is_idle(slots_R)][: (len(slots_R) + 1) // 2]

    def _limits(self, slots_R: IntArray, num_tokens_R: IntArray) -> IntArray:
        table = self.table
        # A step with k drafts yields up to k + 1 tokens.
        remaining_R = table.max_length_S[slots_R] - num_tokens_R - 1
        if (shape := self.config.draft_shape).branches:
            remaining_R = shape.limit(remaining_R, self.config.max_length - num_tokens_R - 1)
        drafts_R = np.minimum(table.max_drafts_S[slots_R], remaining_R)
        if self.kv_cache_manager.has_windows:
            # A window's pages are kept until drafts in flight are verified, which allows for the rows of one
            # step.
            drafts_R = np.minimum(drafts_R, self.config.max_rows - 1 - table.ahead_drafts_S[slots_R])
        return drafts_R

    def _drafts(
        self,
        slots_R: IntArray,
        known_R: IntArray,
        limits_R: IntArray,
        now_s: float,
        *,
        background: bool = False,
    ) -> IntArray:
        """Return the number of drafts of each request, 0 for those that do not decode."""
        drafts_R = np.zeros_like(known_R)
        if not self.drafter.health.ready:
            return drafts_R
        decoding, context, prompt_rows = (known_R == 1).nonzero()[0], self._context(slots_R), 0
        if len(decoding) < len(known_R):  # rare
            prompt_rows = int(known_R.sum()) - len(decoding)
            slots_R, limits_R = slots_R[decoding], limits_R[decoding]
        load = StepLoad(len(decoding), min(prompt_rows, self.config.max_rows), context)
        self.drafter.on_draft_limits(limits_R)
        chosen_R = self.controller.choose_drafts(
            slots_R, limits_R, load, now_s, background=background, is_half=self._in_two_batches
        )
        if self.drafter.can_draft:
            drafts_R[decoding] = chosen_R
        return drafts_R

    def _context(self, slots_R: IntArray) -> float:
        return float(self.table.num_computed_S[slots_R].sum())

    def _wanted_rows(self, slots_R: IntArray, known_R: IntArray, drafts_R: IntArray) -> IntArray:
        """Return the rows that each sequence can use."""
        wanted_R = np.where(known_R == 1, 1 + drafts_R, known_R)
        if (refilled := self.drafter.refill.current) is None:
            return wanted_R
        maximum = self.drafter.refill.rows(int(drafts_R.max(initial=0)), len(slots_R) - 1)
        return np.where(slots_R == refilled.slot, np.minimum(wanted_R, maximum), wanted_R)

    def _allocate_rows(self, slots_R: IntArray, first_R: IntArray, rows_R: IntArray) -> int:
        """Allocate the pages of all rows, from position `first_R` on, in rank order; return how many
        sequences remain.
        """
        self.kv_cache_manager.free_out_of_window(slots_R, self.table.min_computed(slots_R))
        if self.kv_cache_manager.allocate(slots_R, first_R + rows_R):
            return len(slots_R)
        return self._cover_some_rows(slots_R, first_R, rows_R)

    def _cover_some_rows(self, slots_R: IntArray, first_R: IntArray, rows_R: IntArray) -> int:
        """Cover the rows if any pool has too few pages.

        Lower-ranked background work is preempted first. Then rows are cut (in place), so that drafts are
        dropped first; to keep a first row, lower-ranked sequences are preempted. A prompt can only lack pages
        in groups with a window, because those are freed as it passes.
        """
        manager = self.kv_cache_manager
        while not manager.allocate(slots_R, first_R + rows_R):
            last = self.queues.running[-1]
            if not last.request.background or last.slot == slots_R[-1]:
                break
            self.queues.preempt(last)
        else:
            return len(slots_R)
        num_left, others = len(slots_R), self.queues.running_without(slots_R) if self._in_two_batches else []
        for index in manager.short_of_pages(slots_R, first_R + rows_R):
            slot, first, rows = int(slots_R[index]), int(first_R[index]), int(rows_R[index])
            while index < num_left and not manager.can_allocate(slot, first + 1):
                last = self.table.sequences[int(slots_R[num_left - 1])]
                if others and others[-1].rank > last.rank:
                    last = others.pop()
                else:
                    num_left -= 1
                self.queues.preempt(last)
            if index >= num_left:
                break
            rows_R[index] = manager.allocate_up_to(slot, first + rows) - first
        return num_left

    def _admit_waiting(
        self, slots_R: IntArray, rows_R: IntArray, budget: int, now_s: float, *, background: bool
    ) -> tuple[IntArray, IntArray]:
        """Admit waiting sequences, strictly by rank, while there are slots, rows and pages."""
        queues, num_before, rows = self.queues, len(self._admitted), list[int]()
        blocked: Reason | None = None
        while (sequence := queues.next_waiting()) and sequence.request.background == background:
            if budget <= 0:
                blocked = "rows"
                break
            if not (self.table.has_free_slot or queues.may_preempt_for(sequence)):
                blocked = "slots"
                break
            hit, num_tokens = self.kv_cache_manager.find_prefix(sequence), len(sequence.token_ids)
            left = num_tokens - hit.num_pages * self.config.page_size
            if not self.config.enable_chunked_prefill and budget < left <= self.config.max_rows:
                blocked = "whole_prompt"
                break
            if not queues.preempt_for(sequence, hit):
                blocked = "pages"
                break
            self._admitted.append(queues.admit(sequence, hit, now_s))
            if sequence is self.drafter.refill.current:
                self.counters.drafter_refilled_tokens += left
                num_drafts = self.drafter.draft_length(background=background)
                left = min(left, self.drafter.refill.rows(num_drafts, len(slots_R)))
            rows.append(min(left, budget))
            budget -= rows[-1]
        if blocked is not None:
            self.flight_recorder.on_blocked(blocked, background=background)
        slots = [admitted.slot for admitted in self._admitted[num_before:]]
        self.controller.admit(slots, [self.table.sequences[slot].request for slot in slots])
        more = np.array([slots, rows], dtype=np.int32)
        return np.append(slots_R, more[0]), np.append(rows_R, more[1])

    def _make_plan(self, slots_R: IntArray, rows_R: IntArray) -> SchedulerOutput:
        table, left_R = self.table, self.table.pending_tokens(slots_R)
        known_R, min_R = np.minimum(rows_R, left_R), table.min_computed(slots_R)
        entries, saves = self.kv_cache_manager.take_page_table_updates(), None
        if (states := self.kv_cache_manager.states) is not None:
            saves = states.plan_saves(slots_R, min_R, table.max_tokens(slots_R) - left_R + rows_R)
        return SchedulerOutput(
            step=self._num_steps,
            admitted=tuple(self._admitted),
            page_groups=entries.groups,
            page_slots=entries.slots,
            page_indices=entries.indices,
            page_ids=entries.pages,
            slots=slots_R,
            num_computed=np.where(table.ahead_samples_S[slots_R] > 0, np.int32(-1), min_R),
            num_rows=rows_R,
            num_drafts=rows_R - known_R,
            samples=known_R == left_R,
            saves=saves,
            writes_context=self.drafter.writes_context,
        )

    # Committing.

    def commit(self, result: StepResult, now_s: float) -> list[SequenceUpdate]:
        """Commit the result of the oldest plan in flight.

        Returns updates for requests that got tokens or failed.
        """
        assert self.in_flight, "a result without a plan"
        step = self.in_flight.popleft()
        outcome = read_result(self.table, step.plan, step.remaining_R, result)
        self.table.on_completed(outcome.slots, outcome.num_known, outcome.num_planned, outcome.samples)
        done = CompletedStep(step.plan, result, outcome, step.remaining_R, step.planned_s, now_s)
        self.flight_recorder.observe(done)
        self.counters.observe(done)
        for slot, rows in outcome.prompt_logprobs.items():
            # Their first row is at `num_computed_S`, which is updated next.
            self.table.sequences[slot].take_prompt_logprobs(int(self.table.num_computed_S[slot]), rows)
        self.table.append(outcome.slots, outcome.token_ids, outcome.num_out, outcome.num_computed)
        if outcome.failed.any():  # other requests must not reuse what failed requests computed
            self.kv_cache_manager.invalidate(outcome.slots[outcome.failed].tolist())
        self.kv_cache_manager.cache_full_pages(self.table, outcome.slots)
        if self.kv_cache_manager.states is not None:
            self.kv_cache_manager.states.commit(step.plan, outcome, self.table)
        self.drafter.on_completed(step.plan, result.timings)
        self.queues.tier.on_completed(step.plan, result.timings)
        self.controller.on_completed(step, outcome, result, now_s, has_background=self.queues.has_background)
        updates = make_updates(self.table, outcome)
        self.queues.finish(updates)
        return updates

    def _forget_slot(self, slot: int) -> None:
        """Drop the results in flight of a slot before its sequence leaves."""
        for step in self.in_flight:
            step.remaining_R[step.plan.slots == slot] = False
        self.drafter.refill.on_sequence_removed(slot)


def split_rows(wanted_R: IntArray, budget: int) -> IntArray:
    """Return one row for each sequence, plus the rest of the budget in rank order, as wanted."""
    extra_R = wanted_R - 1
    used_R = np.cumsum(extra_R) - extra_R
    return 1 + np.minimum(extra_R, np.maximum(budget - len(wanted_R) - used_R, 0))
