"""Writes schemas as llguidance's Lark, with an end to every lexeme that a model may repeat without one.

    EnforcedSchema, JsonLayout ─▶ the right-hand side of a Lark rule

Objects, arrays, alternatives, references, numbers and values of any type are rules: whitespace, digits and
depth are bounded. llguidance's own JSON Schema compiler writes bounds of numbers, patterns, formats, and what
intersects schemas (`allOf`, keywords beside `$ref` or `anyOf`, `patternProperties`). There whitespace is in
separators alone, and the digits of free numbers have no bound. Nor have texts: code and documents are long.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .json_schema import EnforcedSchema, Schema
from .lark_text import quoted
from .schema_keywords import LARGEST, fits_type

MAX_DIGITS = 20  # of an integer, and of a fraction
MAX_EXPONENT_DIGITS = 3
# Of a value of which the schema says nothing: with the objects and arrays around it, and without them.
MAX_ANY_DEPTH, MIN_ANY_DEPTH = 8, 3
MAX_KEY_CHARS = 256  # of a name that the schema does not give
MAX_INDENTED_DEPTH = 8
MAX_RULES_CHARS = 1 << 20
_EXPONENT = rf"([eE][+-]?[0-9]{{1,{MAX_EXPONENT_DIGITS}}})?"
_POSITIVE = rf"(0|[1-9][0-9]{{0,{MAX_DIGITS - 1}}})"
INTEGER = f"-?{_POSITIVE}"
_FRACTION = rf"(\.[0-9]{{1,{MAX_DIGITS}}})?"
NUMBER = f"{INTEGER}{_FRACTION}{_EXPONENT}"
# One character of a JSON text: as it is, or escaped where it must be.
_CHAR = r'([^"\\\x00-\x1f\x7f]|\\["\\bfnrt]|\\u00(0[0-7bBeEfF]|1[0-9a-fA-F]|7[fF]))'
_KEY = f'/"{_CHAR}{{0,{MAX_KEY_CHARS}}}"/'
_TYPES = ("null", "boolean", "number", "string", "array", "object")
_OF_STRINGS = frozenset(("minLength", "maxLength", "pattern", "format"))
_OF_NUMBERS = frozenset(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"))
_OF_ARRAYS = frozenset(("items", "prefixItems", "minItems", "maxItems"))
_OF_OBJECTS = frozenset(("properties", "required", "additionalProperties", "minProperties", "maxProperties"))
_SMALLEST_MULTIPLE = 1e-10  # the smallest one that llguidance can represent
_OF_ONE_TYPE = _OF_STRINGS | _OF_NUMBERS | _OF_ARRAYS | _OF_OBJECTS | {"type"}


@dataclass(frozen=True, slots=True)
class JsonLayout:
    """Whitespace of JSON.

    Attributes:
        separators: of items, and of a name and its value.
        indents: a newline and the indentation of the depth may follow "{", "[" and ",", and precede "}", "]".
    """

    separators: tuple[str, str] = (",", ":")
    indents: bool = False

    @property
    def guidance(self) -> Mapping[str, Any]:
        """The layout for llguidance's compiler, which has whitespace in separators alone."""
        item, key = self.separators
        return {
            "whitespace_flexible": False,
            "item_separator": ", ?" if self.indents else item,
            "key_separator": ": ?" if self.indents else key,
        }


COMPACT = JsonLayout()
SPACED = JsonLayout((", ", ": "))  # as in chat templates, which also makes most of it forced tokens
INDENTED = JsonLayout(indents=True)


def json_rule(schema: EnforcedSchema, layout: JsonLayout) -> str:
    """Return the right-hand side of a Lark rule for the JSON that fits a schema."""
    if schema.guidance is not None:  # the client chose llguidance's layout
        return schema.lark({**layout.guidance, **schema.guidance})
    try:
        return f"%lark {{\n{_Writer(schema, layout).text()}\n}}"
    except _TooLongError:  # definitions are written for every depth, and for every part that intersects them
        return schema.lark(layout.guidance)


class _TooLongError(Exception):
    """The rules are much longer than the schema."""


