"""The application over real HTTP on a tiny random pair: answers, streams, failures, disconnects."""

from __future__ import annotations

import json
import re
import socket
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest
from support.checkpoints.text_pair import LiveServer
from support.engines.pausable_executor import PausableExecutors
from support.servers.server_probes import Serve, error_of, events, http_client, idle, scrape
from support.waiting import wait_until

NAME = "tiny"
GREEDY: dict[str, Any] = {"model": NAME, "temperature": 0, "max_tokens": 24}
USER = [{"role": "user", "content": "Say something."}]


def stream(http: httpx.Client, path: str, **body: Any) -> list[Any]:
    with http.stream("POST", path, json={**GREEDY, "stream": True, **body}) as response:
        assert response.status_code == 200
        return events(response)


def test_a_completion_is_the_same_complete_and_streamed(client: openai.OpenAI) -> None:
    whole = client.completions.create(prompt="def f(", **GREEDY)
    assert whole.id.startswith("cmpl-") and whole.model == NAME
    assert whole.choices[0].finish_reason in ("length", "stop")
    pieces = list(client.completions.create(prompt="def f(", stream=True, **GREEDY))
    assert "".join(piece.choices[0].text for piece in pieces) == whole.choices[0].text
    assert [p.choices[0].finish_reason for p in pieces if p.choices[0].finish_reason] == [
        whole.choices[0].finish_reason
    ]


def test_a_chat_answer_is_the_same_complete_and_streamed(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(messages=USER, **GREEDY)
    message = whole.choices[0].message
    assert message.role == "assistant" and whole.id.startswith("chatcmpl-")
    pieces = list(client.chat.completions.create(messages=USER, stream=True, **GREEDY))
    assert "".join(piece.choices[0].delta.content or "" for piece in pieces) == message.content
    assert pieces[0].choices[0].delta.role == "assistant"


def test_speculation_changes_no_answer_and_reports_its_counts(client: openai.OpenAI) -> None:
    for extra in ({"temperature": 0}, {"temperature": 1.0, "seed": 7, "top_p": 0.9}):
        body = {**GREEDY, **extra, "prompt": "import os", "max_tokens": 40}
        drafted = client.completions.create(**body)
        plain = client.completions.create(**body, extra_body={"speculative": False})
        assert drafted.choices[0].text == plain.choices[0].text
        figures = drafted.model_extra["metrics"]["speculative_decoding"]
        assert len(figures["acceptance_histogram"]) == figures["num_spec_tokens"] + 1 == 16
        assert sum(figures["acceptance_histogram"]) == figures["num_spec_steps"]
        assert figures["num_accepted_draft_tokens"] == sum(
            i * count for i, count in enumerate(figures["acceptance_histogram"])
        )
        assert plain.model_extra["metrics"]["speculative_decoding"] is None


def test_the_stream_of_a_chat_follows_the_grammar(http: httpx.Client) -> None:
    options = {"include_usage": True}
    found = stream(http, "/v1/chat/completions", messages=USER, stream_options=options)
    *chunks, last = found
    assert {chunk["object"] for chunk in found} == {"chat.completion.chunk"}
    assert len({chunk["id"] for chunk in found}) == 1
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert all(chunk["usage"] is None and len(chunk["choices"]) == 1 for chunk in chunks)
    ends = [c for chunk in chunks for c in chunk["choices"] if c["finish_reason"]]
    assert len(ends) == 1 and ends[0] is chunks[-1]["choices"][0] and ends[0]["delta"] == {}
    assert last["choices"] == [] and last["metrics"]["speculative_decoding"]["num_spec_steps"] > 0
    usage = last["usage"]
    assert usage["completion_tokens"] == 24 and usage["total_tokens"] == usage["prompt_tokens"] + 24
    assert usage["prompt_tokens_details"]["cached_tokens"] >= 0


def test_a_stream_has_an_event_per_block_and_growing_usage(http: httpx.Client) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    found = stream(http, "/v1/completions", prompt="x = ", stream_options=options, return_token_ids=True)
    *chunks, last = found
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts) and counts[-1] == last["usage"]["completion_tokens"] == 24
    blocks = [c["token_ids"] for chunk in chunks for c in chunk["choices"] if "token_ids" in c]
    figures = last["metrics"]["speculative_decoding"]
    assert sum(map(len, blocks)) == 24
    assert len(blocks) <= 1 + figures["num_spec_steps"] + 2  # the prefill's token and undrafted last steps
    whole = http.post("/v1/completions", json={**GREEDY, "prompt": "x = ", "return_token_ids": True}).json()
    assert [i for block in blocks for i in block] == whole["choices"][0]["token_ids"]


