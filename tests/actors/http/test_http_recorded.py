"""Recorded requests of other clients (`make compat` runs the clients themselves)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from support.checkpoints.text_pair import LiveServer, make_text_pair
from support.paths import DATA, TESTS
from support.servers.server_probes import Serve

RECORDED: list[dict[str, Any]] = json.loads((DATA / "recorded_requests.json").read_text())
LAST_EVENTS = {  # of a stream, by path
    "/v1/responses": ("response.completed", "response.incomplete"),
    "/v1/messages": ("message_stop",),
}


@pytest.fixture(scope="module")
def server(serve: Serve, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """A server with the context of the shipped pair, with which the requests were recorded."""
    target, drafter = make_text_pair(tmp_path_factory.mktemp("pair"), context=1024)
    template = str(TESTS / "compat" / "tools.jinja")
    pair = {"model": str(target), "speculative_config": {"model": str(drafter)}}
    with serve(**pair, chat_template=template, served_model_name="manta", unknown_params="reject") as server:
        yield server


@pytest.mark.parametrize("request_", RECORDED, ids=lambda request: request["name"])
def test_recorded_client_requests_are_answered_without_unknown_fields(
    http: httpx.Client, request_: dict[str, Any]
) -> None:
    path, body = request_["path"], request_["body"]
    response = http.post(path, headers=request_["headers"], content=json.dumps(body))
    assert response.status_code == 200, response.text
    if not body.get("stream"):
        check_complete_answer(path, body, response.json())
        return
    data = [line[6:] for line in response.text.split("\n") if line.startswith("data: ")]
    if path in LAST_EVENTS:
        assert json.loads(data[-1])["type"] in LAST_EVENTS[path]
        return
    assert data[-1] == "[DONE]"
    chunks = [json.loads(each) for each in data[:-1]]
    assert sum(choice["finish_reason"] is not None for chunk in chunks for choice in chunk["choices"]) == 1
    if "stream_options" in body:
        assert chunks[-1]["choices"] == [] and chunks[-1]["usage"]["completion_tokens"] > 0


def check_complete_answer(path: str, body: dict[str, Any], answer: dict[str, Any]) -> None:
    """Check that everything that its client reads is present."""
    if path.endswith("completions"):
        count = len(body["prompt"]) * body.get("n", 1) if isinstance(body.get("prompt"), list) else 1
        assert [choice["index"] for choice in answer["choices"]] == list(range(count))
        assert answer["usage"]["completion_tokens"] > 0
    elif path.endswith("count_tokens"):
        assert answer["input_tokens"] > 0
    else:
        assert answer["usage"]["output_tokens"] > 0
        assert answer["content"] if path.endswith("messages") else answer["output"]


def test_lm_evals_sums_are_log_probabilities_of_its_prompts_tokens(http: httpx.Client) -> None:
    requested = next(request for request in RECORDED if request["name"] == "lm-eval: loglikelihood")
    reported = http.post(requested["path"], json=requested["body"]).json()["choices"][0]["logprobs"]
    assert (
        len(reported["token_logprobs"])
        == len(reported["top_logprobs"])
        == len(requested["body"]["prompt"][0]) + 1
    )
    for logprob, top in zip(reported["token_logprobs"][1:-1], reported["top_logprobs"][1:-1], strict=True):
        assert logprob <= max(top.values()) <= 0
