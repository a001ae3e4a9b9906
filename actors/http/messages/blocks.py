"""Content blocks of /v1/messages become messages of a chat.

What tools returned stands there in messages of the user; a chat has messages of their own for it. Messages of
one role beside each other are one turn. Every block is read or refused; only thinking that its server has
encrypted says nothing here.
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

    def turn(self, role: str, name: str) -> JsonObject:
        """The last message if it is of that role, else a new one."""
        if not self.messages or self.messages[-1]["role"] != role:
            self.add({"role": role, "content": ""}, name)
        return self.messages[-1]

    def say(self, role: str, text: str, name: str) -> None:
        """A text on a line of its own in the turn of a role."""
        turn = self.turn(role, name)
        turn["content"] += "\n" + text if turn["content"] else text


def read_messages(system: Content | None, messages: Sequence[tuple[str, Content]]) -> Conversation:
    """The conversation of a request.

    Args:
        messages: pairs of a role (user, assistant or system) and a content.
    """
    found = Conversation()
    if system:
        _read_system(found, system, "system", "system")
    for i, (role, content) in enumerate(messages):
        at = f"messages.{i}"
        blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
        if role == "user":
            _read_user(found, blocks, at)
        elif role == "system":
            _read_system(found, content, at, f"{at}.content")
        else:
            _read_assistant(found.turn("assistant", at), blocks, at)
    if found.messages:
        last = found.messages[-1]
        found.is_open = last["role"] == "assistant" and bool(last["content"]) and "tool_calls" not in last
    return found


def _read_system(found: Conversation, content: Content, at: str, where: str) -> None:
    found.say("system", _text_of(content, where), at)


def _read_user(found: Conversation, blocks: Sequence[Mapping[str, Any]], at: str) -> None:
    """Texts and what tools returned, in their order."""
    for i, block in enumerate(blocks):
        where = f"{at}.content.{i}"
        if block.get("type") == "tool_result":
            content = _text_of(block.get("content") or "", f"{where}.content")
            id = _string(block, "tool_use_id", where)
            found.add({"role": "tool", "tool_call_id": id, "content": content}, at)
        else:
            found.say("user", _text(block, where), at)


def _read_assistant(turn: JsonObject, blocks: Sequence[Mapping[str, Any]], at: str) -> None:
    for i, block in enumerate(blocks):
        where = f"{at}.content.{i}"
        kind = block.get("type")
        if kind == "thinking":
            turn["reasoning_content"] = turn.get("reasoning_content", "") + _string(block, kind, where)
        elif kind == "tool_use":
            turn.setdefault("tool_calls", []).append(_call(block, where))
        elif kind != "redacted_thinking":
            turn["content"] += _text(block, where)


def _call(block: Mapping[str, Any], at: str) -> JsonObject:
    function = {"name": _string(block, "name", at), "arguments": block.get("input")}
    return {"id": _string(block, "id", at), "type": "function", "function": function}


def _text_of(content: Any, at: str) -> str:  # Any: JSON.
    """A string, or a list of blocks that are text, one below the other."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not all(isinstance(block, Mapping) for block in content):
        raise RequestError(f"{at} must be a string or a list of blocks.", param=at)
    return "\n".join(_text(block, f"{at}.{i}") for i, block in enumerate(content))


def _text(block: Mapping[str, Any], at: str) -> str:
    kind = _string(block, "type", at)
    if kind != "text":
        raise RequestError(
            f"{at}: a block of type {kind[:60]} cannot stand here. This model reads text: blocks of "
            "type text, tool_use, tool_result and thinking, each where Anthropic's API has it.",
            param=at,
        )
    return _string(block, "text", at)


def _string(block: Mapping[str, Any], name: str, at: str) -> str:
    value = block.get(name)
    if not isinstance(value, str):
        raise RequestError(f"{at}.{name} must be a string.", param=f"{at}.{name}")
    return value
