"""Where each running request stands in its grammar, and what that says of a step's rows.

A mirror, like `drafter/step/request_states.py`, which owns it: a matcher per slot that has read the tokens
that stand. A step's drafts are walked through before the rows are laid out, and the matcher goes back to
where it was. So nothing has to be undone when drafts are rejected, and what a row may choose depends on the
tokens before it alone: speculation changes no token.

    stands          {"a":
    drafted         1     5     true  }
    can be          1     5
    rows       X1   X2    X3    X4    X5      masks of X1, X2, X3; a row behind what cannot be is of a text
                                              that will not be: all tokens are as good

Tokens that the grammar forces stand in for drafts: in the places next to what stands, and in those next to a
draft that cannot be. They are sure whatever the drafter thought, and nothing is behind what cannot be: so the
drafts are walked through first (`walk`), and masks made of the rows that are left (`masks`).

A matcher that fails (a grammar that takes too many steps or states) is begun anew once, if that takes
milliseconds (`Grammar.is_cheap`). If that fails too, or where a grammar is at its end, no token but an end
can follow. Whatever one request's grammar raises ends that answer and is logged; the others' are not touched.

Legend: R requests of a step, K most drafts, D drafts of a request, M rows of requests with grammars, W words.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

import numpy as np
from llguidance import LLExecutor, LLMatcher
from numpy.typing import NDArray

from ...cluster.request.structured_outputs import SlotGrammar
from .compiler import MAX_FORCED, GrammarCompiler, GrammarError, reason_of
from .token_bitmasks import Ints, RowMasks, Words

logger = logging.getLogger(__name__)

Margins = NDArray[np.float32]
_Drafted = tuple[LLMatcher, int, list[int]]  # its row among the masks, and the drafts behind
TokenReader = Callable[[int, int, int], list[int]]  # (slot, begin, end) -> these tokens of its request


@dataclass(slots=True)
class _Slot:
    """A request on its way through its grammar.

    Attributes:
        matcher: has read what stands; None before the grammar begins.
        num_read: tokens of the request, prompt included, that have been read.
        recent: before the grammar begins, the last generated tokens: one less than what it begins behind.
        is_over: something stands that the grammar cannot read: the text has ended.
        forces: what is forced may be asked for.
        is_renewed: it was begun anew.
        has_failed: nothing but an end can follow any more.
    """

    held: SlotGrammar
    matcher: LLMatcher | None
    num_read: int
    recent: list[int] = field(default_factory=list[int])
    is_over: bool = False
    forces: bool = True
    is_renewed: bool = False
    has_failed: bool = False


@dataclass(slots=True)
class _Walk:
    """A request's way through a step's drafts, which are edited.

    Attributes:
        place: of the request in the step.
        standing: tokens that have not been read.
        margins_D: of the drafts, edited likewise; None if nobody asks.
        matcher: stands where the grammar begins to hold; None where it does not within the drafts.
        num_free: drafts before the grammar holds.
        num_walked: drafts behind them that can be.
    """

    slot: _Slot
    place: int
    standing: Callable[[], list[int]]
    drafts_D: Ints
    margins_D: Margins | None
    matcher: LLMatcher | None = None
    num_free: int = 0
    num_walked: int = 0

    def has_failed(self) -> bool:
        return self.matcher is not None and self.matcher.is_error()


@dataclass(frozen=True, slots=True)
class StepWalks:
    """The ways of a step's requests that have grammars; `GrammarStates.masks` takes it."""

    walks: tuple[_Walk, ...]
    forces: bool


