"""Calls as JSON with bare keys, and quote marks around texts: Gemma 4."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ...cluster.errors import RequestError
from ..structured_outputs.lark_text import either, quoted, regex
from .argument_schema import ArgumentSchema, Branch, no_constant, without_zero_fraction
from .call_syntax import CallRules, OpenCalls, Schemas
from .lark_writer import LarkWriter, branches_of, strings, without
from .tagged_calls import escaped, name_before
from .text_stream import Marks, NotACallError, Sink, TextSource, Waiting

_AFTER_NAME = re.compile(r"[{<\n]")
_BARE_END = re.compile(r"[{}\[\],:<]")
_BARE_KEY = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]*")
_ANY_KEY = regex("[A-Za-z_][A-Za-z0-9_]{0,63}")
_SCALARS = ("null", "boolean", "integer", "number")
_MAX_RULES = 2000


@dataclass(frozen=True, slots=True, kw_only=True)
class QuotedCalls:
    """Calls written as `begin call:NAME{key:quote text quote,other:42} end`, JSON with bare keys."""

    begin: str
    heading: str
    quote: str
    end: str

    @property
    def begins(self) -> tuple[str, ...]:
        return (self.begin,)

    def read(self, source: TextSource, calls: OpenCalls, mark: str) -> Waiting[None]:
        """Read `call:NAME{..} end` and convert it to JSON as it arrives."""
        if (yield from source.starts_with(self.heading, ":")) is None:  # some calls lack the word
            raise NotACallError
        name = (yield from name_before(source, _AFTER_NAME)).strip()
        if (yield from source.starts_with(self.end)) is not None:
            calls.open(name, closed=True)
            calls.add("{}")
            return
        if (yield from source.peek()) != "{":
            raise NotACallError
        calls.open(name)
        yield from self._read_value(source, calls.add, calls.schemas.get(name))
        yield from source.skip()
        yield from source.closing(self.end)

    def _read_value(self, source: TextSource, add: Sink, schema: ArgumentSchema | None) -> Waiting[None]:
        depth, key = 0, ""
        quotes = Marks(self.quote)
        while True:
            bare: list[str] = []
            found = yield from source.span(_BARE_END, bare.append)
            if word := "".join(bare).strip():
                is_key = found == ":"
                if depth == 1 and is_key:
                    key = word
                value = schema.property(key) if schema is not None and depth == 1 else None
                is_text = is_key or (value is not None and value.types == {"string"})
                add(json.dumps(word, ensure_ascii=False) if is_text else _bare_as_json(word))
            if found == "<":
                if (yield from source.starts_with(self.quote)) is None:
                    return  # the call ends too early
                add('"')
                if (yield from source.through(quotes, lambda text: add(escaped(text)))) is None:
                    return
                add('"')
                continue
            if not found:
                return
            yield from source.character()
            add(found + " " if found in ",:" else found)
            depth += (found in "{[") - (found in "}]")
            if depth == 0:
                return

    def rules(self, lark: LarkWriter, schemas: Schemas) -> CallRules:
        return CallRules(calls=[self._call(lark, name, schema) for name, schema in schemas.items()])

    def _call(self, lark: LarkWriter, name: str, schema: ArgumentSchema) -> str:
        arguments = _QuotedValues(self, lark, name, schema).arguments()
        return f"{lark.text(self.begin + self.heading + name)} {arguments} {lark.text(self.end)}"


class _QuotedValues:
    """Writes the Lark of one tool's values."""

    def __init__(self, syntax: QuotedCalls, lark: LarkWriter, name: str, schema: ArgumentSchema) -> None:
        self._syntax = syntax
        self._lark = lark
        self._name = name
        self._root = schema
        self._rules: dict[str, str] = {}

    def arguments(self) -> str:
        if not self._root.schema:
            return '"{}"'
        found = [self._object(b) for b in branches_of(self._root, self._name) if b.allows("object")]
        return either(each for each in found if each is not None)

    def _value(self, schema: Any) -> str:
        """Return the name of the rule for a schema's values; the same schema has the same rule."""
        key = json.dumps(schema, sort_keys=True)
        if key in self._rules:
            return self._rules[key]
        rule = self._rules[key] = self._lark.reserve()
        if len(self._rules) > _MAX_RULES:
            raise RequestError(
                f"tools: the schema of {self._name} is too large for this model's call format. "
                "Make it simpler.",
                param="tools",
            )
        self._lark.define(rule, either(self._alternatives(self._root.at(schema))))
        return rule

    def _alternatives(self, schema: ArgumentSchema) -> list[str]:
        branches = branches_of(schema, self._name)
        quote = self._lark.text(self._syntax.quote)
        found: list[str] = []
        if (text := strings(self._lark, branches, self._name)) is not None:
            forbidden = without(text, [quoted(self._syntax.quote)])
            found.append(f"{quote} {self._lark.until(forbidden, self._syntax.quote)}")
        if scalars := frozenset(each for each in _SCALARS if any(b.allows(each) for b in branches)):
            found.append(self._lark.json(schema, scalars))
        for branch in branches:
            if (literals := branch.literals) is not None:
                found += [self._literal(each) for each in literals if isinstance(each, list | dict)]
                continue
            if branch.allows("object") and (written := self._object(branch)) is not None:
                found.append(written)
            if branch.allows("array"):
                found.append(self._array(branch))
        return found or ["/[^\\s\\S]/"]  # no value is allowed

    def _object(self, branch: Branch) -> str | None:
        """Return the Lark of objects, optional fields last; None if none is allowed."""
        fields: tuple[list[str], list[str]] = ([], [])
        for key in branch.names:
            value, is_required = branch.property(key), key in branch.required
            if value is False:
                if is_required:
                    return None
                continue
            written = f"{self._lark.text(self._key(key) + ':')} {self._value({} if value is None else value)}"
            fields[not is_required].append(written)
        if not branch.names and (extra := branch.property("")) is not False:
            field = f'{_ANY_KEY} ":" {self._value({} if extra is None else extra)}'
            return f'"{{" ({field} ("," {field})*)? "}}"'
        return f'"{{" {_listed(*fields)} "}}"'

    def _array(self, branch: Branch) -> str:
        first: list[str] = []
        for each in branch.given("prefixItems")[:1]:
            first = [self._value(schema) for schema in each] if isinstance(each, list) else []
        items = [each for each in branch.given("items") if isinstance(each, Mapping | bool)]
        low = max([0, *(n for n in branch.given("minItems") if isinstance(n, int))])
        high = min([n for n in branch.given("maxItems") if isinstance(n, int)], default=None)
        if any(each is False for each in items):
            high = len(first) if high is None else min(high, len(first))
        item = self._value(items[0] if len(items) == 1 else {"allOf": items} if items else {})
        return f'"[" {_sequence(first, item, low, high)} "]"'

    def _literal(self, value: Any) -> str:
        return self._lark.text(self._written(value))

    def _written(self, value: Any) -> str:
        if isinstance(value, dict):
            return "{" + ",".join(f"{self._key(k)}:{self._written(v)}" for k, v in value.items()) + "}"
        if isinstance(value, list):
            return "[" + ",".join(map(self._written, value)) + "]"
        if isinstance(value, str):
            return f"{self._syntax.quote}{value}{self._syntax.quote}"
        return json.dumps(value)

    def _key(self, key: str) -> str:
        """Return a key as written: bare, or as a text if it could be read as something else."""
        return key if _BARE_KEY.fullmatch(key) else f"{self._syntax.quote}{key}{self._syntax.quote}"


