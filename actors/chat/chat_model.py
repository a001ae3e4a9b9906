"""How a model converses: which formats its answers are written in, found by its chat template or by name.

Made once per engine, by whoever answers conversations: the HTTP front and those who answer batch rows. Makes
a `AnswerParserFactory` for each request.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ...cluster.errors import ConfigError, RequestError, did_you_mean
from ...cluster.request.request import SamplingParams
from ...cluster.request.structured_outputs import StructuredOutputsParams
from ..tokenization.tokenizer import Tokenizer
from .answer_parser import AnswerParserFactory
from .chat_formats import CALLS, REASONING, TEMPLATE_SIGNS, CallSyntax, Messages, ThinkingFormat, marks_of
from .reasoning_tokens import reasoning_marks
from .tool_call_grammars import forced_calls, strict_calls

AUTO, NONE = "auto", "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatModel:
    """Of one model.

    Attributes:
        calls: how it calls tools; None: it cannot.
        thinking: how it writes what it thinks; None: it does not.
        call_parser, reasoning_parser: their names.
        auto_calls: a model may be left the choice whether to call tools.
        kept_token_ids: special tokens that the formats read, so that no text may lack them.
    """

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
        """Found by what the chat template names, or by what settings say. Raises ConfigError."""
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
        """Raise RequestError if tools cannot be offered so.

        They are refused rather than ignored: an agent whose tools are never called has no way to see why.
        """
        if self.calls is None:
            raise RequestError(
                "tools: this model's chat template knows no tools, so it would never hear of them. Leave "
                "them out, or start the server with --tool-call-parser and --chat-template.",
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
        """How what follows a prompt is read.

        Args:
            prompt: a rendered conversation.
            schemas: tools that may be called, with their arguments' schemas; None or none: no call is read.
            parallel: False leaves out all calls behind the first.
            with_reasoning: False leaves out what the model thinks.
            continued: the message that the answer continues, if it does.
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

    def forced(
        self, prompt: str, schemas: Mapping[str, Mapping[str, Any]], *, parallel: bool
    ) -> StructuredOutputsParams:
        """What makes an answer call these tools, behind its reasoning. Arguments as of `reading`."""
        assert self.calls is not None and self.tokenizer is not None, "the tools were checked"
        lark = forced_calls(self.calls, schemas, self.tokenizer.special_token_ids, several=parallel)
        return StructuredOutputsParams(
            grammar=lark, after_token_ids=self.end_of_reasoning(prompt), sent_as="tools"
        )

    def strict(
        self, prompt: str, schemas: Mapping[str, Mapping[str, Any]], strict: Collection[str]
    ) -> StructuredOutputsParams | None:
        """What makes calls of strict tools, if there are any, heed their schemas; None where nothing can."""
        assert self.calls is not None and self.tokenizer is not None, "the tools were checked"
        tags = strict_calls(self.calls, schemas, strict, self.tokenizer.special_token_ids)
        if tags is None:
            return None
        behind = self.end_of_reasoning(prompt)
        return StructuredOutputsParams(structural_tag=tags, after_token_ids=behind, sent_as="tools")

    def end_of_reasoning(self, prompt: str) -> tuple[int, ...]:
        """The tokens that end the reasoning which is to follow a prompt; () where none can be awaited.

        That is also where its end is no token of its own: a model may write the same text with others.
        """
        if self.thinking is None or self.tokenizer is None:
            return ()
        if isinstance(self.thinking, Messages):
            ids = self.tokenizer.encode(self.thinking.ends[0], add_special_tokens=False)
        elif prompt.rstrip().endswith(self.thinking.end):
            return ()
        else:
            ids = self.tokenizer.encode(self.thinking.end, add_special_tokens=False)
        return tuple(ids) if len(ids) == 1 else ()

    def limited(self, params: SamplingParams, prompt: str) -> SamplingParams:
        """The parameters with the marks of reasoning, where its budget needs them and they are known."""
        if params.thinking_token_budget is None or params.reasoning_end_token_ids:
            return params
        if self.thinking is None or self.tokenizer is None:
            return params
        begin, end = reasoning_marks(self.thinking, self.tokenizer)
        is_told = not isinstance(self.thinking, ThinkingFormat) or self.thinking.begin in prompt
        if not is_told and self._opened(prompt, None):
            begin = ()  # the answer begins within
        return replace(params, reasoning_start_token_ids=begin, reasoning_end_token_ids=end)

    def _opened(self, prompt: str, continued: str | None) -> bool:
        """Whether the prompt ends within reasoning."""
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
        hint = did_you_mean(name, [AUTO, NONE, *known], else_say=f"Known: {', '.join(known)}.")
        raise ConfigError(f"{setting}={name!r} is not known. {hint}", param=setting)
    return name


def _by_template(tokenizer: Tokenizer | None) -> tuple[str | None, str | None]:
    """The names of both formats."""

    def names(signs: Sequence[str]) -> bool:
        return tokenizer is not None and all(map(tokenizer.template_uses, signs))

    found = ((calls, thinking) for signs, calls, thinking in TEMPLATE_SIGNS if names(signs))
    return next(found, (None, None))
