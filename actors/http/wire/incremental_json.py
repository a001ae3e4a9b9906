"""Parses long JSON in slices, so that other threads run between them: `loads_in_slices`.

    {"model": "m", "messages": [{..}, {..}, | {..}, {..}, | {.., "content": "a long | text | in slices"}]}

orjson parses each slice, and holds the GIL meanwhile: 30 MB at once would block all streams for 100 ms. This
module only finds where to cut. Results and errors are those of `orjson.loads`. Meant for threads.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, TypeAlias

import orjson

SLICE_BYTES = 1 << 18
MAX_DEPTH = 6  # body, messages, message, content, part, text; deeper ones are parsed whole
_BRACKET_OR_QUOTE = re.compile(rb'["\[\]{}]')
_HIGH_SURROGATE = re.compile(rb"\\u[dD][89abAB]..")
_ESCAPED_PAIR_BYTES = 12
_SPACES = re.compile(rb"[ \t\n\r]*")
_SPACE = frozenset(b" \t\n\r")
_BACKSLASH, _COLON, _QUOTE = b'\\:"'
Bytes: TypeAlias = bytes | bytearray


def loads_in_slices(body: Bytes) -> Any:  # Any: JSON.
    """Parse like `orjson.loads`, with its errors."""
    return _value(body, *_stripped(body, 0, len(body)), MAX_DEPTH)


def end_of_string(body: Bytes, at: int) -> int:
    """Return the index after the closing quote; `at` is the one after the opening quote."""
    while True:
        quote = body.find(b'"', at)
        if quote < 0:
            return len(body)
        first = quote
        while body[first - 1] == _BACKSLASH:
            first -= 1
        if (quote - first) % 2 == 0:
            return quote + 1
        at = quote + 1


# Below, `begin` and `end` delimit a part of the body without surrounding spaces: long parts are not copied.


def _value(body: Bytes, begin: int, end: int, depth: int) -> Any:
    """Parse one JSON value in slices of about SLICE_BYTES; containers down to `depth` levels.

    A container is cut into runs of elements: short ones are parsed together, and a long element by itself.
    """
    if end - begin <= SLICE_BYTES or depth == 0:
        return orjson.loads(memoryview(body)[begin:end])
    brackets = body[begin : begin + 1] + body[end - 1 : end]
    if brackets == b'""':
        return _string(body, begin + 1, end - 1)
    if brackets == b"[]":
        found: list[Any] = []
        for run in _runs(body, begin, end):
            found += (
                [_value(body, *run, depth - 1)]
                if _is_long(run)
                else orjson.loads(b"[%b]" % body[slice(*run)])
            )
        return found
    if brackets == b"{}":
        members: dict[str, Any] = {}
        for run in _runs(body, begin, end):
            members |= (
                _member(body, *run, depth) if _is_long(run) else orjson.loads(b"{%b}" % body[slice(*run)])
            )
        return members
    return orjson.loads(memoryview(body)[begin:end])


def _member(body: Bytes, begin: int, end: int, depth: int) -> dict[str, Any]:
    key_end = end_of_string(body, begin + 1)
    colon, _ = _stripped(body, key_end, end)
    if body[begin] != _QUOTE or colon >= end or body[colon] != _COLON:
        raise orjson.JSONDecodeError("a key and a colon were expected", "", 0)
    return {orjson.loads(body[begin:key_end]): _value(body, *_stripped(body, colon + 1, end), depth - 1)}


def _is_long(run: tuple[int, int]) -> bool:
    return run[1] - run[0] > SLICE_BYTES


def _runs(body: Bytes, begin: int, end: int) -> Iterator[tuple[int, int]]:
    """Yield runs of elements that fit a slice, or one longer element, cut at the value's own commas."""
    first, comma = begin + 1, 0  # start of the run; the last comma at which it can end
    for gap, gap_end in _gaps(body, begin, end):
        while True:
            maximum = first + SLICE_BYTES
            comma = max(comma, body.rfind(b",", gap, min(gap_end, maximum)))
            if gap_end <= maximum:
                break
            if comma < first:
                comma = body.find(b",", gap, gap_end)
            if comma < 0:
                break
            yield _filled(body, first, comma)
            first = comma + 1
            gap = max(gap, first)
    if first > begin + 1 or _stripped(body, first, end - 1)[0] < end - 1:
        yield _filled(body, first, end - 1)


def _gaps(body: Bytes, begin: int, end: int) -> Iterator[tuple[int, int]]:
    """Yield the parts of a list or object outside its strings and nested brackets."""
    depth, gap, at = 0, begin + 1, begin + 1
    while True:
        found = _BRACKET_OR_QUOTE.search(body, at, end)
        if found is None:
            raise orjson.JSONDecodeError("a bracket is not closed", "", 0)
        place = found.start()
        if depth == 0:
            yield gap, place
        if body[place] == _QUOTE:
            at = end_of_string(body, place + 1)
        else:
            depth += 1 if body[place] in b"[{" else -1
            at = place + 1
        if depth == 0:
            gap = at
        elif depth < 0:
            break
    if at != end:
        raise orjson.JSONDecodeError("unexpected content after the last bracket", "", 0)


def _filled(body: Bytes, begin: int, end: int) -> tuple[int, int]:
    run = _stripped(body, begin, end)
    if run[0] >= run[1]:
        raise orjson.JSONDecodeError("a value was expected next to a comma", "", 0)
    return run


def _stripped(body: Bytes, begin: int, end: int) -> tuple[int, int]:
    spaces = _SPACES.match(body, begin, end)
    begin = spaces.end() if spaces else begin
    while end > begin and body[end - 1] in _SPACE:
        end -= 1
    return begin, end


def _string(body: Bytes, begin: int, end: int) -> str:
    if end_of_string(body, begin) != end + 1:
        raise orjson.JSONDecodeError("unexpected content after the closing quote", "", 0)
    found = ""
    while begin < end:
        cut = end if end - begin <= SLICE_BYTES else _between_characters(body, begin, begin + SLICE_BYTES)
        found += orjson.loads(b'"%b"' % body[begin:cut])  # grows in place: no iteration copies all of it
        begin = cut
    return found


def _between_characters(body: Bytes, begin: int, at: int) -> int:
    """Return an index up to `at` that splits no character and no escape; `begin` is one."""
    while body[at] & 0xC0 == 0x80:
        at -= 1
    while (backslash := body.rfind(b"\\", max(begin, at - _ESCAPED_PAIR_BYTES), at)) >= 0:
        first = begin + len(body[begin : backslash + 1].rstrip(b"\\"))
        if first == begin:
            return begin + max(2, (backslash + 1 - begin) // 2 * 2)
        if not _HIGH_SURROGATE.fullmatch(body, first - 6, first):
            return first
        at = first
    return at
