"""Converts tool call arguments in a conversation's history to a form that the chat template can render.

APIs carry arguments as JSON in a string; templates are written for objects (transformers' convention). Models
make mistakes and responses are cut off, so a string may not be a JSON object; the template then gets the text
as the model wrote it. It is never an error, because clients send the history again with every turn. A
template that cannot render text (it iterates an object's items) gets an object containing the text; a
template that cannot render an object (it joins strings) gets JSON.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from ...cluster.errors import RequestError
from .surrogates import loads

Messages: TypeAlias = Sequence[Mapping[str, Any]]  # Any: a message's content is a string or a list of parts
# Key of an object that wraps invalid arguments; Anthropic's documentation recommends it.
INVALID_JSON = "INVALID_JSON"
MAX_DEPTH = 64  # of an object given to templates; deeper arguments are passed as text
_PROBE = "manta-probe"


def parse_arguments(messages: Messages) -> list[Mapping[str, Any]]:
    """Make each call's arguments an object if they are one, else text."""
    return _with_arguments(messages, _parsed)


def read_object(arguments: str) -> dict[str, Any] | None:
    """Return the JSON object; None if the arguments are none. "" is an empty object."""
    try:
        found = loads(arguments or "{}")
    except ValueError:
        return None
    return found if isinstance(found, dict) and _depth_fits(found, MAX_DEPTH) else None


def invalid_json(arguments: str) -> dict[str, Any]:
    """Wrap invalid arguments in an object, for APIs and templates that only take objects."""
    return {INVALID_JSON: arguments}


@dataclass(frozen=True, slots=True)
class ArgumentForms:
    objects: bool  # it renders objects
    text: bool  # it renders text unchanged

    @classmethod
    def of(cls, render: Callable[[Messages], str]) -> ArgumentForms:
        return cls(
            objects=_rendered(render, {"key": _PROBE}) is not None,
            text=_PROBE in (_rendered(render, f'{{"key": "{_PROBE}') or ""),
        )

    def apply(self, messages: Messages) -> list[Mapping[str, Any]]:
        return _with_arguments(messages, self._written)

    def _written(self, arguments: Any) -> Any:
        if isinstance(arguments, str):
            return arguments if self.text or not self.objects else invalid_json(arguments)
        return arguments if self.objects or not self.text else json.dumps(arguments, ensure_ascii=False)


def has_calls(messages: Messages) -> bool:
    return any(message.get("tool_calls") for message in messages)


def _with_arguments(messages: Messages, change: Callable[[Any], Any]) -> list[Mapping[str, Any]]:
    return [
        {**message, "tool_calls": [_changed(call, change) for call in message["tool_calls"]]}
        if isinstance(message.get("tool_calls"), list | tuple)
        else message
        for message in messages
    ]


def _changed(call: Any, change: Callable[[Any], Any]) -> Any:  # Any: input of `LLM.chat`
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        return call
    return {**call, "function": {**function, "arguments": change(function.get("arguments"))}}


def _parsed(arguments: Any) -> Any:
    """Return arguments as an object or as text. None becomes an empty object."""
    found = read_object(arguments) if isinstance(arguments, str) else {} if arguments is None else arguments
    if not isinstance(found, Mapping) or not _depth_fits(found, MAX_DEPTH):
        return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    text = found.get(INVALID_JSON)
    return text if len(found) == 1 and isinstance(text, str) else found


def _depth_fits(value: Any, maximum: int) -> bool:
    if isinstance(value, Mapping):
        return maximum > 0 and all(_depth_fits(each, maximum - 1) for each in value.values())
    if isinstance(value, list):
        return maximum > 0 and all(_depth_fits(each, maximum - 1) for each in value)
    return True


def _rendered(render: Callable[[Messages], str], arguments: Any) -> str | None:
    """Render a call with these arguments; None if the template rejects it."""
    function = {"name": "probe", "arguments": arguments}
    call = {"id": "probe0000", "type": "function", "function": function}  # Mistral's ids have nine characters
    messages = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": call["id"], "name": "probe", "content": "x"},
    ]
    try:
        return render(messages)
    except RequestError:
        return None
