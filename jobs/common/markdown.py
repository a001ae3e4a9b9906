"""Markdown helpers: tables, and the sections of docstrings."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from inspect import cleandoc

SECTIONS = ("Args:", "Attributes:", "Raises:", "Returns:", "Example:", "Examples:")
_ENTRY = re.compile(r" {4}(\*{0,2}\w+(?:, \*{0,2}\w+)*): (.*)")


def cell(text: str) -> str:
    """Return text as a table cell: one line, with bars and tags escaped."""
    return re.sub(r"<(?=[\w/!])", "&lt;", " ".join(text.split())).replace("|", "\\|")


def code(text: str) -> str:
    """Return text as inline code; Python-Markdown does not interpret bars and tags in it."""
    return f"`{' '.join(text.split())}`" if text else ""


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [list(head), ["---"] * len(head), *map(list, rows)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def summary(docstring: str | None) -> str:
    """Return the part of a docstring before its first section, as Markdown."""
    text = cleandoc(docstring or "")
    ends = [found.start() for name in SECTIONS if (found := re.search(rf"^{name}$", text, re.MULTILINE))]
    return text[: min(ends, default=len(text))].strip()


def described(docstring: str | None, section: str) -> dict[str, str]:
    """Return the entries of a section such as "Attributes:" by name; `a, b: text` describes both."""
    found: dict[str, str] = {}
    names: list[str] = []
    _, _, rest = cleandoc(docstring or "").partition(f"{section}\n")
    for line in rest.splitlines():
        if entry := _ENTRY.fullmatch(line):
            names = [name.lstrip("*") for name in entry[1].split(", ")]
            found |= dict.fromkeys(names, entry[2])
        elif line.startswith(" " * 8):
            found |= {name: f"{found[name]} {line.strip()}" for name in names}
        elif line.strip():
            break
    return found