class _Writer:
    """Writes one schema. Values are rules, which are shared where their bodies are the same."""

    def __init__(self, schema: EnforcedSchema, layout: JsonLayout) -> None:
        self._schema, self._layout = schema, layout
        self._rules: dict[str, str] = {}
        self._terminals: dict[str, str] = {}
        self._num_chars = 0
        self._names: dict[str, str] = {}  # of rules and terminals, by their bodies
        self._defined: dict[tuple[str, int], str] = {}  # rules of definitions, by depth
        self._pending: list[tuple[str, str, int]] = []  # of these

    def text(self) -> str:
        start = self._value(self._schema.schema, 0)
        while self._pending:
            rule, name, depth = self._pending.pop()
            target = self._schema.defs[name]
            self._rules[rule] = self._json(False) if target is False else self._value(target, depth)
        rules = {"start": start, **self._rules, **self._terminals}
        return "\n".join(f"{name}: {body}" for name, body in rules.items())

    def _value(self, schema: Schema, depth: int) -> str:
        """Return the rule of a value. `depth`: of the objects and arrays around it."""
        if isinstance(schema, bool):
            assert schema, "callers leave out what is impossible"
            return self._any(depth)
        said = {name: value for name, value in schema.items() if name != "$defs"}
        match sorted(said):
            case []:
                return self._any(depth)
            case ["$ref"]:
                return self._reference(said["$ref"].removeprefix("#/$defs/"), depth)
            case ["anyOf"]:
                return self._alternatives([each for each in said["anyOf"] if each is not False], said, depth)
            case ["allOf"] if len(said["allOf"]) == 1 and said["allOf"][0] is not False:
                return self._value(said["allOf"][0], depth)
            case _ if said.keys() & {"enum", "const"}:
                return self._literals(said)
            case _ if said.keys() <= _OF_ONE_TYPE:
                return self._typed(said, depth)
            case _:
                return self._json(said)

    def _alternatives(self, options: Sequence[Schema], said: Schema, depth: int) -> str:
        if not options:
            return self._json(said)  # refused there
        return self._rule(" | ".join(dict.fromkeys(self._value(each, depth) for each in options)))

    def _reference(self, name: str, depth: int) -> str:
        key = name, min(depth, MAX_INDENTED_DEPTH if self._layout.indents else 0)
        if key not in self._defined:
            self._defined[key] = f"def_{len(self._defined)}"
            self._pending.append((self._defined[key], *key))
        return self._defined[key]

    def _typed(self, said: Mapping[str, Any], depth: int) -> str:
        types = said.get("type", _TYPES)
        names = [types] if isinstance(types, str) else types
        return self._rule(" | ".join(dict.fromkeys(self._of_type(name, said, depth) for name in names)))

    def _of_type(self, name: str, said: Mapping[str, Any], depth: int) -> str:
        match name:
            case "null":
                return '"null"'
            case "boolean":
                return self._terminal("BOOLEAN", '"true" | "false"')
            case "integer" | "number":
                return self._number(name, _only(said, _OF_NUMBERS))
            case "array":
                return self._array(_only(said, _OF_ARRAYS), depth)
            case "object":
                return self._object(_only(said, _OF_OBJECTS), depth)
            case _:
                return self._text(_only(said, _OF_STRINGS))

    def _text(self, said: Mapping[str, Any]) -> str:
        low, high = said.get("minLength", 0), said.get("maxLength")
        if said.keys() - {"minLength", "maxLength"} or low > (low if high is None else high):
            return self._json({"type": "string", **said})
        times = f"{{{low},{'' if high is None else high}}}" if said else "*"
        return self._terminal("TEXT", f'/"{_CHAR}{times}"/')

    def _number(self, name: str, said: Mapping[str, Any]) -> str:
        if name == "integer" and not said:
            return self._terminal("INTEGER", f"/{INTEGER}/")
        for bounds, sign, but in (
            ({}, "-?", ""),
            ({"minimum": 0}, "", ""),
            ({"exclusiveMinimum": 0}, "", r" & ~/0(\.0*)?([eE].*)?/"),
        ):
            if name == "number" and said == bounds:
                return self._terminal("NUMBER", f"/{sign}{_POSITIVE}{_FRACTION}{_EXPONENT}/{but}")
        closed = {"type": name, **said}
        for low, bound in (("inimum", -LARGEST), ("aximum", LARGEST)):
            if not said.keys() & {f"m{low}", f"exclusiveM{low}"}:
                closed[f"m{low}"] = bound
        values = [value for key, value in said.items() if key != "multipleOf"]
        if name == "number" and all(not value or abs(value) > 1e-5 for value in values):
            closed.setdefault("multipleOf", _SMALLEST_MULTIPLE)
        return self._json(closed)

    def _array(self, said: Mapping[str, Any], depth: int) -> str:
        first, items = list(said.get("prefixItems", ())), said.get("items", True)
        low, high = said.get("minItems", 0), said.get("maxItems")
        if False in first:
            high = min(first.index(False), len(first) if high is None else high)
        if items is False:
            high = len(first) if high is None else min(len(first), high)
        if high is not None:
            first = first[:high]
            if low > high:
                return self._json({"type": "array", **said})  # refused there
        item = "" if len(first) == high else self._value(items, depth + 1)
        if not first:
            return self._list("[", item, "]", depth, low, high)
        begin, comma, end = self._marks("[", "]", depth)
        more = None if high is None else high - len(first)
        after = _more(f"{comma} {item}", max(low - len(first), 0), more) if item else ""
        for i in range(len(first) - 1, 0, -1):
            after = f"{comma} {self._value(first[i], depth + 1)} {after}"
            after = after if i < low else f"({after})?"
        body = f"{self._value(first[0], depth + 1)} {after}"
        return self._rule(f"{begin} {body if low else f'({body})?'} {end}")

    def _object(self, said: Mapping[str, Any], depth: int) -> str:
        properties, required = said.get("properties", {}), said.get("required", ())
        additional = said.get("additionalProperties", True)
        schemas = {**properties, **{name: additional for name in required if name not in properties}}
        low, high = said.get("minProperties", 0), said.get("maxProperties")
        if any(schemas[name] is False for name in required) or (schemas and (low or high is not None)):
            return self._json({"type": "object", **said})
        colon = self._colon()
        more = ""
        if additional is not False and high != 0:
            key = self._key(list(schemas))
            more = self._rule(f"{key} {colon} {self._value(additional, depth + 1)}")
        pairs = [
            (self._rule(f"{_literal(name)} {colon} {self._value(schema, depth + 1)}"), name in required)
            for name, schema in schemas.items()
            if schema is not False
        ]
        if not pairs:
            return self._list("{", more, "}", depth, low, high)
        begin, comma, end = self._marks("{", "}", depth)
        return self._rule(f"{begin} {self._pairs(pairs, more, comma)} {end}")

    def _pairs(self, pairs: Sequence[tuple[str, bool]], more: str, comma: str) -> str:
        """Write properties in their order, of which some may be absent, and then any number of others."""
        after = f"({comma} {more})*" if more else ""
        begins: list[str] = [f"{more} {after}"] if more else []
        is_needed = False
        for pair, is_required in reversed(pairs):
            begins = [f"{pair} {after}"] if is_required else [f"{pair} {after}", *begins]
            is_needed = is_needed or is_required
            this = f"{comma} {pair}" if is_required else f"({comma} {pair})?"
            after = self._rule(f"{this} {after}")
        options = " | ".join(begins)
        return f"({options})" if is_needed else f"({options})?"

    def _any(self, depth: int, left: int | None = None) -> str:
        """Return the rule of any value. `left`: how deep objects and arrays may be nested in it."""
        left = max(MAX_ANY_DEPTH - depth, MIN_ANY_DEPTH) if left is None else left
        options = [self._of_type(name, {}, depth) for name in ("string", "number", "boolean", "null")]
        if left:
            inner = self._any(depth + 1, left - 1)
            pair = self._rule(f"{self._key(())} {self._colon()} {inner}")
            options += [self._list("{", pair, "}", depth), self._list("[", inner, "]", depth)]
        return self._rule(" | ".join(options))

    def _list(
        self, begin: str, item: str, end: str, depth: int, low: int = 0, high: int | None = None
    ) -> str:
        """Return the rule of `low` to `high` items between marks."""
        begin, comma, end = self._marks(begin, end, depth)
        if not item or high == 0:
            return self._rule(f"{begin} {end}")
        more = _more(f"{comma} {item}", max(low - 1, 0), None if high is None else high - 1)
        return self._rule(f"{begin} {item} {more} {end}" if low else f"{begin} ({item} {more})? {end}")

    def _literals(self, said: Mapping[str, Any]) -> str:
        values = said["enum"] if "enum" in said else [said["const"]]
        is_plain = said.keys() <= {"enum", "type"} or said.keys() <= {"const", "type"}
        if not is_plain or any(isinstance(value, list | dict) for value in values):
            return self._json(said)
        types = said.get("type", _TYPES)
        names = [types] if isinstance(types, str) else types
        allowed = [value for value in values if fits_type(value, names)]
        if not allowed:
            return self._json(said)  # refused there
        return self._terminal("VALUE", " | ".join(dict.fromkeys(map(_literal, allowed))))

    def _json(self, schema: Schema) -> str:
        part = self._schema.part(schema)
        used = _reachable(part)
        said = part.schema if isinstance(part.schema, Mapping) else {"enum": []}
        said = {name: value for name, value in said.items() if name != "$defs"}
        if used:
            said["$defs"] = used
        return self._rule(EnforcedSchema(said).lark(self._layout.guidance))

    def _marks(self, begin: str, end: str, depth: int) -> tuple[str, str, str]:
        """Return the marks of an object or array: its begin, its comma and its end."""
        if not self._layout.indents:
            return quoted(begin), quoted(self._layout.separators[0]), quoted(end)
        inner, outer = _indentation(depth + 1), _indentation(depth)
        return (
            self._terminal("BEGIN", rf"/\{begin}{inner}/"),
            self._terminal("COMMA", f"/,{inner}/"),
            self._terminal("END", rf"/{outer}\{end}/"),
        )

    def _colon(self) -> str:
        if self._layout.indents:
            return self._terminal("COLON", "/: ?/")
        return quoted(self._layout.separators[1])

    def _key(self, names: Sequence[str]) -> str:
        """Return a terminal for names that the schema does not give."""
        others = " | ".join(map(_literal, names))
        return self._terminal("KEY", f"{_KEY} & ~({others})" if others else _KEY)

    def _rule(self, body: str) -> str:
        if body in self._rules or body in self._terminals:
            return body  # it is a rule by itself
        if body not in self._names:
            self._num_chars += len(body)
            if self._num_chars > MAX_RULES_CHARS:
                raise _TooLongError
            self._names[body] = name = f"value_{len(self._names)}"
            self._rules[name] = body
        return self._names[body]

    def _terminal(self, kind: str, body: str) -> str:
        if body not in self._names:
            self._names[body] = name = f"{kind}_{len(self._names)}"
            self._terminals[name] = body
        return self._names[body]


