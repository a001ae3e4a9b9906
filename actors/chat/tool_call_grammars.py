"""Grammars that force tool calls in the syntax of each format, in llguidance's Lark.

The counterpart of `tool_parsers.py`, which reads what they allow. Marks that are special tokens are named by
their ids, since text never matches a special token.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from typing import Any

from ..structured_outputs.json_schema import check_size
from .chat_formats import CallSyntax, HeadedCalls, JsonCalls, Messages, QuotedCalls, TaggedCalls
from .schema_values import is_text, property_schema

Schema = Mapping[str, Any]  # Any: JSON.
# Spaces as in the JSON of chat templates, which also makes most of them forced tokens.
_AS_TRAINED = {"x-guidance": {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}}
_ANY_OBJECT: Schema = {"type": "object"}


def forced_calls(
    syntax: CallSyntax | Messages, schemas: Mapping[str, Schema], special: Mapping[str, int], *, several: bool
) -> str:
    """Return the Lark grammar of at least one call of these tools and nothing else.

    `special`: ids of special tokens by text. `several`: calls may follow each other. Raises RequestError if
    the schemas are too long or nested too deep.
    """
    check_size(schemas, "tools")
    return _Writer(special).lark(syntax, schemas, several=several)


def strict_calls(
    syntax: CallSyntax | Messages,
    schemas: Mapping[str, Schema],
    strict: Collection[str],
    special: Mapping[str, int],
) -> Mapping[str, Any] | None:
    """Return a structural tag for optional calls; None unless their begin mark is text and they are JSON."""
    if not isinstance(syntax, JsonCalls) or not syntax.begin or syntax.begin in special:
        return None
    structures = [
        {
            "begin": f"{syntax.begin}\n{_json_head(syntax, name)}",
            "schema": {**(schema if name in strict and schema else _ANY_OBJECT), **_AS_TRAINED},
            "end": f"}}\n{syntax.end}",
        }
        for name, schema in schemas.items()
    ]
    return {"structures": structures, "triggers": [syntax.begin]}


def _json_head(syntax: JsonCalls, name: str) -> str:
    return f'{{"name": {json.dumps(name)}, "{syntax.arguments}": '


class _Writer:
    def __init__(self, special: Mapping[str, int]) -> None:
        self._special = special
        self._rules: dict[str, str] = {}

    def lark(self, syntax: CallSyntax | Messages, schemas: Mapping[str, Schema], *, several: bool) -> str:
        calls = [self._call(syntax, name, schema, at) for at, (name, schema) in enumerate(schemas.items())]
        self._rules["call"] = " | ".join(f"({call})" for call in calls)
        before, between, after = self._around(syntax)
        more = f"({between} call)*" if several else ""
        self._rules["start"] = f"{before} call {more} {after}"
        return "\n".join(f"{name}: {body}" for name, body in self._rules.items())

    def _around(self, syntax: CallSyntax | Messages) -> tuple[str, str, str]:
        if isinstance(syntax, JsonCalls):
            return "", self._text("\n" if syntax.begin else syntax.between + " "), ""
        if isinstance(syntax, HeadedCalls):
            return self._text(syntax.section), "", self._text(syntax.section_end)
        return "", "" if isinstance(syntax, QuotedCalls | Messages) else self._text("\n"), ""

    def _call(self, syntax: CallSyntax | Messages, name: str, schema: Schema, at: int) -> str:
        if isinstance(syntax, JsonCalls):
            line = "\n" if syntax.begin else ""
            begin, end = syntax.begin + line + _json_head(syntax, name), "}" + line + syntax.end
            return f"{self._text(begin)} {self._json(f'args_{at}', schema)} {self._text(end)}"
        if isinstance(syntax, HeadedCalls):
            begin = f"{self._text(syntax.begin + syntax.prefix + name + ':')} /[0-9]{{1,4}}/"
            arguments = self._json(f"args_{at}", schema)
            return f"{begin} {self._text(syntax.heading)} {arguments} {self._text(syntax.end)}"
        if isinstance(syntax, TaggedCalls):
            return self._tagged(syntax, name, schema, at)
        if isinstance(syntax, QuotedCalls):
            return self._quoted(syntax, name, schema, at)
        return self._message(syntax, name, schema, at)

    def _tagged(self, syntax: TaggedCalls, name: str, schema: Schema, at: int) -> str:
        line = "\n" if syntax.newlines else ""
        opening = syntax.section + ("\n" if syntax.name_open else "") + syntax.name_open + name
        parts = [self._text(f"{opening}{syntax.name_close}\n")]
        for i, (key, optional) in enumerate(_properties(schema)):
            value = property_schema(schema, key)
            begin = f"{syntax.key_open}{key}{syntax.key_close}"
            begin += f"\n{syntax.value_open}" if syntax.value_open else line
            end = f"{line}{syntax.value_close}\n"
            if is_text(value):
                rule = f"value_{at}_{i}"
                self._rules[f"{rule}[suffix={json.dumps(end)}]"] = r"/(?s:.*)/"
                written = f"{self._text(begin)} {rule}"
            else:
                json_value = self._json(f"value_{at}_{i}", value or {}, schema)
                written = f"{self._text(begin)} {json_value} {self._text(end)}"
            parts.append(f"({written})?" if optional else written)
        closing = f"{syntax.end}\n{syntax.section_end}" if syntax.section_end else syntax.end
        return " ".join([*parts, self._text(closing)])

    def _quoted(self, syntax: QuotedCalls, name: str, schema: Schema, at: int) -> str:
        """Write texts between quote marks, other values as JSON, optional fields last."""
        fields: tuple[list[str], list[str]] = ([], [])
        for i, (key, optional) in enumerate(_properties(schema)):
            value = property_schema(schema, key)
            if is_text(value):
                quote = self._text(syntax.quote)
                written = f"{quote} /(?s:.*)/ {quote}"
            else:
                written = self._json(f"value_{at}_{i}", value or {}, schema)
            fields[optional].append(f"{self._text(key + ':')} {written}")
        opening = self._text(syntax.begin + syntax.heading + name + "{")
        return f"{opening} {_listed(*fields)} {self._text('}' + syntax.end)}"

    def _message(self, syntax: Messages, name: str, schema: Schema, at: int) -> str:
        header = f"{syntax.start}assistant"
        if syntax.channel:
            header += f"{syntax.channel}commentary to={syntax.prefix}{name} {syntax.kind}json"
        else:
            header += f" to={name}"
        return f"{self._text(header + syntax.body)} {self._json(f'args_{at}', schema)}"

    def _json(self, rule: str, schema: Schema, root: Schema | None = None) -> str:
        """Add a rule for a schema's JSON; return its name. `root` holds referenced definitions."""
        schema = schema or _ANY_OBJECT if root is None else schema
        if root is not None:
            schema = {**schema, **{name: root[name] for name in ("$defs", "definitions") if name in root}}
        self._rules[rule] = f"%json {json.dumps({**schema, **_AS_TRAINED}, ensure_ascii=False)}"
        return rule

    def _text(self, text: str) -> str:
        parts: list[str] = []
        while text:
            found = [(text.find(mark), mark) for mark in self._special if mark in text]
            at, mark = min(found, default=(len(text), ""))
            if at:
                parts.append(json.dumps(text[:at], ensure_ascii=False))
            if mark:
                parts.append(f"<[{self._special[mark]}]>")
            text = text[at + len(mark) :]
        return " ".join(parts)


def _properties(schema: Schema) -> list[tuple[str, bool]]:
    properties, required = schema.get("properties"), schema.get("required")
    names = list(properties) if isinstance(properties, Mapping) else []
    needed = (
        {name for name in required if isinstance(name, str)} if isinstance(required, list) else set[str]()
    )
    return [(name, name not in needed) for name in names]


def _listed(required: list[str], optional: list[str]) -> str:
    """Return the Lark of comma-separated fields, of which optional ones may be absent."""

    def after(fields: list[str]) -> str:
        return " ".join(f'("," {field})?' for field in fields)

    if required:
        return ' "," '.join(required) + " " + after(optional)
    first = (f"{field} {after(optional[i + 1 :])}" for i, field in enumerate(optional))
    return f"({' | '.join(first)})?" if optional else ""
