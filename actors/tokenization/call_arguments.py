"""Arguments of the calls in a conversation's history, in the form that the model's chat template can write.

APIs carry arguments as JSON in a string, and templates are written for objects (transformers' convention).
Models make slips, and answers are cut: then the string is no JSON object, and the template gets the text as
the model wrote it. No history is refused for it, because a client sends it again with every later turn.
Templates that cannot write text (they go through an object's items) get an object with the text in it; those
that cannot write an object (they join strings) get JSON. Used by `Tokenizer` and `ChatTemplate`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from ...cluster.errors import RequestError
from .surrogates import loads

Messages: TypeAlias = Sequence[Mapping[str, Any]]  # Any: a message's content is a string or a list of parts
# The key of an object that holds text in place of arguments; Anthropic's documentation recommends it.
INVALID_JSON = "INVALID_JSON"
MAX_DEPTH = 64  # of an object that templates get; what is nested deeper is text
_PROBE = "manta-probe"


def parse_arguments(messages: Messages) -> list[Mapping[str, Any]]:
    """Return the messages with the arguments of each call as an object where they are one, else as text."""
    return _with_arguments(messages, _parsed)


def read_object(arguments: str) -> dict[str, Any] | None:
    """Return the JSON object that a call's arguments are, or None; no arguments are an empty object."""
    try:
        found = loads(arguments or "{}")
    except ValueError:
        return None
    return found if isinstance(found, dict) and _depth_fits(found, MAX_DEPTH) else None


def invalid_json(arguments: str) -> dict[str, Any]:
    """Return an object in place of arguments that are none, for APIs and templates that take only objects."""
    return {INVALID_JSON: arguments}


@dataclass(frozen=True, slots=True)
class ArgumentForms:
    """What a template can write as a call's arguments.

    Attributes:
        objects: it takes objects.
        text: it takes text, and shows it.
    """

    objects: bool
    text: bool

    @classmethod
    def of(cls, render: Callable[[Messages], str]) -> ArgumentForms:
        """Try a template with a call of each form."""
        return cls(
            objects=_rendered(render, {"key": _PROBE}) is not None,
            text=_PROBE in (_rendered(render, f'{{"key": "{_PROBE}') or ""),
        )

    def apply(self, messages: Messages) -> list[Mapping[str, Any]]:
        """Return the messages with arguments in a form that the template takes."""
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


def _changed(call: Any, change: Callable[[Any], Any]) -> Any:  # Any: what `LLM.chat` is given
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        return call
    return {**call, "function": {**function, "arguments": change(function.get("arguments"))}}


def _parsed(arguments: Any) -> Any:
    """An object, or text. Nothing at all is an object without keys."""
    found = read_object(arguments) if isinstance(arguments, str) else {} if arguments is None else arguments
    if not isinstance(found, Mapping) or not _depth_fits(found, MAX_DEPTH):
        return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    text = found.get(INVALID_JSON)
    return text if len(found) == 1 and isinstance(text, str) else found


def _depth_fits(value: Any, most: int) -> bool:
    """Whether a value has at most so many levels of objects and lists."""
    if isinstance(value, Mapping):
        return most > 0 and all(_depth_fits(each, most - 1) for each in value.values())
    if isinstance(value, list):
        return most > 0 and all(_depth_fits(each, most - 1) for each in value)
    return True


def _rendered(render: Callable[[Messages], str], arguments: Any) -> str | None:
    """A prompt with a call that has these arguments, and its result; None where the template refuses it."""
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
