"""The chat formats of a model, and the parsers of its answers.

`ChatModel` has the formats, found by the chat template or configured by name; created once per engine.
`AnswerParserFactory` parses the responses to one request, each completion with its own `AnswerParser`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ...cluster.errors import ConfigError, RequestError, did_you_mean
from ...cluster.request.request import SamplingParams
from ...cluster.request.structured_outputs import StructuredOutputsParams
from ..tokenization.tokenizer import Tokenizer
from .chat_formats import (
    CALLS,
    REASONING,
    TEMPLATE_SIGNS,
    CallSyntax,
    Messages,
    ThinkingFormat,
    marks_of,
)
from .stream_parser import Splitter
from .text_stream import AnswerDelta, concatenate, content_only
from .tool_call_grammars import forced_calls, strict_calls

AUTO, NONE = "auto", "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatModel:
    """`kept_token_ids`: special tokens that the formats parse, so they must not be removed from the text."""

    calls: CallSyntax | Messages | None = None
    thinking: ThinkingFormat | Messages | None = None
    call_parser: str | None = None
    reasoning_parser: str | None = None
    auto_calls: bool = True
    kept_token_ids: tuple[int, ...] = ()
    tokenizer: Tokenizer | None = None

    @classmethod
    def of(
        cls,
        tokenizer: Tokenizer | None,
        *,
        tool_call_parser: str = AUTO,
        reasoning_parser: str = AUTO,
        auto_calls: bool = True,
    ) -> ChatModel:
        """Select formats by settings or, for "auto", by the chat template. Raises ConfigError."""
        by_template = _by_template(tokenizer)
        call_name = _chosen("tool_call_parser", tool_call_parser, CALLS, by_template[0])
        reasoning_name = _chosen("reasoning_parser", reasoning_parser, REASONING, by_template[1])
        calls = None if call_name is None else CALLS[call_name]
        thinking = None if reasoning_name is None else REASONING[reasoning_name]
        marks = {mark for given in (calls, thinking) if given is not None for mark in marks_of(given)}
        special = {} if tokenizer is None or not marks else tokenizer.special_token_ids
        return cls(
            calls=calls,
            thinking=thinking,
            call_parser=call_name,
            reasoning_parser=reasoning_name,
            auto_calls=auto_calls,
            kept_token_ids=tuple(sorted(special[mark] for mark in marks & special.keys())),
            tokenizer=tokenizer,
        )

    def check_tools(self, tool_choice: str) -> None:
        """Raise RequestError if tools cannot be offered: an agent cannot see that its tools are ignored."""
        if self.calls is None:
            raise RequestError(
                "tools: this model's chat template does not support tools, so the model would not see them. "
                "Leave them out, or start the server with --tool-call-parser and --chat-template.",
                param="tools",
            )
        if tool_choice == "auto" and not self.auto_calls:
            raise RequestError(
                'tool_choice "auto" needs a server started with --enable-auto-tool-choice; "required", '
                '"none" and a named function work without.',
                param="tool_choice",
            )

    def reading(
        self,
        prompt: str,
        schemas: Mapping[str, Mapping[str, Any]] | None = None,
        *,
        parallel: bool = True,
        with_reasoning: bool = True,
        continued: str | None = None,
    ) -> AnswerParserFactory:
        """Return the parser factory for the text that follows a prompt.

        Args:
            schemas: argument schemas of the callable tools by name; without any, no calls are parsed.
            parallel: False drops all calls after the first.
            continued: the message that the response continues, if any.
        """
        return AnswerParserFactory(
            thinking=self.thinking,
            calls=self.calls if schemas else None,
            schemas=schemas or {},
            opened=self._opened(prompt, continued),
            parallel=parallel,
            with_reasoning=with_reasoning,
            tokenizer=self.tokenizer,
        )

    def forced_call_grammar(
        self, prompt: str, schemas: Mapping[str, Mapping[str, Any]], *, parallel: bool
    ) -> StructuredOutputsParams:
        """Return the grammar that forces calls of these tools after the reasoning."""
        assert self.calls is not None and self.tokenizer is not None, "the tools were checked"
        lark = forced_calls(self.calls, schemas, self.tokenizer.special_token_ids, several=parallel)
        return StructuredOutputsParams(
            grammar=lark, after_token_ids=self.end_of_reasoning(prompt), sent_as="tools"
        )

    def strict_call_grammar(
        self, prompt: str, schemas: Mapping[str, Mapping[str, Any]], strict: Collection[str]
    ) -> StructuredOutputsParams | None:
        """Return structural tags that make strict tools' calls follow their schemas; None if impossible."""
        assert self.calls is not None and self.tokenizer is not None, "the tools were checked"
        tags = strict_calls(self.calls, schemas, strict, self.tokenizer.special_token_ids)
        if tags is None:
            return None
        end_tokens = self.end_of_reasoning(prompt)
        return StructuredOutputsParams(structural_tag=tags, after_token_ids=end_tokens, sent_as="tools")

    def end_of_reasoning(self, prompt: str) -> tuple[int, ...]:
        """Return the tokens that end the reasoning; () for several, as the same text has other tokens."""
        if self.thinking is None or self.tokenizer is None:
            return ()
        if isinstance(self.thinking, Messages):
            ids = self.tokenizer.encode(self.thinking.ends[0], add_special_tokens=False)
        elif prompt.rstrip().endswith(self.thinking.end):
            return ()
        else:
            ids = self.tokenizer.encode(self.thinking.end, add_special_tokens=False)
        return tuple(ids) if len(ids) == 1 else ()

    def with_thinking_budget(self, params: SamplingParams, prompt: str) -> SamplingParams:
        """Add the reasoning marks if a thinking budget needs them and they are known."""
        if params.thinking_token_budget is None or params.reasoning_end_token_ids:
            return params
        if self.thinking is None or self.tokenizer is None:
            return params
        begin, end = reasoning_marks(self.thinking, self.tokenizer)
        is_in_prompt = not isinstance(self.thinking, ThinkingFormat) or self.thinking.begin in prompt
        if not is_in_prompt and self._opened(prompt, None):
            begin = ()  # the response begins within reasoning
        return replace(params, reasoning_start_token_ids=begin, reasoning_end_token_ids=end)

    def _opened(self, prompt: str, continued: str | None) -> bool:
        if not isinstance(self.thinking, ThinkingFormat):
            return False
        begin, end = self.thinking.begin, self.thinking.end
        if continued is not None:
            return continued.rfind(begin) > continued.rfind(end)
        tail = prompt.rstrip().removesuffix(self.thinking.heading).rstrip()
        return tail.endswith(begin) or (self.thinking.always_open and not tail.endswith(end))

    def __str__(self) -> str:
        calls, thinking = self.call_parser or NONE, self.reasoning_parser or NONE
        return f"tool_call_parser={calls}, reasoning_parser={thinking}"


