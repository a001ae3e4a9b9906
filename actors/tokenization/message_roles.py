"""Finds which roles a chat template accepts at which position, and rewrites conversations accordingly.

Clients place system and developer messages anywhere, and several messages of one role in a row. Templates
reject some of these (Qwen3.5 accepts a system message only first, Gemma 2 none, Mistral no two user messages
in a row) or drop them silently (Qwen3 developer messages, gpt-oss a second system message). Messages that a
template accepts are passed unchanged. All others become part of a message that it accepts:

    developer                       system, if the template does not name developers
    several of them at the start    one message
    at the start, none accepted     the beginning of the first user message, or a user message of its own
    after the start                 the end of the preceding user message, else the beginning of the following
                                    one, else a user message of its own
    a user message after a user's   one message; likewise for the assistant
    a user message after a tool's   the end of the tool's result
    text with reasoning and calls   reasoning, if the template accepts only one of them (gpt-oss)

What a template accepts is found by rendering short conversations, each once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any, TypeAlias

from ...cluster.errors import RequestError
from .call_arguments import has_calls

Message: TypeAlias = Mapping[str, Any]  # Any: message content is a string or a list of typed parts.
SYSTEM_ROLES = ("system", "developer")
MAX_PROBED = 4  # leading messages; a template that accepts this many is assumed to accept more
_BREAK = "\n\n"
_REASONING = ("reasoning", "reasoning_content", "thinking")
# Mistral's templates require an id of nine letters or digits.
_CALL_ID = "probe0000"


class TemplateRoles:
    """The roles that one template accepts.

    `render` raises RequestError for what the template rejects. `names_developers`: its source contains the
    word "developer".
    """

    def __init__(self, render: Callable[[Sequence[Message]], str], *, names_developers: bool) -> None:
        self._render = render
        self._names_developers = names_developers
        self._taken: dict[tuple[str, ...], bool] = {}

    def takes(self, *roles: str) -> bool:
        """Return whether the template renders every message of a conversation with these roles.

        `call` is an assistant's message with a call, `said call` one with reasoning and text; their contents
        are not checked.
        """
        if roles not in self._taken:
            self._taken[roles] = self._try(roles)
        return self._taken[roles]

    def fit(self, messages: Sequence[Message]) -> list[Message]:
        """Return the conversation in a form that the template accepts; unchanged where possible."""
        found = [self._with_known_role(message) for message in messages]
        if not self.takes("user"):
            return found
        num_leading = next((i for i, each in enumerate(found) if not _is_system(each)), len(found))
        leading, following = found[:num_leading], found[num_leading:]
        taken = self._leading(leading, ("user",) if following else ())
        found = self._following(found) if taken is None else taken + self._following(following)
        if has_calls(found) and self._wants_thought_text():
            found = [_with_text_as_reasoning(each) for each in found]
        for role, probed in (
            ("user", ("user", "user")),
            ("assistant", ("user", *2 * ("assistant",), "user")),
        ):
            if _is_in_a_row(found, role, role) and not self.takes(*probed):
                found = _joined(found, role, role)
        answered = ("user", "call", "tool")
        if (
            _is_in_a_row(found, "tool", "user")
            and self.takes(*answered)
            and not self.takes(*answered, "user")
        ):
            found = _joined(found, "tool", "user")
        return found

    def _with_known_role(self, message: Message) -> Message:
        if message.get("role") != "developer":
            return message
        is_known = self._names_developers and self.takes("developer", "user")
        return message if is_known else {**message, "role": "system"}

    def _leading(self, messages: list[Message], following: tuple[str, ...]) -> list[Message] | None:
        """Return leading system messages in an accepted form; None if none is accepted before `following`."""
        roles = [each["role"] for each in messages[:MAX_PROBED]]
        if not roles or self.takes(*roles, *following):
            return messages
        role = next((role for role in (roles[0], "system") if self.takes(role, *following)), None)
        return None if role is None else _joined_all(messages, role)

    def _following(self, messages: list[Message]) -> list[Message]:
        """Rewrite system messages that the template rejects after the start."""
        found: list[Message] = []
        awaits_user = False  # the last message was a system message that may be merged into a user's
        for message in messages:
            if _is_system(message) and not self._accepts_after(message["role"]):
                message = {**message, "role": "user"}
                if found and found[-1]["role"] == "user":
                    found[-1] = _join(found[-1], message)
                else:
                    found.append(message)
                    awaits_user = True
                continue
            if awaits_user and message.get("role") == "user":
                message = _join(found.pop(), message)
            awaits_user = False
            found.append(message)
        return found

    def _wants_thought_text(self) -> bool:
        """Return whether text next to reasoning and calls must become reasoning."""
        return self.takes("user", "call", "tool") and not self.takes("user", "said call", "tool")

    def _accepts_after(self, role: str) -> bool:
        return self.takes("user", role, "user") and self.takes("user", "assistant", role, "user")

    def _try(self, roles: tuple[str, ...]) -> bool:
        marks = [f"probed{i}text" for i in range(len(roles))]
        messages = [_probe(role, mark) for role, mark in zip(roles, marks, strict=True)]
        try:
            rendered = self._render(messages)
        except RequestError:
            return False
        pairs = zip(marks, roles, strict=True)
        return all(mark in rendered for mark, role in pairs if not role.endswith("call"))


def _probe(role: str, text: str) -> Message:
    if not role.endswith("call"):
        return {"role": role, "content": text} | ({"tool_call_id": _CALL_ID} if role == "tool" else {})
    call = {"id": _CALL_ID, "type": "function", "function": {"name": "probe", "arguments": {}}}
    message = {"role": "assistant", "content": "", "tool_calls": [call]}
    return message | ({"content": text, **dict.fromkeys(_REASONING, text)} if role == "said call" else {})


def _with_text_as_reasoning(message: Message) -> Message:
    reasoning = next((message[name] for name in _REASONING if message.get(name)), None)
    if not message.get("tool_calls") or reasoning is None or not message.get("content"):
        return message
    joined = _join({"content": reasoning}, {"content": message["content"]})["content"]
    return {**message, "content": "", **dict.fromkeys(_REASONING, joined)}


def _is_system(message: Message) -> bool:
    return message.get("role") in SYSTEM_ROLES


def _is_in_a_row(messages: Sequence[Message], first: str, second: str) -> bool:
    return any((a.get("role"), b.get("role")) == (first, second) for a, b in pairwise(messages))


def _joined(messages: Sequence[Message], first: str, second: str) -> list[Message]:
    found: list[Message] = []
    for message in messages:
        if found and (found[-1].get("role"), message.get("role")) == (first, second):
            found[-1] = _join(found[-1], message)
        else:
            found.append(message)
    return found


def _joined_all(messages: Sequence[Message], role: str) -> list[Message]:
    joined = {**messages[0], "role": role}
    for message in messages[1:]:
        joined = _join(joined, message)
    return [joined]


def _join(one: Message, other: Message) -> Message:
    joined = dict(one)
    contents = [content for each in (one, other) if (content := each.get("content"))]
    if all(isinstance(content, str) for content in contents):
        joined["content"] = _BREAK.join(contents)
    else:
        joined["content"] = [part for content in contents for part in _parts(content)]
    for name in _REASONING:
        if other.get(name):
            joined[name] = _BREAK.join(filter(None, (one.get(name), other[name])))
    if other.get("tool_calls"):
        joined["tool_calls"] = [*(one.get("tool_calls") or ()), *other["tool_calls"]]
    return joined


def _parts(content: str | Sequence[object]) -> Sequence[object]:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content