def _only(said: Mapping[str, Any], names: frozenset[str]) -> dict[str, Any]:
    return {name: value for name, value in said.items() if name in names}


def _more(item: str, low: int, high: int | None) -> str:
    """Return the Lark of `low` to `high` items."""
    if high == 0:
        return ""
    return f"({item}){{{low},{'' if high is None else high}}}" if low or high is not None else f"({item})*"


def _indentation(depth: int) -> str:
    """Return a regular expression for a space, or a newline and at most the indentation of a depth."""
    depth = min(depth, MAX_INDENTED_DEPTH)
    return rf"( |\n {{0,{4 * depth}}}|\n\t{{1,{depth}}})?" if depth else r"[ \n]?"


def _literal(value: Any) -> str:
    """Return a scalar's JSON as Lark; a float that is a small integer is written as one."""
    is_whole = isinstance(value, float) and value.is_integer() and abs(value) < 1 << 53
    return quoted(json.dumps(int(value) if is_whole else value, ensure_ascii=False))


def _reachable(part: EnforcedSchema) -> dict[str, Schema]:
    """Return the definitions that a schema refers to."""
    found: dict[str, Schema] = {}
    said = part.schema if isinstance(part.schema, Mapping) else {}
    pending = [*_references({name: value for name, value in said.items() if name != "$defs"})]
    while pending:
        name = pending.pop()
        if name not in found and name in part.defs:  # it is not where a value of an enum looks like one
            found[name] = part.defs[name]
            pending += _references(found[name])
    return found


def _references(schema: Any) -> Iterator[str]:
    if isinstance(schema, list):
        for each in schema:
            yield from _references(each)
    elif isinstance(schema, Mapping):
        if isinstance(schema.get("$ref"), str):
            yield schema["$ref"].removeprefix("#/$defs/")
        for each in schema.values():
            yield from _references(each)
