r"""Messages of clients in the form that a chat template and a tokenizer accept.

`TemplateRoles` finds which roles a template accepts at which position, and rewrites conversations to fit.
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

*Arguments of calls* are JSON in a string for APIs, and objects for templates (transformers' convention).
Models make mistakes and responses are cut off, so a string may not be a JSON object; the template then gets
the text as the model wrote it (`message_forms.py`). It is never an error, because clients send the history
again with every turn.

*Lone surrogates* (\ud800 to \udfff without a partner) are read as U+FFFD. JSON's escapes and Python's strings
can hold half a character; UTF-8, tokenizers and orjson cannot. Models and tools write such halves (cut emoji,
file names that are no Unicode), and their clients send them back with every later turn. So bodies, batch rows
and the arguments of calls are parsed here (`loads`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any, TypeAlias

import orjson

from ...cluster.errors import RequestError

Message: TypeAlias = Mapping[str, Any]  # Any: message content is a string or a list of typed parts.
Messages: TypeAlias = Sequence[Message]
SYSTEM_ROLES = ("system", "developer")
MAX_PROBED = 4  # leading messages; a template that accepts this many is assumed to accept more
_BREAK = "\n\n"
_REASONING = ("reasoning", "reasoning_content", "thinking")
# Mistral's templates require an id of nine letters or digits.
CALL_ID = "probe0000"


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
            self._taken[roles] = self._renders_all(roles)
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

    def _renders_all(self, roles: tuple[str, ...]) -> bool:
        """Render a conversation with a unique text in each message; return whether all texts are there."""
        marks = [f"probed{i}text" for i in range(len(roles))]
        messages = [_probe(role, mark) for role, mark in zip(roles, marks, strict=True)]
        try:
            rendered = self._render(messages)
        except RequestError:
            return False
        pairs = zip(marks, roles, strict=True)
        # Calls have no text, or one that templates may leave out beside reasoning.
        return all(mark in rendered for mark, role in pairs if not role.endswith("call"))


def _probe(role: str, text: str) -> Message:
    if not role.endswith("call"):
        return {"role": role, "content": text} | ({"tool_call_id": CALL_ID} if role == "tool" else {})
    call = {"id": CALL_ID, "type": "function", "function": {"name": "probe", "arguments": {}}}
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
    joined = {**one, "content": _BREAK.join(filter(None, map(text_of, (one, other))))}
    for name in _REASONING:
        if other.get(name):
            joined[name] = _BREAK.join(filter(None, (one.get(name), other[name])))
    if other.get("tool_calls"):
        joined["tool_calls"] = [*(one.get("tool_calls") or ()), *other["tool_calls"]]
    return joined


def text_of(message: Message) -> str:
    """Return the content; the texts of parts are lines."""
    content = message.get("content") or ""
    return content if isinstance(content, str) else "\n".join(part["text"] for part in content)


def text_parts(text: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text}]


# Key of an object that wraps invalid arguments; Anthropic's documentation recommends it.
INVALID_JSON = "INVALID_JSON"
MAX_DEPTH = 64  # of an object given to templates; deeper arguments are passed as text
_LONG_INTEGER = re.compile(r"\d{19}")


def parse_arguments(messages: Messages) -> list[Mapping[str, Any]]:
    """Make each call's arguments an object if they are one, else text."""
    return with_arguments(messages, _parsed)


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


def has_calls(messages: Messages) -> bool:
    return any(message.get("tool_calls") for message in messages)


def with_arguments(messages: Messages, change: Callable[[Any], Any]) -> list[Mapping[str, Any]]:
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
    found = _read_exactly(arguments) if isinstance(arguments, str) else {} if arguments is None else arguments
    if not isinstance(found, Mapping) or not _depth_fits(found, MAX_DEPTH):
        return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    text = found.get(INVALID_JSON)
    return text if len(found) == 1 and isinstance(text, str) else found


def _read_exactly(arguments: str) -> dict[str, Any] | None:
    """Return the JSON object as `read_object` does, with integers of any length, which orjson rounds."""
    found = read_object(arguments)
    if not found or not _LONG_INTEGER.search(arguments):
        return found
    return json.loads(replace_escapes(without_surrogates(arguments).encode()))


def _depth_fits(value: Any, maximum: int) -> bool:
    if isinstance(value, Mapping):
        return maximum > 0 and all(_depth_fits(each, maximum - 1) for each in value.values())
    if isinstance(value, list):
        return maximum > 0 and all(_depth_fits(each, maximum - 1) for each in value)
    return True


# The escapes of a pair, or of a half alone.
_ESCAPE = re.compile(
    rb"\\u[dD][89abAB][\da-fA-F]{2}\\u[dD][c-fC-F][\da-fA-F]{2}|\\u[dD][89a-fA-F][\da-fA-F]{2}"
)
_LONE_BYTES = 6
_REPLACEMENT = rb"\ufffd"


# Any: JSON.
def loads(text: str | bytes | bytearray, parse: Callable[[bytes | bytearray], Any] | None = None) -> Any:
    """Parse JSON as orjson does, or as `parse` with its errors, with U+FFFD for lone surrogates."""
    read: Callable[..., Any] = parse or orjson.loads
    try:
        return read(text)
    except orjson.JSONDecodeError:
        replaced = replace_escapes(without_surrogates(text).encode() if isinstance(text, str) else text)
        if replaced == text:
            raise
        return read(replaced)


def replace_escapes(body: bytes | bytearray) -> bytes | bytearray:
    """Return JSON with U+FFFD for each escape of a lone surrogate; the same object if there is none."""
    # By `find`: a regular expression over a long body would keep Python's lock, and stop all other threads.
    replaced: bytearray | None = None
    at = 0
    while (begin := body.find(b"\\u", at)) >= 0:
        at = begin + 2
        if not _is_escaped(body, begin) and (found := _ESCAPE.match(body, begin)):
            at = found.end()
            if at - begin == _LONE_BYTES:
                replaced = bytearray(body) if replaced is None else replaced
                replaced[begin:at] = _REPLACEMENT
    return body if replaced is None else replaced


def _is_escaped(body: bytes | bytearray, at: int) -> bool:
    first = at
    while first and body[first - 1] == ord("\\"):
        first -= 1
    return (at - first) % 2 == 1


def without_surrogates(text: str) -> str:
    """Return U+FFFD for each lone surrogate; two that form a pair become their character."""
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
