"""Requests with a conversation, as of /v1/chat/completions, and the choices of its responses.

A conversation's tools are in OpenAI's format: functions, and which of them must be called.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag, model_validator

from ....cluster.errors import RequestError, brief
from ....cluster.request.request import MAX_LOGPROBS
from ...chat.chat_model import AnswerParserFactory
from ...chat.text_stream import AnswerDelta, CallPiece, TextPiece
from ...engine.outputs import CompletionOutput
from ...tokenization.client_messages import text_of, text_parts
from ...tokenization.prompts import Chat, require_tokenizer
from ...tokenization.tokenizer import Tokenizer
from ..wire.json_io import Integer, JsonObject
from ..wire.request_model import DESCRIPTIONS, RequestModel, unread_keys, without_nulls
from .logprobs import chat_logprobs
from .protocol import GenerationRequest
from .tool_outputs import output_text

TOOL_NAME = r"^[a-zA-Z0-9_.-]{1,128}$"
MAX_TOOLS = 512
REASONING_FIELDS = ("reasoning", "reasoning_content")  # vLLM's name, and that of most others


class FunctionTool(RequestModel):
    """A function that the model may call; `parameters` is a JSON schema of its arguments (Any: JSON).

    Other fields are passed to the chat template, which usually writes all of them.
    """

    name: Annotated[str, Field(pattern=TOOL_NAME)]
    description: str | None = None
    parameters: Annotated[dict[str, Any] | None, BeforeValidator(without_nulls)] = None
    strict: bool | None = None

    def own_unknown_fields(self) -> Iterable[str]:
        return ()


class Tool(RequestModel):
    """An entry of `tools`; functions are the only type."""

    unread = ("cache_control",)

    type: Literal["function"] = "function"
    function: FunctionTool

    def for_template(self) -> dict[str, Any]:
        return {"type": self.type, "function": self.function.model_dump(exclude_unset=True)}


class NamedFunction(RequestModel):
    name: str


class NamedTool(RequestModel):
    """A `tool_choice` that names one function, which must then be called."""

    type: Literal["function"] = "function"
    function: NamedFunction


class AllowedTools(RequestModel):
    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], Field(min_length=1, max_length=MAX_TOOLS)]


class AllowedToolsChoice(RequestModel):
    """A `tool_choice` that offers some of the tools."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


# Any: a validator sees raw JSON.
def _form_of_choice(value: Any) -> str:
    if isinstance(value, NamedTool | AllowedToolsChoice):
        return "[named]" if isinstance(value, NamedTool) else "[allowed]"
    if isinstance(value, dict):
        return "[allowed]" if value.get("type") == "allowed_tools" else "[named]"
    return "[word]"


# The brackets keep the forms out of the paths in errors (`wire/errors.py`).
ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("[word]")]
    | Annotated[NamedTool, Tag("[named]")]
    | Annotated[AllowedToolsChoice, Tag("[allowed]")],
    Discriminator(_form_of_choice),
]


