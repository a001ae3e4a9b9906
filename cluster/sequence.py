"""A request's progress: `Sequence` is what seldom changes, `SlotTable` what every step changes.

While a sequence waits it has known tokens and nothing else. While it runs it has a slot, and its numbers are
row `slot` of the table's arrays: planning and committing a step are then a few NumPy calls for all running
sequences, not a loop. The workers keep the same rows under the same slots. Edited by the scheduler alone.

Which pages it has is `page_books.py`'s.

Shape legend: S slots, L longest sequence, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np

from .grammar import SlotGrammar
from .logprobs import RowLogprobs
from .plan import BoolArray, IntArray, SchedulerOutput, SlotSampling
from .request import Request
from .token_rules import TokenRules

WAITING = -1  # the slot of a sequence that does not run
Rank = tuple[int, int, int]  # background work or not, priority, arrival


@dataclass(slots=True, eq=False)
class Sequence:
    """One request on its way.

    Attributes:
        request: what was asked.
        rank: place in the order in which sequences are served, lower first.
        token_ids: int32; all known tokens while it waits (while it runs they are in the table).
        max_length: tokens, prompt included, at which it ends at the latest.
        sampling: what workers need to know of its parameters. Log probabilities of the prompt are asked for
            until all are there.
        prompt_logprobs: those that are there, until they are given out.
        eos_token_ids: those that end it without being a `stop_reason`.
        digests: of its first full pages, as far as they were needed.
        num_cached_tokens: found in the prefix cache when it first entered; None before.
        queue_s: how long it waited until then.
        slot: while it runs.
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
    slot: int = WAITING

    @classmethod
    def of(cls, request: Request, rank: Rank, max_length: int, model_eos: tuple[int, ...]) -> Sequence:
        """A request as it arrives.

        Args:
            request: checked and seeded.
            rank: its place.
            max_length: what no sequence can exceed.
            model_eos: the model's end tokens.
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
                rules=TokenRules.of(params, length),
                logprobs=params.logprobs,
                prompt_logprobs=params.prompt_logprobs if length > 1 else None,
                prompt_length=length,
                grammar=None if grammar is None else SlotGrammar(grammar, length),
            ),
            eos_token_ids=frozenset(eos),
        )

    @property
    def lacks_prompt_logprobs(self) -> bool:
        """Whether rows of its prompt have to be computed for what they tell, known or not."""
        return self.sampling.prompt_logprobs is not None

    def take_prompt_logprobs(self, first: int, rows: RowLogprobs) -> None:
        """What the rows from position `first` on tell; after a preemption some tell it again."""
        asked, num_known = self.sampling.prompt_logprobs, sum(map(len, self.prompt_logprobs))
        if asked is None:
            return
        assert first <= num_known, "rows of the prompt are missing"
        self.prompt_logprobs.append(rows.cut(num_known - first, len(rows), asked))
        if num_known + len(self.prompt_logprobs[-1]) == len(self.request.prompt_token_ids) - 1:
            self.sampling = replace(self.sampling, prompt_logprobs=None)

    def stop_reason(self, token_id: int) -> int | None:
        """What to report when this token ended it."""
        return None if token_id in self.eos_token_ids else token_id


class SlotTable:
    """The running sequences' numbers, by slot.

    Args:
        num_slots: most sequences that run at once.
        max_model_len, vocab_size: of the model.
    """

    def __init__(self, num_slots: int, max_model_len: int, vocab_size: int) -> None:
        self.token_ids_SL = np.zeros((num_slots, max_model_len), dtype=np.int32)
        self.num_tokens_S = np.zeros(num_slots, dtype=np.int32)  # known tokens
        self.num_computed_S = np.zeros(num_slots, dtype=np.int32)  # tokens whose K/V exist
        self.max_length_S = np.zeros(num_slots, dtype=np.int32)
        self.max_drafts_S = np.zeros(num_slots, dtype=np.int32)
        # What the steps in flight do to the numbers above, once they are committed.
        self._ahead_3S = np.zeros((3, num_slots), dtype=np.int32)
        self.ahead_rows_S = self._ahead_3S[0]  # known tokens they compute
        self.ahead_samples_S = self._ahead_3S[1]  # fewest tokens they bring: one per step
        self.ahead_drafts_S = self._ahead_3S[2]  # most tokens they bring beyond these
        self.stop_uses_V = np.zeros(vocab_size, dtype=np.int32)  # running sequences that a token would end
        self.sequences: dict[int, Sequence] = {}
        self._free_slots = list(range(num_slots - 1, -1, -1))

    @property
    def has_free_slot(self) -> bool:
        return bool(self._free_slots)

    def enter(self, sequence: Sequence, num_computed: int, max_drafts: int) -> int:
        """Give a waiting sequence a slot; K/V of its first tokens may be there already."""
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

    def least_computed(self, slots_R: IntArray) -> IntArray:
        """Where each sequence stands when the steps in flight have ended, if no draft is accepted."""
        return self.num_computed_S[slots_R] + self.ahead_rows_S[slots_R]

    def go_on(self, slots_R: IntArray) -> BoolArray:
        """Which sequences the steps in flight do not bring to their greatest length, whatever is accepted."""
        return self.num_tokens_S[slots_R] + self.ahead_samples_S[slots_R] < self.max_length_S[slots_R]

    def is_idle(self, slots_R: IntArray) -> BoolArray:
        """Which sequences no step in flight computes."""
        return self.ahead_rows_S[slots_R] == 0

    def most_tokens(self, slots_R: IntArray) -> IntArray:
        """Tokens of each sequence, drafts in flight taken as accepted; if it goes on, it is not full."""
        ahead_R = self.ahead_samples_S[slots_R] + self.ahead_drafts_S[slots_R]
        return np.minimum(self.num_tokens_S[slots_R] + ahead_R, self.max_length_S[slots_R] - 1)

    def known_rows(self, slots_R: IntArray) -> IntArray:
        """Tokens of each sequence that no step computes yet; the anchor where one in flight samples."""
        left_R = self.num_tokens_S[slots_R] - self.least_computed(slots_R)
        return np.where(self.ahead_samples_S[slots_R] > 0, 1, left_R)

    def depart(self, plan: SchedulerOutput) -> None:
        """A step is in flight."""
        self._count_ahead(1, plan.slots, plan.num_rows - plan.num_drafts, plan.num_drafts, plan.samples)

    def arrive(self, slots_R: IntArray, known_R: IntArray, drafts_R: IntArray, samples_R: BoolArray) -> None:
        """A step in flight has ended, for these of its sequences; the others have left."""
        self._count_ahead(-1, slots_R, known_R, drafts_R, samples_R)

    def _count_ahead(
        self, sign: int, slots_R: IntArray, known_R: IntArray, drafts_R: IntArray, samples_R: BoolArray
    ) -> None:
        # One assignment: each costs a microsecond or two.
        self._ahead_3S[:, slots_R] += sign * np.array((known_R, samples_R, drafts_R), dtype=np.int32)

    def known_tokens(self, slot: int) -> IntArray:
        """A copy of all tokens of a running sequence."""
        return self.token_ids_SL[slot, : self.num_tokens_S[slot]].copy()

    def leave(self, sequence: Sequence) -> None:
        """Take a sequence's slot back; it keeps its tokens. Its pages are not this table's."""
        slot = sequence.slot
        sequence.token_ids = self.known_tokens(slot)
        sequence.slot = WAITING
        del self.sequences[slot]
        self.stop_uses_V[list(sequence.sampling.stop_token_ids)] -= 1
        self._free_slots.append(slot)

    def check_invariants(self) -> None:
        """Slots are free or hold one sequence, and no sequence is shorter than what is computed."""
        slots = sorted([*self.sequences, *self._free_slots])
        assert slots == list(range(len(self.num_tokens_S))), "a slot is lost or doubled"
        for slot, sequence in self.sequences.items():
            assert sequence.slot == slot, "a sequence does not know its slot"
            assert 0 <= self.num_computed_S[slot] < self.num_tokens_S[slot] < self.max_length_S[slot]
            assert 0 <= self.ahead_samples_S[slot] <= self.ahead_rows_S[slot], "a step ahead computes nothing"
        num_stops = sum(len(q.sampling.stop_token_ids) for q in self.sequences.values())
        assert self.stop_uses_V.sum() == num_stops, "stop tokens are counted for sequences that are gone"
