"""Logits rules of request slots, and the tokens they have seen; finds which rules apply in a step's rows.

Kept only for slots with rules. For penalties the distinct tokens are counted incrementally; rows of a block
add the drafts on their path, in a chain all before them. Owned by `drafter/step/request_states.py`, which
reports admissions; `drafter/step/inputs/logits_processors.py` defines the rules.

    position    n        n+1     n+2            known: all up to n; the third row also sees d1 and d2
    row         anchor   d1      d2
    samples     X_n+1    X_n+2   X_n+3
    counts      known    + d1    + d1 + d2

Reasoning ends when a request's thinking budget is spent: a row is then forced to a token. A row sees the
tokens before it, drafts included, as plain decoding would, so speculation changes nothing. The definition,
for rules that are evaluated on the host; `step/gpu_triton/sampling/logits_processors.py` derives the same
from the token table.

    .. <think> a b c | </think> d e     budget 3: after `c` the end mark's first token is forced, then its
               1 2 3                    others; a part of it that is already present counts

Legend: S slots, T tokens of a request, X sampled rows, W those of a request, U distinct tokens before any of
them, F (row, token) pairs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from ....cluster.request.request import LogitsProcessorParams, ThinkingBudget
from ..inputs.logits_processors import LogitsRules, RuledRows, TokenCounts
from ..inputs.row_layout import Ints

Endings = dict[int, list[tuple[tuple[int, ...], int]]]
State = TypeVar("State")


class RuleStates:
    """The rules of the slots that have any.

    Attributes:
        slots: rules by slot; `rows` need not be called while it is empty.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.slots: dict[int, _SlotRules] = {}

    def admit(self, slot: int, rules: LogitsProcessorParams | None) -> None:
        """Replace a slot's rules by those of a newly admitted or resumed request."""
        self.slots.pop(slot, None)
        if rules is not None:
            self.slots[slot] = _SlotRules.of(rules, self._device)

    def rows(
        self, tokens_ST: Tensor, slots_X: Ints, num_known_X: Ints, parents_X: Ints
    ) -> tuple[RuledRows, ...]:
        """Return the rules that apply in sampled rows.

        Args:
            tokens_ST: all tokens; the own tokens of a request's rows after its first follow the known ones.
            slots_X: slot of each row; rows of a request are adjacent.
            num_known_X: number of the request's known tokens, which are final.
            parents_X: the row of its request with the tokens that a row sees besides its own. -1 for
                rows that see the known tokens alone.
        """
        if not len(slots_X):
            return ()
        begins = np.flatnonzero(np.diff(slots_X, prepend=-1)).tolist()
        return tuple(
            self.slots[slot].rows(begin, end, tokens_ST[slot], int(num_known_X[begin]), parents_X[begin:end])
            for begin, end in zip(begins, [*begins[1:], len(slots_X)], strict=True)
            if (slot := int(slots_X[begin])) in self.slots
        )


class _Paths(NamedTuple):
    """The paths of a request's rows: a row sees its own token after those of its parent (-1: the known ones).

    `drafts_W`: own token of each row, meaningless without a parent.
    """

    parents_W: list[int]
    drafts_W: list[int]

    @classmethod
    def of(cls, tokens_T: Tensor, num_known: int, parents_W: Ints) -> _Paths:
        has_drafts = bool((parents_W >= 0).any())
        drafts = tokens_T[num_known : num_known + len(parents_W) - 1].tolist() if has_drafts else []
        return cls(parents_W.tolist(), [-1, *drafts] if has_drafts else [-1] * len(parents_W))

    def states(self, known: State, after: Callable[[State, int], State]) -> list[State]:
        """Return the state of each row, given that of the known tokens."""
        states = list[State]()
        for parent, draft in zip(*self, strict=True):
            states.append(known if parent < 0 else after(states[parent], draft))
        return states


