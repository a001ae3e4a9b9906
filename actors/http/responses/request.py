"""The body of /v1/responses, and its translation to a `ChatRequest`.

Fields that this API lacks (`top_k`, `seed`, `speculative` ...) are passed to the chat unchanged. Fields that
need stored responses are refused.

An answer consists of several items (its reasoning, its text, each of its calls), and clients send them back
as such; a chat has one message for all of them. Items that cannot be used here are skipped and reported to
the client, so that a session can continue: calls that OpenAI's servers answered, content that another server
has encrypted, references to items that it stores, unknown types.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from ....cluster.errors import RequestError
from ..generation.chat_adapter import SupportedOptions, chat_request, rename_error_fields
from ..protocol.chat_completion import ChatRequest
from ..protocol.tool_outputs import TranslatedMessages, content_of, output_text, required_text
from ..wire.json_io import Integer, JsonObject
from ..wire.request_model import RequestModel, unread_keys, without_nulls
from .tools import INPUT, ClientTools, flat_name

NOTHING_STORED = "This server keeps no responses: send the whole conversation in `input`."
# Field -> the values that mean "not used", and what to do instead of using it.
NEVER: Mapping[str, tuple[tuple[object, ...], str]] = {
    "previous_response_id": ((), NOTHING_STORED),
    "conversation": ((), NOTHING_STORED),
    "prompt": ((), "This server keeps no prompts: send `instructions` and `input`."),
    "background": ((False,), "Leave it out: an answer is streamed or complete."),
    "context_management": (([],), "This server does not compact: shorten `input`."),
    "max_tool_calls": ((), "It limits tools that the server runs; this server runs none."),
    "moderation": ((), "This server does not moderate."),
    "logprobs": ((False,), "Ask /v1/chat/completions for log probabilities."),
    "top_logprobs": ((0,), "Ask /v1/chat/completions for log probabilities."),
    "prompt_logprobs": ((), "Ask /v1/chat/completions for log probabilities."),
    "return_token_ids": ((False,), "Ask /v1/chat/completions for tokens."),
    "messages": ((), "The field is called input here."),
    "max_completion_tokens": ((), "The field is called max_output_tokens here."),
    "response_format": ((), "The field is called text.format here."),
    "reasoning_effort": ((), "The field is called reasoning.effort here."),
    "n": ((1,), "A response has one answer: send several requests, or use /v1/chat/completions."),
    "stop": (([],), "This API has no stop strings: use /v1/chat/completions."),
}
# Fields that describe the request or save costs at a hosted service; they do not affect the answer.
SILENT = frozenset(
    {
        *("user", "safety_identifier", "service_tier", "prompt_cache_key", "prompt_cache_retention"),
        *("prompt_cache_options", "stream_options", "client_metadata"),
    }
)
# Path in the chat -> in this body.
NAMES = {
    "prompt": "input",
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "max_tokens": "max_output_tokens",
    "response_format": "text.format",
    "response_format.json_schema": "text.format",
    "response_format.schema": "text.format.schema",
    "reasoning_effort": "reasoning.effort",
    "tool_choice.function": "tool_choice",
}


class ReasoningOptions(RequestModel):
    """Options of reasoning. There are no summaries: the reasoning itself is returned."""

    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None


class TextFormat(RequestModel):
    """`type`, and the name and schema of a json_schema; a schema is also taken with json_object."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str | None = None
    description: str | None = None
    schema_: Annotated[dict[str, Any] | bool | None, Field(alias="schema")] = None  # Any: JSON
    strict: bool | None = None


class TextOptions(RequestModel):
    format: TextFormat = Field(default_factory=TextFormat)

    def response_format(self) -> JsonObject | None:
        """Return the format for a chat, where a schema and its name are one level deeper."""
        format = self.format
        if format.type == "text":
            return None
        fields = format.model_dump(by_alias=True, exclude_none=True, include=set(TextFormat.model_fields))
        kind = fields.pop("type")
        if kind == "json_object":
            return {"type": kind, **({"schema": format.schema_} if format.schema_ is not None else {})}
        return {"type": kind, **({"json_schema": fields} if fields else {})}