def _sequence(first: list[str], item: str, low: int, high: int | None) -> str:
    """Return the Lark of `low` to `high` comma-separated items: those of `first`, then any number of `item`.

    An optional item may only follow the one before it, so the option of that one contains its own:
    `a ("," b ("," c)?)?`. Written from the end. `high` is None without an upper bound.
    """
    if high == 0:
        return ""
    first = (first or [item])[:high]
    num_more = f"{max(low - len(first), 0)},{'' if high is None else high - len(first)}"
    following = "" if high == len(first) else f' ("," {item}){{{num_more}}}'
    for place in range(len(first) - 1, 0, -1):
        following = f' "," {first[place]}{following}'
        if place >= low:
            following = f" ({following[1:]})?"
    written = f"{first[0]}{following}"
    return written if low else f"({written})?"


def _listed(required: list[str], optional: list[str]) -> str:
    """Return the Lark of comma-separated fields, of which optional ones may be absent."""

    def after(fields: list[str]) -> str:
        return " ".join(f'("," {field})?' for field in fields)

    if required:
        return ' "," '.join(required) + " " + after(optional)
    first = (f"{field} {after(optional[i + 1 :])}" for i, field in enumerate(optional))
    return f"({' | '.join(first)})?" if optional else ""


def _bare_as_json(word: str) -> str:
    try:
        json.loads(word, parse_constant=no_constant)
    except ValueError:
        return json.dumps(word, ensure_ascii=False)
    return without_zero_fraction(word)
