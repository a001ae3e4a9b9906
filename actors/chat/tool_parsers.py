"""Readers of tool calls, one for each kind of syntax (`chat_formats.py`).

A reader begins after the mark that begins a call and reads up to the mark that ends it. Before it has opened
the call it raises NotACallError for unexpected text, which `Splitter` then shows as content. Afterwards all
text is arguments; their consumer checks them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from ..tokenization.client_messages import loads
from .chat_formats import HeadedCalls, JsonCalls, QuotedCalls, TaggedCalls
from .schema_values import as_json, is_text, no_constant, property_schema
from .text_stream import Marks, NotACallError, Sink, TextSource, Waiting

_STRUCTURE = re.compile(r'["{}\[\]<]')  # "<" never occurs in JSON outside of a string, so a mark begins there
_IN_STRING = re.compile(r'["\\]')
_AFTER_SCALAR = re.compile(r"[,}\]\s<]")
_MAX_CHARS = 1024  # of a string that is a key or a name


def json_string(source: TextSource) -> Waiting[str]:
    """Return a string's value. Raises NotACallError if it is none, or too long for a name."""
    parts: list[str] = []

    def take(text: str) -> None:
        parts.append(text)
        if sum(map(len, parts)) > _MAX_CHARS:
            raise NotACallError

    if (yield from source.peek()) != '"':
        raise NotACallError
    if not (yield from _string(source, take)):
        raise NotACallError
    try:
        return loads("".join(parts))
    except ValueError:
        raise NotACallError from None


def json_value(source: TextSource, sink: Sink) -> Waiting[None]:
    """Pass on a value up to the bracket that closes it, or to a mark. Only nesting depth is tracked."""
    depth = 0
    while True:
        found = yield from source.span(_STRUCTURE, sink)
        if found in ("", "<"):
            return
        if found == '"':
            if not (yield from _string(source, sink)):
                return
            continue
        sink((yield from source.character()))
        depth += 1 if found in "{[" else -1
        if depth == 0:
            return


def skip_value(source: TextSource) -> Waiting[None]:
    first = yield from source.peek()
    if first and first in "{[":
        yield from json_value(source, _nowhere)
    elif first == '"':
        yield from _string(source, _nowhere)
    else:
        yield from source.span(_AFTER_SCALAR, _nowhere)


def _string(source: TextSource, sink: Sink) -> Waiting[bool]:
    """Pass on a string with its quotes. Return False if the text ends within it."""
    sink((yield from source.character()))
    while True:
        found = yield from source.span(_IN_STRING, sink)
        if not found:
            return False
        yield from source.character()
        if found == '"':
            sink(found)
            return True
        sink(found + (yield from source.character()))


def _nowhere(text: str) -> None:
    pass


TOOL_NAME = re.compile(r"[\w.:/-]{1,256}")
_AFTER_NAME = re.compile(r"[\n<]")
_BARE_END = re.compile(r"[{}\[\],:<]")
_NAMES = {"name"}
_ARGUMENTS = {"arguments", "parameters"}
_LABELS = {"type", "id"}


class OpenCalls(Protocol):
    @property
    def schemas(self) -> Mapping[str, Mapping[str, Any]]:
        """Argument schemas of the callable tools by name (Any: JSON)."""
        ...

    def open(self, name: str, id: str | None = None) -> None: ...

    def add(self, arguments: str) -> None: ...


def read_json_call(source: TextSource, calls: OpenCalls, syntax: JsonCalls) -> Waiting[None]:
    """Read `{"name": .., "arguments": {..}}`, keys in either order."""
    name: str | None = None
    early: list[str] = []  # arguments that came before the name
    opened = False
    yield from source.skip()
    yield from source.expect("{")
    while True:
        yield from source.skip()
        if (yield from source.starts_with("}")):
            break
        key = yield from json_string(source)
        yield from source.skip()
        yield from source.expect(":")
        yield from source.skip()
        if key in _NAMES and name is None:
            name = yield from json_string(source)
            if not syntax.begin and name not in calls.schemas:
                raise NotACallError  # other JSON
            if early:
                calls.open(name)
                opened = True
                calls.add("".join(early))
        elif key in _ARGUMENTS and not opened and not early:
            if (yield from source.peek()) != "{":
                raise NotACallError
            if name is not None:
                calls.open(name)
                opened = True
            yield from json_value(source, calls.add if opened else early.append)
        elif key in _LABELS:
            yield from skip_value(source)
        else:
            raise NotACallError
        yield from source.skip()
        if (yield from source.starts_with(",")) is None:
            if (yield from source.starts_with("}")) is None and not opened:
                raise NotACallError
            break
    if not opened:
        if name is None:
            raise NotACallError
        calls.open(name)
        calls.add("".join(early) or "{}")
    if syntax.end:
        yield from source.skip()
        yield from source.starts_with(syntax.end)


def read_headed_call(source: TextSource, calls: OpenCalls, syntax: HeadedCalls) -> Waiting[None]:
    header = (yield from source.short(Marks(syntax.heading))).strip()
    calls.open(header.removeprefix(syntax.prefix).rpartition(":")[0] or header, header)
    yield from read_raw_arguments(source, calls, Marks(syntax.end))