# Any: a validator sees raw JSON.
def _input_list(value: Any) -> Any:
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    if not isinstance(value, list) or not value or not all(isinstance(item, dict) for item in value):
        raise RequestError("input must be a string or a list of items, and not empty.", param="input")
    return value


class ResponsesRequest(RequestModel):
    input: Annotated[
        list[dict[str, Any]], BeforeValidator(_input_list, json_schema_input_type=str | list[Any])
    ]
    model: str | None = None
    instructions: str | None = None
    stream: bool | None = None
    max_output_tokens: Annotated[Integer | None, Field(ge=1)] = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Literal["none", "auto", "required"] | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    include: list[str] | None = None
    truncation: Literal["auto", "disabled"] | None = None
    metadata: dict[str, str] | None = None
    store: bool | None = None

    @cached_property
    def client_tools(self) -> ClientTools:
        return ClientTools(self.tools or ())

    def ignored(self, supported: SupportedOptions) -> list[str]:
        """Return the names of ignored fields that SDKs send by themselves."""
        found = [*self.client_tools.left_out, *(["store"] if self.store else [])]
        found += [f"include.{name}" for name in self.include or () if name != "reasoning.encrypted_content"]
        is_ignored = self._effort is not None and not (supported.effort or self._switches(supported))
        return [*found, "reasoning.effort"] if is_ignored else found

    def conversation(self) -> TranslatedMessages:
        conversation = read_items(self.instructions, self.input)
        if isinstance(self.tool_choice, dict):
            for name in unread_keys(self.tool_choice, "name", "namespace", "mode", "tools"):
                conversation.note_unknown(f"tool_choice.{name}")
        return conversation

    def for_chat(self, conversation: TranslatedMessages, supported: SupportedOptions) -> ChatRequest:
        """Translate the body. Raises RequestError with this body's field names."""
        extra = self.model_extra or {}
        for name, (nothing, remedy) in NEVER.items():
            if extra.get(name) is not None and extra[name] not in nothing:
                raise RequestError(f"{name} is not supported. {remedy}", param=name)
        if not conversation.messages:
            raise RequestError(
                f"input: none of its items is supported ({', '.join(conversation.skipped)}). This server "
                "stores no items: send the messages, calls and outputs themselves.",
                param="input",
            )
        if self.truncation == "auto":
            raise RequestError(
                "truncation: this server drops no items of a conversation that is too long. Shorten `input`, "
                "or send truncate_prompt_tokens.",
                param="truncation",
            )
        tools = self.client_tools.tools
        flat = {f"tools.{i}.function": tool.at for i, tool in enumerate(tools)}
        with rename_error_fields({**NAMES, **conversation.names, **flat}):
            return chat_request(
                {
                    **{
                        name: value
                        for name, value in extra.items()
                        if name not in NEVER and name not in SILENT
                    },
                    "model": self.model,
                    "metadata": self.metadata,
                    "store": self.store,
                    "messages": conversation.messages,
                    "stream": self.stream,
                    "max_completion_tokens": self.max_output_tokens,
                    "tools": [{"type": "function", "function": tool.function} for tool in tools] or None,
                    "tool_choice": self.client_tools.choice(self.tool_choice),
                    "parallel_tool_calls": self.parallel_tool_calls,
                    "response_format": self.text.response_format() if self.text else None,
                    "reasoning_effort": self._effort if supported.effort else None,
                    **self._thinking_fields(supported),
                }
            )

    @property
    def _effort(self) -> str | None:
        return self.reasoning.effort if self.reasoning else None

    def _switches(self, supported: SupportedOptions) -> bool:
        """Effort "none" switches thinking off in a template without efforts."""
        return self._effort == "none" and supported.switch and not supported.effort

    def _thinking_fields(self, supported: SupportedOptions) -> JsonObject:
        if not self._switches(supported):
            return {}
        own = (self.model_extra or {}).get("chat_template_kwargs") or {}
        return {"chat_template_kwargs": {"enable_thinking": False, **own}}


