"""Prompts made of columns: `--template "Translate {text} into {language}."`.

`{name}` stands for a column's value, `{{` and `}}` for braces; nothing else of Python's formatting is taken,
so that a column may have any name without `:`, `!` and braces. Used by `rows.py`, and before a job starts.
"""

from __future__ import annotations

import functools
import json
import string
from collections.abc import Mapping
from typing import Any

from ...cluster.errors import ConfigError, RequestError, did_you_mean


def render(template: str, record: Mapping[str, Any]) -> str:  # Any: what a row of the user's dataset holds
    """The prompt of a record. Raises RequestError when a column is missing or empty."""
    return "".join(text if name is None else text + _value(name, record) for text, name in _pieces(template))


def template_columns(template: str) -> tuple[str, ...]:
    """The columns that a template names, each once. Raises ConfigError when it is not one."""
    return tuple(dict.fromkeys(name for _, name in _pieces(template) if name is not None))


@functools.lru_cache(maxsize=8)
def _pieces(template: str) -> tuple[tuple[str, str | None], ...]:
    """Text, and the name of the column behind it."""
    try:
        found = list(string.Formatter().parse(template))
    except ValueError as error:
        raise _wrong(template, f"{error}") from None
    if plain := next((name for _, name, spec, turned in found if spec or turned), None):
        raise _wrong(template, f"of {{{plain}}} only the name is understood, nothing behind ':' or '!'")
    if any(name == "" for _, name, _, _ in found):
        raise _wrong(template, "{} names no column")
    return tuple((text, name) for text, name, _, _ in found)


def _wrong(template: str, why: str) -> ConfigError:
    return ConfigError(
        f"template={template!r}: {why}. Write {{column}} for a column, and {{{{ or }}}} for a brace.",
        param="template",
    )


def _value(name: str, record: Mapping[str, Any]) -> str:
    value = record.get(name)
    if value is None:
        present = [str(column) for column, held in record.items() if held is not None]
        raise RequestError(f"template: the row has no {name}. {did_you_mean(name, present)}", param=name)
    return value if isinstance(value, str) else json.dumps(value, default=str, ensure_ascii=False)
