"""The items of an answer: in the order of the text, for whole answers and every split of a stream alike."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from manta.actors.chat.chat_model import AnswerParser, AnswerParserFactory
from manta.actors.chat.text_stream import AnswerDelta, TextPiece
from manta.actors.http.anthropic.event_writer import MessageWriter
from manta.actors.http.generation.output_items import Section, SectionWriter
from manta.actors.http.protocol.chat_completion import ChatShape
from manta.actors.http.responses.event_writer import ResponseWriter
from manta.actors.http.responses.tools import ClientTools
from support.recorded_answers import FORMATS, splitter

USAGE: dict[str, Any] = {
    "prompt_tokens": 1,
    "completion_tokens": 1,
    "total_tokens": 2,
    "prompt_tokens_details": {"cached_tokens": 0},
}
CALL = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
HEADER = "<|start|>assistant<|channel|>"
# Text of the model, and the kinds and texts of its items.
ORDERED = [
    ("hermes", f"pre\n{CALL}\nF.\n{CALL}", ["pre", "now", "F.", "now"]),
    (
        "hermes",
        f"<think>\none\n</think>\n\npre\n{CALL}\n<think>\ntwo\n</think>\n\nF.",
        ["one", "pre", "now", "two", "F."],
    ),
    (
        "harmony",
        f"<|channel|>analysis<|message|>one<|end|>{HEADER}commentary<|message|>pre<|end|>"
        f"{HEADER}analysis<|message|>two<|end|>{HEADER}analysis<|message|>three<|end|>"
        f"{HEADER}commentary to=functions.now<|message|>{{}}<|call|>{HEADER}final<|message|>F.",
        ["one", "pre", "two", "three", "now", "F."],
    ),
]


def writers() -> list[SectionWriter]:
    return [ResponseWriter({"id": "resp_1"}, ClientTools([])), MessageWriter("msg_1", "m", 9)]


def sections(name: str, *texts: str, with_reasoning: bool = True, parallel: bool = True) -> list[Section]:
    """Return the sections that each API's writer makes of an answer that arrives in these parts."""
    found: list[list[Section]] = []
    for writer in writers():
        parser = AnswerParser(splitter(name, parallel=parallel), with_reasoning=with_reasoning)
        for at, text in enumerate(texts, 1):
            writer.feed(parser.feed(text, final=at == len(texts)))
        writer.finish("stop", None, USAGE)
        found.append(writer.sections)
    assert found[0] == found[1]
    return found[0]


@pytest.mark.parametrize(("name", "text", "wanted"), ORDERED)
def test_items_have_the_order_of_the_text_and_are_not_joined(name: str, text: str, wanted: list[str]) -> None:
    assert [each.name or each.text for each in sections(name, text)] == wanted


def test_texts_around_what_is_left_out_stay_apart() -> None:
    _, text, _ = ORDERED[1]
    left = {"with_reasoning": False, "parallel": False}
    assert [each.name or each.text for each in sections("hermes", f"{text}\n{CALL}\nG.", **left)] == [
        *("pre", "now", "F.", "G."),
    ]


@pytest.mark.parametrize("name", FORMATS)
@given(st.data())
def test_every_split_of_an_answer_makes_the_same_items(name: str, data: st.DataObject) -> None:
    own = [answer["text"] for answer in FORMATS[name]["answers"]]
    text = "".join(data.draw(st.lists(st.sampled_from([*own, "pre", "\n", "F. "]), min_size=1, max_size=4)))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    split = [text[begin:end] for begin, end in itertools.pairwise([0, *cuts, len(text)])]
    with_reasoning, parallel = data.draw(st.booleans()), data.draw(st.booleans())
    options = {"with_reasoning": with_reasoning, "parallel": parallel}
    assert sections(name, *split, **options) == sections(name, text, **options)


@given(st.lists(st.tuples(st.sampled_from(["reasoning", "content"]), st.text(min_size=1))))
def test_chunks_of_a_chat_have_the_order_of_the_text(texts: list[Any]) -> None:
    delta = AnswerDelta(tuple(TextPiece(kind, text, at) for at, (kind, text) in enumerate(texts)))
    chunks = ChatShape(AnswerParserFactory(), ["reasoning"]).chunks(0, delta)
    assert [choice["delta"] for choice in chunks] == [{kind: text} for kind, text in texts] or not texts


@pytest.mark.parametrize(
    ("name", "text", "content", "reasoning"),
    [
        ("hermes", ORDERED[0][1], "pre\n\nF.", ""),
        ("hermes", ORDERED[1][1], "pre\n\nF.", "one\ntwo"),
        ("harmony", ORDERED[2][1], "pre\nF.", "one\ntwo\nthree"),
    ],
)
def test_a_chat_joins_the_texts_of_an_answer_by_newlines(
    name: str, text: str, content: str, reasoning: str
) -> None:
    shape, parser = ChatShape(AnswerParserFactory(), ["reasoning"]), AnswerParser(splitter(name))
    pieces = [parser.feed(each, final=at == len(text)) for at, each in enumerate(text, 1)]
    deltas = [choice["delta"] for piece in pieces for choice in shape.chunks(0, piece)]
    whole = shape.full_choice(0, AnswerParser(splitter(name)).feed(text, final=True), "stop")["message"]
    for kind, wanted in (("content", content), ("reasoning", reasoning)):
        assert "".join(delta.get(kind) or "" for delta in deltas) == wanted == whole.get(kind, "")
