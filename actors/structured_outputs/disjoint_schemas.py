"""Whether schemas exclude each other: then their `oneOf` is an `anyOf`. Called by `json_schema.py`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any

Schema = Mapping[str, Any] | bool  # Any, here and below: JSON
MAX_OPTIONS = 128  # their pairs are compared
MAX_COMPARED = 20_000  # pairs of schemas within them
_OF_VALUES = {bool: "boolean", int: "number", float: "number", str: "string", list: "array", dict: "object"}


def are_disjoint(options: Sequence[Schema], defs: Mapping[str, Schema]) -> bool:
    """Return True if no value fits two of the options; False also if that is not seen."""
    comparison = _Comparison(defs)
    return len(options) <= MAX_OPTIONS and all(
        comparison.exclude(one, other) for one, other in combinations(options, 2)
    )


class _Comparison:
    """Compares schemas, and the schemas within them as often as `MAX_COMPARED`."""

    def __init__(self, defs: Mapping[str, Schema]) -> None:
        self._defs = defs
        self._left = MAX_COMPARED
        self._open: set[tuple[int, int]] = set()  # pairs that are being compared: references may lead back

    def exclude(self, one: Schema, other: Schema) -> bool:
        if one is False or other is False:
            return True
        pair = id(one), id(other)
        self._left -= 1
        if isinstance(one, bool) or isinstance(other, bool) or self._left < 0 or pair in self._open:
            return False
        self._open.add(pair)
        try:
            return (
                self._parts_exclude(one, other) or self._parts_exclude(other, one) or self._differ(one, other)
            )
        finally:
            self._open.discard(pair)

    def _parts_exclude(self, one: Mapping[str, Any], other: Schema) -> bool:
        if "anyOf" in one and all(self.exclude(each, other) for each in one["anyOf"]):
            return True
        if any(self.exclude(each, other) for each in one.get("allOf", ())):
            return True
        target = self._defs.get(one["$ref"].removeprefix("#/$defs/"), True) if "$ref" in one else True
        return self.exclude(target, other)

    def _differ(self, one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
        values, others = _values(one), _values(other)
        if values is not None and others is not None and not any(each in others for each in values):
            return True
        common = _types(one) & _types(other)
        if common != {"object"}:
            return not common
        # An object that has the required properties of both fits one at most.
        names = {*one.get("required", ()), *other.get("required", ())}
        return any(self.exclude(_property(one, name), _property(other, name)) for name in names)


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
