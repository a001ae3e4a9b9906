"""A lone surrogate in JSON and in text is read as U+FFFD."""

from __future__ import annotations

import json
from typing import Any
from unittest.mock import patch

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from manta.actors.chat.chat_formats import CALLS
from manta.actors.chat.stream_parser import Splitter
from manta.actors.http.wire import incremental_json as json_slices
from manta.actors.http.wire.incremental_json import loads_in_slices
from manta.actors.tokenization.client_messages import loads, read_object, without_surrogates
from manta.actors.tokenization.special_tokens import map_texts

HALVES = {
    "high": ("\ud800", "\ufffd"),
    "low": ("\udfff", "\ufffd"),
    "reversed": ("\ude00\ud83d", "\ufffd\ufffd"),
    "two high": ("\ud83d\ud83d\ude00", "\ufffd\U0001f600"),
    "pair": ("\ud83d\ude00", "\U0001f600"),
    "between": ("a\udc00b", "a\ufffdb"),
    "behind a backslash": ("\\\ud800", "\\\ufffd"),
    "only its name": ("\\ud800", "\\ud800"),
}
TEXTS = st.text(st.characters(categories=["L", "Cs"]) | st.sampled_from('\\"u8dé\ud83d\ude00'), max_size=12)
VALUES = st.recursive(
    TEXTS, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXTS, inner, max_size=3)
)


@pytest.mark.parametrize("name", HALVES)
def test_a_lone_surrogate_becomes_the_replacement_character(name: str) -> None:
    text, read = HALVES[name]
    assert without_surrogates(text) == read
    for written in (json.dumps(text), json.dumps(text).replace("\\ud", "\\uD"), f'"{text}"'):
        if "\\" not in text or written == json.dumps(text):
            assert loads(written) == read
    assert read_object(json.dumps({text: [text]})) == {read: [read]}


@given(VALUES)
def test_json_with_lone_surrogates_is_read_with_replacement_characters(value: Any) -> None:
    body = json.dumps(value).encode()
    wanted = map_texts(json.loads(body), without_surrogates)
    assert loads(body) == loads(bytearray(body)) == loads(body.decode()) == wanted
    with patch.object(json_slices, "SLICE_BYTES", 24):
        assert loads(body, loads_in_slices) == wanted
    broken = body[:-1] + b"x"
    with pytest.raises(orjson.JSONDecodeError):
        loads(broken)


WRITTEN = {
    "qwen3_coder": "<tool_call>\n<function=f>\n<parameter=a>\n{}\n</parameter>\n</function>\n</tool_call>",
    "glm45": "<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>{}</arg_value>\n</tool_call>",
}


@pytest.mark.parametrize("format", WRITTEN)
def test_values_of_a_call_contain_no_lone_surrogates(format: str) -> None:
    schemas = {"f": {"type": "object", "properties": {"a": {"type": "array"}}}}
    splitter = Splitter(None, CALLS[format], schemas=schemas, id_seed="x")
    text = WRITTEN[format].format('["\\ud800"]')
    ((call,),) = [piece.calls for piece in (splitter.feed(text), splitter.finish()) if piece.calls]
    assert orjson.loads(call.arguments) == {"a": ["\ufffd"]}
