"""Invalid values of sampling parameters and `LLM`'s methods are refused by field, with a remedy."""

from __future__ import annotations

from collections.abc import Iterator
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


@pytest.mark.parametrize(
    "prompts", [None, 5, 1.5, True, object(), b"ab", {1, 2}, {}, ["a", 5], ["a", None], [b"a"]]
)
def test_a_prompt_of_a_wrong_type_is_refused(llm: LLM, prompts: Any) -> None:
    with pytest.raises(RequestError) as refused:
        llm.generate(prompts, use_tqdm=False)
    assert refused.value.param == "prompt"
    with pytest.raises(RequestError):
        next(llm.stream(prompts))
    assert not core_of(llm).has_unfinished


@pytest.mark.parametrize(
    "params", [{"temperature": 0}, "x", 5, [None], [{"n": 1}], [SamplingParams()] * 2, []]
)
def test_sampling_parameters_of_a_wrong_type_are_refused(llm: LLM, params: Any) -> None:
    with pytest.raises(RequestError, match=r"one each|one for each") as refused:
        llm.generate("x", params, use_tqdm=False)
    assert refused.value.param == "sampling_params"
    with pytest.raises(RequestError):
        next(llm.stream("x", params))


@pytest.mark.parametrize("maximum", ["x", 1.5, -1, True, [1]])
def test_an_invalid_number_of_drafts_is_refused(llm: LLM, maximum: Any) -> None:
    with pytest.raises(RequestError) as refused:
        llm.generate("x", use_tqdm=False, max_draft_tokens=maximum)
    assert refused.value.param == "max_draft_tokens"


@pytest.mark.parametrize(
    "messages", [None, 5, "hi", ["hi"], [None], [5], [[5]], {"role": "user"}, [{"role": 5}]]
)
def test_messages_of_a_wrong_type_are_refused(llm: LLM, messages: Any) -> None:
    with pytest.raises(RequestError) as refused:
        llm.chat(messages, use_tqdm=False)
    assert (refused.value.param or "").startswith("messages")


@pytest.mark.parametrize("name", ["tools", "chat_template_kwargs"])
def test_options_of_a_wrong_type_are_refused(llm: LLM, name: str) -> None:
    for value in (5, "x", object()):
        with pytest.raises(RequestError) as refused:
            llm.chat([{"role": "user", "content": "x"}], use_tqdm=False, **{name: value})
        assert (refused.value.param or "").startswith(name)
