"""Invalid values of sampling parameters and `LLM`'s methods are refused by field, with a remedy."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from manta import LLM, SamplingParams
from manta.cluster.errors import RequestError
from manta.cluster.request.structured_outputs import StructuredOutputsParams
from support.engines.opened import core_of

FIELDS = [field.name for field in fields(SamplingParams)]
ODD = [
    *(None, True, False, "", "0.7", "5", b"5", 1.5, -1, 0, 2**70, float("nan"), float("inf"), -float("inf")),
    *(
        [],
        [None],
        ["a"],
        [True],
        [1.5],
        [float("nan")],
        [[1]],
        [[]],
        [["a"]],
        [b"a"],
        [(1, "a")],
        [(True, 1.0)],
    ),
    *({}, {"a": 1}, {1: "a"}, {1: float("nan")}, {(1, 2): 3}, {"json": {}}, set(), {1}, {"regex": "a"}),
    *(object(), int, len, 1j, range(3), Ellipsis, np.array([1, 2]), np.array(2.0), StructuredOutputsParams),
]


@given(name=st.sampled_from(FIELDS), value=st.sampled_from(range(len(ODD))))
def test_a_value_is_accepted_or_refused_by_its_field(name: str, value: int) -> None:
    try:
        params = SamplingParams(**{name: ODD[value]})
    except RequestError as error:
        assert (error.param or "").split(".")[0] == name
        assert error.message.startswith(name) and "must be" in error.message
        assert " object at 0x" not in error.message or ODD[value] is not None
    else:
        hash(params.with_seed(1))
        assert SamplingParams(**{name: getattr(params, name)}) == params


@pytest.mark.parametrize(
    ("name", "value", "remedy"),
    [
        ("temperature", "0.7", "a number from 0 to 100"),
        ("temperature", None, "a number from 0 to 100"),
        ("temperature", float("nan"), "a number from 0 to 100"),
        ("temperature", [1.0], "a number from 0 to 100"),
        ("n", None, "an integer from 1 to 128"),
        ("n", True, "an integer from 1 to 128"),
        ("n", 1.5, "an integer from 1 to 128"),
        ("max_tokens", [5], "at least 1"),
        ("seed", "5", "a 64-bit signed integer"),
        ("ignore_eos", "false", "true or false"),
        ("ignore_eos", 1, "true or false"),
        ("stop", 5, "a list of strings"),
        ("stop", [5], "non-empty strings"),
        ("stop", {"a": 1}, "a list of strings"),
        ("stop_token_ids", 5, "a list of token ids"),
        ("stop_token_ids", "12", "a list of token ids"),
        ("stop_token_ids", [True], "integers"),
        ("allowed_token_ids", ["5"], "integers"),
        ("bad_words_token_ids", [5], "a list of token ids"),
        ("logit_bias", [5], "a mapping of token ids to numbers"),
        ("logit_bias", {"a": 1}, "a mapping of token ids to numbers"),
        ("logit_bias", {1.5: 1}, "a mapping of token ids to numbers"),
        ("logit_bias", {5: True}, "a mapping of token ids to numbers"),
        ("structured_outputs", {"json": {}}, "a StructuredOutputsParams, or None"),
    ],
)
def test_a_wrong_type_is_refused_with_the_right_one(name: str, value: object, remedy: str) -> None:
    with pytest.raises(RequestError, match=remedy) as refused:
        SamplingParams(**{name: value})  # type: ignore[arg-type]
    assert refused.value.param == name


def test_numbers_of_other_types_are_converted() -> None:
    given = SamplingParams(
        n=np.int64(2),
        temperature=np.float32(0.5),
        max_tokens=16.0,  # type: ignore[arg-type]  # as JSON and data frames have it
        stop_token_ids=np.array([3, 4]),  # type: ignore[arg-type]
        logit_bias={"5": np.float64(1.0)},  # type: ignore[arg-type]
    )
    assert given == SamplingParams(
        n=2, temperature=0.5, max_tokens=16, stop_token_ids=(3, 4), logit_bias=((5, 1.0),)
    )
    assert [type(value) for value in (given.n, given.temperature, given.max_tokens)] == [int, float, int]


@pytest.fixture(scope="module")
def llm(pair: tuple[Path, Path]) -> Iterator[LLM]:
    with LLM(str(pair[0]), dtype="float32", num_threads=1, num_pages=64) as llm:
        yield llm


TALK = [{"role": "user", "content": "x"}]
NO_PROMPTS = [None, 5, 1.5, True, object(), b"ab", {1, 2}, {}, ["a", 5], ["a", None], [b"a"]]
NO_PARAMS = [{"temperature": 0}, "x", 5, [None], [{"n": 1}], [SamplingParams()] * 2, []]
NO_MESSAGES = [None, 5, "hi", ["hi"], [None], [5], [[5]], {"role": "user"}, [{"role": 5}]]
# A call of an `LLM` with a value, the field that is refused, and the values.
CALLS: list[tuple[Callable[[LLM, Any], object], str, list[Any]]] = [
    (lambda llm, value: llm.generate(value, use_tqdm=False), "prompt", NO_PROMPTS),
    (lambda llm, value: next(llm.stream(value)), "prompt", NO_PROMPTS),
    (lambda llm, value: llm.generate("x", value, use_tqdm=False), "sampling_params", NO_PARAMS),
    (lambda llm, value: next(llm.stream("x", value)), "sampling_params", NO_PARAMS),
    (
        lambda llm, value: llm.generate("x", use_tqdm=False, max_draft_tokens=value),
        "max_draft_tokens",
        ["x", 1.5, -1, True, [1]],
    ),
    (lambda llm, value: llm.chat(value, use_tqdm=False), "messages", NO_MESSAGES),
    (lambda llm, value: llm.chat(TALK, use_tqdm=False, tools=value), "tools", [5, "x", object()]),
    (
        lambda llm, value: llm.chat(TALK, use_tqdm=False, chat_template_kwargs=value),
        "chat_template_kwargs",
        [5, "x", object()],
    ),
]


@pytest.mark.parametrize(
    ("call", "field", "value"), [(call, field, value) for call, field, values in CALLS for value in values]
)
def test_an_argument_of_a_wrong_type_is_refused_by_its_field(
    llm: LLM, call: Callable[[LLM, Any], object], field: str, value: Any
) -> None:
    with pytest.raises(RequestError) as refused:
        call(llm, value)
    assert (refused.value.param or "").startswith(field)
    if field == "sampling_params":
        assert "one each" in refused.value.message or "one for each" in refused.value.message
    assert not core_of(llm).has_unfinished