def test_several_prompts_and_completions_keep_their_indices(http: httpx.Client) -> None:
    body = {**GREEDY, "temperature": 1.0, "seed": 3, "prompt": ["a = ", "b = "], "n": 2}
    whole = http.post("/v1/completions", json=body).json()
    assert [choice["index"] for choice in whole["choices"]] == [0, 1, 2, 3]
    assert whole["choices"][0]["text"] != whole["choices"][1]["text"]
    assert "metrics" not in whole and whole["usage"]["completion_tokens"] == 4 * 24
    texts = dict.fromkeys(range(4), "")
    ends = dict.fromkeys(range(4), 0)
    for chunk in stream(http, "/v1/completions", **{**body, "stream": True}):
        for choice in chunk["choices"]:
            texts[choice["index"]] += choice["text"]
            ends[choice["index"]] += choice["finish_reason"] is not None
    assert [texts[i] for i in range(4)] == [choice["text"] for choice in whole["choices"]]
    assert set(ends.values()) == {1}


def test_a_stop_string_ends_the_answer_and_is_reported(http: httpx.Client) -> None:
    whole = http.post("/v1/completions", json={**GREEDY, "prompt": "abc"}).json()["choices"][0]["text"]
    stop = next(c for c in whole[3:] if c.isascii())
    choice = http.post("/v1/completions", json={**GREEDY, "prompt": "abc", "stop": stop}).json()["choices"][0]
    assert choice["finish_reason"] == "stop" and choice["stop_reason"] == stop
    assert choice["text"] == whole[: whole.index(stop)]


def test_a_repeated_prompt_is_read_from_the_cache(http: httpx.Client) -> None:
    body = {**GREEDY, "prompt": list(range(60, 160)), "max_tokens": 2}
    cached = [
        http.post("/v1/completions", json={**body, **salt}).json()["usage"]["prompt_tokens_details"]
        for salt in ({}, {}, {"cache_salt": "mine"})
    ]
    assert cached[0]["cached_tokens"] == 0 < cached[1]["cached_tokens"] and cached[2]["cached_tokens"] == 0


@pytest.mark.parametrize(
    "fields",
    [
        '"prompt": "a\\ud83d"',
        '"prompt": ["\\udfff", "\\ude00\\ud83d"]',
        '"prompt": "x", "cache_salt": "\\ud800"',
        '"prompt": "x", "stop": "\\ud800", "bad_words": ["\\udc00"]',
        '"prompt": "x", "user": "\\ud800", "metadata": {"tenant": "\\udc00", "\\ud800": "x"}',
    ],
)
def test_a_lone_surrogate_is_read_as_the_replacement_character(http: httpx.Client, fields: str) -> None:
    content = f'{{"max_tokens": 2, "temperature": 0, {fields}}}'
    headers = {"content-type": "application/json"}
    found = []
    for written in (content, re.sub(r"\\ud[89a-f]..", r"\\ufffd", content)):
        response = http.post("/v1/completions", content=written.encode(), headers=headers)
        assert response.status_code == 200, response.text
        found.append([choice["text"] for choice in response.json()["choices"]])
    assert found[0] == found[1]


def test_unknown_fields_are_named_in_a_header(http: httpx.Client) -> None:
    response = http.post("/v1/completions", json={**GREEDY, "prompt": "x", "frobnicate": 1, "user": "me"})
    assert response.status_code == 200 and response.headers["x-ignored-params"] == "frobnicate"
    chat = {**GREEDY, "messages": USER, "chat_template_kwargs": {"style": "So:", "enable_thinking": False}}
    response = http.post("/v1/chat/completions", json=chat)
    assert response.headers["x-ignored-params"] == "chat_template_kwargs.enable_thinking"
    response = http.post("/v1/chat/completions", json={**GREEDY, "messages": USER, "reasoning_effort": "low"})
    assert response.status_code == 200 and response.headers["x-ignored-params"] == "reasoning_effort"
    response = http.post(
        "/v1/chat/completions", json={**GREEDY, "messages": USER, "reasoning_effort": "auto"}
    )
    assert response.status_code == 200 and "x-ignored-params" not in response.headers


def test_the_template_gets_its_variables(http: httpx.Client) -> None:
    plain = http.post("/tokenize", json={"messages": USER}).json()
    styled = http.post("/tokenize", json={"messages": USER, "chat_template_kwargs": {"style": "So:"}}).json()
    assert styled["count"] > plain["count"]


def test_models_are_listed_and_found(client: openai.OpenAI) -> None:
    (model,) = client.models.list().data
    assert model.id == NAME and model.model_extra["max_model_len"] == 512
    assert client.models.retrieve(NAME).id == NAME
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("some/other")