ROLES = ("user", "assistant", "system", "developer")
PARTS = ("reasoning_content", "content", "tool_calls")  # of an answer, in order
TEXT_PARTS = ("input_text", "output_text", "text")
NAMED_CALLS = ("function_call", "custom_tool_call")
TEXT_OUTPUTS = ("function_call_output", "custom_tool_call_output")


def read_items(instructions: str | None, items: Sequence[Mapping[str, Any]]) -> TranslatedMessages:
    """Return the conversation; the instructions are its system message."""
    reader = _Reader()
    if instructions:
        reader.conversation.add({"role": "system", "content": instructions}, "instructions")
    for i, item in enumerate(items):
        reader.read(item, f"input.{i}")
    return reader.conversation


class _Reader:
    def __init__(self) -> None:
        self.conversation = TranslatedMessages()
        self._unanswered: dict[str, str] = {}  # names of calls without an output so far, by id

    def read(self, item: Mapping[str, Any], at: str) -> None:
        item = without_nulls(item)
        kind = "item_reference" if item.keys() == {"id"} else "message"
        if item.get("type") is not None:
            kind = required_text(item, "type", at)
        if kind == "message":
            self._read_message(item, at)
        elif kind == "reasoning":
            if text := _reasoning(item, at):
                self._answer(at, without=PARTS)["reasoning_content"] = text
        elif kind in NAMED_CALLS or (kind.endswith("_call") and _call_id(item)):
            self._read_call(kind, item, at)
        elif kind in TEXT_OUTPUTS or (kind.endswith("_call_output") and _call_id(item)):
            id = _call_id(item) or self._answered_call(item, at)
            self._unanswered.pop(id, None)
            self.conversation.add({"role": "tool", "tool_call_id": id, "content": _output(item, at)}, at)
        else:
            self.conversation.skip(f"input.{kind}")
            return
        for name in unread_keys(item, *_read_keys(kind)):
            self.conversation.note_unknown(f"input.{name}")
        for field in ("content", "summary"):
            parts = item.get(field)
            for part in parts if isinstance(parts, list) else ():
                for name in unread_keys(part, "text"):
                    self.conversation.note_unknown(f"input.{field}.{name}")

    def _read_message(self, item: Mapping[str, Any], at: str) -> None:
        role, texts = item.get("role"), texts_of(item.get("content"), f"{at}.content")
        if role not in ROLES:
            raise RequestError(f"{at}.role must be one of {', '.join(ROLES)}.", param=f"{at}.role")
        if role == "assistant":
            self._read_texts(texts, at)
        else:
            self.conversation.add({"role": role, "content": content_of(texts)}, at)

    def _read_texts(self, texts: list[str], at: str) -> None:
        """Add texts. A text after a call continues the text before it."""
        messages = self.conversation.messages
        if messages and messages[-1].get("tool_calls"):
            *before, last = texts_of(messages[-1]["content"], at)
            messages[-1]["content"] = content_of([*before, last + "".join(texts[:1]), *texts[1:]])
        else:
            self._answer(at, without=PARTS[1:])["content"] = content_of(texts)

    def _read_call(self, kind: str, item: Mapping[str, Any], at: str) -> None:
        name = required_text(item, "name", at) if kind in NAMED_CALLS else kind.removesuffix("_call")
        function = {"name": flat_name(item.get("namespace"), name), "arguments": _arguments(kind, item)}
        id = required_text(item, "call_id", at)
        self._unanswered[id] = name
        call = {"id": id, "type": "function", "function": function}
        calls = self._answer(at).setdefault("tool_calls", [])
        place = f"messages.{len(self.conversation.messages) - 1}.tool_calls.{len(calls)}"
        self.conversation.names |= {f"{place}.function": at, place: at}
        calls.append(call)

    def _answered_call(self, item: Mapping[str, Any], at: str) -> str:
        """Return the call of an output that names none. Raises RequestError unless it can be of one only."""
        if item.get("call_id") is not None:
            return required_text(item, "call_id", at)
        found = [id for id, name in self._unanswered.items() if item.get("name") in (None, name)]
        if len(found) != 1:
            raise RequestError(
                f"{at}.call_id is needed: {len(found)} calls before this output have none. Send the id of "
                "its call.",
                param=f"{at}.call_id",
            )
        return found[0]

    def _answer(self, at: str, without: Sequence[str] = ()) -> JsonObject:
        """Return the answer's message that an item is part of; a new one if it has any of `without`."""
        messages = self.conversation.messages
        last = messages[-1] if messages else {"role": None}
        if last["role"] != "assistant" or any(last.get(name) for name in without):
            self.conversation.add({"role": "assistant", "content": ""}, at)
        return messages[-1]


