"""Tracks whether the drafter is available and of which running requests it has the context K/V.

Drafting for a request needs the drafter's K and V of all its computed tokens. They are missing if the drafter
was replaced, or not written for a while (`ContextWriteGate`). Then running requests decode without drafts
until they are recomputed (`DrafterContextRefill`), and new ones get no cached page that lacks the context.
Used by `scheduler.py`; changes the request queues and their pages.

Legend: L running sequences of one kind (online, background) without drafter context.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from ..speculation.draft_trimming import BETTER
from ..speculation.loss_budget import MAX_BACKOFF, RETRY_STEPS, Backoff
from ..step.executor import DrafterHealth
from ..step.limits import SchedulerConfig
from ..step.scheduler_output import IntArray, SchedulerOutput, StepTimings
from ..step.sequence import WAITING, Sequence, SlotTable
from .background_budget import CHUNK
from .request_queues import RequestQueues
from .step_controller import StepController

# Steps without useful drafts until writes stop. With 1,024 a useless drafter costs 2.3 % of 4,000 steps, with
# 384 1.3 % (simulated, writes a sixteenth of a pass).
_IDLE_STEPS = 256
# Without writes until a trial may resume them, which recomputes a request: the longest wait for a retry.
_PAUSE_STEPS = MAX_BACKOFF * RETRY_STEPS
_REFILL_STEPS = RETRY_STEPS  # most for one sequence, whose reader waits meanwhile
# Maximum rows recomputed for each remaining token: a recomputed row costs about a tenth of a plain token on a
# CPU and a hundredth on a GPU, because a chunk reads the weights once, and drafts save about half of a token.
_ROWS_PER_TOKEN = 8


class ContextWriteGate:
    """Stops writing the drafter's context K/V while drafts have gained nothing for long.

    Resuming recomputes at least one request. So a mere trial waits until enough steps have been saved, and
    twice as many after each unsuccessful one. Writes that take little time are never stopped.

    Attributes:
        on: whether the next step writes.
        wanted: draft length that was chosen when writes resumed; 0 once drafts are possible.
    """

    def __init__(self, *, may_stop: bool) -> None:
        self._may_stop, self.on, self.wanted = may_stop, True, 0
        self._rest = Backoff(_PAUSE_STEPS)
        self._max_idle = _IDLE_STEPS
        self._steps = 0  # since drafts were useful; while off, since writes stopped
        self._write_s = self._total_s = 0.0  # of these steps

    @property
    def should_stop(self) -> bool:
        maximum = _IDLE_STEPS if self.wanted else self._max_idle
        is_idle = self._may_stop and self.on and self._steps >= maximum
        return is_idle and self._write_s > (BETTER - 1.0) * self._total_s

    def stop(self) -> None:
        self.on, self.wanted, self._steps = False, 0, 0

    def may_resume_for(self, *, trial: bool) -> bool:
        """Return whether chosen drafts, for a trial or because they pay, justify resuming writes."""
        return not self.on and (not trial or self._steps >= self._rest.steps)

    def resume(self, wanted: int = 0, *, trial: bool = False) -> None:
        self.on, self.wanted = True, wanted
        # Simulated with four requests: with 32 steps after a trial drafts return late or never as texts get
        # easy; where they never pay, 64 take 4 % longer than 32, and 256 take 8 %.
        self._max_idle = RETRY_STEPS if trial else _IDLE_STEPS
        self._rest.fail()
        self._begin()

    def on_scheduled(self, *, useful: bool) -> None:
        """Record a scheduled step; `useful`: whether it drafts, and not only for a trial."""
        self._steps += 1
        if useful:
            self._rest.reset()
            self._max_idle = _IDLE_STEPS
            self._begin()

    def on_drafts_possible(self) -> None:
        """Restart the count of idle steps: drafts have become possible."""
        self.wanted, self._steps = 0, 0

    def _begin(self) -> None:
        self._steps, self._write_s, self._total_s = 0, 0.0, 0.0

    def on_completed(self, timings: StepTimings) -> None:
        self._write_s += timings.inject_s
        self._total_s += timings.total_s


class DrafterContextRefill:
    """Chooses the running requests to recompute for their drafter context, and their rows per step.

    A recomputed request is preempted and readmitted. So one (`current`) is recomputed at a time, the shortest
    first, with as many rows per step as drafts are missing, or as there are other requests. A request that is
    too long, or about to end, continues without drafts; as many tokens are assumed to remain as were
    generated.
    """

    def __init__(self, max_rows: int, *, chunks: bool) -> None:
        self._max_rows, self._chunks = max_rows, chunks
        # Prompt tokens by slot, of online and of background requests running without drafter context.
        self._prompts: tuple[dict[int, int], dict[int, int]] = ({}, {})
        self._min_rows = CHUNK
        self.current: Sequence | None = None

    @property
    def is_pending(self) -> bool:
        """Whether a sequence is recomputed or lacks drafter context."""
        return self.current is not None or any(self._prompts)

    def begin(self, running: Iterable[Sequence], num_tokens: int = 0) -> None:
        """Start recomputing these sequences, with rows enough per step for `num_tokens` tokens each."""
        self._prompts, self.current = ({}, {}), None
        self._min_rows = CHUNK + num_tokens // _REFILL_STEPS
        for sequence in running:
            request = sequence.request
            if request.max_draft_tokens != 0:
                self._prompts[request.background][sequence.slot] = len(request.prompt_token_ids)

    def on_sequence_removed(self, slot: int) -> None:
        """Forget the sequence of this slot; the next one in it has drafter context."""
        for prompts in self._prompts:
            prompts.pop(slot, None)

    def rows(self, num_drafts: int, num_others: int) -> int:
        """Return the most rows of the recomputed sequence in a step with `num_others` other requests."""
        if not num_others or not self._chunks:
            return self._max_rows
        num_missing = num_drafts * sum(map(len, self._prompts))
        return min(max(num_missing, num_others, self._min_rows), self._max_rows)

    def next(
        self, table: SlotTable, num_drafts: int, num_others: int, *, background: bool
    ) -> Sequence | None:
        """Return the next sequence to recompute; None while one is recomputed, or if none is worth it."""
        if self.current is not None:
            slot = self.current.slot
            if slot != WAITING and int(table.pending_tokens(np.array([slot]))[0]) > 1:
                return None
            self.current = None
        slots_L = np.array(list(self._prompts[background]), dtype=np.int32)
        slots_L = slots_L[table.unfinished(slots_L)]
        if not num_drafts or not len(slots_L) or self._max_rows <= (1 + num_others) * (1 + num_drafts):
            return None
        tokens_L = table.num_tokens_S[slots_L]
        prompts_L = np.array([self._prompts[background][slot] for slot in slots_L.tolist()])
        remaining_L = np.maximum(tokens_L - prompts_L, 2 * _REFILL_STEPS)
        remaining_L = np.minimum(remaining_L, table.max_length_S[slots_L] - tokens_L)
        maximum = self.rows(num_drafts, num_others) * (_REFILL_STEPS if self._chunks else 1)
        pays_L = tokens_L <= np.minimum(_ROWS_PER_TOKEN * remaining_L, maximum)
        if not pays_L.any():
            return None
        return table.sequences[int(slots_L[pays_L][tokens_L[pays_L].argmin()])]


class DrafterContext:
    """Tracks the drafter and its context for one engine's requests."""

    def __init__(self, config: SchedulerConfig, queues: RequestQueues, controller: StepController) -> None:
        self._queues, self._controller = queues, controller
        self.health = DrafterHealth()
        self.refill = DrafterContextRefill(config.max_rows, chunks=config.enable_chunked_prefill)
        self._writes = ContextWriteGate(may_stop=config.num_speculative_tokens > 0 and not config.halves)

    @property
    def writes_context(self) -> bool:
        """Whether the next step writes the drafter's context."""
        return self._writes.on

    @property
    def can_draft(self) -> bool:
        """Whether requests with context may draft."""
        return self.health.ready and self._writes.on

    def update_health(self, health: DrafterHealth) -> None:
        """Update the drafter's state; called before every plan."""
        before, self.health = self.health, health
        is_new = health.generation != before.generation
        if before.ready and (is_new or not health.ready):
            self._queues.counters.drafter_losses += 1
        if is_new:
            self._forget()
            self._writes.resume()
            self._controller.on_drafter_replaced()

    def prepare(self) -> None:
        """Prepare a plan: stop or resume writes, and preempt a request that will be recomputed in it."""
        if self._writes.should_stop:
            # No request drafts from now on; draft lengths are chosen as before.
            self._stop()
        elif not self._writes.on:
            self._resume_if_chosen()
        if self.can_draft and self.refill.is_pending:
            self._refill_next()

    def draft_length(self, *, background: bool) -> int:
        """Return the last draft length, or the one that is wanted once drafts are possible."""
        return self._controller.last_choice(background=background).length or self._writes.wanted

    def on_draft_limits(self, limits_R: IntArray) -> None:
        """Make the controller retry drafts once the limits allow a decoding request to draft again."""
        if self._writes.wanted and limits_R.any():
            self._writes.on_drafts_possible()
            self._controller.retry_soon()

    def on_scheduled(self, plan: SchedulerOutput, *, is_trial: bool) -> None:
        self._writes.on_scheduled(useful=not is_trial and plan.num_draft_tokens > 0)

    def on_completed(self, plan: SchedulerOutput, timings: StepTimings) -> None:
        self._writes.on_completed(timings)
        if not plan.writes_context:
            self._queues.counters.drafter_unwritten_tokens += plan.num_batched_tokens

    def _forget(self, *, marked: bool = False) -> None:
        """Drop the context of everything computed; if `marked`, only of the cache's marked pages. The
        shortest running request is then recomputed whatever its length.
        """
        running, table = self._queues.running, self._queues.table
        self._queues.kv_cache_manager.invalidate([sequence.slot for sequence in running], marked=marked)
        lengths = (int(table.num_tokens_S[q.slot]) for q in running if q.request.max_draft_tokens != 0)
        self._disable_drafts(running, min(lengths, default=0) if marked else 0)

    def _disable_drafts(self, running: list[Sequence], num_tokens: int = 0) -> None:
        self._queues.table.max_drafts_S[[sequence.slot for sequence in running]] = 0
        self.refill.begin(running, num_tokens)

    def _stop(self) -> None:
        """Stop writes, and mark the pages that are filled from now on."""
        self._writes.stop()
        self._queues.kv_cache_manager.cache.mark()
        self.refill.begin(())
        self._queues.counters.drafter_rests += 1

    def _resume_if_chosen(self) -> None:
        """Resume writes if drafts were chosen but could not be made."""
        for background in (False, True):
            choice = self._controller.last_choice(background=background)
            if choice.num_drafts_R.any() and self._writes.may_resume_for(trial=choice.is_trial):
                self._forget(marked=True)
                return self._writes.resume(choice.length, trial=choice.is_trial)

    def _refill_next(self) -> None:
        """Preempt the next request to recompute, if it can be readmitted in this plan."""
        queues = self._queues
        background, num_others = not queues.num_online_running, len(queues.running) - 1
        num_drafts = self.draft_length(background=background)
        sequence = self.refill.next(queues.table, num_drafts, num_others, background=background)
        if sequence is None or (queues.waiting and queues.waiting[0].rank < sequence.rank):
            return
        num_tokens = int(queues.table.num_tokens_S[sequence.slot])
        if queues.kv_cache_manager.can_admit(
            queues.kv_cache_manager.cache.no_hit, num_tokens, queues.num_ahead(sequence)
        ):
            queues.requeue(sequence, "refilled")
            self.refill.current = sequence
