"""Prepares JSON schemas for llguidance: rejects what it would misread, and bounds whitespace."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from ...cluster.errors import RequestError

# A degenerate model writes whitespace to the end of its output: after this much it must continue.
MAX_WHITESPACE = r"[ \n\r\t]{0,64}"
MAX_GRAMMAR_CHARS = 131_072
MAX_JSON_DEPTH = 120  # JSON schema readers accept up to 128


# Any, here and below: JSON.
def written_schema(schema: Any, field: str, *, whitespace: bool = True) -> str:
    """Return a schema as JSON text for llguidance.

    `whitespace`: allow it between JSON tokens, as the schema's own `x-guidance` says. Raises RequestError,
    which names `field`, if it is not a schema or cannot be enforced.
    """
    check_size(schema, field)
    keywords = {} if schema is True else schema
    guidance = keywords.get("x-guidance", {}) if isinstance(keywords, Mapping) else None
    if not isinstance(keywords, Mapping) or not isinstance(guidance, Mapping):
        raise _refusal(field, "a JSON schema is an object, or true; false allows no answer")
    if not whitespace:
        guidance = {**guidance, "whitespace_flexible": False}
    elif not guidance.keys() & {"whitespace_flexible", "whitespace_pattern"}:
        guidance = {**guidance, "whitespace_pattern": MAX_WHITESPACE}
    try:
        text = json.dumps({**keywords, "x-guidance": guidance}, ensure_ascii=False)
        has_misread_bounds = _has_misread_bounds(keywords)
    except (TypeError, ValueError, RecursionError) as error:
        raise _refusal(field, f"it cannot be written as JSON: {error}") from None
    if has_misread_bounds:
        raise _refusal(field, "exclusive bounds that are whole numbers need the other bound at least 1 away")
    return text


def check_size(value: Any, field: str) -> None:
    """Raise RequestError for too deep or large JSON, without recursion or serialization."""
    num_chars, depth, layer = 0, 0, [value]
    while layer:
        following: list[Any] = []
        for part in layer:
            if isinstance(part, Mapping):
                num_chars += sum(map(len, map(str, part.keys()))) + 4 * len(part)
                parts = part.values()
            else:
                num_chars += len(part) if isinstance(part, str | list | tuple) else 1
                parts = part if isinstance(part, list | tuple) else ()
            if num_chars > MAX_GRAMMAR_CHARS:
                raise _refusal(field, f"it is too long; at most {MAX_GRAMMAR_CHARS} characters are taken")
            following += parts
        layer, depth = following, depth + 1
        if depth > MAX_JSON_DEPTH:
            raise _refusal(field, f"it is nested too deep; at most {MAX_JSON_DEPTH} levels are taken")


def _has_misread_bounds(schema: Any) -> bool:
    """Return whether llguidance would accept a value that bounds exclude: 0 in 0 < x < 0.5."""
    if isinstance(schema, list):
        return any(map(_has_misread_bounds, schema))
    if not isinstance(schema, Mapping):
        return False
    low, high = (
        next((v for name in names if isinstance(v := schema.get(name), int | float)), None)
        for names in (("exclusiveMinimum", "minimum"), ("exclusiveMaximum", "maximum"))
    )
    excluded = [schema.get(name) for name in ("exclusiveMinimum", "exclusiveMaximum")]
    is_whole = any(isinstance(v, int | float) and v == v // 1 for v in excluded)
    close = low is not None and high is not None and high - low < 1
    return (close and is_whole) or any(map(_has_misread_bounds, schema.values()))


def _refusal(field: str, reason: str) -> RequestError:
    return RequestError(f"{field}: {reason}.", param=field)
