"""Converts content blocks of /v1/messages to messages of a chat.

Tool results are blocks of user messages here; a chat has separate messages for them. Every block is read or
refused, except redacted thinking, which only its own server can decrypt.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ....cluster.errors import RequestError
from ..protocol.tool_outputs import TranslatedMessages, output_text, readable_text, required_text
from ..wire.json_io import JsonObject

Content = str | list[dict[str, Any]]  # Any: JSON
FAILED = "Error:"


def read_messages(system: Content | None, messages: Sequence[tuple[str, Content]]) -> TranslatedMessages:
    """Return the conversation of a request. `messages`: role (user, assistant, system) and content."""
    found = TranslatedMessages()
    if system:
        found.add({"role": "system", "content": _text_of(system, "system")}, "system")
    for i, (role, content) in enumerate(messages):
        at = f"messages.{i}"
        blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
        if role == "user":
            _read_user(found, blocks, at)
        elif role == "system":
            found.add({"role": role, "content": _text_of(content, f"{at}.content")}, at)
        else:
            found.add(_read_assistant(blocks, at), at)
    if found.messages:
        last = found.messages[-1]
        found.is_open = last["role"] == "assistant" and bool(last["content"]) and "tool_calls" not in last
    return found


def _read_user(found: TranslatedMessages, blocks: Sequence[Mapping[str, Any]], at: str) -> None:
    """Add texts and tool results in order. Adjacent texts form one message."""
    texts: list[str] = []

    def flush_text() -> None:
        if texts:
            found.add({"role": "user", "content": "\n".join(texts)}, at)
            texts.clear()

    for i, block in enumerate(blocks):
        where = f"{at}.content.{i}"
        if block.get("type") == "tool_result":
            flush_text()
            found.add(_result(block, where), at)
        else:
            text = readable_text(block)
            texts.append(_text(block, where) if text is None else text)
    flush_text()


def _result(block: Mapping[str, Any], at: str) -> JsonObject:
    """Return a tool result. An error is marked in its text: a chat's message has no field for it."""
    content = output_text(block.get("content"), f"{at}.content")
    if block.get("is_error"):
        content = f"{FAILED} {content}".rstrip()
    return {"role": "tool", "tool_call_id": required_text(block, "tool_use_id", at), "content": content}


def _read_assistant(blocks: Sequence[Mapping[str, Any]], at: str) -> JsonObject:
    """Return one message. Adjacent texts are joined by newlines; those around a call are one text."""
    message: JsonObject = {"role": "assistant", "content": ""}
    before = None
    for i, block in enumerate(blocks):
        where = f"{at}.content.{i}"
        kind = block.get("type")
        if kind == "thinking":
            message["reasoning_content"] = message.get("reasoning_content", "") + required_text(
                block, kind, where
            )
        elif kind == "tool_use":
            message.setdefault("tool_calls", []).append(_call(block, where))
        elif kind != "redacted_thinking":
            message["content"] += ("\n" if before == "text" else "") + _text(block, where)
        before = kind
    return message


def _call(block: Mapping[str, Any], at: str) -> JsonObject:
    function = {"name": required_text(block, "name", at), "arguments": block.get("input")}
    return {"id": required_text(block, "id", at), "type": "function", "function": function}


def _text_of(content: Any, at: str) -> str:  # Any: JSON.
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not all(isinstance(block, Mapping) for block in content):
        raise RequestError(f"{at} must be a string or a list of blocks.", param=at)
    return "\n".join(_text(block, f"{at}.{i}") for i, block in enumerate(content))


def _text(block: Mapping[str, Any], at: str) -> str:
    kind = required_text(block, "type", at)
    if kind != "text":
        raise RequestError(
            f"{at}: a block of type {kind[:60]} is not allowed here. This model reads text: blocks of "
            "type text, tool_use, tool_result and thinking, each where Anthropic's API has it.",
            param=at,
        )
    return required_text(block, "text", at)
