"""Hostile grammars: `HOSTILE`, tuples of a name, a route, a body, and the allowed statuses.

They overflow stacks, take seconds to compile or gigabytes of memory, compile fast and fail or explode at a
later token, or force long texts. None may end a process, pause a parallel stream, or cause a 500. `SHORT`
names one of each kind. Used by `abuse.py` and `test_hostile_grammars.py`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

Json = Any  # JSON
TEXT, CHAT = "/v1/completions", "/v1/chat/completions"
STATUSES = (200, 400, 413)  # answered, or refused by name


def chain(length: int, keyword: str | None) -> Json:
    """A chain of definitions that refer to each other."""
    definitions: dict[str, Json] = {}
    for i in range(length):
        reference = {"$ref": f"#/$defs/d{i + 1}"}
        definitions[f"d{i}"] = reference if keyword is None else {keyword: [reference]}
    return {"$ref": "#/$defs/d0", "$defs": {**definitions, f"d{length}": {"type": "integer"}}}


def chain_of_objects(length: int) -> Json:
    definitions: dict[str, Json] = {
        f"d{i}": {"type": "object", "properties": {"a": {"$ref": f"#/$defs/d{i + 1}"}}, "required": ["a"]}
        for i in range(length)
    }
    return {"$ref": "#/$defs/d0", "$defs": {**definitions, f"d{length}": {"type": "integer"}}}


def nested(depth: int, kind: str) -> Json:
    schema: Json = {"type": "integer"}
    for _ in range(depth):
        if kind == "array":
            schema = {"type": "array", "items": schema}
        elif kind == "object":
            schema = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
        else:
            schema = {kind: [schema]}
    return schema


def doubled(times: int, name: str) -> str:
    """A text of 4 characters, doubled a number of times by rules (`name` in lower case) or terminals."""
    rules = "\n".join(f"{name}{i + 1}: {name}{i} {name}{i}" for i in range(times))
    return f'start: {name}{times}\n{name}0: "abcd"\n{rules}'


def refers_to_itself(times: int) -> Json:
    """A property of branches that are all the same property: a number to the power of 8 branches."""
    branches = {"anyOf": [{"$ref": "#/$defs/a"}] * times}
    return {"type": "object", "properties": {"x": branches}, "$defs": {"a": branches}}


def _patterns(count: int) -> Json:
    return {
        "type": "object",
        "patternProperties": {f"^a{i}[a-z]*$": {"type": "integer"} for i in range(count)},
    }


def _tool(parameters: Json) -> Json:
    function = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    return {"tools": [function], "tool_choice": "required"}


def _format(schema: Json) -> Json:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}}


def _tags(schema: Json) -> Json:
    tag = {"begin": "<f>", "content": {"type": "json_schema", "json_schema": schema}, "end": "</f>"}
    form = {"type": "triggered_tags", "triggers": ["<f>"], "tags": [tag]}
    return {"response_format": {"type": "structural_tag", "format": form}}


def _ends(elements: int, chars: int) -> Json:
    """Alternatives of a tag whose end is long: it is written after each."""
    content = {"type": "or", "elements": [{"type": "regex", "pattern": "a"}] * elements}
    form = {"type": "tag", "begin": "<f>", "content": content, "end": "x" * chars}
    return {"response_format": {"type": "structural_tag", "format": form}}


_RULES = " | ".join(f"r{i}" for i in range(1500))
_TERMINALS = " | ".join(f"T{i}" for i in range(800))
_SCHEMAS: Mapping[str, Json] = {
    "1,500 allOf behind each other": chain(1500, "allOf"),
    "1,500 anyOf behind each other": chain(1500, "anyOf"),
    "1,500 oneOf behind each other": chain(1500, "oneOf"),
    "3,000 references behind each other": chain(3000, None),
    "1,000 objects behind each other": chain_of_objects(1000),
    "200 allOf behind each other": chain(200, "allOf"),
    "100 nested arrays": nested(100, "array"),
    "300 nested arrays": nested(300, "array"),
    "300 nested objects": nested(300, "object"),
    "300 nested anyOf": nested(300, "anyOf"),
    "300 patterns of properties": _patterns(300),
    "100 patterns of properties": _patterns(100),
    "a large divisor": {"type": "integer", "multipleOf": 99_991},
    "a larger divisor": {"type": "integer", "multipleOf": 1_000_003, "minimum": 12_345, "maximum": 10**15},
    "1,500 properties": {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(1500)}},
    "2,500 values": {"enum": [f"value {i} of {i * 7919 % 10_007}" for i in range(2500)]},
    "100,000 values": {"enum": list(range(100_000))},
    "100,000 characters that must come": {"const": "hello world " * 8000},
    "a long pattern": {"type": "string", "pattern": "^(a|b)?" + "(a|b)?" * 10_000 + "$"},
    "a nested pattern": {"type": "string", "pattern": "^((a{1,500}b{1,500}){1,500}c){1,500}$"},
    "a length and a pattern": {
        "type": "string",
        "pattern": "^(ab|a|b){5,2000}$",
        "minLength": 500,
        "maxLength": 900,
    },
    "50,000 letters": {"type": "string", "pattern": "^a*$", "minLength": 50_000, "maxLength": 50_000},
    "a schema that is its own part": {"allOf": [{"$ref": "#"}]},
    "20,000 items": {"type": "array", "items": {"const": "abcdef"}, "minItems": 20_000, "maxItems": 20_000},
}
_REGEXES: Mapping[str, str] = {
    "20,000 options": "(a|b)?" * 20_000,
    "3,000 options": "(a|b)?" * 3000,
    "a million letters": "(a{1000}){1000}",
    "huge repetitions": "(a{1,100000}){1,100000}",
    "forced nested repetitions": "(y|z)(((abc){99}){99}){99}",
    "18,000 forced characters": "(y|z)(abcdef){3000}",
    "96,000 characters as they are": "abcd efg " * 10_000,
    "250 groups": "(" * 250 + "a" + ")" * 250,
    "60,000 groups": "(" * 60_000 + "a" + ")" * 60_000,
    "2 to the 25 states": "(a|b|c)*a(a|b|c){25}",
    "Unicode classes": r"(\p{L}|\p{N}){1,3000}" * 20,
    "a hundred stars": "(a*b*c*)*" * 300,
}
_GRAMMARS: Mapping[str, str] = {
    "3,000 rules behind each other": "start: r0\n"
    + "\n".join(f'r{i}: "a" r{i + 1} | "b"' for i in range(3000))
    + '\nr3000: "x"',
    "3,000 terminals behind each other": "start: T0\n"
    + "\n".join(f'T{i}: "a" T{i + 1} | "b"' for i in range(3000))
    + '\nT3000: "x"',
    "120,000 empty lines": "\n" * 120_000,
    "6,000 rules of EBNF": "root ::= r0\n"
    + "\n".join(f'r{i} ::= "a" r{i + 1}' for i in range(6000))
    + '\nr6000 ::= "x"',
    "60,000 groups of EBNF": "root ::= " + "(" * 60_000 + '"a"' + ")" * 60_000,
    "60,000 groups of Lark": "start: " + "(" * 60_000 + '"a"' + ")" * 60_000,
    "no end": 'start: "abcdefgh" start',
    "no end behind a choice": 'start: /[yz]/ s\ns: "abcdefgh" s',
    "a rule of itself": "start: start",
    "ambiguous": 'start: s\ns: s s s | s s | "a" | /[a-z]+/ | ""',
    "100,000 times a rule": 'start: a{100000}\na: "x"',
    "a rule doubled 30 times": doubled(30, "r"),
    "a terminal doubled 14 times": doubled(14, "R"),
    "a terminal doubled 40 times": doubled(40, "R"),
    "1,500 rules at once": f"start: {_RULES}\n"
    + "\n".join(f'r{i}: /[a-z]{{1,{i % 50 + 2}}}/ r{(i * 7 + 1) % 1500} | "x"' for i in range(1500)),
    "800 terminals at once": f"start: ({_TERMINALS})*\n"
    + "\n".join(f"T{i}: /[a-z]*{chr(97 + i % 26)}[a-z]{{{i % 30}}}[0-9]/" for i in range(800)),
    "five intersections": "start: A\nA: " + " & ".join(f"/([a-z]{{{n}}})*/" for n in (3, 5, 7, 11, 13)),
    "what is not": r"start: A" + "\n" + r"A: /(.|\n)*/ & ~/(.|\n)*a(.|\n){14}b(.|\n)*/",
    "a schema in it": f"start: %json {json.dumps(chain(1500, 'allOf'))}",
}

HOSTILE: list[tuple[str, str, dict[str, Json]]] = [
    *((name, CHAT, _format(schema)) for name, schema in _SCHEMAS.items()),
    *((name, TEXT, {"structured_outputs": {"regex": regex}}) for name, regex in _REGEXES.items()),
    *((name, TEXT, {"structured_outputs": {"grammar": text}}) for name, text in _GRAMMARS.items()),
    ("4,096 choices", TEXT, {"structured_outputs": {"choice": [f"c{i} of all" for i in range(4096)]}}),
    ("100,000 choices", TEXT, {"structured_outputs": {"choice": ["a"] * 100_000}}),
    ("3 choices of 30 kB", TEXT, {"structured_outputs": {"choice": [f"w{i} " * 10_000 for i in range(3)]}}),
    ("a chain in a tag", CHAT, _tags(chain(1500, "allOf"))),
    ("a chain as a tool", CHAT, _tool({"type": "object", **chain(1500, "allOf")})),
    ("a tool with 300 nested objects", CHAT, _tool(nested(300, "object"))),
    ("a tool that refers to itself", CHAT, _tool(refers_to_itself(30))),
    ("a tool with patterns", CHAT, _tool(_patterns(300))),
    ("200 ends of 100 kB", CHAT, _ends(200, 100_000)),
    ("a chain as text", TEXT, {"structured_outputs": {"json": json.dumps(chain(1500, "allOf"))}}),
    ("100,000 brackets", TEXT, {"structured_outputs": {"json": "[" * 100_000}}),
]
SHORT = (
    "1,500 allOf behind each other",
    "3,000 references behind each other",
    "300 nested anyOf",
    "300 patterns of properties",
    "forced nested repetitions",
    "3,000 rules behind each other",
    "no end behind a choice",
    "18,000 forced characters",
    "4,096 choices",
    "a chain in a tag",
    "a tool that refers to itself",
    "200 ends of 100 kB",
)


def body_of(path: str, fields: Mapping[str, Json]) -> dict[str, Json]:
    """A whole request with these fields."""
    requested: dict[str, Json] = (
        {"messages": [{"role": "user", "content": "x"}]} if path == CHAT else {"prompt": "x"}
    )
    return {**requested, "max_tokens": 24, "seed": 1, **fields}


HOSTILE = [(name, path, body_of(path, fields)) for name, path, fields in HOSTILE]
