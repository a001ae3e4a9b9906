"""Converts input items of /v1/responses to messages of a chat.

An answer consists of several items (its reasoning, its text, each of its calls), and clients send them back
as such; a chat has one message for all of them. Items that cannot be used here are skipped and reported to
the client, so that a session can continue: calls that OpenAI's servers answered, content that another server
has encrypted, references to items that it stores, unknown types.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from ....cluster.errors import RequestError
from ..protocol.tool_outputs import TranslatedMessages, output_text, required_text
from ..wire.json_io import JsonObject
from .tools import INPUT, flat_name

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

    def read(self, item: Mapping[str, Any], at: str) -> None:
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
            id = _call_id(item) or required_text(item, "call_id", at)
            self.conversation.add({"role": "tool", "tool_call_id": id, "content": _output(item, at)}, at)
        elif f"input.{kind}" not in self.conversation.skipped:
            self.conversation.skipped.append(f"input.{kind}")

    def _read_message(self, item: Mapping[str, Any], at: str) -> None:
        role, text = item.get("role"), text_of(item.get("content"), f"{at}.content")
        if role not in ROLES:
            raise RequestError(f"{at}.role must be one of {', '.join(ROLES)}.", param=f"{at}.role")
        if role == "assistant":
            self._read_text(text, at)
        else:
            self.conversation.add({"role": role, "content": text}, at)

    def _read_text(self, text: str, at: str) -> None:
        """Add text. Text after a call continues the text before it."""
        messages = self.conversation.messages
        if messages and messages[-1].get("tool_calls"):
            messages[-1]["content"] += text
        else:
            self._answer(at, without=PARTS[1:])["content"] = text

    def _read_call(self, kind: str, item: Mapping[str, Any], at: str) -> None:
        name = required_text(item, "name", at) if kind in NAMED_CALLS else kind.removesuffix("_call")
        function = {"name": flat_name(item.get("namespace"), name), "arguments": _arguments(kind, item)}
        call = {"id": required_text(item, "call_id", at), "type": "function", "function": function}
        calls = self._answer(at).setdefault("tool_calls", [])
        place = f"messages.{len(self.conversation.messages) - 1}.tool_calls.{len(calls)}"
        self.conversation.names |= {f"{place}.function": at, place: at}
        calls.append(call)

    def _answer(self, at: str, without: Sequence[str] = ()) -> JsonObject:
        """Return the answer's message that an item is part of; a new one if it has any of `without`."""
        messages = self.conversation.messages
        last = messages[-1] if messages else {"role": None}
        if last["role"] != "assistant" or any(last.get(name) for name in without):
            self.conversation.add({"role": "assistant", "content": ""}, at)
        return messages[-1]


def text_of(content: Any, at: str) -> str:  # Any: JSON.
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise RequestError(f"{at} must be a string or a list of parts.", param=at)
    return "\n".join(_part(part, f"{at}.{i}") for i, part in enumerate(content))


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
    return json.dumps(output, ensure_ascii=False)
