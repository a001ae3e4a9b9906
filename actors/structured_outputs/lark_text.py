"""Parts of grammars in llguidance's Lark."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable

ANY_TEXT = "/(?s:.*)/"
_PIECES = re.compile(r"\\.|/|\n", re.DOTALL)  # an escape, or what ends a regular expression


def quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def either(bodies: Iterable[str]) -> str:
    """Return the alternatives as one item. None of them may have alternatives outside of brackets."""
    found = list(dict.fromkeys(bodies))
    return found[0] if len(found) == 1 else f"({' | '.join(found)})"


def regex(pattern: str) -> str:
    """Return a regular expression between slashes; what ends one, a slash or a newline, is escaped."""

    def written(piece: re.Match[str]) -> str:
        return {"/": r"\/", "\n": r"\n"}.get(piece[0].removeprefix("\\"), piece[0])

    return f"/{_PIECES.sub(written, pattern)}/"