class ToolOptions(RequestModel):
    """Fields about tools of requests that take messages.

    Attributes:
        tools: functions that the model may call.
        tool_choice: none, auto (the model's choice), required, one function by name, or `allowed_tools`: the
            functions that are offered, and whether one of them must be called.
        parallel_tool_calls: false: at most one call.
    """

    tools: Annotated[list[Tool] | None, Field(max_length=MAX_TOOLS)] = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None

    @model_validator(mode="after")
    def _check_tools(self) -> ToolOptions:
        names = [tool.function.name for tool in self.tools or ()]
        for at, name in enumerate(names):
            if name in names[:at]:
                raise RequestError(
                    f"tools.{at}.function.name: {brief(name)} is the name of another tool, too.",
                    param=f"tools.{at}.function.name",
                )
        choice = self.tool_choice
        if not names and not (choice is None or choice in ("none", "auto")):
            raise RequestError("tool_choice needs tools: send some, or leave it out.", param="tool_choice")
        for at, name in self._chosen_names():
            if name not in names:
                raise RequestError(
                    f"{at}: {brief(name)} is no tool. Tools: {', '.join(map(brief, names))}.", param=at
                )
        return self

    def _chosen_names(self) -> Iterator[tuple[str, str]]:
        """Yield the functions that `tool_choice` names, with their paths."""
        choice = self.tool_choice
        if isinstance(choice, NamedTool):
            yield "tool_choice.function.name", choice.function.name
        elif isinstance(choice, AllowedToolsChoice):
            for i, tool in enumerate(choice.allowed_tools.tools):
                yield f"tool_choice.allowed_tools.tools.{i}.function.name", tool.function.name

    @property
    def choice(self) -> Literal["none", "auto", "required"]:
        """Whether tools may or must be called; a named one must be."""
        choice = self.tool_choice
        if not self.tools or choice == "none":
            return "none"
        if isinstance(choice, AllowedToolsChoice):
            return choice.allowed_tools.mode
        return "auto" if choice in (None, "auto") else "required"

    @property
    def offered_tools(self) -> list[Tool]:
        """The tools that the prompt lists: all, or the allowed ones."""
        tools = self.tools or []
        if self.choice == "none":
            return []
        if not isinstance(self.tool_choice, AllowedToolsChoice):
            return tools
        allowed = {name for _, name in self._chosen_names()}
        return [tool for tool in tools if tool.function.name in allowed]

    @property
    def available_tools(self) -> list[FunctionTool]:
        """The functions that may be called."""
        functions = [tool.function for tool in self.offered_tools]
        if isinstance(self.tool_choice, NamedTool):
            return [each for each in functions if each.name == self.tool_choice.function.name]
        return functions

    @property
    def schemas(self) -> Mapping[str, Mapping[str, Any]]:
        return {each.name: each.parameters or {} for each in self.available_tools}


TEXT_PARTS = ("text", "input_text", "output_text", "refusal")


# Any: validators see raw JSON.
def _whether_logprobs(value: Any) -> Any:
    """Refuse numbers: 0 is not false, but a value of completions' `logprobs`."""
    if value is None or isinstance(value, bool):
        return value
    raise RequestError(
        f"logprobs={brief(value)} is not allowed: chat takes true or false, and the number of likeliest "
        "tokens in top_logprobs.",
        param="logprobs",
    )


class CalledFunction(RequestModel):
    """A called function; `arguments` is JSON as text or parsed (Any: `tokenization/client_messages.py`)."""

    name: str
    arguments: Any = None


class ToolCall(RequestModel):
    """A call that the model has made, sent back by the client."""

    id: str | None = None
    type: Annotated[Literal["function"], BeforeValidator(lambda value: value or "function")] = "function"
    function: CalledFunction

    def own_unknown_fields(self) -> Iterable[str]:
        return ()

    def for_template(self) -> dict[str, Any]:
        function = {"name": self.function.name, "arguments": self.function.arguments}
        return {**self.model_dump(exclude={"function"}, exclude_none=True), "function": function}