def _chosen(setting: str, name: str, known: Mapping[str, object], found: str | None) -> str | None:
    if name == AUTO:
        return found
    if name == NONE:
        return None
    if name not in known:
        hint = did_you_mean(name, [AUTO, NONE, *known], fallback=f"Known: {', '.join(known)}.")
        raise ConfigError(f"{setting}={name!r} is not known. {hint}", param=setting)
    return name


def _by_template(tokenizer: Tokenizer | None) -> tuple[str | None, str | None]:
    def names(signs: Sequence[str]) -> bool:
        return tokenizer is not None and all(map(tokenizer.template_uses, signs))

    found = ((calls, thinking) for signs, calls, thinking in TEMPLATE_SIGNS if names(signs))
    return next(found, (None, None))


class ReasoningCounter:
    """Counts the reasoning tokens of one completion. `opened`: the prompt ends within reasoning."""

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
    """Parses one completion's text. `with_reasoning`: False drops it. `called`: a tool was called.

    Without a splitter all text is content.
    """

    def __init__(self, splitter: Splitter | None, *, with_reasoning: bool = True) -> None:
        self._splitter = splitter
        self._with_reasoning = with_reasoning
        self.called = False

    def feed(self, text: str, *, final: bool = False) -> AnswerDelta:
        """Parse the next text, the last one if `final`; return what is new."""
        if self._splitter is None:
            return content_only(text)
        piece = self._splitter.feed(text)
        if final:
            piece = concatenate((piece, self._splitter.finish()))
        self.called = self.called or bool(piece.calls)
        return piece if self._with_reasoning else piece.without_reasoning()


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerParserFactory:
    """Creates the parsers of a request's completions; most arguments are those of `Splitter`."""

    thinking: ThinkingFormat | Messages | None = None
    calls: CallSyntax | Messages | None = None
    schemas: Mapping[str, Mapping[str, Any]] = field(default_factory=dict[str, Mapping[str, Any]])
    opened: bool = False
    parallel: bool = True
    with_reasoning: bool = True  # False drops the model's reasoning
    tokenizer: Tokenizer | None = None  # the model's tokenizer, used only to count tokens

    def make_parser(self, response_id: str, index: int) -> AnswerParser:
        """Return a parser of one completion. The arguments determine its tool call ids."""
        if self.thinking is None and self.calls is None:
            return AnswerParser(None)
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
        """Return a counter of reasoning tokens; None if the marks are not single tokens."""
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
