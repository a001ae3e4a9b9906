"""Markdown of the reference pages: tables, code, and summaries of docstrings."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from inspect import cleandoc

SECTIONS = ("Args:", "Attributes:", "Raises:", "Returns:", "Example:", "Examples:")


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
