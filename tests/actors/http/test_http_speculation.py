"""Speculation fields of requests and answers, over real HTTP."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from manta.actors.engine.outputs import RequestMetrics, TracedStep, token_origins
from manta.actors.http.generation.generation_task import MAX_TRACED_TOKENS, acceptance
from support.checkpoints.text_pair import LiveServer
from support.servers.server_probes import Serve

PATH = "/v1/completions"
BODY = {"prompt": "import os", "temperature": 1, "seed": 3, "max_tokens": 40, "return_token_ids": True}
TRACED = {"max_tokens": 3, "return_trace": True}
USAGE = {"include_usage": True}


@pytest.fixture(scope="module")
def server(serve: Serve) -> Iterator[LiveServer]:
    """A server that reports nothing about speculation by default."""
    with serve(per_request_spec_decode_metrics="none") as server:
        yield server


def answer(http: httpx.Client, **body: Any) -> Any:
    response = http.post(PATH, json={**BODY, **body})
    assert response.status_code == 200, response.text
    return response.json()


def check_trace(figures: Any, num_tokens: int) -> None:
    """Check that the reported tokens, steps and totals agree."""
    trace = figures["trace"]
    assert trace["first_token"] == 0 and trace["truncated"] is False
    assert len(trace["origins"]) == len(trace["steps"]) == num_tokens
    by_step: list[list[str]] = [[] for _ in range(trace["steps"][-1] + 1)]
    for origin, step in zip(trace["origins"], trace["steps"], strict=True):
        by_step[step].append(origin)
    assert trace["steps"] == sorted(trace["steps"]) and all(by_step)
    verified = [origins for origins in by_step if origins != ["plain"]]
    for origins in verified:
        assert origins[-1] in ("draft", "bonus") and set(origins[:-1]) <= {"draft"}
    assert [origins.count("draft") for origins in verified] == figures["per_step_accepted"]
    assert sum(figures["per_step_accepted"]) == figures["num_accepted_draft_tokens"] > 0
    assert sum(figures["per_step_drafted"]) == figures["num_draft_tokens"]
    assert len(verified) == figures["num_spec_steps"] == len(figures["per_step_drafted"])


def test_a_trace_has_the_origin_of_each_token(http: httpx.Client) -> None:
    plain = answer(http, speculative=False)
    assert plain["metrics"]["time_to_first_token_ms"] > 0 and "speculative_decoding" not in plain["metrics"]
    traced = answer(http, speculative=TRACED)
    assert traced["choices"][0]["text"] == plain["choices"][0]["text"]
    figures = traced["metrics"]["speculative_decoding"]
    check_trace(figures, len(traced["choices"][0]["token_ids"]))
    assert max(figures["per_step_drafted"]) == 3 and len(figures["acceptance_histogram"]) == 16


def test_a_stop_string_truncates_trace_and_text(http: httpx.Client) -> None:
    whole = answer(http)["choices"][0]["text"]
    traced = answer(http, speculative={"return_trace": True}, stop=whole[len(whole) // 2 :][:2])
    trace = traced["metrics"]["speculative_decoding"]["trace"]
    assert traced["choices"][0]["finish_reason"] == "stop"
    assert len(trace["origins"]) == len(traced["choices"][0]["token_ids"]) > 0


def test_a_streams_trace_is_in_its_usage_chunk(http: httpx.Client) -> None:
    whole = answer(http, speculative=TRACED)["metrics"]["speculative_decoding"]
    body = {**BODY, "speculative": TRACED, "stream": True, "stream_options": USAGE}
    with http.stream("POST", PATH, json=body) as response:
        *chunks, last = (json.loads(line[6:]) for line in response.iter_lines() if line.startswith("data: {"))
    assert last["choices"] == [] and last["metrics"]["speculative_decoding"] == whole
    assert not any("metrics" in chunk for chunk in chunks)


@pytest.mark.parametrize(
    "body",
    [
        {"n": 2},
        {"prompt": ["a", "b"]},
        {"stream": True},
        {"include_metrics": False},
        {"speculative": {"enabled": False, "return_trace": True}},
    ],
)
def test_an_unsupported_trace_is_named_as_ignored(http: httpx.Client, body: Any) -> None:
    with http.stream("POST", PATH, json={**BODY, "max_tokens": 2, "speculative": TRACED, **body}) as response:
        assert response.status_code == 200
        assert response.headers["x-ignored-params"] == "speculative.return_trace"


STEPS = (TracedStep(0, 0, 1), TracedStep(3, 1, 2), TracedStep(3, 3, 4), TracedStep(3, 2, 1))


def metrics(steps: tuple[TracedStep, ...]) -> RequestMetrics:
    return RequestMetrics(0, 0.0, 0.1, 0.2, 3, 9, 6, [0, 1, 1, 1], steps)


def test_an_answer_without_a_draft_has_numbers_as_in_vllm() -> None:
    figures = acceptance(RequestMetrics(0, 0.0, 0.1, 0.2, 0, 0, 0, []), 3, detailed=False)
    assert (figures["mean_acceptance_length"], figures["draft_acceptance_rate"]) == (1.0, 0.0)
    assert figures["acceptance_histogram"] == [0, 0, 0, 0]


def test_a_steps_tokens_are_accepted_drafts_and_then_the_targets_own() -> None:
    found = list(token_origins(STEPS))
    assert found[:3] == [(0, "plain"), (1, "draft"), (1, "bonus")]
    assert found[3:] == [*[(2, "draft")] * 3, (2, "bonus"), (3, "draft")]  # the last one was cut


def test_a_trace_names_the_branches_of_accepted_drafts() -> None:
    steps = (
        TracedStep(0, 0, 1),
        TracedStep(7, 3, 4, (0, 2, 0)),
        TracedStep(7, 1, 2),
        TracedStep(7, 2, 1, (1, 0)),
    )
    trace = acceptance(metrics(steps), 3, detailed=False, first_traced=0)["trace"]
    assert trace["branches"] == [0, 0, 2, 0, 0, 0, 0, 1]
    chains = acceptance(metrics(STEPS), 3, detailed=False, first_traced=0)["trace"]
    assert "branches" not in chains


def test_a_detailed_answer_has_verify_steps_and_a_long_trace_is_truncated() -> None:
    summary = acceptance(metrics(()), 3, detailed=False)
    assert summary["per_step_accepted"] is None and "trace" not in summary
    detailed = acceptance(metrics(STEPS), 3, detailed=True)
    assert detailed["per_step_accepted"] == [1, 3, 2] and detailed["per_step_drafted"] == [3, 3, 3]
    long = acceptance(metrics(STEPS * 4096), 3, detailed=True, first_traced=7)["trace"]
    assert len(long["origins"]) == MAX_TRACED_TOKENS and long["truncated"] and long["first_token"] == 7
