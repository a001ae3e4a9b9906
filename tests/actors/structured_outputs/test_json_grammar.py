"""Grammars of JSON schemas: what they allow fits the schema, and every number, depth and space has an end."""

from __future__ import annotations

import json
import random
import re
from copy import deepcopy
from typing import Any

import jsonschema
import pytest
from hypothesis import HealthCheck, Phase, assume, given, settings
from hypothesis import strategies as st
from jsonschema.exceptions import best_match
from llguidance import LLMatcher, LLTokenizer
from manta.actors.structured_outputs.json_grammar import COMPACT, INDENTED, SPACED, JsonLayout, json_rule
from manta.actors.structured_outputs.json_schema import SchemaReader
from support.oracles.schemas import HELD, LEFT_OUT

FIELD = "schema"
BYTES = LLTokenizer("byte")
LAYOUTS = {"compact": COMPACT, "spaced": SPACED, "indented": INDENTED}
MAX_BYTES = 3000


def matcher_of(schema: Any, layout: JsonLayout = COMPACT) -> LLMatcher:
    rule = json_rule(SchemaReader().read(schema, FIELD), layout)
    return LLMatcher(BYTES, LLMatcher.grammar_from_lark(f"start: {rule}"), log_level=0)


def allows(matcher: LLMatcher, text: str) -> bool:
    copy = matcher.deep_copy()
    written = list(text.encode())
    return copy.try_consume_tokens(written) == len(written) and copy.is_accepting()


def walk(matcher: LLMatcher, chance: random.Random) -> str | None:
    """Write a text that the grammar allows, byte by byte; None if it does not end."""
    matcher, written = matcher.deep_copy(), bytearray()
    while len(written) < MAX_BYTES:
        bits = matcher.compute_bitmask()
        allowed = [byte for byte in range(256) if bits[byte >> 3] >> (byte & 7) & 1]
        if not allowed or (matcher.is_accepting() and chance.random() < 0.3):
            return written.decode()
        ends = [byte for byte in allowed if byte in b'"]}']
        byte = chance.choice(ends if ends and chance.random() < 0.2 + len(written) / 500 else allowed)
        matcher.try_consume_tokens([byte])
        written.append(byte)
    return None


def without(schema: Any, paths: tuple[str, ...]) -> Any:
    """Return a schema without the keywords at these paths."""
    schema = deepcopy(schema)
    for path in paths:
        *parents, last = path.removeprefix(f"{FIELD}.").split(".")
        part = schema
        for name in parents:
            part = part[int(name)] if isinstance(part, list) else part[name]
        del part[last]
    return schema


def check_texts(schema: Any, layout: JsonLayout, chance: random.Random, num_texts: int) -> int:
    """Assert that what a grammar allows fits what the reader enforces. Return how many texts ended."""
    matcher = matcher_of(schema, layout)
    if matcher.is_error():
        assert re.search("nsatisf|empty", matcher.get_error()), (schema, matcher.get_error())
        return 0
    enforced = without(schema, SchemaReader().read(schema, FIELD).left_out)
    checker = jsonschema.Draft202012Validator(
        enforced, format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER
    )
    texts = [text for _ in range(num_texts) if (text := walk(matcher, chance)) is not None]
    for text in texts:
        error = best_match(checker.iter_errors(json.loads(text)))
        assert error is None, (schema, text, error and error.message)
    return len(texts)


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("name", [*HELD, *LEFT_OUT])
def test_what_a_grammar_allows_fits_the_schema_without_what_is_named(name: str, layout: JsonLayout) -> None:
    schema = HELD[name] if name in HELD else LEFT_OUT[name][0]
    assert check_texts(schema, layout, random.Random(name), 4) > 0


NAMES = st.sampled_from(("a", "b", "a b", 'q"', "é"))
SCALARS = st.sampled_from((None, True, False, 0, 1, -2.5, 3.0, 9007199254740993, "", "a", 'é"\\', "12"))
COUNTS = st.integers(0, 3)
LEAVES = st.one_of(
    st.just(True),
    st.just({}),
    st.fixed_dictionaries({"type": st.sampled_from(("null", "boolean", "integer", "number", "string"))}),
    st.fixed_dictionaries({"enum": st.lists(SCALARS, min_size=1, max_size=4)}),
    st.fixed_dictionaries({"const": SCALARS}),
    st.fixed_dictionaries(
        {"type": st.just("string")},
        optional={
            "minLength": COUNTS,
            "maxLength": st.integers(3, 9),
            "pattern": st.sampled_from((r"^\d{2,3}$", "b", r"^\w+\s?$", "^(?!a)b", r"^[^\W_]$")),
        },
    ),
    st.fixed_dictionaries(
        {"type": st.sampled_from(("integer", "number", ["number", "null"]))},
        optional={
            "minimum": st.sampled_from((0, -5, 2.5, -1e30)),
            "maximum": st.sampled_from((10, 99.5, 2**64)),
            "exclusiveMinimum": st.sampled_from((0, 1)),
        },
    ),
    st.fixed_dictionaries(
        {"type": st.just("string"), "format": st.sampled_from(("date", "time", "uuid", "path", "ipv4"))}
    ),
)


