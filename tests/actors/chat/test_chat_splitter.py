"""Parsing of answers: recorded outputs of each format cut at every position, and plain text."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from manta.actors.chat.chat_formats import CALLS, REASONING
from manta.actors.chat.text_stream import AnswerDelta, concatenate, content_only
from support.recorded_answers import FORMATS, splitter

ANSWERS = [
    pytest.param(name, answer, id=f"{name}-{at}")
    for name, found in FORMATS.items()
    for at, answer in enumerate(found["answers"])
]


def read(name: str, *texts: str, opened: bool = False) -> AnswerDelta:
    reader = splitter(name, opened=opened)
    return concatenate([*(reader.feed(text) for text in texts), reader.finish()])


def test_every_format_has_recorded_answers() -> None:
    assert {found["calls"] for found in FORMATS.values()} == set(CALLS) - {"qwen3_xml"}
    assert CALLS["qwen3_xml"] is CALLS["qwen3_coder"]
    assert {found["thinking"] for found in FORMATS.values()} >= set(REASONING) - {"deepseek_r1"}


@pytest.mark.parametrize(("name", "answer"), ANSWERS)
def test_an_answer_is_split_into_its_parts(name: str, answer: Any) -> None:
    piece = read(name, answer["text"], opened=answer.get("opened", False))
    assert (piece.reasoning, piece.content) == (answer["reasoning"], answer["content"])
    assert [[call.name, call.arguments] for call in piece.calls] == answer["calls"]
    assert [call.index for call in piece.calls] == list(range(len(piece.calls)))
    ids = [call.id for call in piece.calls]
    assert len(set(ids)) == len(ids) and ids == answer.get("ids", ids)


@pytest.mark.parametrize(("name", "answer"), ANSWERS)
def test_output_depends_on_the_text_and_not_on_its_cuts(name: str, answer: Any) -> None:
    text, opened = answer["text"], answer.get("opened", False)
    by_character = splitter(name, opened=opened)
    so_far: list[AnswerDelta] = [AnswerDelta()]
    for character in text:
        so_far.append(concatenate([so_far[-1], by_character.feed(character)]))
    whole = concatenate([so_far[-1], by_character.finish()])
    for first in range(len(text) + 1):
        reader = splitter(name, opened=opened)
        first_part = reader.feed(text[:first])
        assert first_part == so_far[first]
        rest = reader.feed(text[first:])
        assert concatenate([first_part, rest]) == so_far[-1]
        assert concatenate([first_part, rest, reader.finish()]) == whole
    step = 1 + len(text) // 40  # of longer texts, a grid of pairs of cuts that meets every mark
    for first in range(0, len(text), step):
        for second in range(first, len(text), step):
            assert read(name, text[:first], text[first:second], text[second:], opened=opened) == whole


UNCLOSED = {
    "qwen3_coder": (
        "<tool_call>\n<function=f>\n<parameter=city>\nOslo\n</function>\n</tool_call>\n"
        "<tool_call>\n<function=g>\n<parameter=a>\nx </function> y\n</parameter>\n</function>\n</tool_call>"
    ),
    "mimo": (
        "<tool_call>\n<function=f>\n<parameter=city>Oslo</function>\n</tool_call>"
        "<tool_call><function=g><parameter=a>x </function> y</parameter></function></tool_call>"
    ),
    "minimax_m2": (
        '</think><minimax:tool_call>\n<invoke name="f">\n<parameter name="city">Oslo</invoke>\n'
        '<invoke name="g">\n<parameter name="a">x </invoke> y</parameter></invoke>\n</minimax:tool_call>'
    ),
    "glm45": (
        "<tool_call>f\n<arg_key>city</arg_key>\n<arg_value>Oslo</tool_call>\n"
        "<tool_call>g\n<arg_key>a</arg_key><arg_value>x </tool_call> y</arg_value></tool_call>"
    ),
}


@pytest.mark.parametrize("name", UNCLOSED)
def test_a_value_without_an_end_tag_ends_with_the_call(name: str) -> None:
    text, mark = UNCLOSED[name], {"minimax_m2": "</invoke>", "glm45": "</tool_call>"}.get(name, "</function>")
    whole = read(name, text)
    assert [(call.name, json.loads(call.arguments)) for call in whole.calls] == [
        ("f", {"city": "Oslo"}),
        ("g", {"a": f"x {mark} y"}),
    ]
    assert read(name, *text) == whole and not whole.content
    first = text.partition(mark)[0] + mark  # the answer ends there
    assert [json.loads(call.arguments) for call in read(name, first).calls] == [{"city": "Oslo"}]


PLAIN_CHARACTERS = st.text(st.sampled_from("ab \n\t<>{}[]|/:,\"'=\\éß漢") | st.characters(codec="utf-8"))


@pytest.mark.parametrize("name", FORMATS)
@given(text=PLAIN_CHARACTERS, cut=st.integers(0, 40))
def test_a_plain_text_passes_unchanged(name: str, text: str, cut: int) -> None:
    if name == "minimax_m2":  # all of it is reasoning until that ends
        assert read(name, "</think>", "a" + text[:cut], text[cut:]).content == "a" + text
    else:
        assert read(name, text[:cut], text[cut:]) == content_only(text)


TEXTS = [answer["text"] for found in FORMATS.values() for answer in found["answers"]]
PARTS = sorted({text[i : i + 9] for text in TEXTS for i in range(0, len(text), 7)})
MARKS = ["<tool_call>", "</tool_call>", "<|message|>", "<|start|>", "{", "}", '"name"', ":", "now", "\n"]
PIECES = st.lists(st.sampled_from(PARTS) | st.sampled_from(MARKS), max_size=12)


@pytest.mark.parametrize("name", FORMATS)
@given(pieces=PIECES)
def test_malformed_answers_raise_nothing_and_do_not_depend_on_cuts(name: str, pieces: list[str]) -> None:
    whole = read(name, "".join(pieces))
    assert read(name, *pieces) == whole == read(name, *"".join(pieces))


def test_a_call_is_streamed_and_only_possible_marks_are_held_back() -> None:
    reader = splitter("hermes")
    assert reader.feed("Well <to").content == "Well "
    assert reader.feed("day").content == "<today"
    assert reader.feed('\n<tool_call>{"name": "now", "arg') == AnswerDelta()
    opening = reader.feed('uments": {')
    assert [(call.name, call.arguments) for call in opening.calls] == [("now", "{")]
    assert reader.feed('"zone": "U').calls[0].arguments == '"zone": "U'


def test_without_parallel_calls_there_is_one() -> None:
    (answer,) = [a for a in FORMATS["hermes"]["answers"] if len(a["calls"]) == 2]
    reader = splitter("hermes", parallel=False)
    found = concatenate([reader.feed(answer["text"]), reader.finish()])
    assert [call.name for call in found.calls] == ["get_weather"] and found.content == ""


def test_an_answer_of_a_hundred_thousand_characters_is_parsed_in_linear_time() -> None:
    reader = splitter("hermes")
    text = (
        "<" * 1000 + '<tool_call>{"name": "now", "arguments": {"a": "' + "x\\n" * 30_000 + '"}}</tool_call>'
    )
    found = concatenate([reader.feed(text[i : i + 7]) for i in range(0, len(text), 7)] + [reader.finish()])
    assert json.loads(found.calls[0].arguments) == {"a": "x\n" * 30_000} and found.content == "<" * 1000


def test_ids_of_calls_are_as_mistrals_templates_accept_them() -> None:
    found = read("mistral", '[TOOL_CALLS]now{}[TOOL_CALLS][{"name": "now", "arguments": {}}]')
    first, second = [call.id or "" for call in found.calls]
    assert first != second and all(len(each) == 9 and each.isalnum() for each in (first, second))