def read_raw_arguments(source: TextSource, calls: OpenCalls, end: Marks) -> Waiting[str | None]:
    """Read JSON up to a mark and return the mark. If there is no JSON, the arguments are `{}`."""
    yield from source.skip()
    some = False

    def add(text: str) -> None:
        nonlocal some
        some = True
        calls.add(text)

    mark = yield from source.through(end, add)
    if not some and not source.ended:
        calls.add("{}")
    return mark


def read_tagged_call(source: TextSource, calls: OpenCalls, syntax: TaggedCalls) -> Waiting[None]:
    """Read `NAME name_close (key_open KEY key_close value_open value value_close)* end`."""
    if syntax.name_close:
        name = yield from source.short(Marks(syntax.name_close))
    else:
        yield from source.skip()
        name = yield from _name_before(source, _AFTER_NAME)
    name = name.strip()
    calls.open(name)
    schema = calls.schemas.get(name, {})
    separator = "{"
    while True:
        yield from source.skip()
        mark = yield from source.starts_with(syntax.key_open, syntax.end)
        if mark != syntax.key_open:
            break
        source.mark()
        try:
            key = (yield from source.short(Marks(syntax.key_close))).strip()
        except NotACallError:
            if source.ended:
                return
            source.go_back()
            mark = None
            break
        source.forget()
        if syntax.value_open:
            yield from source.skip()
            yield from source.starts_with(syntax.value_open)
        calls.add(separator + json.dumps(key, ensure_ascii=False) + ": ")
        separator = ", "
        if not (yield from _read_value(source, calls, syntax, property_schema(schema, key))):
            return
    if not source.ended or mark is not None:
        calls.add("{}" if separator == "{" else "}")


def _read_value(
    source: TextSource, calls: OpenCalls, syntax: TaggedCalls, schema: Mapping[str, Any] | None
) -> Waiting[bool]:
    """Read a value, text as it arrives, other types when complete. False if the text ends within."""
    if syntax.newlines:
        yield from source.starts_with("\n")
    if is_text(schema):
        calls.add('"')
        ended = yield from _through_value(source, syntax, lambda text: calls.add(escaped(text)))
        if ended:
            calls.add('"')
    else:
        parts: list[str] = []
        ended = yield from _through_value(source, syntax, parts.append)
        if ended:
            calls.add(as_json("".join(parts), schema))
    return ended


def _through_value(source: TextSource, syntax: TaggedCalls, sink: Sink) -> Waiting[bool]:
    """Pass on a value up to its end; False if the text ends before.

    The value ends at its own mark or, if the model omitted that, at the call's end mark. The latter is left
    unread, and counts only if what may follow a call comes next, since a value may contain it.
    """
    followers = tuple(filter(None, (syntax.section_end, syntax.section, syntax.name_open)))
    ends = Marks(syntax.value_close, syntax.end, newlines=int(syntax.newlines))
    while (mark := (yield from source.through(ends, sink))) is not None:
        if mark.endswith(syntax.value_close):
            return True
        source.mark(len(syntax.end))
        yield from source.skip()
        is_end = (yield from source.starts_with(*followers)) is not None or source.ended
        source.go_back()
        if is_end:
            return True
        yield from source.expect(syntax.end)
        sink(mark)
    return False


def read_quoted_call(source: TextSource, calls: OpenCalls, syntax: QuotedCalls) -> Waiting[None]:
    """Read `call:NAME{key:quote text quote,other:42} end` and convert it to JSON as it arrives."""
    yield from source.expect(syntax.heading)
    name = yield from _name_before(source, re.compile(r"[{<\n]"))
    if (yield from source.peek()) != "{":
        raise NotACallError
    calls.open(name.strip())
    yield from _read_quoted_value(source, calls.add, syntax.quote)
    yield from source.skip()
    yield from source.starts_with(syntax.end)


def _read_quoted_value(source: TextSource, add: Sink, quote: str) -> Waiting[None]:
    depth = 0
    quotes = Marks(quote)
    while True:
        bare: list[str] = []
        found = yield from source.span(_BARE_END, bare.append)
        if word := "".join(bare).strip():
            add(_bare_as_json(word, is_key=found == ":"))
        if found == "<":
            if (yield from source.starts_with(quote)) is None:
                return  # the call ends too early
            add('"')
            if (yield from source.through(quotes, lambda text: add(escaped(text)))) is None:
                return
            add('"')
            continue
        if not found:
            return
        yield from source.character()
        add(found + " " if found in ",:" else found)
        depth += (found in "{[") - (found in "}]")
        if depth == 0:
            return


def _bare_as_json(word: str, *, is_key: bool) -> str:
    if not is_key:
        try:
            json.loads(word, parse_constant=no_constant)
            return word
        except ValueError:
            pass
    return json.dumps(word, ensure_ascii=False)


def _name_before(source: TextSource, pattern: re.Pattern[str]) -> Waiting[str]:
    parts: list[str] = []

    def take(text: str) -> None:
        parts.append(text)
        if sum(map(len, parts)) > 256:
            raise NotACallError

    if not (yield from source.span(pattern, take)):
        raise NotACallError
    return "".join(parts)


def escaped(text: str) -> str:
    """Return text as between the quotes of a JSON string; pieces of text give pieces of the string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


Reader = Callable[[TextSource, OpenCalls, Any], Waiting[None]]  # Any: the syntax that it reads
READERS: Mapping[type, Reader] = {
    JsonCalls: read_json_call,
    HeadedCalls: read_headed_call,
    TaggedCalls: read_tagged_call,
    QuotedCalls: read_quoted_call,
}
