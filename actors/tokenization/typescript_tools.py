"""Tools declared in TypeScript, the format that Kimi K2.5 and later were trained on.

    # Tools
    ## functions
    namespace functions {
    // What is it like outside?
    type get_weather = (_: {
      // A city
      city: string,
      days?: number
    }) => any;
    }

The output equals that of `tool_declaration_ts.py`, published with the tokenizers, to the character: required
properties before optional ones, both by name; descriptions of types as comments above them; `$defs` as
interfaces before the function; values of `enum` as Python spells them. A schema that it rejects is rejected
here.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

Schema: TypeAlias = Any  # any JSON from a request; nothing is validated

_STEP = "  "
_BETWEEN = ",\n"
_CONSTRAINTS = {
    "string": ("maxLength", "minLength", "pattern"),
    "number": ("maximum", "minimum"),
    "integer": ("maximum", "minimum"),
    "array": ("maxItems", "minItems"),
}
_OF_UNION = {
    "string": "string",
    "number": "number",
    "integer": "number",
    "boolean": "boolean",
    "null": "null",
    "object": "{}",
    "array": "Array<any>",
}
_ENUM_TYPES: Mapping[str, type | tuple[type, ...]] = {
    "string": str,
    "number": (int, float),
    "integer": int,
    "boolean": bool,
}


class _NoTypeError(Exception):
    """A schema that the published encoder rejects. Never leaves this file."""


def declare(tools: Sequence[Mapping[str, Any]]) -> str | None:
    """Declare tools with sorted keys, which order the interfaces; None if one cannot be declared."""
    try:
        functions = [tool.get("function") for tool in tools if tool.get("type") == "function"]
        declared = [_Declaration().of(function) for function in functions if function]
    except (_NoTypeError, AttributeError, KeyError, RecursionError, TypeError, ValueError):
        return None  # schemas come from clients and may be anything
    if not declared:
        return ""
    return "\n".join(["# Tools", "", "## functions", "namespace functions {", *declared, "}", ""])


def sort_keys(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: sort_keys(value[key]) for key in sorted(value)}
    return [sort_keys(item) for item in value] if isinstance(value, list) else value


class _Declaration:
    def __init__(self) -> None:
        self._definitions: dict[str, Schema] = {}
        self._names_root = False

    def of(self, function: Mapping[str, Any]) -> str:
        lines: list[str] = []
        parameters = function.get("parameters") or {}
        arguments = self._object(parameters, "")
        if self._names_root:
            fields = _BETWEEN.join(field for _, field in self._fields(parameters, _STEP))
            lines.append(f"interface parameters {{\n{fields}\n}}")
            arguments = "parameters"
        for name, schema in list(self._definitions.items()):  # nested definitions do not become interfaces
            described = schema.get("description", "")
            interface = f"interface {name} {self._type(schema, '')}"
            lines += [_comment(described, ""), interface] if described else [interface]
        if description := function.get("description"):
            lines.append(_comment(description, ""))
        return "\n".join([*lines, f"type {function.get('name', 'function')} = (_: {arguments}) => any;"])

    def _type(self, schema: Schema, indent: str) -> str:
        match kind := _kind(schema):
            case "anything":
                return "null" if schema is False else "any"
            case "$ref":
                return self._reference(schema["$ref"])
            case "anyOf":
                return " | ".join([self._type(each, indent) for each in schema["anyOf"]])
            case "enum":
                return _enum(schema)
            case "union":
                return " | ".join([_OF_UNION[each] for each in schema["type"]])
            case "object":
                return self._object(schema, indent)
            case "array":
                return self._array(schema, indent)
        return "number" if kind == "integer" else kind

    def _reference(self, reference: str) -> str:
        if reference == "#":
            self._names_root = True
            return "parameters"
        name = reference.rpartition("/")[2]
        if not reference.startswith("#/$defs/") or name not in self._definitions:
            raise _NoTypeError
        return name

    def _object(self, schema: Schema, indent: str) -> str:
        self._definitions.update(schema.get("$defs") or {})
        rest = schema.get("additionalProperties")
        if isinstance(rest, dict):
            rest = self._type(rest, indent + _STEP)
        elif rest is not None:
            rest = {True: "any", False: "never"}[rest]
        fields = [
            field for _, field in sorted(self._fields(schema, indent + _STEP), key=lambda each: each[0])
        ]
        fields += [f"{indent}{_STEP}[k: string]: {rest}"] if rest is not None else []
        return f"{{\n{_BETWEEN.join(fields)}\n{indent}}}" if fields else "{}"

    def _fields(self, schema: Schema, indent: str) -> list[tuple[tuple[bool, str], str]]:
        """Return the fields in the schema's order, each with its sort key: (is optional, name)."""
        required, fields = schema.get("required", []), []
        for name, of_field in schema.get("properties", {}).items():
            optional = name not in required
            default = of_field.get("default") if isinstance(of_field, dict) else None
            text = _comments(of_field, indent)
            if default is not None:
                default_text = repr(default) if isinstance(default, (int, float)) else _json(default)
                text += f"{indent}// Default: {default_text}\n"
            text += f"{indent}{name}{'?' if optional else ''}: {self._type(of_field, indent)}"
            fields.append(((optional, name), text))
        return fields

    def _array(self, schema: Schema, indent: str) -> str:
        items = schema.get("items") or {}
        if comments := _comments(items, indent + _STEP):
            inner = self._type(items, indent + _STEP)
            return f"Array<\n{comments}{indent}{_STEP}{inner}\n{indent}>"
        return f"Array<{self._type(items, indent)}>"


def _kind(schema: Schema) -> str:
    """Return a deciding keyword, "union", "anything", or the value of `type`."""
    if isinstance(schema, bool):
        return "anything"
    for keyword in ("$ref", "anyOf", "enum"):
        if keyword in schema:
            return keyword
    if "type" in schema:
        return "union" if isinstance(schema["type"], list) else str(schema["type"])
    if schema:
        raise _NoTypeError
    return "anything"


def _comments(schema: Schema, indent: str) -> str:
    """Return the lines above a type: its description, and the bounds that can be written."""
    kind = _kind(schema)
    if kind == "anything":
        return ""
    lines = [_comment(schema["description"], indent)] if schema.get("description") else []
    if bounds := [f"{name}: {schema[name]}" for name in _CONSTRAINTS.get(kind, ()) if name in schema]:
        lines.append(f"{indent}// {', '.join(bounds)}")
    return "".join(f"{line}\n" for line in lines)


def _comment(text: str, indent: str) -> str:
    return "\n".join([f"{indent}// {line}" if line else "" for line in text.split("\n")])


def _enum(schema: Schema) -> str:
    values, kinds = schema["enum"], schema.get("type")
    if isinstance(kinds, list):
        others = [kind for kind in kinds if kind != "null"]
        if len(kinds) > 2 or (len(kinds) == 2 and len(others) == 2):
            raise _NoTypeError
        kinds = others[0] if others else "null"
    if any(value is not None and not isinstance(value, _ENUM_TYPES.get(kinds, object)) for value in values):
        raise _NoTypeError
    return " | ".join([f'"{value}"' if isinstance(value, str) else str(value) for value in values])


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