class ChatMessage(RequestModel):
    """One message. Other fields (name, tool_call_id ...) are passed to the chat template."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[dict[str, Any]], Field(fail_fast=True)] | None = None
    tool_calls: list[ToolCall] | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None

    def own_unknown_fields(self) -> Iterable[str]:
        parts = self.content if isinstance(self.content, list) else ()
        texts = (part for part in parts if part.get("type") in TEXT_PARTS)  # a tool's may be of any type
        return (f"content.{name}" for part in texts for name in unread_keys(part, "text"))

    def for_template(self, at: str) -> dict[str, Any]:
        """Return the content as text or as text parts, and the reasoning under each usual name."""
        others = {name: value for name, value in (self.model_extra or {}).items() if value is not None}
        message = {**others, "role": self.role, "content": self.content or ""}
        if self.role == "tool":
            message["content"] = output_text(self.content, f"{at}.content")
        elif isinstance(self.content, list):
            texts = (_text(part, f"{at}.content.{i}") for i, part in enumerate(self.content))
            message["content"] = [part for text in texts for part in text_parts(text)] or ""
        if reasoning := self.reasoning_content or self.reasoning:
            message |= dict.fromkeys(("reasoning", "reasoning_content", "thinking"), reasoning)
        if self.tool_calls:
            message["tool_calls"] = [call.for_template() for call in self.tool_calls]
        return message


class ChatTemplateOptions(ToolOptions):
    """Options for making a prompt of messages; the same for all requests that take messages.

    Attributes:
        add_generation_prompt: the template begins the answer.
        continue_final_message: the answer continues the last message.
        chat_template: a Jinja template; needs trust_request_chat_template.
        chat_template_kwargs: variables for the template.
        documents: for templates that support them.
        reasoning_effort: for templates that support it; auto is the template's default.
    """

    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    documents: list[dict[str, Any]] | None = None
    reasoning_effort: Literal["auto", "none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = (
        None
    )

    @model_validator(mode="after")
    def _check_ending(self) -> ChatTemplateOptions:
        is_asked = self.add_generation_prompt and "add_generation_prompt" in self.model_fields_set
        if self.continue_final_message and is_asked:
            raise RequestError(
                "continue_final_message and add_generation_prompt exclude each other; send one of them.",
                param="continue_final_message",
            )
        return self


Messages = Annotated[list[ChatMessage], Field(min_length=1, fail_fast=True)]


class ChatRequest(ChatTemplateOptions, GenerationRequest):
    """The body of /v1/chat/completions.

    Attributes:
        messages: the conversation so far.
        logprobs: return the log probability of each token.
        top_logprobs: also return those of this many likeliest tokens in each position.
        include_reasoning: return the reasoning, too.
    """

    messages: Messages
    logprobs: Annotated[bool | None, BeforeValidator(_whether_logprobs)] = None
    top_logprobs: Integer | None = None
    include_reasoning: bool = True

    @model_validator(mode="after")
    def _top_logprobs_need_logprobs(self) -> ChatRequest:
        if self.top_logprobs and not self.logprobs:
            raise RequestError(
                f"top_logprobs={self.top_logprobs} needs logprobs=true. Send both, or neither.",
                param="top_logprobs",
            )
        if not 0 <= (self.top_logprobs or 0) <= MAX_LOGPROBS:
            raise RequestError(
                f"top_logprobs={self.top_logprobs} is not allowed: it must be an integer from 0 to "
                f"{MAX_LOGPROBS}.",
                param="top_logprobs",
            )
        return self

    @property
    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def continued(self) -> str | None:
        """Text of the message that the answer continues; None if it continues none."""
        if not self.continue_final_message:
            return None
        return text_of(self.messages[-1].for_template(f"messages.{len(self.messages) - 1}"))


def conversation(
    options: ChatTemplateOptions, messages: Sequence[ChatMessage], tokenizer: Tokenizer | None
) -> Chat:
    """Return the engine's chat. Raises RequestError for documents that the template would ignore."""

    def uses(variable: str) -> bool:
        return require_tokenizer(tokenizer, "messages").template_uses(variable)

    variables = dict(options.chat_template_kwargs or {})
    if options.reasoning_effort not in (None, "auto"):
        variables["reasoning_effort"] = options.reasoning_effort
    if options.documents and not (uses("documents") or options.chat_template is not None):
        raise RequestError(
            "documents: this model's chat template does not support them. Put them into a message.",
            param="documents",
        )
    return Chat(
        [message.for_template(f"messages.{i}") for i, message in enumerate(messages)],
        options.add_generation_prompt,
        options.continue_final_message,
        variables,
        tools=[tool.for_template() for tool in options.offered_tools] or None,
        documents=options.documents,
        template=options.chat_template,
    )


