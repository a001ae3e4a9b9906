"""The tokens around reasoning, and the number of reasoning tokens of a completion, for `usage`.

Counted by tokens alone, so that the number depends neither on speculation nor on how the text was split. It
is therefore reported only if the marks are single tokens, as in all models trained to reason.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from ..tokenization.tokenizer import Tokenizer
from .chat_formats import Messages, ThinkingFormat


class ReasoningCounter:
    """Counts the reasoning tokens of one completion. `count`: reasoning tokens so far, without the marks.

    Args:
        begin: the tokens before reasoning.
        end: the token after it.
        opened: the prompt ends within reasoning.
    """

    def __init__(self, begin: Sequence[int], end: int, *, opened: bool) -> None:
        self._begin, self._end = tuple(begin), end
        self._recent: deque[int] = deque(maxlen=len(begin))
        self._inside = opened
        self.count = 0

    @classmethod
    def of(
        cls, thinking: ThinkingFormat | Messages, tokenizer: Tokenizer, *, opened: bool
    ) -> ReasoningCounter | None:
        begin, end = reasoning_marks(thinking, tokenizer)
        last = thinking.begin if isinstance(thinking, ThinkingFormat) else thinking.body
        if len(end) != 1 or len(tokenizer.encode(last, add_special_tokens=False)) != 1:
            return None
        return cls(begin, end[0], opened=opened)

    def feed(self, token_ids: Sequence[int]) -> None:
        for token_id in token_ids:
            self._recent.append(token_id)
            if not self._inside:
                self._inside = tuple(self._recent) == self._begin
            elif token_id == self._end:
                self._inside = False
            else:
                self.count += 1


def reasoning_marks(
    thinking: ThinkingFormat | Messages, tokenizer: Tokenizer
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the tokens before and after reasoning."""
    if isinstance(thinking, ThinkingFormat):
        texts = thinking.begin, thinking.end
    else:
        (thoughts,) = thinking.thoughts
        header = thinking.channel + thoughts if thinking.channel else f" to={thoughts}"
        texts = header + thinking.body, thinking.ends[0]
    begin, end = (tuple(tokenizer.encode(text, add_special_tokens=False)) for text in texts)
    return begin, end
