"""Ends reasoning when a request's thinking budget is spent: finds the token that a row is forced to.

A row sees the tokens before it, drafts included, as plain decoding would, so speculation changes nothing. The
definition, for rules that are evaluated on the host (`logits_processor_states.py`);
`step/gpu_triton/sampling/logits_processors.py` derives the same from the token table.

    .. <think> a b c | </think> d e     budget 3: after `c` the end mark's first token is forced, then its
               1 2 3                    others; a part of it that is already present counts
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ....cluster.request.logits_processors import ThinkingBudget


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