class GrammarStates:
    """The grammars of running requests.

    Args:
        num_threads: that make a step's masks.
    """

    def __init__(self, compiler: GrammarCompiler, num_threads: int) -> None:
        self.compiler = compiler
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
        """`walk`, then `masks` of all rows."""
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
        """Let grammars into a step: edit its drafts. None: no grammar has a say.

        Args:
            begin_R: how many tokens of each request stand.
            counts_R: rows that choose: 1 + drafts; or 0.
            drafts_RK: edited; negative ones are none.
            read: of tokens that stand.
            margins_RK: edited: inf where a token is forced, nan behind what cannot be.
            forces: put what is forced in the place of drafts; else they stay as they are.
        """
        numbers = slots_R.tolist()
        held = [place for place, number in enumerate(numbers) if number in self._slots and counts_R[place]]
        if not held:
            return None
        walks = list[_Walk]()
        for place in held:
            number, last, begin = numbers[place], int(counts_R[place]) - 1, int(begin_R[place])
            slot = self._slots[number]
            standing = partial(_unread, slot, number, begin, read)
            margins_D = None if margins_RK is None else margins_RK[place, :last]
            walks.append(_Walk(slot, place, standing, drafts_RK[place, :last], margins_D))
        for walk in walks:
            self._try(walk, forces)
            if walk.has_failed():
                self._renew(walk)
                self._try(walk, forces)
        return StepWalks(tuple(walks), forces)

    def masks(self, step: StepWalks, counts_R: Ints) -> RowMasks:
        """What rows may choose. Masks are of nothing where no matcher says anything.

        Args:
            counts_R: rows that choose, no more than were walked through.
        """
        is_held_R = np.zeros(len(counts_R), dtype=np.bool_)
        is_held_R[[walk.place for walk in step.walks]] = True
        counts_H = counts_R[is_held_R]
        bits_MW, ends_H = self._room(int(counts_H.sum())), np.cumsum(counts_H)
        rows = list(zip(step.walks, (ends_H - counts_H).tolist(), ends_H.tolist(), strict=True))
        self._write(rows, bits_MW)
        if failed := [row for row in rows if row[0].has_failed()]:
            for walk, *_ in failed:
                self._renew(walk)
                self._try(walk, step.forces)
            self._write(failed, bits_MW)
        for walk, first, end in rows:
            if walk.slot.has_failed and first + walk.num_free < end:
                bits_MW[first + walk.num_free].fill(0)
        rows_M = np.flatnonzero(np.repeat(is_held_R, counts_R))
        return RowMasks(rows_M, bits_MW, self.compiler.eos_token_ids[0])

    def _room(self, num_rows: int) -> Words:
        """Masks that allow everything."""
        if len(self._bits_MW) < num_rows:
            self._bits_MW = np.empty((num_rows, self.compiler.mask_words), dtype=np.int32)
        bits_MW = self._bits_MW[:num_rows]
        bits_MW.fill(-1)
        return bits_MW

    def _try(self, walk: _Walk, forces: bool) -> None:
        """`_go`; what it raises ends this answer alone."""
        with _ending(walk.slot):
            self._go(walk, forces)
        if walk.slot.has_failed:
            walk.matcher, walk.num_free, walk.num_walked = None, 0, 0

    def _go(self, walk: _Walk, forces: bool) -> None:
        """Read what stands, and walk through the drafts."""
        slot = walk.slot
        if slot.has_failed:
            return
        self._read(slot, walk.standing())
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
            margins_D[walk.num_walked + (ends and not slot.is_over) :] = np.nan  # an end may be right

    def _follow(
        self, slot: _Slot, matcher: LLMatcher, drafts: list[int], forces: bool
    ) -> tuple[int, list[int]]:
        """Put what is forced in the place of drafts; how many from the first on can be, and which are
        forced."""
        num_walked, forced, places = 0, _forced(slot, matcher) if forces else [], list[int]()
        while num_walked < len(drafts):
            drafts[num_walked : num_walked + len(forced)] = forced[: len(drafts) - num_walked]
            places += range(num_walked, num_walked + len(forced))
            count = matcher.try_consume_tokens(self._before_end(drafts[num_walked:]))
            num_walked += count
            forced = _forced(slot, matcher) if forces and count else []
            if not forced:
                break
        if num_walked:
            matcher.rollback(num_walked)
        return num_walked, places

    def _write(self, rows: Iterable[tuple[_Walk, int, int]], bits_MW: Words) -> None:
        """Masks of the walks' rows, which begin and end there."""
        drafted = list[tuple[_Walk, _Drafted]]()
        begin, stride = bits_MW.ctypes.data, bits_MW.strides[0]
        for walk, first, end in rows:
            row = first + walk.num_free
            if walk.matcher is None or row >= end:
                continue
            num_walked = min(walk.num_walked, end - row - 1)
            bits_MW[row : row + num_walked + 1].fill(0)
            if num_walked:
                walked = walk.drafts_D[walk.num_free : walk.num_free + num_walked].tolist()
                drafted.append((walk, (walk.matcher, row, walked)))
            elif not walk.slot.is_over:
                with _ending(walk.slot):
                    walk.matcher.unsafe_compute_mask_ptr(begin + row * stride, stride)
        if drafted:
            make = self._executor.unsafe_compute_mask_ptr_with_draft_token
            try:
                make([each for _, each in drafted], begin, stride, len(bits_MW))
            except Exception:  # of one of them
                for walk, each in drafted:
                    with _ending(walk.slot):
                        make([each], begin, stride, len(bits_MW))

    def _before_end(self, drafts: list[int]) -> list[int]:
        """Those before the first that ends the text or is no token."""
        is_end = (t in self._eos or not 0 <= t < self.compiler.vocab_size for t in drafts)
        return drafts[: next((i for i, ends in enumerate(is_end) if ends), len(drafts))]

    def _begin(self, held: SlotGrammar) -> _Slot:
        slot = _Slot(held, None, held.prompt_length, forces=held.grammar.forces)
        if not held.grammar.after_token_ids:
            try:
                slot.matcher = self.compiler.matcher(held.grammar)
            except GrammarError as error:
                _fail(slot, error)
        return slot

    def _read(self, slot: _Slot, tokens: list[int]) -> None:
        """Take in tokens that stand."""
        slot.num_read += len(tokens)
        if slot.matcher is None:
            end = _end_of_start(slot, tokens)
            if end is None:
                keep = len(slot.held.grammar.after_token_ids) - 1
                slot.recent = [*slot.recent, *tokens][-keep:] if keep else []
                return
            slot.matcher, tokens = self.compiler.matcher(slot.held.grammar), tokens[end:]
        slot.is_over = slot.is_over or slot.matcher.try_consume_tokens(tokens) < len(tokens)

    def _start(self, slot: _Slot, drafts: list[int]) -> tuple[LLMatcher | None, int]:
        """Where the grammar holds in a step: a matcher, and how many drafts come before."""
        if slot.matcher is not None:
            return slot.matcher, 0
        num_free = _end_of_start(slot, drafts)
        if num_free is None:
            return None, len(drafts)
        return self.compiler.matcher(slot.held.grammar), num_free

    def _renew(self, walk: _Walk) -> None:
        """Begin again, with a grammar compiled anew; once, and if a step can wait for it."""
        slot, matcher = walk.slot, walk.matcher
        self.compiler.forget(slot.held.grammar)
        if slot.is_renewed or not slot.held.grammar.is_cheap:
            _fail(slot, "" if matcher is None else reason_of(matcher))
        elif slot.matcher is not None:
            fresh = self._begin(slot.held)
            slot.matcher, slot.num_read, slot.is_over = fresh.matcher, fresh.num_read, False
            slot.recent, slot.has_failed = [], fresh.has_failed
        slot.is_renewed, slot.forces = True, False  # what is forced may be what it fails at