def unused_fields(
    options: ChatTemplateOptions, messages: Sequence[ChatMessage], tokenizer: Tokenizer
) -> list[str]:
    """Return dotted names of what is passed to the chat template, which does not mention it."""
    calls = [call for message in messages for call in message.tool_calls or ()]
    passed = [f"chat_template_kwargs.{name}" for name in options.chat_template_kwargs or ()]
    if options.reasoning_effort not in (None, "auto"):
        passed.append("reasoning_effort")
    for at, parts in (("messages", messages), ("messages.tool_calls", calls)):
        passed += [
            f"{at}.{name}" for part in parts for name in part.model_extra or () if name not in DESCRIPTIONS
        ]

    def is_used(name: str) -> bool:
        return tokenizer.template_uses(name) or name in (options.chat_template or "")

    return [at for at in dict.fromkeys(passed) if not is_used(at.rpartition(".")[2])]


def _text(part: Mapping[str, Any], at: str) -> str:
    kind = part.get("type")
    text = part.get("refusal" if kind == "refusal" else "text")
    if kind not in TEXT_PARTS or not isinstance(text, str):
        raise RequestError(
            f'{at}: only parts {{"type": "text", "text": ...}} are supported; this model reads no images or '
            "sound.",
            param=at,
        )
    return text


class ChatShape:
    """Formats the choices of a chat; see `ResponseShape` in `generation/generation.py`.

    Deltas of calls are OpenAI's: first id and name, then the arguments.
    """

    prefix = "chatcmpl-"
    full_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def __init__(
        self, parser_factory: AnswerParserFactory, reasoning_fields: Sequence[str] = REASONING_FIELDS
    ) -> None:
        self.parsers = parser_factory
        self._reasoning_fields = reasoning_fields

    def opening(self, index: int) -> JsonObject | None:
        return _choice(index, {"role": "assistant", "content": ""})

    def chunks(self, index: int, delta: AnswerDelta) -> list[JsonObject]:
        choices = [_choice(index, part) for each in delta.pieces for part in self._deltas(each)]
        return choices or [_choice(index, {"content": ""})]

    def _deltas(self, piece: TextPiece | CallPiece) -> list[JsonObject]:
        if isinstance(piece, CallPiece):
            return [{"tool_calls": [delta]} for delta in _call_deltas(piece)]
        fields = self._reasoning_fields if piece.kind == "reasoning" else ("content",)
        return [dict.fromkeys(fields, piece.joined)]

    def end(self, index: int, finish_reason: str) -> JsonObject:
        return _choice(index, {}, finish_reason)

    def full_choice(self, index: int, delta: AnswerDelta, finish_reason: str) -> JsonObject:
        content = delta.content if delta.content or not delta else None
        message: JsonObject = {"role": "assistant", "content": content, "refusal": None}
        if delta.reasoning:
            message |= dict.fromkeys(self._reasoning_fields, delta.reasoning)
        if delta.calls:
            message["tool_calls"] = [_call(call) for call in delta.calls]
        return {"index": index, "message": message, "logprobs": None, "finish_reason": finish_reason}

    def logprobs(self, completion: CompletionOutput, num_top: int, offset: int) -> JsonObject:
        return chat_logprobs(completion, num_top)


def _choice(index: int, delta: JsonObject, finish_reason: str | None = None) -> JsonObject:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": finish_reason}


def _call_deltas(call: CallPiece) -> list[JsonObject]:
    found: list[JsonObject] = []
    if call.id is not None:
        found.append({"index": call.index, **_call(replace(call, arguments=""))})
    if call.arguments:
        found.append({"index": call.index, "function": {"arguments": call.arguments}})
    return found


def _call(call: CallPiece) -> JsonObject:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.id, "type": "function", "function": function}
