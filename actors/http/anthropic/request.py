"""Bodies of /v1/messages and count_tokens, and their translation to a `ChatRequest`.

Tool results are blocks of user messages here; a chat has separate messages for them. What Anthropic's servers
add to a conversation (their tools' calls and results, encrypted thinking) is skipped and named to the client,
so that a session can continue. Images and files of the user are refused: the answer would ignore them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from ....cluster.errors import RequestError
from ..generation.chat_adapter import SupportedOptions, chat_request, rename_error_fields
from ..protocol.chat_completion import ChatRequest
from ..protocol.tool_outputs import TranslatedMessages, content_of, output_text, readable_text, required_text
from ..wire.json_io import Integer, JsonObject, Number
from ..wire.request_model import RequestModel, unread_keys
from .tools import AnthropicTool, own_tool

# Field -> what to do instead of using it.
NEVER: Mapping[str, str] = {
    "container": "This server runs no containers: run tools yourself.",
    "thread": "This server keeps no conversations: send all messages.",
    "compaction": "This server does not compact: shorten `messages`.",
    "mcp_servers": "This server calls no other servers: list their tools in `tools`, and call them yourself.",
    "n": "A message has one answer: send several requests, or use /v1/chat/completions.",
    "stop": "The field is called stop_sequences here.",
    "max_completion_tokens": "The field is called max_tokens here.",
    "response_format": "The field is called output_config.format here.",
    "reasoning_effort": "The field is called output_config.effort here.",
    "thinking_token_budget": "The field is called thinking.budget_tokens here.",
    "logprobs": "Ask /v1/chat/completions for log probabilities.",
    "top_logprobs": "Ask /v1/chat/completions for log probabilities.",
    "prompt_logprobs": "Ask /v1/chat/completions for log probabilities.",
    "return_token_ids": "Ask /v1/chat/completions for tokens.",
}
# Fields that describe the request or belong to a hosted service; they do not affect the answer.
SILENT = frozenset(
    {
        *("metadata", "service_tier", "cache_control", "context_management", "inference_geo", "speed"),
        *("diagnostics", "workspace_id", "user_profile_id", "stream_options"),
    }
)
# Path in the chat -> in this body.
NAMES = {
    "prompt": "messages",
    "stop": "stop_sequences",
    "max_completion_tokens": "max_tokens",
    "response_format": "output_config.format",
    "response_format.json_schema": "output_config.format",
    "reasoning_effort": "output_config.effort",
    "thinking_token_budget": "thinking.budget_tokens",
    "tool_choice.function": "tool_choice",
}
# The answer continues the conversation's last message, which is the assistant's.
CONTINUES_LAST_MESSAGE = {"continue_final_message": True, "add_generation_prompt": False}
CHOICES = {"auto": "auto", "any": "required", "none": "none"}


class Message(RequestModel):
    role: Literal["user", "assistant", "system"]
    content: Content


class ToolChoice(RequestModel):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool = False

    def for_chat(self) -> str | JsonObject:
        if self.type != "tool":
            return CHOICES[self.type]
        if self.name is None:
            raise RequestError('tool_choice.name: type "tool" needs it.', param="tool_choice.name")
        return {"type": "function", "function": {"name": self.name}}


class AnthropicThinking(RequestModel):
    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: Annotated[Integer | None, Field(ge=1)] = None


class OutputFormat(RequestModel):
    type: Literal["json_schema"]
    json_schema: Annotated[dict[str, Any], Field(alias="schema")]


class OutputConfig(RequestModel):
    format: OutputFormat | None = None
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None


class CountRequest(RequestModel):
    """The fields that determine the prompt."""

    messages: Annotated[list[Message], Field(min_length=1)]
    model: str | None = None
    system: Content | None = None
    tools: list[Annotated[AnthropicTool, BeforeValidator(own_tool)]] | None = None
    tool_choice: ToolChoice | None = None
    thinking: AnthropicThinking | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None

    @model_validator(mode="after")
    def _one_format(self) -> CountRequest:
        if self.output_format is not None and self.output_config and self.output_config.format is not None:
            raise RequestError(
                "output_format is the earlier name of output_config.format. Send one of them.",
                param="output_format",
            )
        return self

    def conversation(self) -> TranslatedMessages:
        return read_messages(self.system, [(message.role, message.content) for message in self.messages])

    def ignored(self, supported: SupportedOptions) -> list[str]:
        """Return the names of ignored fields that clients send for every model."""
        effort = self.output_config is not None and self.output_config.effort is not None
        found = ["output_config.effort"] if effort and not supported.effort else []
        if self.thinking is None:
            return found
        if self.thinking.budget_tokens is not None and not supported.thinks:
            found.append("thinking.budget_tokens")
        return [*found, "thinking"] if self.thinking.type == "disabled" and not supported.switch else found

    def for_chat(self, conversation: TranslatedMessages, supported: SupportedOptions) -> ChatRequest:
        """Translate the body. Raises RequestError with this body's field names."""
        extra = self.model_extra or {}
        for name, remedy in NEVER.items():
            if extra.get(name):
                raise RequestError(f"{name} is not supported. {remedy}", param=name)
        known = {name: value for name, value in extra.items() if name not in NEVER and name not in SILENT}
        with rename_error_fields({**NAMES, **conversation.names, **self._tool_names()}):
            return chat_request({**known, **self._fields(conversation, supported)})

    @property
    def eager_tools(self) -> frozenset[str]:
        return frozenset(tool.name for tool in self.tools or () if tool.eager_input_streaming)

    def _tool_names(self) -> dict[str, str]:
        """Map chat's paths in tools to this body's, which have one level less."""
        names: dict[str, str] = {}
        for i in range(len(self.tools or ())):
            names[f"tools.{i}.function"] = f"tools.{i}"
            names[f"tools.{i}.function.parameters"] = f"tools.{i}.input_schema"
        return names

    def _fields(self, conversation: TranslatedMessages, supported: SupportedOptions) -> JsonObject:
        choice, config = self.tool_choice, self.output_config or OutputConfig()
        return {
            "model": self.model,
            "messages": conversation.messages,
            "tools": [tool.for_chat() for tool in self.tools] if self.tools else None,
            "tool_choice": choice.for_chat() if choice else None,
            **({"parallel_tool_calls": False} if choice and choice.disable_parallel_tool_use else {}),
            "response_format": _response_format(self.output_format or config.format),
            "reasoning_effort": config.effort if supported.effort else None,
            **(CONTINUES_LAST_MESSAGE if conversation.is_open else {}),
            **self._thinking_fields(supported),
        }

    def _thinking_fields(self, supported: SupportedOptions) -> JsonObject:
        if self.thinking is None:
            return {}
        fields: JsonObject = {
            "thinking_token_budget": self.thinking.budget_tokens if supported.thinks else None
        }
        if supported.switch:
            own = (self.model_extra or {}).get("chat_template_kwargs") or {}
            fields["chat_template_kwargs"] = {"enable_thinking": self.thinking.type != "disabled", **own}
        return fields


