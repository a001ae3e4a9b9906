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

# A pair or a half, as group 1, after complete pairs of backslashes: after an odd number it is not an escape.
_ESCAPES = re.compile(
    rb"(?<!\\)(?:\\\\)*"
    rb"(\\u[dD][89abAB][\da-fA-F]{2}\\u[dD][c-fC-F][\da-fA-F]{2}|\\u[dD][89a-fA-F][\da-fA-F]{2})"
)
_LONE_BYTES = 6
_REPLACEMENT = rb"\ufffd"


# Any: JSON.
def loads(text: str | bytes | bytearray, parse: Callable[[bytes | bytearray], Any] | None = None) -> Any:
    """Parse JSON as orjson does, with U+FFFD for lone surrogates. Raises orjson.JSONDecodeError.

    Args:
        parse: parser to use instead of `orjson.loads`, with the same errors.
    """
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
    replaced: bytearray | None = None
    for found in _ESCAPES.finditer(body):
        begin, end = found.span(1)
        if end - begin == _LONE_BYTES:
            replaced = bytearray(body) if replaced is None else replaced
            replaced[begin:end] = _REPLACEMENT
    return body if replaced is None else replaced


def without_surrogates(text: str) -> str:
    """Return text with U+FFFD for each lone surrogate; two that form a pair become their character."""
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
