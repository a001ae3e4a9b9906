"""Reasoning that must end: which token a row is bound to, where a request's budget of thoughts is spent.

A row sees the tokens before it, drafts among them, as plain decoding would, so that speculation changes
nothing. The definition, for rules that are counted on the host (`logits_processor_states.py`);
`step/gpu_triton/sampling/logits_processors.py` finds the same in the table of tokens.

    .. <think> a b c | </think> d e     budget 3: behind `c` the end's first token is the only one, and its
               1 2 3                    others follow; a part of it that stands there already counts
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ....cluster.request.logits_processors import ThinkingBudget


@dataclass(frozen=True, slots=True)
class ThinkingBudgetState:
    """Where a request's reasoning stands behind some of its tokens.

    Attributes:
        num_read: tokens.
        begin: the position behind the start of reasoning; None outside.
        recent: the last tokens, as many as one of the marks has.
    """

    rule: ThinkingBudget
    num_read: int = 0
    begin: int | None = None
    recent: tuple[int, ...] = ()

    @classmethod
    def at_start(cls, rule: ThinkingBudget, prompt_length: int) -> ThinkingBudgetState:
        """Before any token. Without a mark for its start reasoning begins with the answer."""
        return cls(rule, begin=None if rule.start else prompt_length)

    def behind(self, tokens: Sequence[int]) -> ThinkingBudgetState:
        """Behind further tokens."""
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
        """The only token that can follow, if there is one."""
        if self.begin is None or (count := self.num_read - self.begin) < self.rule.budget:
            return None
        end = self.rule.end
        begun = (k for k in range(len(end) - 1, 0, -1) if k <= count and _ends(self.recent, end[:k]))
        return end[next(begun, 0)]


def _ends(tokens: tuple[int, ...], mark: tuple[int, ...]) -> bool:
    return tokens[len(tokens) - len(mark) :] == mark
