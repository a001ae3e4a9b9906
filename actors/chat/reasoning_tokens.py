"""Which tokens stand around reasoning, and how many tokens of a completion were reasoning, for `usage`.

Counted by tokens alone, so that the figure depends neither on speculation nor on how an answer is cut. So it
is only told where marks are tokens of their own, as in all models that were trained to think.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from ..tokenization.tokenizer import Tokenizer
from .chat_formats import Messages, ThinkingFormat


class ReasoningCounter:
    """Of one completion.

    Args:
        begin: the tokens before reasoning.
        end: the token behind it.
        opened: the prompt ends within reasoning.

    Attributes:
        count: tokens of reasoning so far, without the marks.
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
        """None where a mark is no token."""

        begin, end = reasoning_marks(thinking, tokenizer)
        last = thinking.begin if isinstance(thinking, ThinkingFormat) else thinking.body
        if len(end) != 1 or len(tokenizer.encode(last, add_special_tokens=False)) != 1:
            return None
        return cls(begin, end[0], opened=opened)

    def feed(self, token_ids: Sequence[int]) -> None:
        """Take in what follows."""
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
    """The tokens before reasoning and behind it."""
    if isinstance(thinking, ThinkingFormat):
        texts = thinking.begin, thinking.end
    else:
        (thoughts,) = thinking.thoughts
        header = thinking.channel + thoughts if thinking.channel else f" to={thoughts}"
        texts = header + thinking.body, thinking.ends[0]
    begin, end = (tuple(tokenizer.encode(text, add_special_tokens=False)) for text in texts)
    return begin, end
