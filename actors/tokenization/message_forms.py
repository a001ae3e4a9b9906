"""The form in which one template takes contents and the arguments of calls.

*Contents* are text, or a list of text parts; clients send both. Templates take text, parts, or both:

    {{ message.content + "\\n" }}                              fails for parts, or writes them as Python would
    {% for part in message.content %}{{ part.text }}          loses text
    {{ message.content[0].text }}                             loses all parts but one
    {% if message.content is string %} .. {% else %} ..       takes both

A content is passed as sent if the template takes it so, and else in the other form. Parts become lines.

*Arguments* are objects or text (`client_messages.py`); a template may take only one of them.

What a template takes is found by rendering short conversations, each once.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ...cluster.errors import RequestError
from .client_messages import CALL_ID, Message, Messages, invalid_json, text_of, text_parts, with_arguments

_PROBES = "manta-probe", "another-probe"
_KEY = "manta-key"


@dataclass(frozen=True, slots=True)
class _Forms:
    text: bool
    part: bool  # a list of one part
    parts: bool  # a list of several


class ContentForms:
    """The forms of content that a template takes, for each role.

    `render` raises RequestError for what the template rejects.
    """

    def __init__(self, render: Callable[[Messages], str]) -> None:
        self._render = render
        self._found: dict[str, _Forms] = {}

    def apply(self, messages: Messages) -> list[Message]:
        return [self._written(message) for message in messages]

    def _written(self, message: Message) -> Message:
        content, forms = message.get("content"), self._of(message.get("role") or "")
        if not isinstance(content, str):
            if forms.parts or not isinstance(content, list | tuple):
                return message
            content = text_of(message)
        in_parts = forms.part and not forms.text
        return {**message, "content": text_parts(content) if in_parts else content}

    def _of(self, role: str) -> _Forms:
        if role not in self._found:
            self._found[role] = self._find(role)
        return self._found[role]

    def _find(self, role: str) -> _Forms:
        first, second = _PROBES
        parts = [{**part, _KEY: ""} for text in _PROBES for part in text_parts(text)]
        one, two = self._shown(role, parts[:1]), self._shown(role, parts)
        is_dumped = _KEY in one  # the list is written as Python or JSON would write it
        return _Forms(
            text=first in self._shown(role, first),
            part=first in one and not is_dumped,
            parts=first in two and second in two and not is_dumped,
        )

    def _shown(self, role: str, content: Any) -> str:
        """Render a message with this content; "" if the template rejects it."""
        user, probed = {"role": "user", "content": "x"}, {"role": role, "content": content}
        try:
            match role:
                case "user":
                    return self._render([probed])
                case "assistant":
                    return self._render([*self.apply([user]), probed, *self.apply([user])])
                case "tool":
                    probed |= {"tool_call_id": CALL_ID, "name": "probe"}
                    called = self.apply([user, _call({})])
                    forms = ArgumentForms.of(lambda messages: self._render(self.apply(messages[:-1])))
                    return self._render([*forms.apply(called), probed])
                case _:
                    return self._render([probed, *self.apply([user])])
        except RequestError:
            return ""


@dataclass(frozen=True, slots=True)
class ArgumentForms:
    objects: bool  # it renders objects
    text: bool  # it renders text unchanged

    @classmethod
    def of(cls, render: Callable[[Messages], str]) -> ArgumentForms:
        probe, _ = _PROBES
        return cls(
            objects=_rendered(render, {"key": probe}) is not None,
            text=probe in (_rendered(render, f'{{"key": "{probe}') or ""),
        )

    def apply(self, messages: Messages) -> list[Message]:
        return with_arguments(messages, self._written)

    def _written(self, arguments: Any) -> Any:
        if isinstance(arguments, str):
            return arguments if self.text or not self.objects else invalid_json(arguments)
        return arguments if self.objects or not self.text else json.dumps(arguments, ensure_ascii=False)


def _call(arguments: Any) -> Message:
    call = {"id": CALL_ID, "type": "function", "function": {"name": "probe", "arguments": arguments}}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


def _rendered(render: Callable[[Messages], str], arguments: Any) -> str | None:
    """Render a call with these arguments; None if the template rejects it."""
    messages = [
        {"role": "user", "content": "x"},
        _call(arguments),
        {"role": "tool", "tool_call_id": CALL_ID, "name": "probe", "content": "x"},
    ]
    try:
        return render(messages)
    except RequestError:
        return None
