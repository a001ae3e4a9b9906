"""JSON parsed in slices equals orjson's result, and what orjson refuses is refused."""

from __future__ import annotations

import json
from typing import Any
from unittest.mock import patch

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from manta.actors.http.wire import incremental_json as json_slices
from manta.actors.http.wire.incremental_json import SLICE_BYTES, loads_in_slices

TRICKY = '\\"[{,}]: \U0001f600é\n'
SCALARS = (
    st.none()
    | st.integers(-(2**53), 2**53)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=60)
    | st.text(alphabet=TRICKY, max_size=80)
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=8) | st.dictionaries(st.text(TRICKY, max_size=30), inner, max_size=6)
    ),
    max_leaves=40,
)


def bodies(value: Any) -> list[bytes]:
    """Yield the same value in clients' spellings: plain characters, escaped, and with whitespace."""
    return [orjson.dumps(value), json.dumps(value).encode(), json.dumps(value, indent=2).encode()]


def parsed(loads: Any, body: bytes) -> Any:
    try:
        return [loads(body)]
    except orjson.JSONDecodeError:
        return "refused"


@pytest.fixture(scope="module", autouse=True)
def small_slices() -> Any:
    with patch.object(json_slices, "SLICE_BYTES", 24):
        yield


@settings(max_examples=80)
@given(VALUES)
def test_json_parsed_in_slices_gives_the_same_value(value: Any) -> None:
    for body in bodies(value):
        assert loads_in_slices(body) == value


@settings(max_examples=200)
@given(VALUES, st.integers(0, 2), st.data())
def test_broken_json_is_refused_like_by_a_single_parse(value: Any, form: int, data: st.DataObject) -> None:
    body = bytearray(bodies(value)[form])
    at = data.draw(st.integers(0, len(body)))
    body[at : at + data.draw(st.integers(0, 1))] = data.draw(
        st.sampled_from([b"", b",", b'"', b"\\", b"]", b"}", b":", b"[", b" ", b"\xff", b"\\ud83d", b"NaN"])
    )
    assert parsed(loads_in_slices, bytes(body)) == parsed(orjson.loads, bytes(body))


@pytest.mark.parametrize("text", ["\\" * 999, "\U0001f600" * 300, "é" * 500, '"' * 500, "a\\" * 400])
def test_a_long_string_is_cut_between_its_characters(text: str) -> None:
    for body in bodies([text, {"a": text}]):
        assert loads_in_slices(body) == [text, {"a": text}]


def test_at_most_one_slice_is_parsed_per_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_slices, "SLICE_BYTES", SLICE_BYTES)
    message = {"role": "user", "content": "x\n" * 100_000}
    body = orjson.dumps({"messages": [message] * 5, "prompt": list(range(300_000)), "n": 1})
    parse, lengths = orjson.loads, list[int]()
    monkeypatch.setattr(orjson, "loads", lambda part: lengths.append(len(part)) or parse(part))
    assert loads_in_slices(body)["messages"][4] == message
    assert len(lengths) > 10 and max(lengths) <= SLICE_BYTES + 2
