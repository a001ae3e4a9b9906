"""Names that are read from files, and that must stay in the folder of those files.

For an output's papers, a storage's papers and a checkpoint's index, each of which may be another's. Pure.
"""

from __future__ import annotations

import re

_PART = r"(?!\.{1,2}(?:/|$))[^/\0]+"
_INNER = re.compile(rf"{_PART}(/{_PART})*")
_SHOWN = 100  # characters of a name that is refused


def inner_name(name: object, pattern: re.Pattern[str] = _INNER) -> str:
    """Return the name if it leads to something below its own folder.

    Args:
        pattern: that the whole name must match besides.

    Raises:
        ValueError: it is no text, absolute, leads out of the folder, or does not match.
    """
    if not isinstance(name, str) or not pattern.fullmatch(name) or not _INNER.fullmatch(name):
        raise ValueError(f"{str(name)[:_SHOWN]!r} names no file of its own folder")
    return name
