"""A request's progress: `Sequence` has what rarely changes, `SlotTable` what every step changes.

A waiting sequence only has known tokens. A running one has a slot, and its numbers are row `slot` of the
table's arrays, so that planning and committing a step are a few NumPy calls for all running sequences instead
of a loop. The workers have the same rows for the same slots. Only the scheduler changes them.
`cluster/kv_cache/kv_cache_manager.py` has the pages.

Shape legend: S slots, L longest sequence, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np

from ..request.logprobs import RowLogprobs
from ..request.request import LogitsProcessorParams, Request
from ..request.structured_outputs import SlotGrammar
from .scheduler_output import BoolArray, IntArray, SchedulerOutput, SlotSampling

WAITING = -1  # the slot of a sequence that does not run
Rank = tuple[int, int, int]  # background work or not, priority, arrival


@dataclass(slots=True, eq=False)
class Sequence:
    """One live request.

    Attributes:
        rank: its position in the serving order, lower first.
        token_ids: int32; all known tokens while it waits (while it runs they are in the table).
        max_length: largest number of tokens, including the prompt.
        sampling: its parameters for the workers. Prompt log probabilities are requested until all have
            arrived.
        prompt_logprobs: those that have arrived, until they are returned.
        eos_token_ids: end tokens that are not reported as a `stop_reason`.
        digests: of its first full pages, as far as they were needed.
        num_cached_tokens: tokens found in the prefix cache when it first entered; None before.
        queue_s: how long it waited until then.
        was_looked_up, is_read_for: whether a tier below the cache was asked for its prefix since it waits,
            and whether it waits for pages from there (`kv_cache/kv_tier.py`).
        num_read_tokens: tokens whose pages were read from there.
    """

    request: Request
    rank: Rank
    token_ids: IntArray
    max_length: int
    sampling: SlotSampling
    eos_token_ids: frozenset[int]
    prompt_logprobs: list[RowLogprobs] = field(default_factory=list[RowLogprobs])
    digests: list[bytes] = field(default_factory=list[bytes])
    num_cached_tokens: int | None = None
    queue_s: float = 0.0
    was_looked_up: bool = False
    is_read_for: bool = False
    num_read_tokens: int = 0
    slot: int = WAITING

    @classmethod
    def of(cls, request: Request, rank: Rank, max_length: int, model_eos: tuple[int, ...]) -> Sequence:
        """Make the sequence of a request; `max_length` and `model_eos` are the engine's.

        A resumed request has output tokens already, which count as output, not as prompt.
        """
        params, length = request.params, len(request.prompt_token_ids)
        assert params.seed is not None, "SamplingParams.with_seed() comes before the engine"
        room = max_length - length
        grammar = params.grammar
        eos = model_eos if params.ends_at_eos else ()
        return cls(
            request=request,
            rank=rank,
            token_ids=np.array(request.prompt_token_ids + request.output_token_ids, dtype=np.int32),
            max_length=length + min(params.max_tokens or room, room),
            sampling=SlotSampling(
                temperature=params.temperature,
                top_k=params.top_k,
                top_p=params.top_p,
                min_p=params.min_p,
                seed=params.seed,
                min_length=length + params.min_tokens,
                stop_token_ids=tuple(dict.fromkeys((*eos, *params.stop_token_ids))),
                rules=LogitsProcessorParams.of(params, length),
                logprobs=params.logprobs,
                prompt_logprobs=params.prompt_logprobs if length > 1 else None,
                prompt_length=length,
                grammar=None if grammar is None else SlotGrammar(grammar, length),
            ),
            eos_token_ids=frozenset(eos),
        )

    @property
    def lacks_prompt_logprobs(self) -> bool:
        """Whether prompt rows must be computed for their log probabilities, even if they are cached."""
        return self.sampling.prompt_logprobs is not None

    def take_prompt_logprobs(self, first: int, rows: RowLogprobs) -> None:
        """Add log probabilities of rows from position `first` on; after a preemption some are repeated."""
        num_top, num_known = self.sampling.prompt_logprobs, sum(map(len, self.prompt_logprobs))
        if num_top is None:
            return
        assert first <= num_known, "rows of the prompt are missing"
        self.prompt_logprobs.append(rows.cut(num_known - first, len(rows), num_top))
        if num_known + len(self.prompt_logprobs[-1]) == len(self.request.prompt_token_ids) - 1:
            self.sampling = replace(self.sampling, prompt_logprobs=None)

    def stop_reason(self, token_id: int) -> int | None:
        return None if token_id in self.eos_token_ids else token_id


class SlotTable:
    """The running sequences' numbers, by slot."""

    def __init__(self, num_slots: int, max_model_len: int, vocab_size: int) -> None:
        self.token_ids_SL = np.zeros((num_slots, max_model_len), dtype=np.int32)
        self.num_tokens_S = np.zeros(num_slots, dtype=np.int32)  # known tokens
        self.num_computed_S = np.zeros(num_slots, dtype=np.int32)  # tokens whose K/V exist
        self.max_length_S = np.zeros(num_slots, dtype=np.int32)
        self.max_drafts_S = np.zeros(num_slots, dtype=np.int32)
        # Changes to the numbers above when the steps in flight are committed.
        self._ahead_3S = np.zeros((3, num_slots), dtype=np.int32)
        self.ahead_rows_S = self._ahead_3S[0]  # known tokens that they compute
        self.ahead_samples_S = self._ahead_3S[1]  # fewest tokens that they yield: one per step
        self.ahead_drafts_S = self._ahead_3S[2]  # most tokens that they yield in addition
        self.stop_uses_V = np.zeros(vocab_size, dtype=np.int32)  # running sequences that a token would end
        self.sequences: dict[int, Sequence] = {}
        self._free_slots = list(range(num_slots - 1, -1, -1))

    @property
    def has_free_slot(self) -> bool:
        return bool(self._free_slots)

    def admit(self, sequence: Sequence, num_computed: int, max_drafts: int) -> int:
        """Give a waiting sequence a slot; K/V of its first `num_computed` tokens already exist."""
        slot = sequence.slot = self._free_slots.pop()
        count = len(sequence.token_ids)
        self.sequences[slot] = sequence
        self.token_ids_SL[slot, :count] = sequence.token_ids
        self.num_tokens_S[slot] = count
        self.num_computed_S[slot] = num_computed
        self._ahead_3S[:, slot] = 0
        self.max_length_S[slot] = sequence.max_length
        self.max_drafts_S[slot] = max_drafts
        self.stop_uses_V[list(sequence.sampling.stop_token_ids)] += 1
        return slot

    def min_computed(self, slots_R: IntArray) -> IntArray:
        """Return the computed tokens of each sequence after the steps in flight, if no draft is accepted."""
        return self.num_computed_S[slots_R] + self.ahead_rows_S[slots_R]

    def unfinished(self, slots_R: IntArray) -> BoolArray:
        """Return which sequences may need another step: those in flight need not complete them."""
        return self.num_tokens_S[slots_R] + self.ahead_samples_S[slots_R] < self.max_length_S[slots_R]

    def is_idle(self, slots_R: IntArray) -> BoolArray:
        return self.ahead_rows_S[slots_R] == 0

    def max_tokens(self, slots_R: IntArray) -> IntArray:
        """Return each sequence's tokens if all drafts in flight are accepted and it is not full."""
        ahead_R = self.ahead_samples_S[slots_R] + self.ahead_drafts_S[slots_R]
        return np.minimum(self.num_tokens_S[slots_R] + ahead_R, self.max_length_S[slots_R] - 1)

    def pending_tokens(self, slots_R: IntArray) -> IntArray:
        """Return each sequence's known tokens that no step computes yet; 1 (the anchor) if one samples."""
        left_R = self.num_tokens_S[slots_R] - self.min_computed(slots_R)
        return np.where(self.ahead_samples_S[slots_R] > 0, 1, left_R)

    def on_scheduled(self, plan: SchedulerOutput) -> None:
        self._count_ahead(1, plan.slots, plan.num_rows - plan.num_drafts, plan.num_drafts, plan.samples)

    def on_completed(
        self, slots_R: IntArray, known_R: IntArray, drafts_R: IntArray, samples_R: BoolArray
    ) -> None:
        """Record that a step in flight has ended, for its sequences that have not left."""
        self._count_ahead(-1, slots_R, known_R, drafts_R, samples_R)

    def _count_ahead(
        self, sign: int, slots_R: IntArray, known_R: IntArray, drafts_R: IntArray, samples_R: BoolArray
    ) -> None:
        # A single assignment, as each costs a microsecond or two.
        self._ahead_3S[:, slots_R] += sign * np.array((known_R, samples_R, drafts_R), dtype=np.int32)

    def append(
        self, slots_R: IntArray, token_ids_RW: IntArray, num_out_R: IntArray, num_computed_R: IntArray
    ) -> None:
        """Append each sequence's first `num_out_R` tokens; K/V of `num_computed_R` tokens exist now."""
        columns_W = np.arange(token_ids_RW.shape[1], dtype=np.int32)
        rows, columns = np.nonzero(columns_W < num_out_R[:, None])
        places = self.num_tokens_S[slots_R[rows]] + columns
        self.token_ids_SL[slots_R[rows], places] = token_ids_RW[rows, columns]
        self.num_tokens_S[slots_R] += num_out_R
        self.num_computed_S[slots_R] = num_computed_R

    def copy_tokens(self, slot: int) -> IntArray:
        return self.token_ids_SL[slot, : self.num_tokens_S[slot]].copy()

    def free(self, sequence: Sequence) -> None:
        slot = sequence.slot
        sequence.token_ids = self.copy_tokens(slot)
        sequence.slot = WAITING
        del self.sequences[slot]
        self.stop_uses_V[list(sequence.sampling.stop_token_ids)] -= 1
        self._free_slots.append(slot)

    def check_invariants(self) -> None:
        """Assert that every slot is free or holds one sequence, with consistent lengths."""
        slots = sorted([*self.sequences, *self._free_slots])
        assert slots == list(range(len(self.num_tokens_S))), "a slot is lost or doubled"
        for slot, sequence in self.sequences.items():
            assert sequence.slot == slot, "a sequence does not know its slot"
            assert 0 <= self.num_computed_S[slot] < self.num_tokens_S[slot] < self.max_length_S[slot]
            assert 0 <= self.ahead_samples_S[slot] <= self.ahead_rows_S[slot], "a step ahead computes nothing"
        num_stops = sum(len(q.sampling.stop_token_ids) for q in self.sequences.values())
        assert self.stop_uses_V.sum() == num_stops, "stop tokens are counted for sequences that have left"