class MessagesRequest(CountRequest):
    max_tokens: Annotated[Integer, Field(ge=1)]
    stream: bool | None = None
    temperature: Number | None = None
    top_p: Number | None = None
    top_k: Integer | None = None
    stop_sequences: list[str] | None = None

    def _fields(self, conversation: TranslatedMessages, supported: SupportedOptions) -> JsonObject:
        return {
            **super()._fields(conversation, supported),
            "max_tokens": self.max_tokens,
            "stream": self.stream,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "stop": self.stop_sequences,
        }


def _response_format(format: OutputFormat | None) -> JsonObject | None:
    if format is None:
        return None
    return {"type": "json_schema", "json_schema": {"name": "output", "schema": format.json_schema}}


Content = str | list[dict[str, Any]]  # Any: JSON
FAILED = "Error:"
# Types of blocks that Anthropic's servers make or read.
OF_SERVERS = re.compile(
    r"\w+_tool_(use|result)|mcp_tool_listing|tool_(addition|removal)|container_upload|compaction|fallback"
    r"|(redacted_)?thinking"
)
# Type of a block -> the keys that are read, besides descriptions.
READ_KEYS: Mapping[str, tuple[str, ...]] = {
    "text": ("text",),
    "thinking": ("thinking",),
    "tool_use": ("name", "input"),
    "tool_result": ("tool_use_id", "content", "is_error"),
    "search_result": ("title", "source", "content"),
    "document": ("title", "context", "source"),
    "compaction": ("content",),
}


