"""JSON schemas of all keyword kinds: supported ones and unsupported ones.

Small ones, so that a model that chooses at random comes to an end.
"""

from __future__ import annotations

from typing import Any

from manta import StructuredOutputsParams

_POINT = {"type": "object", "properties": {"x": {"type": "boolean"}}, "required": ["x"]}
_CLOSED = {"additionalProperties": False}


def _object(required: tuple[str, ...] = ("a",), **properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(required), **_CLOSED}


def _array(items: Any, minimum: int = 0, maximum: int = 3, **more: Any) -> dict[str, Any]:
    return {"type": "array", "items": items, "minItems": minimum, "maxItems": maximum, **more}


_BOOL, _DIGIT = {"type": "boolean"}, {"type": "integer", "minimum": 0, "maximum": 9}
_WORD = {"type": "string", "maxLength": 4}

HELD: dict[str, Any] = {
    # Types.
    "null": {"type": "null"},
    "boolean": _BOOL,
    "several types": {"type": ["boolean", "null"]},
    "type by its values": {"enum": [True, None]},
    # Values.
    "enum of texts": {"enum": ["red", "green", "blue"]},
    "enum of all kinds": {"enum": ["x", 1, 2.5, None, True, [1], {"k": 2}]},
    "enum of one": {"enum": ["alone"]},
    "enum beside its type": {"type": "string", "enum": ["a", "b"]},
    "const text": {"const": "fixed"},
    "const number": {"const": 42},
    "const object": {"const": {"a": [1, None]}},
    "text with quotes": {"const": 'say "é"\n\\ 😀'},
    # Integers.
    "minimum and maximum": {"type": "integer", "minimum": 3, "maximum": 17},
    "negative bounds": {"type": "integer", "minimum": -25, "maximum": -3},
    "bounds around zero": {"type": "integer", "minimum": -7, "maximum": 120},
    "exclusive bounds": {"type": "integer", "exclusiveMinimum": 10, "exclusiveMaximum": 13},
    "multiple of": {"type": "integer", "minimum": 0, "maximum": 40, "multipleOf": 10},
    "one integer": {"type": "integer", "minimum": 5, "maximum": 5},
    # Numbers.
    "number within bounds": {"type": "number", "minimum": 0, "maximum": 1},
    "number within exclusive bounds": {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1},
    "number within close bounds": {"type": "number", "exclusiveMinimum": 0.25, "exclusiveMaximum": 0.5},
    # Texts.
    "maxLength": {"type": "string", "maxLength": 5},
    "minLength and maxLength": {"type": "string", "minLength": 2, "maxLength": 4},
    "exact length": {"type": "string", "minLength": 3, "maxLength": 3},
    "pattern": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{3}$"},
    "pattern with a choice": {"type": "string", "pattern": "^(cat|dog|bird)s?$"},
    "pattern and length": {"type": "string", "pattern": "^[a-z]+$", "maxLength": 6},
    "date": {"type": "string", "format": "date"},
    "time": {"type": "string", "format": "time"},
    "date-time": {"type": "string", "format": "date-time"},
    "uuid": {"type": "string", "format": "uuid"},
    "ipv4": {"type": "string", "format": "ipv4"},
    "ipv6": {"type": "string", "format": "ipv6"},
    # Objects.
    "empty object": {"type": "object", **_CLOSED},
    "one property": _object(a=_BOOL),
    "three properties": _object(("a", "b", "c"), a=_BOOL, b=_DIGIT, c={"enum": ["x", "y"]}),
    "optional properties": _object((), a=_BOOL, b=_DIGIT),
    "optional between required": _object(("a", "c"), a=_BOOL, b=_DIGIT, c=_BOOL),
    "nested": _object(a=_object(("b",), b=_object(("c",), c=_BOOL))),
    "property names with spaces": _object(("a b", 'c"d'), **{"a b": _BOOL, 'c"d': _BOOL}),
    "unicode property names": _object(("größe",), größe=_DIGIT),
    "title and description": {"title": "T", "description": "D", **_object(a=_BOOL), "$comment": "C"},
    "default and examples": _object(a={"type": "boolean", "default": True, "examples": [True]}),
    "pattern properties": {
        "type": "object",
        "patternProperties": {"^n[0-9]$": _DIGIT},
        "minProperties": 1,
        "maxProperties": 1,
        **_CLOSED,
    },
    # Arrays.
    "array": _array(_BOOL),
    "minItems": _array(_DIGIT, 2, 3),
    "exactly two": _array(_BOOL, 2, 2),
    "empty array": _array(_BOOL, 0, 0),
    "array of objects": _array(_object(a=_BOOL), 1, 2),
    "array of arrays": _array(_array(_BOOL, 1, 2), 1, 2),
    "prefixItems": {"type": "array", "prefixItems": [_BOOL, _DIGIT], "items": False, "minItems": 2},
    "prefixItems and items": {
        "type": "array",
        "prefixItems": [_DIGIT],
        "items": _BOOL,
        "minItems": 2,
        "maxItems": 3,
    },
    # Several schemas.
    "anyOf": {"anyOf": [_BOOL, _DIGIT]},
    "anyOf of objects": {"anyOf": [_object(a=_BOOL), _object(("b",), b=_DIGIT)]},
    "anyOf with null": _object(a={"anyOf": [_DIGIT, {"type": "null"}]}),
    "oneOf that exclude each other": {"oneOf": [{"type": "boolean"}, {"type": "null"}]},
    "oneOf by a tag": {
        "oneOf": [
            _object(("kind", "v"), kind={"const": "b"}, v=_BOOL),
            _object(("kind", "v"), kind={"const": "d"}, v=_DIGIT),
        ]
    },
    "allOf": {"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 8}]},
    "allOf of objects": {
        "allOf": [{"type": "object", "properties": {"a": _BOOL}, "required": ["a"]}, _object((), a={})]
    },
    # References.
    "$ref to $defs": {"$defs": {"flag": _BOOL}, **_object(a={"$ref": "#/$defs/flag"})},
    "$ref to definitions": {"definitions": {"d": _DIGIT}, **_array({"$ref": "#/definitions/d"}, 1, 2)},
    "$ref used twice": {
        "$defs": {"p": _POINT | _CLOSED},
        **_object(("a", "b"), a={"$ref": "#/$defs/p"}, b={"$ref": "#/$defs/p"}),
    },
    "recursion": {
        "$defs": {"n": _object(("v",), v=_BOOL, next={"anyOf": [{"$ref": "#/$defs/n"}, {"type": "null"}]})},
        "$ref": "#/$defs/n",
    },
    "recursion of the root": _object(("v",), v=_BOOL, kids=_array({"$ref": "#"}, 0, 1)),
    # As pydantic writes them.
    "pydantic": {
        "$defs": {"Color": {"enum": ["r", "g"], "title": "Color", "type": "string"}},
        "properties": {
            "color": {"$ref": "#/$defs/Color"},
            "size": {"maximum": 9, "minimum": 1, "title": "Size", "type": "integer"},
            "note": {"anyOf": [_WORD, {"type": "null"}], "default": None, "title": "Note"},
        },
        "required": ["color", "size"],
        "title": "Thing",
        "type": "object",
        **_CLOSED,
    },
}

# What is no schema, or allows nothing, and a word of the reason.
REFUSED: dict[str, tuple[Any, str]] = {
    "a reference to nothing": ({"$ref": "#/$defs/none"}, "none"),
    "bounds that cross": ({"type": "integer", "minimum": 5, "maximum": 3}, "minimum"),
    "nothing at all": (False, "false"),
    "a schema that is a list": (_object(a=[_BOOL]), "properties.a"),
}

# Keywords that cannot be enforced, and the paths that name them.
LEFT_OUT: dict[str, tuple[Any, list[str]]] = {
    "not": ({"not": {"type": "string"}}, ["not"]),
    "uniqueItems": (
        _object(("tags",), tags=_array(_BOOL, uniqueItems=True)),
        ["properties.tags.uniqueItems"],
    ),
    "contains": ({"type": "array", "contains": _BOOL, "minContains": 2}, ["contains", "minContains"]),
    "if and then": ({"if": _BOOL, "then": _DIGIT}, ["if", "then"]),
    "dependentRequired": ({"type": "object", "dependentRequired": {"a": ["b"]}}, ["dependentRequired"]),
    "oneOf that overlap": ({"oneOf": [_WORD, {"type": "string"}]}, ["oneOf"]),
    "no such type": ({"type": "text"}, ["type"]),
    "no such format": (_object(a={"type": "string", "format": "colour"}), ["properties.a.format"]),
    "a pattern that looks ahead": ({"type": "string", "pattern": "^(?=a)b$"}, ["pattern"]),
    "a pattern that is none": ({"type": "string", "pattern": "(a"}, ["pattern"]),
    "a bound that is read wrongly": (
        {"type": "number", "exclusiveMinimum": 0, "maximum": 0.5},
        ["exclusiveMinimum"],
    ),
    "a multiple of many digits": ({"type": "number", "multipleOf": 1e-30}, ["multipleOf"]),
    "a count that is a text": ({"type": "string", "maxLength": "9"}, ["maxLength"]),
    "sizes beside optional properties": (
        {"type": "object", "properties": {"a": _BOOL}, "minProperties": 2},
        ["minProperties"],
    ),
    "names that cannot be written as patterns": (
        {"type": "object", "propertyNames": {"not": {"const": "a"}}},
        ["propertyNames"],
    ),
    "patterns that overlap": (
        {"type": "object", "patternProperties": {"^a": _BOOL, "b$": _DIGIT}},
        ["patternProperties"],
    ),
    "in a definition that is used twice": (
        {
            "$defs": {"s": {"type": "array", "uniqueItems": True}},
            **_object(a={"$ref": "#/$defs/s"}, b={"$ref": "#/$defs/s"}),
        },
        ["$defs.s.uniqueItems"],
    ),
    "another document": ({"$ref": "https://example.org/point.json"}, ["$ref"]),
    "an unknown keyword": ({"type": "string", "maxlength": 3}, ["maxlength"]),
}


def held_by(schema: Any, **more: Any) -> StructuredOutputsParams:
    return StructuredOutputsParams(json=schema, disable_any_whitespace=True, **more)
