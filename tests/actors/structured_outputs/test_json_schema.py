"""What is read of JSON schemas: keywords that llguidance enforces, and the names of the others."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer
from manta import StructuredOutputsParams
from manta.actors.chat.argument_schema import ArgumentSchema
from manta.actors.structured_outputs.grammar_frontend import written_grammar
from manta.actors.structured_outputs.json_schema import EnforcedSchema, SchemaReader
from manta.cluster.config import EngineConfig, StructuredOutputsConfig
from manta.cluster.errors import ConfigError, RequestError
from support.oracles.schemas import HELD, LEFT_OUT

FIELD = "response_format.json_schema.schema"
COMPACT = {"whitespace_flexible": False}
BYTES = LLTokenizer("byte")


def allows(found: EnforcedSchema, value: object) -> bool:
    """Return whether the grammar of a schema takes a value."""
    grammar = LLMatcher.grammar_from_json_schema(found.text(COMPACT), overrides={"lenient": False})
    matcher = LLMatcher(BYTES, grammar, log_level=0)
    assert not matcher.is_error() or "nsatisf" in matcher.get_error(), matcher.get_error()
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()
    return matcher.try_consume_tokens(list(text)) == len(text) and matcher.is_accepting()


@pytest.mark.parametrize("name", HELD)
def test_nothing_is_left_out_of_a_schema_that_can_be_enforced(name: str) -> None:
    assert SchemaReader().read(HELD[name], FIELD).left_out == ()


@pytest.mark.parametrize("name", LEFT_OUT)
def test_a_keyword_that_cannot_be_enforced_is_named_by_its_path(name: str) -> None:
    schema, paths = LEFT_OUT[name]
    found = SchemaReader().read(schema, FIELD)
    assert list(found.left_out) == [f"{FIELD}.{path}" for path in paths]
    allows(found, None)  # the rest compiles


def test_strict_refuses_a_keyword_that_restricts_and_not_a_format_or_an_unknown_keyword() -> None:
    schema = {
        "properties": {"p": {"type": "string", "format": "path"}, "t": {"uniqueItems": True}},
        "mood": 1,
    }
    with pytest.raises(RequestError, match="uniqueItems") as refused:
        SchemaReader(strict=True).read(schema, FIELD)
    assert refused.value.param == f"{FIELD}.properties.t.uniqueItems"
    del schema["properties"]["t"]
    found = SchemaReader(strict=True).read(schema, FIELD)
    assert found.left_out == (f"{FIELD}.properties.p.format", f"{FIELD}.mood")


@pytest.mark.parametrize(
    "schema",
    [
        {"uniqueItems": False, "not": False, "propertyNames": True, "dependentRequired": {}},
        {"title": "T", "deprecated": True, "x-order": 3, "contentMediaType": "text/html", "example": 1},
        {"type": "integer", "format": "int32"},
        {"then": {"const": 1}, "maxContains": 2},
    ],
)
def test_what_restricts_nothing_is_not_named(schema: dict[str, Any]) -> None:
    assert SchemaReader().read(schema, FIELD).left_out == ()


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        (
            {"propertyNames": {"enum": ["a", "b"]}, "additionalProperties": {"type": "integer"}},
            {"a": 1},
            {"c": 1},
        ),
        ({"propertyNames": {"pattern": "^[a-z]+$"}}, {"a": 1}, {"A": 1}),
        ({"propertyNames": {"maxLength": 2}}, {"ab": 1}, {"abc": 1}),
        ({"properties": {"a": {}}, "unevaluatedProperties": False}, {"a": 1}, {"b": 1}),
        ({"prefixItems": [{"type": "null"}], "unevaluatedItems": False}, [None], [None, 1]),
        ({"items": [{"type": "null"}], "additionalItems": {"type": "integer"}}, [None, 1], [None, "1"]),
        ({"type": ["dict", "float"]}, 1.5, "a"),
        ({"type": "integer", "minimum": 3, "exclusiveMinimum": True}, 4, 3),
        ({"type": "string", "maxLength": 2.0}, "ab", "abc"),
        (
            {"patternProperties": {"^s_": {"type": "string"}, "^n_": {"type": "number"}}},
            {"n_": 1},
            {"n_": "1"},
        ),
        ({"type": "string", "format": "date"}, "2024-02-29", "2023-02-29"),
        (
            {
                "$schema": "http://json-schema.org/draft-07/schema#",
                "definitions": {"i": {"type": "integer"}},
                "items": {"$ref": "#/definitions/i", "maximum": 3},
            },
            [9],
            ["9"],
        ),
        ({"$defs": {"a/b%": {"type": "integer"}}, "items": {"$ref": "#/$defs/a~1b%25"}}, [1], ["1"]),
        ({"$defs": {"A": {"$anchor": "whole", "type": "integer"}}, "items": {"$ref": "#whole"}}, [1], ["1"]),
        (
            {
                "$id": "https://a.org/s",
                "$defs": {"A": {"$id": "i", "type": "integer"}},
                "items": {"$ref": "i"},
            },
            [1],
            ["1"],
        ),
        ({"type": "array", "items": {"$ref": "#"}}, [[], [[]]], [1]),
        ({"items": {"$ref": "#/properties/n"}, "properties": {"n": {"type": "null"}}}, [None], [1]),
    ],
)
def test_what_can_be_said_in_keywords_that_llguidance_has_is_enforced(
    schema: dict[str, Any], good: object, bad: object
) -> None:
    found = SchemaReader().read(schema, FIELD)
    assert not found.left_out and allows(found, good) and not allows(found, bad)


def test_a_part_of_a_schema_stands_alone() -> None:
    schema = {
        "allOf": [{"$ref": "#/definitions/Args"}],
        "required": ["of"],
        "definitions": {
            "Args": {"properties": {"of": {"$ref": "#"}, "n": {"$ref": "#/definitions/N"}}},
            "N": {"type": "integer"},
        },
    }
    found = SchemaReader().read(schema, FIELD)
    arguments = ArgumentSchema(found.schema)
    (branch,) = arguments.branches
    assert branch.names == ["of", "n"] and branch.required == ["of"]
    of, n = arguments.property("of"), arguments.property("n")
    assert of is not None and n is not None and n.types == {"integer"}
    assert allows(n.enforced(), 3) and not allows(n.enforced(), "3")
    assert allows(of.enforced(), {"of": {"of": 1}, "n": 3})


@pytest.mark.parametrize(
    ("pattern", "good", "bad"),
    [
        (r"^\d{4}$", "2024", "١٢٣٤"),
        (r"^\w+$", "a_1", "é"),
        (r"^a\sb$", "a b", "a\u2003b"),
        (r"^\S+$", "é", "\ufeff"),
        (r"^[\w.-]+$", "a.b-c", "é"),
        (r"^[^\d]$", "x", "3"),
        (r"^.$", "é", "\r"),
        (r"^[^]$", "\n", ""),
        (r"^a{,3}$", "a{,3}", "aa"),
        (r"^[[&&b]$", "&", "&&"),
        (r"^\cJ\/$", "\n/", "J/"),
        (r"^\u{1F600}$", "😀", "u"),
        (r"^\p{Lu}$", "Å", "å"),
        (r"\Aa\Z", "a", "ba"),
        (r"^(?<year>[0-9]{2})$", "24", "2"),
    ],
)
def test_patterns_are_those_of_ecma_262_with_ascii_classes(pattern: str, good: str, bad: str) -> None:
    found = SchemaReader().read({"type": "string", "pattern": pattern}, FIELD)
    assert not found.left_out and allows(found, good) and not allows(found, bad)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"disable_any_whitespaces": True}, "Did you mean structured_outputs_config.disable_any_whitespace"),
        ({"reasoning_parser": "qwen3"}, "reasoning_parser is not supported"),
        ({"enable_in_reasoning": True}, "enable_in_reasoning is not supported"),
        ({"backend": "lark"}, "xgrammar"),
        ({"disable_any_whitespace": "yes"}, "True, False"),
    ],
)
def test_a_setting_that_has_no_meaning_here_is_refused_by_name(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        EngineConfig(model="m", structured_outputs_config=settings)


def test_vllm_s_config_makes_json_compact() -> None:
    settings = {"backend": "xgrammar", "disable_any_whitespace": True, "reasoning_parser": ""}
    config = StructuredOutputsConfig.of(settings)
    requested = StructuredOutputsParams(json={"type": "array"})
    _, text = written_grammar(requested, config)
    assert text == written_grammar(replace(requested, disable_any_whitespace=True))[1]
    assert text != written_grammar(requested)[1]
