"""Checks that names read from files stay in the folder of those files.

For an output's metadata, a storage's metadata and a checkpoint's index, each of which may come from someone
else.
"""

from __future__ import annotations

import re

_PART = r"(?!\.{1,2}(?:/|$))[^/\0]+"
_INNER = re.compile(rf"{_PART}(/{_PART})*")
_SHOWN = 100  # characters of a refused name that the message shows


def inner_name(name: object, pattern: re.Pattern[str] = _INNER) -> str:
    """Return the name if it leads to something below its own folder.

    Args:
        pattern: must also match the whole name.

    Raises:
        ValueError: it is not text, is absolute, leads out of the folder, or does not match.
    """
    if not isinstance(name, str) or not pattern.fullmatch(name) or not _INNER.fullmatch(name):
        raise ValueError(f"{str(name)[:_SHOWN]!r} does not name a file in its own folder")
    return name
