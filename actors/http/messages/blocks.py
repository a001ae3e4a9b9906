"""Content blocks of /v1/messages become messages of a chat.

What tools returned stands there in messages of the user; a chat has messages of their own for it. Every block
is read or refused; only thinking that its server has encrypted says nothing here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ....cluster.errors import RequestError
from ..wire import JsonObject

Content = str | list[dict[str, Any]]  # Any: JSON


@dataclass(slots=True)
class Conversation:
    """Messages as a chat has them, and for errors: `messages.3` -> the body's message that it came from.

    Attributes:
        is_open: whether the last one is the beginning of the answer.
    """

    messages: list[JsonObject] = field(default_factory=list[JsonObject])
    names: dict[str, str] = field(default_factory=dict[str, str])
    is_open: bool = False

    def add(self, message: JsonObject, name: str) -> None:
        self.names[f"messages.{len(self.messages)}"] = name
        self.messages.append(message)


def read_messages(system: Content | None, messages: Sequence[tuple[str, Content]]) -> Conversation:
    """The conversation of a request; `messages` are pairs of a role, user or assistant, and a content."""
    found = Conversation()
    if system:
        found.add({"role": "system", "content": _text_of(system, "system")}, "system")
    for i, (role, content) in enumerate(messages):
        at = f"messages.{i}"
        blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
        if role == "user":
            _read_user(found, blocks, at)
        else:
            found.add(_assistant(blocks, at), at)
    last = found.messages[-1]
    found.is_open = last["role"] == "assistant" and bool(last["content"]) and "tool_calls" not in last
    return found


def _read_user(found: Conversation, blocks: Sequence[Mapping[str, Any]], at: str) -> None:
    """Texts and what tools returned, in their order; texts beside each other are one message."""
    texts: list[str] = []

    def flush() -> None:
        if texts:
            found.add({"role": "user", "content": "\n".join(texts)}, at)
            texts.clear()

    for i, block in enumerate(blocks):
        where = f"{at}.content.{i}"
        if block.get("type") == "tool_result":
            flush()
            content = _text_of(block.get("content") or "", f"{where}.content")
            id = _string(block, "tool_use_id", where)
            found.add({"role": "tool", "tool_call_id": id, "content": content}, at)
        else:
            texts.append(_text(block, where))
    flush()


def _assistant(blocks: Sequence[Mapping[str, Any]], at: str) -> JsonObject:
    message: JsonObject = {"role": "assistant", "content": ""}
    for i, block in enumerate(blocks):
        where = f"{at}.content.{i}"
        kind = block.get("type")
        if kind == "thinking":
            message["reasoning_content"] = message.get("reasoning_content", "") + _string(block, kind, where)
        elif kind == "tool_use":
            message.setdefault("tool_calls", []).append(_call(block, where))
        elif kind != "redacted_thinking":
            message["content"] += _text(block, where)
    return message


def _call(block: Mapping[str, Any], at: str) -> JsonObject:
    arguments = block.get("input")
    if not isinstance(arguments, Mapping):
        raise RequestError(f"{at}.input must be an object.", param=f"{at}.input")
    function = {"name": _string(block, "name", at), "arguments": arguments}
    return {"id": _string(block, "id", at), "type": "function", "function": function}


def _text_of(content: Any, at: str) -> str:  # Any: JSON.
    """A string, or a list of blocks that are text, one below the other."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not all(isinstance(block, Mapping) for block in content):
        raise RequestError(f"{at} must be a string or a list of blocks.", param=at)
    return "\n".join(_text(block, f"{at}.{i}") for i, block in enumerate(content))


def _text(block: Mapping[str, Any], at: str) -> str:
    if block.get("type") != "text" or not isinstance(block.get("text"), str):
        kind = str(block.get("type"))[:60]
        raise RequestError(
            f"{at}: a block of type {kind} cannot stand here. This model reads text: blocks of type text, "
            "tool_use, tool_result and thinking, each where Anthropic's API has it.",
            param=at,
        )
    return block["text"]


def _string(block: Mapping[str, Any], name: str, at: str) -> str:
    value = block.get(name)
    if not isinstance(value, str):
        raise RequestError(f"{at}.{name} must be a string.", param=f"{at}.{name}")
    return value
