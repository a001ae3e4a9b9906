"""A request that continues tokens of another engine ends the same, token by token."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from manta.actors.engine.uniproc_executor import InProcessExecutor
from manta.cluster.engine.engine_core import EngineCore
from manta.cluster.errors import RequestError, UnprocessableError
from manta.cluster.request.request import Request, SamplingParams
from support.engines.cluster_checker import (
    EOS,
    VOCAB,
    Outputs,
    expected,
    make_info,
    make_request,
    open_engine,
)
from support.engines.steps import settings

INFO = make_info()
LONG = {"ignore_eos": True, "max_tokens": 30}


def cut(request: Request, tokens: list[int], count: int) -> Request:
    return replace(request, output_token_ids=tuple(tokens[:count]))


@pytest.mark.parametrize(
    "fields",
    [
        {"max_tokens": 20, "ignore_eos": True},
        {"max_tokens": 40},
        {"max_tokens": None},
        {"max_tokens": 40, "min_tokens": 25, "stop_token_ids": (5, 6, 7)},
        {"max_tokens": None, "ignore_eos": True, "stop_token_ids": EOS},
    ],
    ids=str,
)
def test_a_request_resumed_at_any_token_ends_the_same(fields: dict[str, object]) -> None:
    for seed in range(3):
        request = make_request("r", seed=seed, **fields)
        tokens, *end = expected(request, INFO)
        for count in range(len(tokens)):
            outputs = open_engine(INFO).run(cut(request, tokens, count))
            assert outputs.tokens["r"] == tokens[count:] and outputs.ends["r"] == tuple(end)


def test_resumed_tokens_are_cached_but_do_not_count_as_prompt() -> None:
    engine, request = open_engine(INFO), make_request("r", range(2, 12), **LONG)
    tokens = engine.run(request).tokens["r"]
    outputs = engine.run(cut(request, tokens, 20))
    assert outputs.tokens["r"] == tokens[20:] and outputs.cached["r"] == 10, "of 28 tokens, the prompt's"
    assert engine.stats().prompt_tokens == 20
    assert engine.stats().generation_tokens == 30 + 10


def test_completions_of_one_prompt_resume_from_their_own_tokens() -> None:
    params = SamplingParams(n=3, seed=5, max_tokens=20, ignore_eos=True)
    requests = [replace(make_request(f"r{i}"), params=params.child(i)) for i in range(3)]
    engine, whole = open_engine(INFO), [expected(request, INFO)[0] for request in requests]
    engine.add_requests(
        [cut(r, tokens, 4 * i) for i, (r, tokens) in enumerate(zip(requests, whole, strict=True))]
    )
    found = engine.run().tokens
    assert [found[f"r{i}"] for i in range(3)] == [tokens[4 * i :] for i, tokens in enumerate(whole)]


@pytest.mark.parametrize(
    ("tokens", "params", "error", "words"),
    [
        ((2, VOCAB), {}, RequestError, f"token {VOCAB}"),
        ((2, 3, 4), {"max_tokens": 3}, RequestError, "holds 3 tokens; by max_tokens=3 .* nothing is left"),
        ((2,) * 60, {"max_tokens": None}, UnprocessableError, "K/V pages"),
        ((2, EOS[0], 3), {}, RequestError, r"output_token_ids\[1\]=0 is a stop token"),
        ((2, 3, 9), {"stop_token_ids": (9,)}, RequestError, r"output_token_ids\[2\]=9"),
    ],
)
def test_requests_that_cannot_resume_are_refused(
    tokens: tuple[int, ...], params: dict[str, object], error: type[RequestError], words: str
) -> None:
    engine = open_engine(make_info(num_pages=(10,)))
    with pytest.raises(error, match=words):
        engine.add("r", output_token_ids=tokens, **params)
    assert not engine.has_unfinished
    engine.add("r", output_token_ids=(2, EOS[0], 3), max_tokens=9, min_tokens=3)


PROMPTS = (tuple(range(3, 40)), (5, 9, 11))
PARAMS = (
    SamplingParams(temperature=0.0, seed=1, max_tokens=40),
    SamplingParams(temperature=0.7, seed=2, max_tokens=40, ignore_eos=True),
    SamplingParams(temperature=1.0, seed=3, max_tokens=40, stop_token_ids=tuple(range(1, 12))),
    SamplingParams(temperature=1.0, seed=4, max_tokens=40, min_tokens=36, stop_token_ids=tuple(range(1, 40))),
    SamplingParams(temperature=1.0, top_p=0.9, seed=5, max_tokens=40, n=2).child(1),
)


def serve(engine: EngineCore, *requests: Request) -> Outputs:
    for request in requests:
        engine.add_request(request)
    outputs = Outputs()
    while engine.has_unfinished:
        for update in engine.step():
            outputs.put(update)
    return outputs


@pytest.fixture(scope="module")
def engine(tiny_qwen3: Path, tiny_drafter: Path) -> Iterator[EngineCore]:
    config = settings(tiny_qwen3, tiny_drafter, max_num_seqs=8)
    engine = EngineCore(config, InProcessExecutor(config))
    yield engine
    engine.close()


@pytest.mark.parametrize("params", PARAMS, ids=range(len(PARAMS)))
def test_resumed_requests_compute_the_same_tokens(engine: EngineCore, params: SamplingParams) -> None:
    """The prefix cache of the engine is empty, or has all of it."""
    for prompt in PROMPTS:
        request = Request(request_id="whole", prompt_token_ids=prompt, params=params)
        engine.reset_prefix_cache()
        whole = serve(engine, request)
        tokens, end = whole.tokens["whole"], whole.ends["whole"]
        cuts = sorted({0, 1, len(tokens) // 2, len(tokens) - 1} & set(range(len(tokens))))
        rests = [replace(cut(request, tokens, count), request_id=str(count)) for count in cuts]
        for knows_all in (False, True):
            if not knows_all:
                engine.reset_prefix_cache()
            outputs = serve(engine, *rests)
            assert outputs.tokens == {str(count): tokens[count:] for count in cuts}
            assert outputs.ends == dict.fromkeys(map(str, cuts), end)
