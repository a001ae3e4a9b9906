"""Grammar state of each running request, and the token masks of a step's rows.

A mirror owned by `drafter/step/request_states.py`: one matcher per slot, which has consumed the committed
tokens. Before rows are laid out, a step's drafts are walked through and the matcher is rolled back. So
rejected drafts need no undo, and a row's mask depends only on the tokens before it: speculation changes no
token.

    committed       {"a":
    drafts          1     5     true  }
    allowed         1     5
    rows       X1   X2    X3    X4    X5      masks of X1, X2, X3; rows after a disallowed draft
                                              can never be accepted and are left unmasked

Tokens that the grammar forces replace drafts: directly after the committed tokens, and at the first
disallowed draft. Forced tokens are certain, whatever the drafter's margin, and drafts after a disallowed one
are useless. Therefore drafts are walked through first (`walk`), and masks are made for the rows that are left
(`masks`). A draft tree is grown by the same rules along each of its paths (`tree_walks.py`).

A matcher that fails (too many steps or states) is recreated once, if that takes milliseconds
(`Grammar.is_cheap`). If it fails again, or if a grammar is complete, only an end token can follow. An error
in one request's grammar ends that answer and is logged; other requests are not affected.

Legend: R requests of a step, K most drafts, D drafts of a request, M rows of requests with grammars, W words.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
from llguidance import LLExecutor, LLMatcher
from numpy.typing import NDArray

from ...cluster.request.structured_outputs import SlotGrammar
from ...cluster.speculation.draft_tree import Restriction
from .compiler import GrammarCompiler, GrammarError, reason_of
from .grammar_slots import GrammarSlot, end_of_start, ending, fail, forced_tokens
from .token_bitmasks import Ints, RowMasks, Words
from .tree_walks import TreeWalk, restriction

Margins = NDArray[np.float32]
# The argument of llguidance's executor: (matcher, its row among the masks, the drafts after it).
_MatcherWithDrafts = tuple[LLMatcher, int, list[int]]
TokenReader = Callable[[int, int, int], list[int]]  # (slot, begin, end) -> these tokens of its request


@dataclass(slots=True)
class _Walk:
    """The walk of the request at index `place` through a step's drafts, which it edits (with their margins).

    Attributes:
        unread: returns committed tokens that have not been consumed.
        matcher: state where the grammar begins to apply; None if it does not within the drafts.
        num_free, num_walked: drafts before the grammar applies; allowed drafts after those.
    """

    slot: GrammarSlot
    place: int
    unread: Callable[[], list[int]]
    drafts_D: Ints
    margins_D: Margins | None
    matcher: LLMatcher | None = None
    num_free: int = 0
    num_walked: int = 0

    def has_failed(self) -> bool:
        return self.matcher is not None and self.matcher.is_error()


class _RowsOfWalk(NamedTuple):
    """A walk, and the range of its request's rows among a step's masks."""

    walk: _Walk
    first: int
    end: int


@dataclass(frozen=True, slots=True)
class StepWalks:
    """A step's walks.

    `trees`: tokens and parents [R, M] of draft trees that replace the drafts (`DraftTrees`), if any.
    """

    walks: tuple[_Walk, ...]
    forces: bool
    trees: tuple[Ints, Ints] | None = None


class GrammarStates:
    """The grammars of running requests; `num_threads` threads compute a step's masks.

    Attributes:
        slots: the slots with a grammar, and their states.
    """

    def __init__(self, compiler: GrammarCompiler, num_threads: int) -> None:
        self.compiler = compiler
        self._executor = LLExecutor(num_threads)
        self._eos = frozenset(compiler.eos_token_ids)
        self.slots: dict[int, GrammarSlot] = {}
        self._bits_MW = np.empty((0, compiler.mask_words), dtype=np.int32)

    def admit(self, slot: int, slot_grammar: SlotGrammar | None) -> None:
        """Replace a slot's state with that of a newly admitted or resumed request."""
        self.slots.pop(slot, None)
        if slot_grammar is not None:
            self.slots[slot] = self._begin(slot_grammar)

    def holds(self, slots: NDArray[np.integer]) -> bool:
        return bool(self.slots) and not self.slots.keys().isdisjoint(slots.tolist())

    def constrain_drafts(
        self,
        slots_R: Ints,
        begin_R: Ints,
        counts_R: Ints,
        drafts_RK: Ints,
        read: TokenReader,
        *,
        forces: bool = True,
    ) -> RowMasks | None:
        walks = self.walk(slots_R, begin_R, counts_R, drafts_RK, read, forces=forces)
        return None if walks is None else self.masks(walks, counts_R)

    def walk(
        self,
        slots_R: Ints,
        begin_R: Ints,
        counts_R: Ints,
        drafts_RK: Ints,
        read: TokenReader,
        margins_RK: Margins | None = None,
        *,
        forces: bool = True,
    ) -> StepWalks | None:
        """Walk through a step's drafts and edit them. Return None if no grammar applies.

        Args:
            begin_R, counts_R: committed tokens of each request; sampled rows: 1 + drafts, or 0.
            drafts_RK: edited; negative ids are no drafts.
            read: reads committed tokens.
            margins_RK: edited: inf where a token is forced, nan after a disallowed draft.
            forces: replace drafts by forced tokens; otherwise drafts stay as they are.
        """
        numbers = slots_R.tolist()
        walked = [place for place, number in enumerate(numbers) if number in self.slots and counts_R[place]]
        if not walked:
            return None
        walks = list[_Walk]()
        for place in walked:
            number, last, begin = numbers[place], int(counts_R[place]) - 1, int(begin_R[place])
            slot = self.slots[number]
            unread = partial(_read_committed, slot, number, begin, read)
            margins_D = None if margins_RK is None else margins_RK[place, :last]
            walks.append(_Walk(slot, place, unread, drafts_RK[place, :last], margins_D))
        for walk in walks:
            self._walk_or_fail(walk, forces)
            if walk.has_failed():
                self._rewind(walk)
                self._walk_or_fail(walk, forces)
        return StepWalks(tuple(walks), forces)

    def tree_restriction(self, slot: GrammarSlot) -> Restriction:
        """Return what a request's draft tree is restricted to, after `walk`."""
        return restriction(slot, self.compiler)

    def masks(self, step: StepWalks, counts_R: Ints) -> RowMasks:
        """Return the masks of a step's sampled rows, at most those that were walked through."""
        is_held_R = np.zeros(len(counts_R), dtype=np.bool_)
        is_held_R[[walk.place for walk in step.walks]] = True
        counts_H = counts_R[is_held_R]
        bits_MW, ends_H = self._mask_buffer(int(counts_H.sum())), np.cumsum(counts_H)
        rows = list(map(_RowsOfWalk, step.walks, (ends_H - counts_H).tolist(), ends_H.tolist()))
        write = self._write if step.trees is None else partial(self._write_trees, *step.trees)
        write(rows, bits_MW)
        if failed := [each for each in rows if each.walk.has_failed()]:
            for walk, *_ in failed:
                self._rewind(walk)
                self._walk_or_fail(walk, step.forces)
            write(failed, bits_MW)
        for walk, first, end in rows:
            if walk.slot.has_failed and first + walk.num_free < end:
                bits_MW[first + walk.num_free].fill(0)
        rows_M = np.flatnonzero(np.repeat(is_held_R, counts_R))
        return RowMasks(rows_M, bits_MW, self.compiler.eos_token_ids[0])

    def _mask_buffer(self, num_rows: int) -> Words:
        """Return masks that allow every token, in reused memory."""
        if len(self._bits_MW) < num_rows:
            self._bits_MW = np.empty((num_rows, self.compiler.mask_words), dtype=np.int32)
        bits_MW = self._bits_MW[:num_rows]
        bits_MW.fill(-1)
        return bits_MW

    def _walk_or_fail(self, walk: _Walk, forces: bool) -> None:
        with ending(walk.slot):
            self._walk_drafts(walk, forces)
        if walk.slot.has_failed:
            walk.matcher, walk.num_free, walk.num_walked = None, 0, 0

    def _walk_drafts(self, walk: _Walk, forces: bool) -> None:
        slot = walk.slot
        if slot.has_failed:
            return
        self._read(slot, walk.unread())
        drafts = walk.drafts_D.tolist()
        walk.matcher, walk.num_free = self._start(slot, drafts)
        walk.num_walked = 0
        if walk.matcher is None:
            return
        following, forced = drafts[walk.num_free :], list[int]()
        if not slot.is_over:
            walk.num_walked, forced = self._follow(slot, walk.matcher, following, forces)
        if walk.num_walked:
            walk.drafts_D[walk.num_free :] = following
        if walk.margins_D is not None and not walk.has_failed():
            margins_D = walk.margins_D[walk.num_free :]
            margins_D[[place for place in forced if place < walk.num_walked]] = np.inf
            ends = walk.num_walked < len(following) and following[walk.num_walked] in self._eos
            margins_D[walk.num_walked + (ends and not slot.is_over) :] = np.nan  # an end token may be right

    def _follow(
        self, slot: GrammarSlot, matcher: LLMatcher, drafts: list[int], forces: bool
    ) -> tuple[int, list[int]]:
        """Replace drafts by forced tokens, in place.

        Return the number of allowed drafts, and the indices of forced ones (of which some may be beyond the
        allowed ones).
        """
        num_walked, forced_places = 0, list[int]()
        forced = forced_tokens(slot, matcher) if forces else []
        while num_walked < len(drafts):
            num_forced = min(len(forced), len(drafts) - num_walked)
            drafts[num_walked : num_walked + num_forced] = forced[:num_forced]
            forced_places += range(num_walked, num_walked + num_forced)
            count = matcher.try_consume_tokens(self._before_end(drafts[num_walked:]))
            num_walked += count
            # At the first disallowed draft, the grammar may force a token that replaces it.
            forced = forced_tokens(slot, matcher) if forces and count else []
            if not forced:
                break
        if num_walked:
            matcher.rollback(num_walked)
        return num_walked, forced_places

    def _write(self, rows: Iterable[_RowsOfWalk], bits_MW: Words) -> None:
        """Write the masks of rows to which grammars apply: one before the allowed drafts, one after each."""
        with_drafts = list[tuple[_Walk, _MatcherWithDrafts]]()
        address, row_bytes = bits_MW.ctypes.data, bits_MW.strides[0]
        for walk, first, end in rows:
            row = first + walk.num_free  # the first to which the grammar applies
            if walk.matcher is None or row >= end:
                continue
            # A request may have fewer rows than drafts were walked through.
            num_walked = min(walk.num_walked, end - row - 1)
            bits_MW[row : row + num_walked + 1].fill(0)
            if num_walked:
                walked = walk.drafts_D[walk.num_free : walk.num_free + num_walked].tolist()
                with_drafts.append((walk, (walk.matcher, row, walked)))
            elif not walk.slot.is_over:
                with ending(walk.slot):
                    walk.matcher.unsafe_compute_mask_ptr(address + row * row_bytes, row_bytes)
        if with_drafts:
            compute = self._executor.unsafe_compute_mask_ptr_with_draft_token
            try:
                compute([each for _, each in with_drafts], address, row_bytes, len(bits_MW))
            except Exception:
                # One of them fails, and the error does not say which; alone it ends only its own answer.
                for walk, each in with_drafts:
                    with ending(walk.slot):
                        compute([each], address, row_bytes, len(bits_MW))

    def _write_trees(
        self, tokens_RM: Ints, parents_RM: Ints, rows: Iterable[_RowsOfWalk], bits_MW: Words
    ) -> None:
        for walk, first, end in rows:
            nodes, walk.num_free = slice(0, end - first - 1), 0  # only its root is certain to be reached
            with ending(walk.slot):
                tree = TreeWalk(walk.slot, self.compiler)
                tree.extend(parents_RM[walk.place, nodes].tolist(), tokens_RM[walk.place, nodes].tolist())
                tree.write_masks(bits_MW[first:end])
                walk.matcher = tree.failed_matcher or walk.matcher

    def _before_end(self, drafts: list[int]) -> list[int]:
        """Return the drafts before the first that is an end token or no token."""
        is_end = (t in self._eos or not 0 <= t < self.compiler.vocab_size for t in drafts)
        return drafts[: next((i for i, ends in enumerate(is_end) if ends), len(drafts))]

    def _begin(self, slot_grammar: SlotGrammar) -> GrammarSlot:
        """Return the state after the prompt. A grammar with a start marker gets its matcher at the marker."""
        grammar = slot_grammar.grammar
        slot = GrammarSlot(
            slot_grammar, matcher=None, num_read=slot_grammar.prompt_length, forces=grammar.forces
        )
        if not grammar.after_token_ids:
            try:
                slot.matcher = self.compiler.matcher(grammar)
            except GrammarError as error:
                fail(slot, error)
        return slot

    def _read(self, slot: GrammarSlot, tokens: list[int]) -> None:
        slot.num_read += len(tokens)
        if slot.matcher is None:
            end = end_of_start(slot, tokens)
            if end is None:
                keep = len(slot.grammar_slot.grammar.after_token_ids) - 1
                slot.recent = [*slot.recent, *tokens][-keep:] if keep else []
                return
            slot.matcher, tokens = self.compiler.matcher(slot.grammar_slot.grammar), tokens[end:]
        slot.is_over = slot.is_over or slot.matcher.try_consume_tokens(tokens) < len(tokens)

    def _start(self, slot: GrammarSlot, drafts: list[int]) -> tuple[LLMatcher | None, int]:
        """Return the matcher where the grammar begins in a step, and the number of drafts before."""
        if slot.matcher is not None:
            return slot.matcher, 0
        num_free = end_of_start(slot, drafts)
        if num_free is None:
            return None, len(drafts)
        return self.compiler.matcher(slot.grammar_slot.grammar), num_free

    def _rewind(self, walk: _Walk) -> None:
        """Recreate a failed matcher with a newly compiled grammar; once, and only if that is cheap."""
        slot, matcher = walk.slot, walk.matcher
        self.compiler.forget(slot.grammar_slot.grammar)
        if slot.is_renewed or not slot.grammar_slot.grammar.is_cheap:
            fail(slot, "" if matcher is None else reason_of(matcher))
        elif slot.matcher is not None:
            fresh = self._begin(slot.grammar_slot)
            slot.matcher, slot.num_read, slot.is_over = fresh.matcher, fresh.num_read, False
            slot.recent, slot.has_failed = [], fresh.has_failed
        slot.is_renewed, slot.forces = True, False  # computing forced tokens may be the cause


def _read_committed(slot: GrammarSlot, number: int, begin: int, read: TokenReader) -> list[int]:
    return read(number, slot.num_read, begin)
