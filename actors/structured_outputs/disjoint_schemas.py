"""Whether schemas exclude each other: then their `oneOf` is an `anyOf`. Called by `json_schema.py`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any

Schema = Mapping[str, Any] | bool  # Any, here and below: JSON
MAX_OPTIONS = 128  # their pairs are compared
_MAX_DEPTH = 6
_OF_VALUES = {bool: "boolean", int: "number", float: "number", str: "string", list: "array", dict: "object"}


def are_disjoint(options: Sequence[Schema], defs: Mapping[str, Schema]) -> bool:
    """Return True if no value fits two of the options; False also if that is not seen."""
    return len(options) <= MAX_OPTIONS and all(
        _exclude(one, other, defs, 0) for one, other in combinations(options, 2)
    )


def _exclude(one: Schema, other: Schema, defs: Mapping[str, Schema], depth: int) -> bool:
    if one is False or other is False:
        return True
    if depth > _MAX_DEPTH or one is True or other is True:
        return False
    for first, second in ((one, other), (other, one)):
        for alternatives in ("anyOf", "oneOf"):
            if alternatives in first and all(
                _exclude(each, second, defs, depth + 1) for each in first[alternatives]
            ):
                return True
        if any(_exclude(each, second, defs, depth + 1) for each in first.get("allOf", ())):
            return True
        if "$ref" in first:
            target = defs.get(first["$ref"].removeprefix("#/$defs/"), True)
            if _exclude(target, second, defs, depth + 1):
                return True
    values, others = _values(one), _values(other)
    if values is not None and others is not None and not any(each in others for each in values):
        return True
    common = _types(one) & _types(other)
    return not common or (common == {"object"} and _differ_in_a_property(one, other, defs, depth))


def _differ_in_a_property(
    one: Mapping[str, Any], other: Mapping[str, Any], defs: Mapping[str, Schema], depth: int
) -> bool:
    """Return whether an object that has the required properties of either fits one at most."""
    names = {*one.get("required", ()), *other.get("required", ())}
    return any(_exclude(_property(one, name), _property(other, name), defs, depth + 1) for name in names)


def _property(schema: Mapping[str, Any], name: str) -> Schema:
    properties: Mapping[str, Schema] = schema.get("properties", {})
    if name in properties:
        return properties[name]
    return True if "patternProperties" in schema else schema.get("additionalProperties", True)


def _types(schema: Mapping[str, Any]) -> set[str]:
    """Return the types that a schema allows; "number" includes integers."""
    types = schema.get("type", ["null", "boolean", "number", "string", "array", "object"])
    names = [types] if isinstance(types, str) else types
    found = {"number" if each == "integer" else each for each in names}
    values = schema["enum"] if "enum" in schema else [schema["const"]] if "const" in schema else None
    return found if values is None else found & {_OF_VALUES.get(type(each), "null") for each in values}


def _values(schema: Mapping[str, Any]) -> list[tuple[bool, Any]] | None:
    """Return the values of an enum or const, of which true and 1 differ; None if there is neither."""
    values = schema["enum"] if "enum" in schema else [schema["const"]] if "const" in schema else None
    return None if values is None else [(isinstance(each, bool), each) for each in values]
