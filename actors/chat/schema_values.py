"""Converts raw values of tool calls to JSON, using the types in the tool's schema."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from ..tokenization.client_messages import without_surrogates

_MAX_REFERENCES = 8  # longest chain of references
_MAX_PARTS = 1000  # schemas visited per property: branches that refer to branches multiply
_WORDS = {"true": "true", "false": "false", "null": "null", "none": "null"}


def property_schema(schema: Mapping[str, Any], name: str) -> Mapping[str, Any] | None:
    """Return one property's schema with references resolved; None if there is none."""
    properties = schema.get("properties")
    parts = iter(range(_MAX_PARTS))
    return _resolved(properties.get(name), schema, parts) if isinstance(properties, Mapping) else None


def is_text(schema: Mapping[str, Any] | None) -> bool:
    return types_of(schema) in (frozenset(), frozenset({"string"}))


def as_json(raw: str, schema: Mapping[str, Any] | None) -> str:
    """Return a raw value as JSON of a type that the schema allows, else as a JSON string."""
    types, word = types_of(schema), raw.strip()
    known = _WORDS.get(word.lower())
    if known is not None and ("null" if known == "null" else "boolean") in types:
        return known
    if types != {"null", "string"}:
        try:
            value = json.loads(word, parse_constant=no_constant)
        except (ValueError, RecursionError):
            pass
        else:
            if _type_of(value) in types or ("integer" in types and _is_integral(value)):
                return without_surrogates(json.dumps(value, ensure_ascii=False))
    return json.dumps(raw, ensure_ascii=False)


def types_of(schema: Mapping[str, Any] | None) -> frozenset[str]:
    """Return the JSON types that a schema allows; empty if it does not say."""
    if not isinstance(schema, Mapping):
        return frozenset()
    given = schema.get("type")
    if isinstance(given, str):
        return frozenset({given, "integer"} if given == "number" else {given})
    if isinstance(given, list):
        return frozenset(name for name in given if isinstance(name, str))
    if isinstance(given := schema.get("enum"), list):
        return frozenset(map(_type_of, given))
    branches = schema.get("anyOf") or schema.get("oneOf")
    found = [types_of(branch) for branch in branches] if isinstance(branches, list) else []
    return frozenset().union(*found) if all(found) else frozenset()


def _resolved(
    schema: Any, root: Mapping[str, Any], parts: Iterator[int], depth: int = 0
) -> Mapping[str, Any] | None:
    """Resolve references; None if invalid, or once `parts`, the budget of schemas to visit, is exhausted."""
    if not isinstance(schema, Mapping) or depth > _MAX_REFERENCES or next(parts, None) is None:
        return None
    if isinstance(reference := schema.get("$ref"), str):
        found: Any = root
        for step in reference.removeprefix("#/").split("/"):
            found = found.get(step) if isinstance(found, Mapping) else None
        return _resolved(found, root, parts, depth + 1)
    for name in ("anyOf", "oneOf"):
        if isinstance(branches := schema.get(name), list):
            return {**schema, name: [_resolved(branch, root, parts, depth + 1) for branch in branches]}
    return schema


def no_constant(word: str) -> None:
    raise ValueError(word)  # NaN and infinities are not valid JSON


def _type_of(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    kinds = {int: "integer", float: "number", str: "string", list: "array", dict: "object"}
    return kinds[type(value)]


def _is_integral(value: Any) -> bool:
    return isinstance(value, float) and value.is_integer()
