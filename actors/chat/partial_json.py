"""Incremental JSON reading for `tool_parsers.py`: strings are decoded, values are passed on verbatim."""

from __future__ import annotations

import re

from ..tokenization.surrogates import loads
from .text_stream import NotACallError, Sink, TextSource, Waiting

_STRUCTURE = re.compile(r'["{}\[\]<]')  # "<" never occurs in JSON outside of a string, so a mark begins there
_IN_STRING = re.compile(r'["\\]')
_AFTER_SCALAR = re.compile(r"[,}\]\s<]")
_MOST_CHARS = 1024  # of a string that is a key or a name


def json_string(source: TextSource) -> Waiting[str]:
    """Read a string and return its value. Raises NotACallError if it is not one or too long for a name."""
    parts: list[str] = []

    def take(text: str) -> None:
        parts.append(text)
        if sum(map(len, parts)) > _MOST_CHARS:
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
    """Pass on a value that begins with a brace or bracket, up to the matching close.

    Only the nesting depth is tracked; errors inside are left to the consumer of the arguments. A mark in
    between ends the value.
    """
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
