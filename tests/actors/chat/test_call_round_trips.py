"""Whatever a format's grammar can write, its reader reads back as arguments that fit the tool's schema.

Each example walks at random through the grammar of required calls, token by token, and reads the text.
"""

from __future__ import annotations

import json
import random
from functools import cache
from typing import Any

import jsonschema
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from manta.actors.chat.answer_grammar import AnswerGrammar, Reasoning
from manta.actors.chat.chat_formats import CALLS, mark_ids, texts_of
from manta.actors.chat.stream_parser import Splitter
from manta.actors.chat.text_stream import AnswerDelta, concatenate
from manta.actors.tokenization.tokenizer import Tokenizer
from manta.cluster.request.structured_outputs import Grammar
from manta.drafter.grammars.compiler import GrammarCompiler

MAX_TOKENS = 400
END = "<|walk_end|>"
# As vocabularies are published: marks as special tokens, as added tokens that are not, and as plain text.
MARKS = ("special", "added", "text")
LIKELY = '"\n<>{}[],:0129-etruefalsnull /\\'  # characters at which lexers and readers decide

texts = st.fixed_dictionaries(
    {"type": st.just("string")},
    optional={
        "enum": st.lists(st.sampled_from(["celsius", "a b", "", "null", "5"]), min_size=1, unique=True),
        "maxLength": st.integers(2, 6),  # what the patterns need at least
        "pattern": st.sampled_from(["^[a-c]{2,3}$", "x|y", "^k"]),
    },
).filter(lambda s: "enum" not in s or len(s) == 2)
scalars = (
    texts
    | st.sampled_from([{"type": t} for t in ("integer", "number", "boolean", "null", "string")])
    | st.just({"type": "integer", "minimum": 3, "maximum": 70})
    | st.sampled_from([{"type": "string", "format": f} for f in ("email", "ipv4", "uuid", "date")])
    | st.sampled_from([{"const": "fixed"}, {"enum": ["a", 1, None, True]}, {"type": ["string", "null"]}, {}])
    | st.just({"$ref": "#/definitions/Name"})
    | st.just({"type": ["string", "null"], "enum": [None]})
)