@dataclass(slots=True)
class _SlotRules:
    """A slot's rules.

    Attributes:
        endings: by the token before it, what would complete a bad word: (all tokens before it, itself).
        longest: most tokens before a bad word's last.
        thoughts: thinking state after the tokens that are final; None if reasoning has no limit.
        counts: how often each of the first `num_counted` tokens was generated. Prompt tokens are included
            (as 0) if they are penalized.
    """

    rules: LogitsProcessorParams
    fixed: LogitsRules
    endings: Endings
    longest: int
    thoughts: ThinkingBudgetState | None
    counts: dict[int, int] = field(default_factory=dict[int, int])
    num_counted: int = 0

    @classmethod
    def of(cls, rules: LogitsProcessorParams, device: torch.device) -> _SlotRules:
        endings: Endings = {}
        for *before, last in rules.bad_words:
            if before:
                endings.setdefault(before[-1], []).append((tuple(before), last))
        longest = max((len(word) - 1 for word in rules.bad_words), default=0)
        thinking = rules.thinking
        thoughts = None if thinking is None else ThinkingBudgetState.at_start(thinking, rules.prompt_length)
        return cls(rules, LogitsRules.of(rules, device), endings, longest, thoughts)

    def rows(self, begin: int, end: int, tokens_T: Tensor, num_known: int, parents_W: Ints) -> RuledRows:
        """Return what applies in rows `begin` to `end`."""
        paths = _Paths.of(tokens_T, num_known, parents_W)
        impossible = self._impossible(tokens_T[:num_known], paths) if self.endings else None
        seen = self._seen(tokens_T[:num_known], paths) if self.rules.penalizes else None
        forced = None if self.thoughts is None else self._forced(self.thoughts, tokens_T[:num_known], paths)
        return RuledRows(begin, end, self.rules, self.fixed, impossible, seen, forced)

    def _impossible(self, known_T: Tensor, paths: _Paths) -> Tensor | None:
        """Return (row, token) pairs that would complete a bad word of several tokens."""
        start = max(self.rules.prompt_length, len(known_T) - self.longest)
        tails = paths.states(known_T[start:].tolist(), lambda tail, draft: [*tail, draft][-self.longest :])
        pairs = [
            (row, last)
            for row, tail in enumerate(tails)
            if tail
            for before, last in self.endings.get(tail[-1], ())
            if tuple(tail[-len(before) :]) == before
        ]
        return _pairs(pairs, known_T.device)

    def _forced(self, thoughts: ThinkingBudgetState, known_T: Tensor, paths: _Paths) -> Tensor | None:
        """Return (row, token) pairs where reasoning must end."""
        self.thoughts = thoughts = thoughts.after(known_T[thoughts.num_read :].tolist())
        states = paths.states(thoughts, lambda state, draft: state.after([draft]))
        pairs = [(row, token) for row, state in enumerate(states) if (token := state.forced) is not None]
        return _pairs(pairs, known_T.device)

    def _seen(self, known_T: Tensor, paths: _Paths) -> TokenCounts:
        self._count(known_T[self.num_counted :])
        drafts = [draft for parent, draft in zip(*paths, strict=True) if parent >= 0]
        columns = {token: column for column, token in enumerate(dict.fromkeys([*self.counts, *drafts]))}
        counts_WU = np.zeros((len(paths.parents_W), len(columns)), dtype=np.float32)
        counts_WU[:, : len(self.counts)] = np.fromiter(self.counts.values(), np.float32, len(self.counts))
        seen_WU = np.zeros(counts_WU.shape, dtype=np.bool_)
        seen_WU[:, : len(self.counts)] = True
        for row, (parent, draft) in enumerate(zip(*paths, strict=True)):
            if parent >= 0:
                counts_WU[row], seen_WU[row] = counts_WU[parent], seen_WU[parent]
                counts_WU[row, columns[draft]] += 1.0
                seen_WU[row, columns[draft]] = True
        ids_U = np.fromiter(columns, np.int64, len(columns))
        return TokenCounts(*(torch.from_numpy(x).to(known_T.device) for x in (ids_U, counts_WU, seen_WU)))

    def _count(self, new: Tensor) -> None:
        tokens, counts = new.tolist(), self.counts
        num_of_prompt = max(self.rules.prompt_length - self.num_counted, 0)
        if self.rules.repetition != 1.0:
            counts.update(dict.fromkeys(tokens[:num_of_prompt], 0))
        for token in tokens[num_of_prompt:]:
            counts[token] = counts.get(token, 0) + 1
        self.num_counted += len(tokens)


def _pairs(pairs: list[tuple[int, int]], device: torch.device) -> Tensor | None:
    return torch.tensor(pairs, dtype=torch.int64, device=device).T if pairs else None


@dataclass(frozen=True, slots=True)
class ThinkingBudgetState:
    """State of a request's reasoning after some of its tokens.

    Attributes:
        num_read: number of tokens.
        begin: the position after the start of reasoning; None outside.
        recent: the last tokens, as many as the longer mark has.
    """

    rule: ThinkingBudget
    num_read: int = 0
    begin: int | None = None
    recent: tuple[int, ...] = ()

    @classmethod
    def at_start(cls, rule: ThinkingBudget, prompt_length: int) -> ThinkingBudgetState:
        """Return the state before any token. Without a start mark, reasoning begins with the answer."""
        return cls(rule, begin=None if rule.start else prompt_length)

    def after(self, tokens: Sequence[int]) -> ThinkingBudgetState:
        """Return the state after further tokens."""
        rule, begin, num_read, recent = self.rule, self.begin, self.num_read, self.recent
        longest = max(len(rule.start), len(rule.end))
        for token in tokens:
            num_read += 1
            recent = (*recent[1 - longest :], token) if longest > 1 else (token,)
            if rule.start and _ends(recent, rule.start):
                begin = num_read
            elif begin is not None and num_read - begin >= len(rule.end) and _ends(recent, rule.end):
                begin = None
        return replace(self, num_read=num_read, begin=begin, recent=recent)

    @property
    def forced(self) -> int | None:
        """The only token that can follow; None if unconstrained."""
        if self.begin is None or (count := self.num_read - self.begin) < self.rule.budget:
            return None
        end = self.rule.end
        prefix_lengths = (k for k in range(len(end) - 1, 0, -1) if k <= count and _ends(self.recent, end[:k]))
        return end[next(prefix_lengths, 0)]


def _ends(tokens: tuple[int, ...], mark: tuple[int, ...]) -> bool:
    return tokens[len(tokens) - len(mark) :] == mark