def _read_keys(kind: str) -> tuple[str, ...]:
    if kind == "message":
        return "role", "content"
    if kind == "reasoning":
        return "content", "summary"
    if kind.endswith("_output"):
        return "call_id", "output", "name", "namespace", "max_output_length"
    return "call_id", "name", "namespace", "arguments", "input", "action", "operation", "environment"


def texts_of(content: Any, at: str) -> list[str]:  # Any: JSON.
    """Return the text, or the texts of its parts."""
    if isinstance(content, str):
        return [content]
    if not isinstance(content, list):
        raise RequestError(f"{at} must be a string or a list of parts.", param=at)
    return [_part(part, f"{at}.{i}") for i, part in enumerate(content)]


def _part(part: Any, at: str) -> str:
    if isinstance(part, Mapping):
        if part.get("type") in TEXT_PARTS and isinstance(part.get("text"), str):
            return part["text"]
        if part.get("type") == "refusal" and isinstance(part.get("refusal"), str):
            return part["refusal"]
    raise RequestError(
        f'{at}: only parts {{"type": "input_text", "text": ...}} are supported; this model reads no images, '
        "sound or files.",
        param=at,
    )


def _reasoning(item: Mapping[str, Any], at: str) -> str:
    """Return the text, else the summary."""
    for name, kind in (("content", "reasoning_text"), ("summary", "summary_text")):
        parts = item.get(name) or []
        if not isinstance(parts, list) or not all(
            isinstance(part, Mapping) and isinstance(part.get("text"), str) for part in parts
        ):
            raise RequestError(
                f'{at}.{name} must be a list of parts {{"type": "{kind}", "text": ...}}.',
                param=f"{at}.{name}",
            )
        if parts:
            return "".join(part["text"] for part in parts)
    return ""


def _call_id(item: Mapping[str, Any]) -> str | None:
    """Outputs of the local shell may have the id in `id`."""
    found = item.get("call_id")
    if found is None and item["type"] == "local_shell_call_output":
        found = item.get("id")
    return found if isinstance(found, str) else None


def _arguments(kind: str, item: Mapping[str, Any]) -> Any:
    """Return the arguments in the format that `tools.py` gives the model, where it gives one."""
    if kind == "function_call":
        return item.get("arguments")
    if kind == "custom_tool_call":
        return {INPUT: item.get("input")}
    action = item.get("action") or item.get("operation") or item.get("arguments")
    if isinstance(action, Mapping):
        return {
            name: value
            for name, value in action.items()
            if value not in (None, {}) and (name, value) != ("type", "exec")
        }
    return action


def _output(item: Mapping[str, Any], at: str) -> str:
    """Return a tool's output; other than strings and message parts it becomes JSON."""
    output = item.get("output")
    if item["type"] in TEXT_OUTPUTS or isinstance(output, str):
        return output_text(output, f"{at}.output")
    return json.dumps(without_nulls(output), ensure_ascii=False)
