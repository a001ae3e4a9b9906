"""Checks that names from metadata, which may be foreign, stay in the folder of the files."""

from __future__ import annotations

import re

_PART = r"(?!\.{1,2}(?:/|$))[^/\0]+"
_INNER = re.compile(rf"{_PART}(/{_PART})*")
_SHOWN = 100  # characters of a refused name that the message shows


def inner_name(name: object, pattern: re.Pattern[str] = _INNER) -> str:
    """Return the name if it matches `pattern` and leads below its own folder; ValueError otherwise."""
    if not isinstance(name, str) or not pattern.fullmatch(name) or not _INNER.fullmatch(name):
        raise ValueError(f"{str(name)[:_SHOWN]!r} does not name a file in its own folder")
    return name
