"""Parses the responses to one request; each completion's text goes through its own `AnswerParser`.

Created by `ChatModel.reading` for a request and its prompt; used by the endpoints and by batch rows.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ..tokenization.tokenizer import Tokenizer
from .chat_formats import CallSyntax, Messages, ThinkingFormat
from .stream_parser import Splitter
from .text_stream import AnswerDelta, concatenate


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
    if isinstance(thinking, ThinkingFormat):
        texts = thinking.begin, thinking.end
    else:
        (thoughts,) = thinking.thoughts
        header = thinking.channel + thoughts if thinking.channel else f" to={thoughts}"
        texts = header + thinking.body, thinking.ends[0]
    begin, end = (tuple(tokenizer.encode(text, add_special_tokens=False)) for text in texts)
    return begin, end


class AnswerParser:
    """Parses the text of one completion incrementally.

    `with_reasoning`: False drops the reasoning from the output. `called`: whether the completion has called a
    tool so far.
    """

    def __init__(self, splitter: Splitter, *, with_reasoning: bool = True) -> None:
        self._splitter = splitter
        self._with_reasoning = with_reasoning
        self.called = False

    def feed(self, text: str, *, final: bool = False) -> AnswerDelta:
        """Parse the next text, the last one if `final`; return what is new."""
        piece = self._splitter.feed(text)
        if final:
            piece = concatenate((piece, self._splitter.finish()))
        self.called = self.called or bool(piece.calls)
        return piece if self._with_reasoning else replace(piece, reasoning="")


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerParserFactory:
    """Creates the parsers of a request's completions; most arguments are those of `Splitter`.

    Attributes:
        with_reasoning: False drops the model's reasoning.
        tokenizer: the model's tokenizer, used only to count tokens.
    """

    thinking: ThinkingFormat | Messages | None = None
    calls: CallSyntax | Messages | None = None
    schemas: Mapping[str, Mapping[str, Any]] = field(default_factory=dict[str, Mapping[str, Any]])
    opened: bool = False
    parallel: bool = True
    with_reasoning: bool = True
    tokenizer: Tokenizer | None = None

    def make_parser(self, response_id: str, index: int) -> AnswerParser:
        """Return a parser of the `index`th completion of a response. Both determine its tool call ids."""
        splitter = Splitter(
            self.thinking,
            self.calls,
            schemas=self.schemas,
            opened=self.opened,
            id_seed=f"{response_id}/{index}",
            parallel=self.parallel,
        )
        return AnswerParser(splitter, with_reasoning=self.with_reasoning)

    def token_counter(self) -> ReasoningCounter | None:
        """Return a counter of one completion's reasoning tokens; None if the marks are not single tokens."""
        if self.thinking is None or self.tokenizer is None:
            return None
        return ReasoningCounter.of(self.thinking, self.tokenizer, opened=self.opened)

    def counted(self, token_ids: Sequence[int]) -> ReasoningCounter | None:
        if counter := self.token_counter():
            counter.feed(token_ids)
        return counter

    def parse_complete(self, response_id: str, index: int, text: str) -> AnswerDelta:
        return self.make_parser(response_id, index).feed(text, final=True)


PLAIN = AnswerParserFactory()  # for completions: no parsing
