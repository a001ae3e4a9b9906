"""Where each running request stands in its grammar, and what that says of a step's rows.

A mirror, like `drafter/step/states.py`, which owns it: a matcher per slot that has read the tokens that
stand. A step's drafts are walked through before the rows are laid out, and the matcher goes back to where it
was. So nothing has to be undone when drafts are rejected, and what a row may choose depends on the tokens
before it alone: speculation changes no token.

    stands          {"a":
    drafted         1     5     true  }
    can be          1     5
    rows       X1   X2    X3    X4    X5      masks of X1, X2, X3; a row behind what cannot be is of a text
                                              that will not be: all tokens are as good

Tokens that the grammar forces stand in for drafts: in the places next to what stands, and in those next to a
draft that cannot be.

A matcher that fails (a grammar that takes too many steps or states) is compiled anew once. If that fails too,
or where a grammar is at its end, no token but an end can follow.

Legend: R requests of a step, K most drafts, D drafts of a request, M rows of requests with grammars, W words.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
from llguidance import LLExecutor, LLMatcher
from numpy.typing import NDArray

from ...cluster.grammar import SlotGrammar
from .compiler import GrammarCompiler
from .masks import Ints, RowMasks, Words

TokenReader = Callable[[int, int, int], list[int]]  # (slot, begin, end) -> these tokens of its request


@dataclass(slots=True)
class _Slot:
    """A request on its way through its grammar.

    Attributes:
        matcher: has read what stands; None before the grammar begins.
        num_read: tokens of the request, prompt included, that have been read.
        recent: before the grammar begins, the last generated tokens: one less than what it begins behind.
        is_over: something stands that the grammar cannot read: the text has ended.
    """

    held: SlotGrammar
    matcher: LLMatcher | None
    num_read: int
    recent: list[int] = field(default_factory=list[int])
    is_over: bool = False


@dataclass(frozen=True, slots=True)
class _Walk:
    """A request's part of a step: its drafts, which are edited, and the first of its rows among M."""

    slot: _Slot
    standing: Callable[[], list[int]]  # tokens that have not been read
    drafts_D: Ints
    row: int


