"""Bounds on what one operation of a chat template may create: a text, a list or a number.

A template's steps are counted (`jinja_template.py`), but one step can ask for terabytes (`"a" * 10**12`), or
compute for hours while it holds the interpreter (`10**10**10`). Used where a template multiplies, joins,
calls methods of texts, or applies filters.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sized
from typing import Any

import jinja2

MAX_LENGTH = 16_000_000  # characters or elements; longer than any model's context
MAX_BITS = 4096  # of numbers
MAX_NUMBER = 10_000  # given to a method or filter: a width, a count
GROWING_FILTERS = ("batch", "center", "format", "indent", "join", "replace", "slice", "tojson", "wordwrap")
_WITH_WIDTHS = frozenset(
    ("batch", "center", "expandtabs", "indent", "ljust", "rjust", "slice", "tojson", "wordwrap", "zfill")
)
_WIDE = re.compile(r"[%{][^a-zA-Z%{}]*(\d{5}|\*|\{)")  # a width in a format, or one from an argument

# Any: values of templates, in all of these.


def check_operation(operator: str, left: Any, right: Any) -> None:
    """Raise TemplateError if the result of +, *, ** or % would exceed the limits."""
    if operator == "%" and isinstance(left, str):
        _check_format(left)
    elif isinstance(left, int | float) and isinstance(right, int | float):
        if operator == "**" and isinstance(left, int) and isinstance(right, int):
            _check(left.bit_length() * abs(right), MAX_BITS)
        elif operator == "*" and isinstance(left, int) and isinstance(right, int):
            _check(left.bit_length() + right.bit_length(), MAX_BITS)
    elif operator == "*":
        text, count = (right, left) if isinstance(left, int) else (left, right)
        if isinstance(text, Sized) and isinstance(count, int):
            _check(len(text) * count, MAX_LENGTH)
    elif operator == "+" and isinstance(left, Sized) and isinstance(right, Sized):
        _check(len(left) + len(right), MAX_LENGTH)


def check_call(name: str, arguments: Iterable[Any]) -> None:
    """Raise TemplateError if a method of the first argument, or a filter of it, could exceed the limits."""
    _, *others = given = list(arguments)
    texts = [each for each in given if isinstance(each, str)]
    widths = [abs(each) for each in others if isinstance(each, int)] if name in _WITH_WIDTHS else []
    _check(max(widths, default=0), MAX_NUMBER)
    if name == "replace" and len(texts) >= 3:
        text, old, new = texts[:3]
        _check(len(text) + text.count(old) * len(new), MAX_LENGTH)
    elif name in ("format", "format_map") and texts:
        _check_format(texts[0])
    elif name in ("expandtabs", "indent") and texts:
        _check(len(texts[0]) * max(widths, default=8), MAX_LENGTH)


def joined(parts: Iterable[Any], separator: str = "") -> str:
    """Join texts. Raises TemplateError beyond MAX_LENGTH."""
    texts = list(map(str, parts))  # a template's steps limit their number
    _check(sum(map(len, texts)) + len(separator) * len(texts), MAX_LENGTH)
    return separator.join(texts)


def _check_format(text: str) -> None:
    if _WIDE.search(text):
        raise jinja2.TemplateError("a format has a width above 9,999, or one from an argument")


def _check(size: int, maximum: int) -> None:
    if size > maximum:
        raise jinja2.TemplateError(f"an operation asks for {size:.3g}, and at most {maximum:,} are allowed")
