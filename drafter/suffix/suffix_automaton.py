"""Suffix automaton of a growing text: finds where its last tokens occur earlier, and what followed them.

A state represents all strings that end at the same places of the text (Blumer et al., 1985; the online
construction). `link` leads to the state of the longest suffix that ends at more places. So the longest suffix
of the text that occurs earlier is that of the newest state's link, without a search.

States also know how often and where their strings ended last. A new token updates the states on its path of
links, longest strings first and at most `_MAX_UPDATED` of them: in a text such as `aaaa...` the path is as
long as the text. Beyond that, counts of short strings miss occurrences that longer ones have counted (update
exclusion, as in PPM). Appending a token takes constant amortized time.

Tokens are integers. A negative one separates texts: nothing is copied beyond it. Used by `proposer.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

_ROOT, _NONE = 0, -1
_MAX_UPDATED = 64


class Match(NamedTuple):
    """Tokens at the end of a text that also occur in an automaton's text.

    Attributes:
        state: the automaton's state of them.
        length: how many there are; 0 if the last one does not occur.
    """

    state: int
    length: int


NO_MATCH = Match(_ROOT, 0)


class SuffixAutomaton:
    """The automaton of the tokens appended so far; `tokens` holds them."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self._newest = _ROOT
        self._next: list[dict[int, int]] = [{}]
        self._link, self._length = [_NONE], [0]
        # Occurrences, and how many tokens the text had at the end of the last two of them; 0: none.
        self._count, self._latest, self._earlier = [0], [0], [0]

    def extend(self, tokens: Iterable[int]) -> None:
        for token in tokens:
            self._append(token)

    def repeated_suffix(self) -> Match:
        """Return the longest suffix of the text that occurs earlier in it."""
        state = self._link[self._newest]
        return NO_MATCH if state <= _ROOT else Match(state, self._length[state])

    def match(self, text: Sequence[int]) -> Match:
        """Return the longest suffix of another text that occurs in this one."""
        state, length = NO_MATCH
        for token in text:
            while state != _ROOT and token not in self._next[state]:
                state = self._link[state]
                length = self._length[state]
            if (following := self._next[state].get(token)) is not None:
                state, length = following, length + 1
        return Match(state, length)

    def continuation(self, match: Match, count: int) -> tuple[list[int], list[float]]:
        """Return up to `count` tokens that followed the match at its last earlier occurrence, and margins.

        A margin is the number of tokens that match before the draft, times the share of their occurrences
        that this token followed. At the end of the text the copy goes on after its own drafts, so text that
        repeats is continued.
        """
        state, length = match
        tokens, margins = list[int](), list[float]()
        while len(tokens) < count:
            if (end := self._followed_end(state)) == 0:
                state = self._link[state]
                if state <= _ROOT:
                    break
                length = self._length[state]
                continue
            if (token := self.tokens[end]) < 0:
                break
            following = self._next[state][token]
            num_followed = self._count[state] - (self._latest[state] == len(self.tokens))
            share = min(self._count[following] / max(num_followed, 1), 1.0)
            tokens.append(token)
            margins.append(length * share)
            state, length = following, length + 1
        return tokens, margins

    def _followed_end(self, state: int) -> int:
        """Return where the state's strings ended last, if a token follows there; 0 if none does."""
        latest = self._latest[state]
        return latest if latest < len(self.tokens) else self._earlier[state]

    def _append(self, token: int) -> None:
        self.tokens.append(token)
        new, state = self._add(len(self.tokens), {}, _ROOT), self._newest
        while state != _NONE and token not in self._next[state]:
            self._next[state][token] = new
            state = self._link[state]
        if state != _NONE:
            self._link[new] = self._split(state, token)
        self._newest = new
        self._record_occurrence(new)

    def _split(self, state: int, token: int) -> int:
        """Return the state of `state`'s longest string and `token`, split off from longer ones if need be."""
        longer, length = self._next[state][token], self._length[state] + 1
        if self._length[longer] == length:
            return longer
        shorter = self._add(length, dict(self._next[longer]), self._link[longer])
        for values in (self._count, self._latest, self._earlier):
            values[shorter] = values[longer]
        self._link[longer] = shorter
        while state != _NONE and self._next[state].get(token) == longer:
            self._next[state][token] = shorter
            state = self._link[state]
        return shorter

    def _add(self, length: int, following: dict[int, int], link: int) -> int:
        self._next.append(following)
        self._link.append(link)
        self._length.append(length)
        for values in (self._count, self._latest, self._earlier):
            values.append(0)
        return len(self._link) - 1

    def _record_occurrence(self, state: int) -> None:
        """Record that the strings of this state and of its links end at the end of the text."""
        for _ in range(_MAX_UPDATED):
            if state <= _ROOT:
                break
            self._count[state] += 1
            self._earlier[state], self._latest[state] = self._latest[state], len(self.tokens)
            state = self._link[state]