def _forced(slot: _Slot, matcher: LLMatcher) -> list[int]:
    """The tokens that can only be these, if they may be asked for."""
    if not slot.forces:
        return []
    forced = matcher.compute_ff_tokens()
    slot.forces = len(forced) <= MAX_FORCED  # or it is not asked again
    return forced


@contextmanager
def _ending(slot: _Slot) -> Iterator[None]:
    """End the answer whose grammar raises something, and nothing else."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # a panic of llguidance is no Exception
        _fail(slot, f"{type(error).__name__}: {error}")


def _fail(slot: _Slot, cause: object) -> None:
    """End an answer whose grammar cannot go on."""
    if not slot.has_failed:
        logger.warning("an answer ends early: its grammar cannot go on (%s)", cause)
    slot.has_failed, slot.is_over = True, True


def _unread(slot: _Slot, number: int, begin: int, read: TokenReader) -> list[int]:
    return read(number, slot.num_read, begin)


def _end_of_start(slot: _Slot, tokens: list[int]) -> int | None:
    """How many of these tokens there are up to the end of what the grammar begins behind; None without it."""
    wanted, before = slot.held.grammar.after_token_ids, len(slot.recent)
    joined = (*slot.recent, *tokens)
    ends = range(max(before + 1, len(wanted)), len(joined) + 1)
    return next((end - before for end in ends if joined[end - len(wanted) : end] == wanted), None)
