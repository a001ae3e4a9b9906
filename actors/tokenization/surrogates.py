r"""Lone surrogates (\ud800 to \udfff without a partner), which are read as U+FFFD.

JSON's escapes and Python's strings can hold half a character; UTF-8, tokenizers and orjson cannot. Models and
tools write such halves (cut emoji, file names that are no Unicode), and their clients send them back with
every later turn. So bodies, batch rows and the arguments of calls are parsed here.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import orjson

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
