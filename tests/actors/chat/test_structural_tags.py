"""Structural tags in both forms: which texts they accept, whether their marks are text or tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from manta.actors.structured_outputs.grammar_frontend import GrammarFrontend
from manta.actors.structured_outputs.mark_tokens import MarkTokens
from manta.actors.structured_outputs.structural_tags import MAX_DEPTH, lark_of_tags
from manta.actors.tokenization.tokenizer import Tokenizer
from manta.cluster.errors import RequestError
from manta.cluster.request.request import SamplingParams
from manta.cluster.request.structured_outputs import Grammar, StructuredOutputsParams
from manta.drafter.grammars.compiler import GrammarCompiler
from support.checkpoints.byte_tokenizer import byte_tokenizer

QWEN = ("<tool_call>", "</tool_call>", "<think>", "</think>")  # added tokens that are not special


def const(value: str) -> dict[str, Any]:
    return {"type": "const_string", "value": value}


def schema(of: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": of}


def tag(begin: str, content: dict[str, Any], end: str | list[str] = "</f>") -> dict[str, Any]:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def sequence(*elements: dict[str, Any]) -> dict[str, Any]:
    return {"type": "sequence", "elements": list(elements)}


def either(*elements: dict[str, Any]) -> dict[str, Any]:
    return {"type": "or", "elements": list(elements)}


ANY = {"type": "any_text"}
NUMBERS = {"enum": [1, 22]}
CALLS = [tag("<f=a>", schema(NUMBERS)), tag("<f=b>", schema({"type": "boolean"}))]
TRIGGERED = {"type": "triggered_tags", "triggers": ["<f="], "tags": CALLS}
SEPARATED = {"type": "tags_with_separator", "tags": CALLS, "separator": ", "}
A, B = "<f=a>22</f>", "<f=b>true</f>"
FORMATS: dict[str, tuple[dict[str, Any], list[str], list[str]]] = {
    "const_string": (const('say "no"\n'), ['say "no"\n'], ["", 'say "no"']),
    "json_schema": (schema(NUMBERS), ["1", "22"], ["2", "x"]),
    "regex": ({"type": "regex", "pattern": "a/[0-9]+"}, ["a/7", "a/07"], ["a/", "b"]),
    "regex with escapes": (
        {"type": "regex", "pattern": r"a\/b[\/.]\\/\." + "\\\n"},
        ["a/b/\\/.\n", "a/b.\\/.\n"],
        ["a\\/b/\\/.\n", "a/b/\\\\/.\n", "a/b/\\/.\\n"],
    ),
    "any_text": (ANY, ["", "what\never </g>"], []),
    "any_text but": ({**ANY, "excludes": ["no", "never"]}, ["", "n o"], ["no", "or never."]),
    "sequence": (sequence(const("a"), schema(NUMBERS), ANY), ["a1", "a22 and"], ["a", "1", "a3"]),
    "or": (either(const("ab"), CALLS[0], schema(NUMBERS)), ["ab", A, "22"], ["a", "b"]),
    "tag": (CALLS[0], [A, "<f=a>1</f>"], ["<f=a>1", "x" + A, A + "x"]),
    "tag of text": (tag("<t>", ANY, "</t>"), ["<t></t>", "<t>a <\n</t>"], ["<t>", "<t>a</t>b</t>"]),
    "tag of text but": (
        tag("<t>", {**ANY, "excludes": ["no"]}, "</t>"),
        ["<t>a</t>"],
        ["<t>no</t>", "<t>a no b</t>"],
    ),
    "tag with two ends": (tag("<t>", ANY, ["</t>", "!"]), ["<t>a!", "<t>a</t>"], ["<t>a!</t>", "<t>a"]),
    "tag of a sequence": (
        tag("<t>", sequence(const("a"), ANY)),
        ["<t>a</f>", "<t>abc</f>"],
        ["<t></f>", "<t>a"],
    ),
    "tag of either": (
        tag("<t>", either(schema(NUMBERS), {**ANY, "excludes": ["1"]})),
        ["<t>1</f>", "<t>some</f>"],
        ["<t>12</f>"],
    ),
    "triggered": (
        TRIGGERED,
        ["", "some", A, f"so: {A} and {B}, well <f", "<f <f=a>1</f>"],
        ["<f=a>3</f>", "so <f=c>1</f>", "<f="],
    ),
    "triggered, at least one": (
        {**TRIGGERED, "at_least_one": True},
        [A, f"{A} or {B}"],
        ["", "some", "s" + A],
    ),
    "triggered, first alone": (
        {**TRIGGERED, "stop_after_first": True},
        ["some", A, "so " + A],
        [A + " ", A + B],
    ),
    "triggered, one": (
        {**TRIGGERED, "stop_after_first": True, "at_least_one": True},
        [A, B],
        ["", "s" + A, A + "s", A + B],
    ),
    "two triggers": (
        {"type": "triggered_tags", "triggers": ["<f=a", "<f="], "tags": CALLS},
        [f"{A}{B}", "text"],
        ["<f=b>22</f>"],
    ),
    "triggered in a tag": (
        tag("<t>", TRIGGERED, "</t>"),
        ["<t></t>", f"<t>so {A} {B}.</t>"],
        ["<t>", f"<t>{A}", "<t><f=c></t>", "<t></t></t>"],
    ),
    "first alone in a tag": (
        tag("<t>", {**TRIGGERED, "stop_after_first": True}, "</t>"),
        ["<t>some</t>", f"<t>so {A}</t>"],
        [f"<t>{A} </t>", f"<t>{A}{B}</t>"],
    ),
    "separated": (SEPARATED, ["", A, f"{A}, {B}, {A}"], [f"{A}{B}", f"{A}, ", "x"]),
    "separated, at least one": ({**SEPARATED, "at_least_one": True}, [A, f"{A}, {B}"], [""]),
    "separated, first alone": ({**SEPARATED, "stop_after_first": True}, ["", A], [f"{A}, {B}"]),
    "triggered but": (
        tag("<t>", {**TRIGGERED, "excludes": ["no"]}, "</t>"),
        [f"<t>so {A} {B}.</t>"],
        [f"<t>no {A}</t>", f"<t>{A} no</t>"],
    ),
    "optional": ({"type": "optional", "content": CALLS[0]}, ["", A], [A + A, B]),
    "plus": ({"type": "plus", "content": const("ab")}, ["ab", "abab"], ["", "aba"]),
    "star in a tag": (
        tag("<", {"type": "star", "content": const("ab")}, ">"),
        ["<>", "<abab>"],
        ["<", "<a>"],
    ),
    "thinking first": (
        sequence(tag("<think>", ANY, "</think>"), TRIGGERED),
        [f"<think>if <f and </think>so {B}", "<think></think>"],
        [A, "<think>", "<think></think><f=b>1</f>"],
    ),
}


MARKS = ("<f=a>", "<f=b>", "</f>", "<t>", "</t>", "<think>", "</think>")
VOCABULARIES = {
    "text": byte_tokenizer(),
    "added tokens": byte_tokenizer(added=MARKS),
    "special tokens": byte_tokenizer(special=[*MARKS]),
    "some are tokens": byte_tokenizer(added=("<f=a>", "</t>", "<think>")),
}


def taking(tokenizer: Tokenizer, tags: dict[str, Any]) -> Callable[[str], bool]:
    """Return whether a text is accepted, as the tokens that the tokenizer makes of it."""
    compiler = GrammarCompiler(tokenizer.to_json(), tokenizer.vocab_size, (256,))
    lark = lark_of_tags(tags, "structural_tag", marks=MarkTokens.of(tokenizer))

    def takes(text: str) -> bool:
        matcher = compiler.matcher(Grammar("lark", lark))
        ids = tokenizer.encode(text, add_special_tokens=False)
        return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()

    return takes


@pytest.mark.parametrize("marks", VOCABULARIES)
@pytest.mark.parametrize("name", FORMATS)
def test_a_structural_tag_format_accepts_exactly_its_texts(name: str, marks: str) -> None:
    form, right, wrong = FORMATS[name]
    takes = taking(VOCABULARIES[marks], {"format": form})
    assert [text for text in right if not takes(text)] == []
    assert [text for text in wrong if takes(text)] == []


@pytest.mark.parametrize("tokens", [(), QWEN])
def test_tags_around_the_marks_of_a_model_are_written_by_its_tokens(tokens: tuple[str, ...]) -> None:
    call = {
        "begin": '<tool_call>\n{"name": "f", "arguments": ',
        "schema": {"const": 1},
        "end": "}\n</tool_call>",
    }
    takes = taking(byte_tokenizer(added=tokens), {"structures": [call], "triggers": ["<tool_call>"]})
    text = '<tool_call>\n{"name": "f", "arguments": 1}\n</tool_call>'
    assert takes(f"I look.\n{text}\n{text}") and takes("No.")
    assert not takes(text.replace("1", "2")) and not takes("<tool_call>")


def test_an_engine_writes_the_marks_of_its_own_vocabulary() -> None:
    tokenizer = byte_tokenizer(added=QWEN)
    wanted = StructuredOutputsParams(structural_tag={"format": const("<think>Hm")})
    frontend = GrammarFrontend(tokenizer, tokenizer.vocab_size, (256,))
    try:
        found = frontend.compile(SamplingParams(structured_outputs=wanted)).grammar
    finally:
        frontend.close()
    assert found is not None and f"<[{tokenizer.added_token_ids['<think>']}]>" in found.text


@pytest.mark.parametrize("tokens", [(), QWEN])
def test_free_text_may_contain_marks_other_than_its_ends_and_special_tokens(tokens: tuple[str, ...]) -> None:
    function = tag("<function=f>", schema({"const": 1}), "</function>")
    triggered = {"type": "triggered_tags", "triggers": ["<function="], "tags": [function]}
    tokenizer = byte_tokenizer(added=tokens, special=["<|x|>"])
    takes = taking(tokenizer, {"format": sequence(tag("<think>", ANY, "</think>"), triggered)})
    call = "<tool_call>\n<function=f>1</function>\n</tool_call>"
    assert takes(f"<think>If I write {call}?</think>\n{call}\n{call}")
    assert not takes(f"<think>{call}</think>{call.replace('1', '2')}")
    assert not takes("<think></think>a</think><|x|>")
    no_calls = taking(tokenizer, {"format": {**ANY, "excludes": ["<tool_call>"]}})
    assert no_calls("<think>No.</think>") and not no_calls(f"Yes: {call}")


def test_the_older_form_equals_triggered_tags() -> None:
    older = {
        "structures": [
            {"begin": each["begin"], "schema": each["content"]["json_schema"], "end": "</f>"}
            for each in CALLS
        ],
        "triggers": ["<f="],
    }
    assert lark_of_tags(older, "x") == lark_of_tags({"format": TRIGGERED}, "x")


def deep(depth: int) -> dict[str, Any]:
    return const("a") if not depth else either(deep(depth - 1))


@pytest.mark.parametrize(
    ("form", "field", "said"),
    [
        ({}, ".type", "any_text"),
        ({"type": "grammar", "grammar": "root ::= x"}, ".type", "not supported"),
        (3, "", "an object"),
        (const(3), ".value", "a text"),  # type: ignore[arg-type]
        (sequence(), ".elements", "a list of 1"),
        (sequence(ANY, const("a")), ".elements.0", "last"),
        (sequence(TRIGGERED, ANY), ".elements.0", "last"),
        (sequence(either(ANY), const("a")), ".elements.0.elements.0", "last"),
        ({"type": "star", "content": ANY}, ".content", "last"),
        ({**const("a"), "max_chars": 3}, ".max_chars", "not supported"),
        ({**TRIGGERED, "tags": [{**CALLS[0], "trigger": "<"}]}, ".tags.0.trigger", "not supported"),
        (tag("<", ANY, []), ".end", "a list of texts"),
        ({"type": "tag", "begin": "<", "end": ">"}, ".content", "is needed"),
        ({**TRIGGERED, "triggers": ["["]}, ".tags.0.begin", "starts with none"),
        ({**TRIGGERED, "at_least_one": 1}, ".at_least_one", "true or false"),
        ({**SEPARATED, "separator": None}, ".separator", "a text"),
        ({"type": "regex", "pattern": "a\\\\\\"}, ".pattern", "backslash"),
        (deep(MAX_DEPTH), ".elements.0" * MAX_DEPTH, "deep"),
    ],
)
def test_unsupported_formats_are_refused_by_their_part(form: Any, field: str, said: str) -> None:
    with pytest.raises(RequestError, match=said) as refused:
        lark_of_tags({"format": form}, "response_format")
    assert refused.value.param == f"response_format.format{field}"