def test_text_survives_tokenize_and_detokenize(http: httpx.Client) -> None:
    text = "x = 'ü\u2603'\n"
    found = http.post("/tokenize", json={"prompt": text, "return_token_strs": True}).json()
    assert found["count"] == len(found["tokens"]) == len(found["token_strs"])
    assert found["max_model_len"] == 512
    assert http.post("/detokenize", json={"tokens": found["tokens"]}).json() == {"prompt": text}


def test_health_ping_and_version_answer(http: httpx.Client) -> None:
    for response in (http.get("/health"), http.get("/ping"), http.post("/ping")):
        assert response.status_code == 200 and response.content == b""
    assert http.get("/version").json()["version"]


def test_metrics_count_what_was_served(http: httpx.Client) -> None:
    before = scrape(http)
    figures = http.post("/v1/completions", json={**GREEDY, "prompt": "while "}).json()
    after = scrape(http)

    def grown(name: str) -> float:
        return after[name] - before.get(name, 0.0)

    assert 0 <= figures["metrics"]["queue_time_ms"] <= figures["metrics"]["time_to_first_token_ms"]
    spec = figures["metrics"]["speculative_decoding"]
    assert grown("vllm:generation_tokens_total{}") == 24
    assert grown("vllm:time_to_first_token_seconds_count{}") == 1
    assert grown("vllm:request_queue_time_seconds_count{}") == 1
    assert grown("vllm:inter_token_latency_seconds_count{}") == 23
    assert grown("vllm:e2e_request_latency_seconds_count{}") == 1
    assert grown('vllm:request_success_total{"finished_reason": "length"}') == 1
    assert grown("vllm:spec_decode_num_drafts_total{}") == spec["num_spec_steps"]
    assert grown("vllm:spec_decode_num_accepted_tokens_total{}") == spec["num_accepted_draft_tokens"]
    assert after["vllm:num_requests_running{}"] == 0


def test_disconnects_free_their_requests(server: LiveServer) -> None:
    def disconnect_at_once(body: dict[str, Any]) -> None:
        content = json.dumps(body).encode()
        head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        with socket.create_connection(server.address) as connection:
            connection.sendall(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content)

    def one(index: int) -> None:
        body = {**GREEDY, "prompt": [60 + index] * 20, "max_tokens": 400, "ignore_eos": True}
        if index % 4 == 0:  # with and without a stream
            disconnect_at_once({**body, "stream": index % 8 == 0})
            return
        with http_client(server.url) as http:
            stays = index % 4 == 3
            body |= {"stream": True, "max_tokens": 8 if stays else 400}
            with http.stream("POST", "/v1/completions", json=body) as response:
                if stays:
                    assert events(response)
                else:
                    next(response.iter_lines())

    with ThreadPoolExecutor(32) as pool:
        list(pool.map(one, range(32)))
    wait_until(lambda: idle(server))
    assert server.engine.stats().finished["abort"] > 0


def test_the_death_of_the_engine_ends_streams_with_an_error_and_fails_health(serve: Serve) -> None:
    executors = PausableExecutors()
    with serve(executors.make) as server, http_client(server.url) as http:
        body = {"prompt": "x", "max_tokens": 400, "ignore_eos": True, "stream": True}
        executors[0].allow_steps(4)
        with http.stream("POST", "/v1/completions", json=body) as response:
            lines = response.iter_lines()
            first = next(lines)
            executors[0].die()
            *_, failure, done = [line for line in [first, *lines] if line]
        assert done == "data: [DONE]"
        error = json.loads(failure.removeprefix("data: "))["error"]
        assert error["code"] == 503 and "Retry" in error["message"] and "4711" not in error["message"]
        late = http.post("/v1/completions", json={"prompt": "x", "stream": True})
        assert late.status_code == 503 and late.headers["retry-after"]
        assert http.get("/health").status_code == 503
        (reported,) = [
            line for line in http.get("/metrics").text.splitlines() if 'reason="engine_dead"' in line
        ]
        assert reported.endswith(" 1.0"), "the stream that had begun was let in"


def test_large_bodies_are_refused_and_silent_streams_are_kept_alive(serve: Serve) -> None:
    with (
        serve(max_request_bytes=2000, sse_keep_alive_interval=0.001) as server,
        http_client(server.url) as http,
    ):
        large = {"prompt": "x" * 3000}
        pieces = iter([json.dumps(large).encode()])
        whole = http.post("/v1/completions", json=large)
        chunked = http.post("/v1/completions", content=pieces, headers={"content-type": "application/json"})
        assert error_of(whole)["code"] == error_of(chunked)["code"] == 413
        with http.stream("POST", "/v1/completions", json={"prompt": "x", "stream": True}) as response:
            lines = [line for line in response.iter_lines() if line]
        assert lines[-1] == "data: [DONE]" and ": keep-alive" in lines