def _objects(values: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    def of(properties: dict[str, Any], required: set[str]) -> dict[str, Any]:
        names = sorted(required & properties.keys())
        return {
            "type": "object", "properties": properties, "required": names, "additionalProperties": False
        }  # fmt: skip

    keys = st.sampled_from(["city", "n", "a-b", "of"])
    return st.builds(of, st.dictionaries(keys, values, max_size=3), st.sets(keys))


values = st.recursive(
    scalars,
    lambda inner: (
        _objects(inner)
        | st.builds(lambda item: {"type": "array", "items": item, "maxItems": 2}, inner)
        | st.builds(lambda a, b: {"anyOf": [a, b]}, inner, inner)
    ),
    max_leaves=4,
)
roots = st.builds(
    lambda root, wrap: {
        **({"$ref": "#/definitions/Root"} if wrap else root),
        "definitions": {"Name": {"type": "string", "minLength": 1}, "Root": root},
    },
    _objects(values),
    st.booleans(),
)


@cache
def compiled_for(name: str, marks: str) -> tuple[Tokenizer, GrammarCompiler]:
    """Return a tokenizer of bytes whose marks are tokens or text, and what compiles grammars for it."""
    backend = tokenizers.Tokenizer(tokenizers.models.BPE())
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(initial_alphabet=alphabet, vocab_size=300, show_progress=False)
    backend.train_from_iterator([], trainer)
    backend.add_special_tokens([END])
    found = sorted(text for text in texts_of(CALLS[name]) if text[:1] in "<[" and text[-1:] in ">]")
    if marks != "text":
        added = [tokenizers.AddedToken(m, special=marks == "special", normalized=False) for m in found]
        backend.add_tokens(added)
    tokenizer = Tokenizer(backend, None, {})
    ends = (tokenizer.special_token_ids[END],)
    return tokenizer, GrammarCompiler(tokenizer.to_json(), tokenizer.vocab_size, ends)


def walk(name: str, marks: str, schemas: dict[str, Any], rng: random.Random) -> str | None:
    """Return a text that the grammar of required calls writes; None if it grows too long."""
    tokenizer, compiler = compiled_for(name, marks)
    ids = mark_ids([CALLS[name]], tokenizer.added_token_ids)
    lark = AnswerGrammar(CALLS[name], schemas, ids, Reasoning()).forced(several=True)
    matcher = compiler.matcher(Grammar("lark", lark))
    likely = set(tokenizer.encode(LIKELY, add_special_tokens=False)) | set(ids.values())
    (end,) = compiler.eos_token_ids
    written: list[int] = []
    while not (matcher.is_accepting() and rng.random() < 0.5):
        mask = matcher.compute_bitmask()
        allowed = [i for i in range(tokenizer.vocab_size) if mask[i // 8] >> (i % 8) & 1 and i != end]
        if not allowed:
            assert matcher.is_accepting(), lark
            break
        near = [token for token in allowed if token in likely]
        token = rng.choice(near if near and rng.random() < 0.8 else allowed)
        assert matcher.try_consume_tokens([token]) == 1
        written.append(token)
        if len(written) > MAX_TOKENS:
            return None
    reader = tokenizer.detokenizer([], skip_special_tokens=False)
    return reader.step(written) + reader.flush()


def read(name: str, schemas: dict[str, Any], *pieces: str) -> AnswerDelta:
    reader = Splitter(None, CALLS[name], schemas=schemas)
    return concatenate([*(reader.feed(piece) for piece in pieces), reader.finish()])


@pytest.mark.parametrize("marks", MARKS)
@pytest.mark.parametrize("name", sorted(CALLS.keys() - {"qwen3_xml"}))
@given(schema=roots, seed=st.integers(0, 2**32))
def test_arguments_that_a_grammar_writes_are_read_back_and_fit_the_schema(
    name: str, marks: str, schema: dict[str, Any], seed: int
) -> None:
    schemas = {"f": schema, "now": {"type": "object", "properties": {}}}
    text = walk(name, marks, schemas, random.Random(seed))
    if text is None:
        return
    answer = read(name, schemas, text)
    assert answer.calls and not answer.content and not answer.reasoning, text
    for call in answer.calls:
        schema = schemas[call.name or ""]
        jsonschema.validate(json.loads(call.arguments), schema, format_checker=jsonschema.FormatChecker())
    assert read(name, schemas, *text) == answer


@pytest.mark.parametrize("marks", MARKS)
@pytest.mark.parametrize("name", sorted(CALLS.keys() - {"qwen3_xml"}))
def test_recursive_schemas_and_unions_of_arguments_are_read_back(name: str, marks: str) -> None:
    tree = {"type": "object", "properties": {"v": {"type": "integer"}, "next": {"$ref": "#"}}}
    tree |= {"required": ["v"], "additionalProperties": False}
    union = {
        "oneOf": [
            {"type": "object", "properties": {"k": {"const": k}, **more}, "required": ["k", *more]}
            for k, more in (("a", {"n": {"type": "integer"}}), ("b", {"s": {"type": "string"}}))
        ]
    }
    schemas = {"tree": tree, "union": union, "any": {"type": "object"}}
    found = 0
    for seed in range(8):
        text = walk(name, marks, schemas, random.Random(seed))
        for call in read(name, schemas, text or "").calls if text is not None else ():
            jsonschema.validate(json.loads(call.arguments), schemas[call.name or ""])
            found += 1
    assert found


@pytest.mark.parametrize("name", ["qwen3_coder", "glm45"])
def test_a_union_of_texts_objects_and_bounded_numbers_is_written(name: str) -> None:
    number = {"type": "integer", "minimum": 3, "maximum": 70}
    union = {
        "anyOf": [
            {"type": "string", "maxLength": 3},
            number,
            {"type": "object", "additionalProperties": False},
        ]
    }
    schema = {"type": "object", "properties": {"v": union}, "required": ["v"], "additionalProperties": False}
    texts = [walk(name, "special", {"f": schema}, random.Random(seed)) for seed in range(8)]
    assert any(texts)
    for text in filter(None, texts):
        for call in read(name, {"f": schema}, text).calls:
            jsonschema.validate(json.loads(call.arguments), schema)