class GrammarStates:
    """The grammars of running requests.

    Args:
        num_threads: that make a step's masks.
    """

    def __init__(self, compiler: GrammarCompiler, num_threads: int) -> None:
        self._compiler = compiler
        self._executor = LLExecutor(num_threads)
        self._eos = frozenset(compiler.eos_token_ids)
        self._slots: dict[int, _Slot] = {}
        self._bits_MW = np.empty((0, compiler.mask_words), dtype=np.int32)

    def admit(self, slot: int, held: SlotGrammar | None) -> None:
        """A request enters a slot, new or back; what stood there is forgotten."""
        self._slots.pop(slot, None)
        if held is not None:
            self._slots[slot] = self._begin(held)

    def holds(self, slots: NDArray[np.integer]) -> bool:
        """Whether any of these has a grammar."""
        return bool(self._slots) and not self._slots.keys().isdisjoint(slots.tolist())

    def guide(
        self,
        slots_R: Ints,
        begin_R: Ints,
        counts_R: Ints,
        drafts_RK: Ints,
        read: TokenReader,
        *,
        forces: bool = True,
    ) -> RowMasks | None:
        """Let grammars into a step: edit its drafts, and say what its rows may choose. None: no grammar does.

        Args:
            begin_R: how many tokens of each request stand.
            counts_R: rows that choose: 1 + drafts; or 0.
            drafts_RK: edited; negative ones are none.
            read: of tokens that stand.
            forces: put what is forced in the place of drafts; else they stay as they are.
        """
        held = [place for place, number in enumerate(slots_R.tolist()) if number in self._slots]
        held = [place for place in held if counts_R[place]]
        if not held:
            return None
        walks, num_rows = list[_Walk](), 0
        for place in held:
            number, count, begin = int(slots_R[place]), int(counts_R[place]), int(begin_R[place])
            slot = self._slots[number]
            standing = partial(_unread, slot, number, begin, read)
            walks.append(_Walk(slot, standing, drafts_RK[place, : count - 1], num_rows))
            num_rows += count
        bits_MW = self._room(num_rows)
        if failed := self._take(walks, bits_MW, forces):
            for walk in failed:
                self._renew(walk.slot)
            self._take(failed, bits_MW, forces)
        is_held_R = np.zeros(len(slots_R), dtype=np.bool_)
        is_held_R[held] = True
        rows_M = np.flatnonzero(np.repeat(is_held_R, counts_R))
        return RowMasks(rows_M, bits_MW, self._compiler.eos_token_ids[0])

    def _room(self, num_rows: int) -> Words:
        """Masks that allow everything."""
        if len(self._bits_MW) < num_rows:
            self._bits_MW = np.empty((num_rows, self._compiler.mask_words), dtype=np.int32)
        bits_MW = self._bits_MW[:num_rows]
        bits_MW.fill(-1)
        return bits_MW

    def _take(self, walks: Sequence[_Walk], bits_MW: Words, forces: bool) -> list[_Walk]:
        """Take these walks, and write masks of their rows: of nothing where no matcher says anything. Returns
        those whose matcher failed."""
        drafted, taken = list[tuple[LLMatcher, int, list[int]]](), list[tuple[_Walk, LLMatcher]]()
        begin, stride = bits_MW.ctypes.data, bits_MW.strides[0]
        for walk in walks:
            slot = walk.slot
            self._read(slot, walk.standing())
            drafts = walk.drafts_D.tolist()
            start = self._start(slot, drafts)
            if start is None:
                continue
            matcher, num_free = start
            taken.append((walk, matcher))
            row, following = walk.row + num_free, drafts[num_free:]
            num_walked = 0 if slot.is_over else self._follow(matcher, following, forces)
            bits_MW[row : row + num_walked + 1].fill(0)
            if num_walked:
                walk.drafts_D[num_free:] = following
                drafted.append((matcher, row, following[:num_walked]))
            elif not slot.is_over:
                matcher.unsafe_compute_mask_ptr(begin + row * stride, stride)
        if drafted:
            self._executor.unsafe_compute_mask_ptr_with_draft_token(drafted, begin, stride, len(bits_MW))
        return [walk for walk, matcher in taken if matcher.is_error()]

    def _follow(self, matcher: LLMatcher, drafts: list[int], forces: bool) -> int:
        """Put what is forced in the place of drafts, and say how many from the first on can be."""
        num_walked, forced = 0, matcher.compute_ff_tokens() if forces else []
        while num_walked < len(drafts):
            drafts[num_walked : num_walked + len(forced)] = forced[: len(drafts) - num_walked]
            count = matcher.try_consume_tokens(self._before_end(drafts[num_walked:]))
            num_walked += count
            forced = matcher.compute_ff_tokens() if forces and count else []
            if not forced:
                break
        if num_walked:
            matcher.rollback(num_walked)
        return num_walked

    def _before_end(self, drafts: list[int]) -> list[int]:
        """Those before the first that ends the text or is no token."""
        is_end = (t in self._eos or not 0 <= t < self._compiler.vocab_size for t in drafts)
        return drafts[: next((i for i, ends in enumerate(is_end) if ends), len(drafts))]

    def _begin(self, held: SlotGrammar) -> _Slot:
        waits = bool(held.grammar.after_token_ids)
        return _Slot(held, None if waits else self._compiler.matcher(held.grammar), held.prompt_length)

    def _read(self, slot: _Slot, tokens: list[int]) -> None:
        """Take in tokens that stand."""
        slot.num_read += len(tokens)
        if slot.matcher is None:
            end = _end_of_start(slot, tokens)
            if end is None:
                keep = len(slot.held.grammar.after_token_ids) - 1
                slot.recent = [*slot.recent, *tokens][-keep:] if keep else []
                return
            slot.matcher, tokens = self._compiler.matcher(slot.held.grammar), tokens[end:]
        slot.is_over = slot.is_over or slot.matcher.try_consume_tokens(tokens) < len(tokens)

    def _start(self, slot: _Slot, drafts: list[int]) -> tuple[LLMatcher, int] | None:
        """Where the grammar holds in a step: a matcher, and how many drafts come before."""
        if slot.matcher is not None:
            return slot.matcher, 0
        num_free = _end_of_start(slot, drafts)
        return None if num_free is None else (self._compiler.matcher(slot.held.grammar), num_free)

    def _renew(self, slot: _Slot) -> None:
        """Begin again, with a grammar compiled anew."""
        self._compiler.forget(slot.held.grammar)
        if slot.matcher is not None:
            fresh = self._begin(slot.held)
            slot.matcher, slot.num_read, slot.is_over = fresh.matcher, fresh.num_read, False
            slot.recent = []


def _unread(slot: _Slot, number: int, begin: int, read: TokenReader) -> list[int]:
    return read(number, slot.num_read, begin)


def _end_of_start(slot: _Slot, tokens: list[int]) -> int | None:
    """How many of these tokens there are up to the end of what the grammar begins behind; None without it."""
    wanted, before = slot.held.grammar.after_token_ids, len(slot.recent)
    joined = (*slot.recent, *tokens)
    ends = range(max(before + 1, len(wanted)), len(joined) + 1)
    return next((end - before for end in ends if joined[end - len(wanted) : end] == wanted), None)