def read_messages(system: Content | None, messages: Sequence[tuple[str, Content]]) -> TranslatedMessages:
    """Return the conversation of a request. `messages`: role (user, assistant, system) and content."""
    found = TranslatedMessages()
    if system:
        found.add({"role": "system", "content": _content(system, "system")}, "system")
        _name_unread(found, system, "system")
    for i, (role, content) in enumerate(messages):
        at = f"messages.{i}"
        blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
        if role == "user":
            _read_user(found, blocks, at)
        elif role == "system":
            found.add({"role": role, "content": _content(content, f"{at}.content")}, at)
            _name_unread(found, blocks)
        else:
            _read_assistant(found, blocks, at)
    if found.messages:
        last = found.messages[-1]
        found.is_open = last["role"] == "assistant" and bool(last["content"]) and "tool_calls" not in last
    return found


def _read_user(found: TranslatedMessages, blocks: Sequence[Mapping[str, Any]], at: str) -> None:
    """Add texts and tool results in order. Adjacent texts form one message."""
    texts: list[str] = []

    def flush_text() -> None:
        if texts:
            found.add({"role": "user", "content": content_of(texts)}, at)
            texts.clear()

    for i, block in enumerate(blocks):
        where, kind = f"{at}.content.{i}", block.get("type")
        if kind == "tool_result":
            flush_text()
            found.add(_result(block, where), at)
        elif isinstance(kind, str) and OF_SERVERS.fullmatch(kind):
            found.skip(f"messages.{kind}")
            continue
        else:
            text = readable_text(block)
            texts.append(_text(block, where) if text is None else text)
        _name_unread(found, [block])
    flush_text()


def _result(block: Mapping[str, Any], at: str) -> JsonObject:
    """Return a tool result. An error is marked in its text: a chat's message has no field for it."""
    content = output_text(block.get("content"), f"{at}.content")
    if block.get("is_error"):
        content = f"{FAILED} {content}".rstrip()
    return {"role": "tool", "tool_call_id": required_text(block, "tool_use_id", at), "content": content}


def _read_assistant(found: TranslatedMessages, blocks: Sequence[Mapping[str, Any]], at: str) -> None:
    """Add one message. Adjacent texts are parts of it; those around a call are one text."""
    message: JsonObject = {"role": "assistant", "content": ""}
    texts: list[str] = []
    before = None
    for i, block in enumerate(blocks):
        where = f"{at}.content.{i}"
        kind = required_text(block, "type", where)
        if kind == "thinking":
            message["reasoning_content"] = message.get("reasoning_content", "") + required_text(
                block, kind, where
            )
        elif kind == "tool_use":
            message.setdefault("tool_calls", []).append(_call(block, where))
        elif (text := _answer_text(block, where)) is not None:
            texts[-1:] = [*texts[-1:], text] if before == "text" else ["".join([*texts[-1:], text])]
            kind = "text"
        else:
            found.skip(f"messages.{kind}")
            continue
        _name_unread(found, [block])
        before = kind
    message["content"] = content_of(texts)
    if len(message) > 2 or message["content"] or not blocks:
        found.add(message, at)


def _answer_text(block: Mapping[str, Any], at: str) -> str | None:
    """Return the text that a block of an answer shows; None if it shows none."""
    if block["type"] == "text":
        return required_text(block, "text", at)
    if block["type"] == "compaction":  # the summary of what was before
        return block["content"] if isinstance(block.get("content"), str) else None
    return readable_text(block)


def _name_unread(
    found: TranslatedMessages, blocks: str | Sequence[Mapping[str, Any]], at: str = "messages.content"
) -> None:
    for block in () if isinstance(blocks, str) else blocks:
        for name in unread_keys(block, *READ_KEYS.get(block["type"], ())):
            found.note_unknown(f"{at}.{name}")


def _call(block: Mapping[str, Any], at: str) -> JsonObject:
    function = {"name": required_text(block, "name", at), "arguments": block.get("input")}
    return {"id": required_text(block, "id", at), "type": "function", "function": function}


def _content(content: Any, at: str) -> str | list[JsonObject]:  # Any: JSON.
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not all(isinstance(block, Mapping) for block in content):
        raise RequestError(f"{at} must be a string or a list of blocks.", param=at)
    return content_of([_text(block, f"{at}.{i}") for i, block in enumerate(content)])


def _text(block: Mapping[str, Any], at: str) -> str:
    kind = required_text(block, "type", at)
    if kind != "text":
        raise RequestError(
            f"{at}: a block of type {kind[:60]} is not allowed here. This model reads text: blocks of "
            "type text, tool_use, tool_result and thinking, each where Anthropic's API has it.",
            param=at,
        )
    return required_text(block, "text", at)