def composed(schemas: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    lists = st.lists(schemas, min_size=1, max_size=3)
    objects = st.fixed_dictionaries(
        {"type": st.just("object")},
        optional={
            "properties": st.dictionaries(NAMES, schemas, max_size=4),
            "required": st.lists(NAMES, unique=True, max_size=2),
            "additionalProperties": st.one_of(st.booleans(), schemas),
            "propertyNames": st.sampled_from(
                ({"enum": ["a", "x"]}, {"pattern": "^[ab]+$"}, {"maxLength": 3})
            ),
            "minProperties": st.integers(0, 2),
            "maxProperties": st.integers(1, 4),
            "dependentRequired": st.just({"a": ["b"]}),
        },
    )
    arrays = st.fixed_dictionaries(
        {"type": st.just("array")},
        optional={
            "items": schemas,
            "prefixItems": lists,
            "minItems": st.integers(0, 2),
            "maxItems": st.integers(2, 4),
            "uniqueItems": st.just(True),
            "contains": schemas,
        },
    )
    several = st.one_of(
        st.fixed_dictionaries({"anyOf": lists}),
        st.fixed_dictionaries({"oneOf": lists}),
        st.fixed_dictionaries({"anyOf": lists, "type": st.sampled_from(("object", "string"))}),
        st.fixed_dictionaries({"allOf": st.lists(LEAVES, min_size=1, max_size=2)}),
        st.fixed_dictionaries({"if": schemas, "then": schemas, "not": schemas}),
    )
    return st.one_of(objects, arrays, several)


DEFINITIONS = st.recursive(LEAVES, composed, max_leaves=4)
SCHEMAS = st.recursive(st.one_of(LEAVES, st.just({"$ref": "#/$defs/d"})), composed, max_leaves=6)


def test_more_names_than_a_closed_object_has_are_not_enforced() -> None:
    closed = {"type": "object", "properties": {}, "additionalProperties": False, "minProperties": 1}
    check_texts({"anyOf": [closed]}, JsonLayout(), random.Random(0), 3)
    assert SchemaReader().read(closed, FIELD).left_out == (f"{FIELD}.minProperties",)


@settings(
    max_examples=100,
    phases=(Phase.explicit, Phase.generate),
    deadline=None,
    suppress_health_check=(HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much),
)
@given(
    schema=SCHEMAS, definition=DEFINITIONS, layout=st.sampled_from(list(LAYOUTS.values())), seed=st.integers()
)
def test_what_the_grammar_of_any_schema_allows_fits_it(
    schema: Any, definition: Any, layout: JsonLayout, seed: int
) -> None:
    assume(isinstance(schema, dict))
    check_texts({**schema, "$defs": {"d": definition}}, layout, random.Random(seed), 3)


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({"type": "integer"}, ("0", "-7", "18446744073709551615"), ("1" * 21, "01")),
        ({"type": "number"}, ("6.02e23", "-1e-34", "0.1"), ("1." + "1" * 21, "1e1000", "1" * 21)),
        ({"type": "number", "minimum": 0}, ("0", "2.5e-9"), ("-1", "1." + "1" * 21)),
        ({"type": "number", "exclusiveMinimum": 0}, ("0.001", "10"), ("0", "0.0", "0e5")),
        ({"type": "number", "maximum": 99.5}, ("99.25", "-3"), ("100", "1." + "1" * 21, "-" + "1" * 21)),
        ({"type": "string", "format": "duration"}, ('"P1DT2H"',), ('"P' + "1" * 21 + 'D"',)),
        (True, ("[" * 8 + "]" * 8,), ("[" * 9 + "]" * 9,)),
        ({"const": 9007199254740993}, ("9007199254740993",), ("9007199254740992",)),
        ({"type": "object"}, ('{"k":[{"l":1}]}',), ('{"' + "k" * 257 + '":1}',)),
    ],
)
def test_numbers_depth_and_names_have_an_end(
    schema: Any, good: tuple[str, ...], bad: tuple[str, ...]
) -> None:
    matcher = matcher_of(schema)
    assert all(allows(matcher, text) for text in good)
    assert not any(allows(matcher, text) for text in bad)


def test_whitespace_is_a_space_or_a_newline_and_the_indentation_of_the_depth() -> None:
    schema = {"properties": {"a": {"items": {"type": "integer"}}, "b": {}}, "type": "object"}
    indented, compact, spaced = (matcher_of(schema, layout) for layout in (INDENTED, COMPACT, SPACED))
    value = {"a": [1, 2], "b": None}
    for indent in (2, 4, "\t"):
        assert allows(indented, json.dumps(value, indent=indent))
    assert allows(indented, json.dumps(value)) and allows(indented, '{ "a": [1], "b": 2 }')
    for text in ('{  "a":1}', '{\n\n"a":1}', '{"a" :1}', '{\n     "a":1}', '{"a":\n1}', '{"a":1 ,"b":2}'):
        assert not allows(indented, text), text
    assert allows(compact, '{"a":[1,2],"b":null}') and not allows(compact, json.dumps(value))
    assert allows(spaced, json.dumps(value)) and not allows(spaced, '{"a":[1,2],"b":null}')


def test_objects_that_name_their_properties_can_be_closed() -> None:
    schema = {"properties": {"a": {"type": "object"}}, "type": "object"}
    rule = json_rule(SchemaReader(closes_objects=True).read(schema, FIELD), COMPACT)
    matcher = LLMatcher(BYTES, LLMatcher.grammar_from_lark(f"start: {rule}"), log_level=0)
    assert allows(matcher, '{"a":{"x":1}}') and not allows(matcher, '{"b":1}')
