"""Waiting and running requests in priority order; slot, pages and weight of each running one.

    waiting ──enter: slot, prefix hits, pages──▶ running ──leave──▶ gone
       ▲                                            │
       └─────── preempt: loses slot and pages, keeps its tokens

`scheduler.py` decides when; this module updates tables, pages and counts. The order is `Sequence.rank`: by
arrival, or by priority and then arrival, with background work last. `RequestWeights` weighs the tokens of
running requests against each other when draft lengths are chosen and drafts trimmed (`step_controller.py`).

Shape legend: R requests in a step, S slots.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Callable, Iterable
from operator import attrgetter

import numpy as np

from ..kv_cache.kv_cache_manager import KVCacheManager
from ..kv_cache.kv_tier import make_tier
from ..kv_cache.prefix_cache import PrefixHit
from ..records.flight_recorder import FlightRecorder
from ..records.request_timeline import Why
from ..request.request import FinishReason, Request
from ..step.limits import SchedulerConfig
from ..step.scheduler_output import AdmittedRequest, FloatArray, IntArray
from ..step.sequence import WAITING, Sequence, SlotTable
from ..step.step_outcome import SequenceUpdate
from .scheduler_stats import Counters

_by_rank = attrgetter("rank")
# Bounds, chosen, not measured: no request takes more than four fifths of the rows of an equal one.
_LOW, _HIGH = 0.5, 4.0
_PER_PRIORITY = 1.25


class RequestQueues:
    """Waiting and running requests of one engine.

    Args:
        config: configuration of the scheduler.
        on_free: called with a slot before it is freed.
        flight_recorder: records requests that arrive and end.

    Attributes:
        running, waiting: sorted by rank.
        tier: below the pages of the cache.
    """

    def __init__(
        self, config: SchedulerConfig, on_free: Callable[[int], None], flight_recorder: FlightRecorder
    ) -> None:
        self._config = config
        self._on_free = on_free
        self._flight_recorder = flight_recorder
        self.kv_cache_manager = KVCacheManager(config)
        self.tier = make_tier(config, self.kv_cache_manager)
        self.table = SlotTable(config.num_slots, config.max_model_len, config.vocab_size)
        self.counters = Counters(config.num_speculative_tokens)
        self.running: list[Sequence] = []
        self.waiting: list[Sequence] = []
        self._sequences: dict[str, Sequence] = {}
        self._num_added = 0

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._sequences

    @property
    def has_background(self) -> bool:
        if self.running and self.running[-1].request.background:
            return True
        return bool(self.waiting) and self.waiting[-1].request.background

    @property
    def num_online_running(self) -> int:
        return _num_online(self.running)

    @property
    def num_online_waiting(self) -> int:
        return _num_online(self.waiting)

    def add(self, request: Request) -> None:
        self._num_added += 1
        priority = request.priority if self._config.by_priority else 0
        rank = (int(request.background), priority, self._num_added)
        sequence = Sequence.of(request, rank, self._config.max_length, self._config.eos_token_ids)
        self._sequences[request.request_id] = sequence
        insort(self.waiting, sequence, key=_by_rank)
        self._flight_recorder.on_arrival(request)

    def abort(self, request_id: str, reason: FinishReason) -> bool:
        """End a request; return False if it is unknown or has ended."""
        sequence = self._sequences.pop(request_id, None)
        if sequence is None:
            return False
        self.counters.finished[reason] += 1
        if sequence.slot == WAITING:
            self.waiting.remove(sequence)
        else:
            self.running.remove(sequence)
            self._release(sequence)
        self._flight_recorder.on_finished(request_id, reason)
        return True

    def preempt(self, sequence: Sequence) -> None:
        """Move a running sequence back to the queue for lack of room."""
        self.requeue(sequence, "preempted")
        self.counters.preemptions += 1

    def requeue(self, sequence: Sequence, why: Why) -> None:
        """Move a running sequence back to the queue, without slot and pages."""
        self._flight_recorder.on_slot_lost(sequence.request.request_id, why)
        self.running.remove(sequence)
        self._release(sequence)
        sequence.was_looked_up, sequence.num_read_tokens = False, 0
        insort(self.waiting, sequence, key=_by_rank)

    def running_without(self, slots_R: IntArray) -> list[Sequence]:
        """Return the running sequences that have none of these slots, by rank."""
        chosen = set(slots_R.tolist())
        return [sequence for sequence in self.running if sequence.slot not in chosen]

    def can_admit(self, sequence: Sequence, hit: PrefixHit) -> bool:
        """Return whether a slot, a state and pages are free for a sequence, and pages for others to grow."""
        num_tokens, num_before = len(sequence.token_ids), self.num_ahead(sequence)
        has_slot = self.table.has_free_slot and self.kv_cache_manager.has_state
        return has_slot and self.kv_cache_manager.can_admit(hit, num_tokens, num_before)

    def num_ahead(self, sequence: Sequence) -> int:
        """Return the number of running sequences that must keep room to grow."""
        return len(self.running) if sequence.request.background else self.num_online_running

    def preempt_for(self, sequence: Sequence, hit: PrefixHit) -> bool:
        """Preempt background work, if necessary, until a sequence can be admitted; return whether it can."""
        while not self.can_admit(sequence, hit):
            if not self.may_preempt_for(sequence):
                return False
            self.preempt(self.running[-1])
        return True

    def may_preempt_for(self, sequence: Sequence) -> bool:
        """Return whether the last running sequence is background work and this one is not."""
        running = self.running
        return bool(running) and running[-1].request.background and not sequence.request.background

    def next_waiting(self) -> Sequence | None:
        """Return the first sequence that waits for a slot, not for pages of a tier below the cache."""
        return next((sequence for sequence in self.waiting if not sequence.is_read_for), None)

    def admit(self, sequence: Sequence, hit: PrefixHit, now_s: float) -> AdmittedRequest:
        """Admit a waiting sequence, with a cached prefix."""
        table = self.table
        self.waiting.remove(sequence)
        num_cached = hit.num_pages * self._config.page_size
        max_drafts = sequence.request.max_drafts(self._config.max_drafts)
        slot = table.admit(sequence, num_cached, max_drafts)
        state = self.kv_cache_manager.admit(slot, hit, sequence)
        num_read = min(sequence.num_read_tokens, num_cached)
        self._flight_recorder.on_admitted(sequence.request.request_id, slot, num_cached, num_read)
        insort(self.running, sequence, key=_by_rank)
        if sequence.num_cached_tokens is None:
            num_prompt_tokens = len(sequence.request.prompt_token_ids)
            sequence.num_cached_tokens = min(num_cached, num_prompt_tokens)
            sequence.queue_s = now_s - sequence.request.arrival_s
            self.counters.prompt_tokens += num_prompt_tokens
            self.counters.prefix_cache_queries += num_prompt_tokens
            self.counters.prefix_cache_hits += sequence.num_cached_tokens
            self.counters.tier_queries += num_prompt_tokens if sequence.was_looked_up else 0
            self.counters.tier_hits += min(num_read, sequence.num_cached_tokens)
        request, tokens = sequence.request, table.copy_tokens(slot)
        return AdmittedRequest(
            slot,
            request.request_id,
            tokens,
            sequence.sampling,
            state,
            cache_salt=request.cache_salt,
        )

    def finish(self, updates: Iterable[SequenceUpdate]) -> None:
        """Remove the sequences that ended, and prompt log probabilities that were returned."""
        ended: list[Sequence] = []
        for update in updates:
            if update.prompt_logprobs is not None:
                self._sequences[update.request_id].prompt_logprobs.clear()
            if update.finish_reason is not None:
                ended.append(self._sequences.pop(update.request_id))
                self.counters.finished[update.finish_reason] += 1
                self._flight_recorder.on_finished(update.request_id, update.finish_reason)
        for sequence in ended:
            self._release(sequence)
        if ended:
            self.running = [sequence for sequence in self.running if sequence.slot != WAITING]

    def _release(self, sequence: Sequence) -> None:
        self._on_free(sequence.slot)
        self.tier.offer(sequence)
        self.kv_cache_manager.free(sequence.slot)
        self.table.free(sequence)

    def check_invariants(self) -> None:
        """Assert that no page, slot or token is lost or duplicated, and that no shared page is written."""
        self.kv_cache_manager.check_invariants(self.table)
        self.table.check_invariants()
        for queue in (self.running, self.waiting):
            assert queue == sorted(queue, key=_by_rank), "a queue is out of order"
        assert {q.slot for q in self.running} == self.table.sequences.keys(), "a slot has no running sequence"
        assert all(q.slot == WAITING for q in self.waiting), "a waiting sequence has a slot"
        alive = [q.request.request_id for q in (*self.running, *self.waiting)]
        assert sorted(alive) == sorted(self._sequences), "a request is lost or doubled"


def _num_online(queue: list[Sequence]) -> int:
    """Return the number of online requests in a queue; they come first."""
    if not queue or not queue[-1].request.background:
        return len(queue)
    return bisect_left(queue, (1,), key=_by_rank)


class RequestWeights:
    """The values of a token of each running request, 1 by default.

    * A request with a time-per-output-token target (`Request.tpot_ms`) has up to four times the weight while
      it is late, and down to half while it is early.
    * Each level of priority changes the weight by a quarter if the scheduling policy is by priority.
    * Background work has half the weight of online requests.

    Args:
        num_slots: S.
        by_priority: whether `Request.priority` changes the weight.
    """

    def __init__(self, num_slots: int, *, by_priority: bool) -> None:
        self._by_priority = by_priority
        self._fixed_S = np.ones(num_slots, dtype=np.float32)
        self._target_s_S = np.full(num_slots, np.nan)
        self._first_s_S = np.full(num_slots, np.nan)  # time of the first token
        self._tokens_S = np.zeros(num_slots)  # after the first
        self._has_targets = False

    def admit(self, slot: int, request: Request) -> None:
        maximum = math.log(_HIGH, _PER_PRIORITY)
        level = min(max(-request.priority, -maximum), maximum) if self._by_priority else 0.0
        self._fixed_S[slot] = _PER_PRIORITY**level * (_LOW if request.background else 1.0)
        self._target_s_S[slot] = np.nan if request.tpot_ms is None else request.tpot_ms / 1e3
        self._first_s_S[slot], self._tokens_S[slot] = np.nan, 0.0
        self._has_targets = self._has_targets or request.tpot_ms is not None

    def count_tokens(self, slots_R: IntArray, num_tokens_R: IntArray, now_s: float) -> None:
        if not self._has_targets:
            return
        began_R = ~np.isnan(self._first_s_S[slots_R])
        self._tokens_S[slots_R] += np.where(began_R, num_tokens_R, 0)
        self._first_s_S[slots_R[~began_R & (num_tokens_R > 0)]] = now_s

    def of(self, slots_R: IntArray, now_s: float) -> FloatArray:
        """Return the weights of these requests, fp32 [R]."""
        if not self._has_targets:
            return self._fixed_S[slots_R]
        due_s_R = self._target_s_S[slots_R] * (self._tokens_S[slots_R] + 1)
        late_R = ((now_s - self._first_s_S[slots_R]) / due_s_R) ** 2
        late_R = np.where(np.isnan(late_R), 1.0, np.clip(late_R, _LOW, _HIGH))
        return (self._fixed_S[slots_R] * late_R).astype(np.float32)
