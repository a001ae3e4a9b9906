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
from .answer_grammar import AnswerGrammar, Reasoning
from .call_syntax import CallSyntax, ThinkingFormat
from .chat_formats import CALLS, REASONING, TEMPLATE_SIGNS, mark_ids
from .messages import Messages
from .stream_parser import Splitter
from .text_stream import AnswerDelta, concatenate, content_only

AUTO, NONE = "auto", "none"
_ANY_OBJECT: Mapping[str, Any] = {"type": "object"}  # Any: JSON


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatModel:
    """The formats of a model.

    Attributes:
        kept_token_ids: special tokens that the formats parse, so they must not be removed from the text.
        mark_ids: ids of the added tokens among the marks, special or not.
    """

    calls: CallSyntax | None = None
    thinking: ThinkingFormat | Messages | None = None
    call_parser: str | None = None
    reasoning_parser: str | None = None
    auto_calls: bool = True
    kept_token_ids: tuple[int, ...] = ()
    mark_ids: Mapping[str, int] = field(default_factory=dict[str, int])
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
        formats = [given for given in (calls, thinking) if given is not None]
        marks = {} if tokenizer is None else mark_ids(formats, tokenizer.added_token_ids)
        special = frozenset() if tokenizer is None else frozenset(tokenizer.special_token_ids.values())
        return cls(
            calls=calls,
            thinking=thinking,
            call_parser=call_name,
            reasoning_parser=reasoning_name,
            auto_calls=auto_calls,
            kept_token_ids=tuple(sorted(special.intersection(marks.values()))),
            mark_ids=marks,
            tokenizer=tokenizer,
        )

    def check_tools(self, tool_choice: str) -> None:
        """Raise RequestError if tools cannot be offered: an agent cannot see that its tools are ignored."""
        if self.calls is None:
            takes_tools = self.tokenizer is not None and self.tokenizer.template_uses("tools")
            reason = (
                "this model writes calls in a format of which there is no parser, or the server was started "
                f"without one (known: {', '.join(CALLS)})"
                if takes_tools
                else "this model's chat template does not support tools, so the model would not see them"
            )
            raise RequestError(
                f"tools: {reason}. Leave them out, or start the server with --tool-call-parser and "
                "--chat-template.",
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

    def constraint(
        self,
        prompt: str,
        schemas: Mapping[str, Mapping[str, Any]],
        constrained: StructuredOutputsParams | None,
        *,
        required: bool,
        strict: Collection[str] = (),
        are_some: bool = False,
        parallel: bool = True,
        continued: str | None = None,
    ) -> StructuredOutputsParams | None:
        """Return the constraint of all parts of an answer: its reasoning, its calls and its text.

        Args:
            constrained: the requested constraint of the text.
            required: at least one call is required, and so no text.
            strict: tools whose calls must fit their schemas.
            are_some: the request has other tools, too, which must not be called.
            parallel: several calls may follow each other.
            continued: the message that the response continues, if any.
        """
        if (
            constrained is not None
            and (constrained.after_token_ids or continued is not None)
            and not required
        ):
            return constrained
        is_optional = not required and constrained is None
        if is_optional and not (strict or (are_some and schemas)):
            return None
        if not required and constrained is not None and constrained.structural_tag is not None:
            # Tags describe a whole text, with the calls in it.
            return replace(constrained, after_token_ids=self.end_of_reasoning(prompt))
        reasoning, after = self._expected_reasoning(prompt, continued)
        if not required and not schemas and reasoning.format is None:
            return constrained
        if is_optional:
            schemas = {name: schema if name in strict else _ANY_OBJECT for name, schema in schemas.items()}
        grammar = AnswerGrammar(self.calls, schemas, self.mark_ids, reasoning, strict)
        if required:
            lark = grammar.forced(several=parallel)
        elif constrained is not None:
            frame = grammar.constrained(several=parallel)
            return replace(constrained, frame=frame, after_token_ids=after, left_out=tuple(grammar.left_out))
        else:
            lark = grammar.optional()
        return StructuredOutputsParams(
            frame=lark, after_token_ids=after, left_out=tuple(grammar.left_out), sent_as="tools"
        )

    def _expected_reasoning(self, prompt: str, continued: str | None) -> tuple[Reasoning, tuple[int, ...]]:
        """Return the reasoning that a grammar must allow, and the tokens after which it applies."""
        if isinstance(self.thinking, Messages) or isinstance(self.calls, Messages):
            form = self.thinking if isinstance(self.thinking, Messages) else self.calls
            assert isinstance(form, Messages)
            return Reasoning(format=form), ()
        if self.thinking is None or prompt.rstrip().endswith(self.thinking.end):
            return Reasoning(), ()
        if not self._opened(prompt, continued):
            return Reasoning(format=self.thinking), ()
        after = self.end_of_reasoning(prompt)
        return Reasoning(format=self.thinking, opened=True, is_over=bool(after)), after

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
    calls: CallSyntax | None = None
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
