"""Grammars along the paths of a draft tree: which children a node may have, and the masks of its rows.

A copy of the matcher takes microseconds, so each row has its own, which has consumed the row's path.

    committed       {"a":
    row             0      1: 1     2: true     3: 15     4: }
    parent                 0        0           1         2
    allowed after   1 true 5 , }    , }         5 , }     (end)
"""

from __future__ import annotations

from typing import NamedTuple

from llguidance import LLMatcher

from ...cluster.speculation.draft_tree import Child, Restriction, TreeNodes
from .compiler import GrammarCompiler
from .grammar_slots import GrammarSlot, end_of_start, ending, forced_tokens
from .token_bitmasks import Words

_MAX_CHANCE = 0.999  # of a token that is not forced
_MIN_REST = 1e-3  # chance of all tokens that are allowed


class _Place(NamedTuple):
    """A row's position in the grammar; `matcher` is None before it begins, after the tokens of `path`."""

    matcher: LLMatcher | None
    path: list[int]


class TreeWalk:
    """A request's grammar in the rows of its draft tree.

    Attributes:
        failed_matcher: a matcher that exceeded its limits; rows after it have no masks.
    """

    def __init__(self, slot: GrammarSlot, compiler: GrammarCompiler) -> None:
        self._slot, self._compiler = slot, compiler
        self._eos = frozenset(compiler.eos_token_ids)
        # None: no token that is accepted leads to the row, or the text has ended.
        self._places: list[_Place | None] = [None if slot.is_over else _Place(slot.matcher, [])]
        self.failed_matcher: LLMatcher | None = None

    def extend(self, parents: list[int], tokens: list[int]) -> None:
        """Add rows after those that are known: `parents` and `tokens` are of all rows but the first."""
        for row in range(len(self._places), len(parents) + 1):
            before = self._places[parents[row - 1]]
            self._places.append(None if before is None else self._after(before, tokens[row - 1]))

    def matcher(self, row: int) -> LLMatcher | None:
        """Return the matcher after a row's path; None if no grammar applies there."""
        place = self._places[row]
        return None if place is None else place.matcher

    def is_free(self, row: int) -> bool:
        """Return whether the grammar has not begun after a row's path."""
        place = self._places[row]
        return place is not None and place.matcher is None

    def write_masks(self, bits_WM: Words) -> None:
        """Write the masks of all rows; those that need none are left as they are."""
        if self._slot.is_over:
            bits_WM[0].fill(0)
        for row in range(len(bits_WM)):
            if (matcher := self.matcher(row)) is not None and self.failed_matcher is None:
                bits_WM[row].fill(0)
                matcher.unsafe_compute_mask_ptr(bits_WM[row].ctypes.data, bits_WM.strides[0])
                self._check(matcher)

    def allows(self, matcher: LLMatcher, token: int) -> bool:
        if token in self._eos:
            return matcher.is_accepting()
        return matcher.validate_tokens([token]) == 1

    def _after(self, place: _Place, token: int) -> _Place | None:
        if place.matcher is None:
            path, grammar = [*place.path, token], self._slot.grammar_slot.grammar
            begins = end_of_start(self._slot, path) is not None
            return _Place(self._compiler.matcher(grammar) if begins else None, path)
        if token in self._eos or not 0 <= token < self._compiler.vocab_size:
            return None
        matcher = place.matcher.deep_copy()
        is_allowed = matcher.try_consume_tokens([token]) == 1
        self._check(matcher)
        return _Place(matcher, []) if is_allowed else None

    def _check(self, matcher: LLMatcher) -> None:
        if matcher.is_error():
            self.failed_matcher = matcher


def restriction(slot: GrammarSlot, compiler: GrammarCompiler) -> Restriction:
    """Return which children the nodes of a request's draft tree may have.

    Forced tokens replace the candidates as they replace the drafts of a chain: after the committed tokens,
    and where the best candidate is not allowed. Without a child a path ends.
    """
    walk, runs = TreeWalk(slot, compiler), dict[int, list[int]]()

    def children(nodes: TreeNodes, possible: list[Child]) -> list[Child]:
        """Return which of a new node's possible children the grammar allows: a forced token, or some.

        Their chances are relative to the tokens that the grammar allows.
        """
        row = len(nodes.parents)
        walk.extend(nodes.parents, nodes.tokens)
        matcher = walk.matcher(row)
        if matcher is None:
            return possible if walk.is_free(row) else []
        run = runs.get(nodes.parents[-1], [])[1:] if row else forced_tokens(slot, matcher)
        allowed = [child for child in possible if walk.allows(matcher, child.token)] if not run else []
        # The likeliest child is not allowed: there may be only one token that is.
        if not run and allowed[:1] != possible[:1]:
            run = forced_tokens(slot, matcher)
        if run:
            runs[row] = run
            return [Child(1.0, 0, run[0], 0)]
        # Chances of disallowed children go to the others.
        others = sum(child.chance for child in possible) - sum(child.chance for child in allowed)
        rest = max(1.0 - others, _MIN_REST)
        return [child._replace(chance=min(child.chance / rest, _MAX_CHANCE)) for child in allowed]

    def safely(nodes: TreeNodes, possible: list[Child]) -> list[Child]:
        with ending(slot):
            return children(nodes, possible)
        return []

    return safely
