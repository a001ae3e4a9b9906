"""Replicas behind a gateway in one process: routing, streams that survive engines, clients' answers."""

from __future__ import annotations

import asyncio
import json
import logging
import random
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st
from manta.actors.engine.outputs import ResumeState
from manta.actors.engine.uniproc_executor import make_executor
from manta.actors.gateway.app import create_gateway
from manta.actors.gateway.replica_registry import Directory
from manta.actors.gateway.replica_set import Fleet, Member, ServedModel
from manta.actors.gateway.routing_hints import read_hints
from manta.actors.gateway.stream_resume import ResumableStream, ResumePoint
from manta.actors.http.config.settings import ServerSettings
from manta.actors.http.generation.resume_origin import ResumeOrigin, token_comment
from manta.actors.http.middleware import request_body as bodies
from manta.actors.http.protocol.completion import CompletionRequest
from manta.actors.http.wire.sse import KEEP_ALIVE
from manta.actors.tokenization.tokenizer import Tokenizer
from manta.cluster.config import EngineConfig
from manta.cluster.errors import EngineDeadError, NoReplicaError, OverloadedError
from manta.cluster.request.caller import Caller
from manta.cluster.request.request import MAX_SEED
from manta.cluster.step.scheduler_output import SchedulerOutput
from pydantic import ValidationError
from starlette.requests import Request
from support.checkpoints.chat_pairs import ARGUMENTS, HERMES, SAID, TOOLS, chat_config, saying
from support.checkpoints.text_pair import make_text_pair, tiny_settings
from support.engines.passing_executor import PassingExecutor
from support.servers.gateway_stand import GatewayStand, LocalDirectory, dying_stand, replica_record
from support.servers.server_probes import RESUMABLE, events, events_with_ids, http_client, resumed_streams
from support.waiting import wait_until


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> EngineConfig:
    pair = make_text_pair(tmp_path_factory.mktemp("pair"))
    return EngineConfig.from_dict(tiny_settings(pair, max_num_seqs=8, num_pages=256))


def served(name: str, **more: Any) -> ServerSettings:
    return ServerSettings(served_model_name=name, **more)


@pytest.fixture(scope="module")
def stand(config: EngineConfig) -> Iterator[GatewayStand]:
    tiny, other = served("tiny", api_key="key"), served("other")
    plain = replace(config, speculative_config=None)
    with GatewayStand([(config, tiny), (config, tiny), (plain, other)]) as stand:
        yield stand


@pytest.fixture
def http(stand: GatewayStand) -> Iterator[httpx.Client]:
    with http_client(stand.url, "key") as client:
        yield client


NUMBERS = st.none() | st.booleans() | st.integers(-2, 200) | st.floats(-2, 200) | st.integers(1, 9).map(float)


@given(
    NUMBERS | st.integers(1, 200).map(str) | st.just("1_2_8"),
    st.sampled_from(["x", [7], ["x", "y"], [[7], [8]]]),
)
def test_a_gateway_counts_as_many_completions_as_a_replica_reads(n: object, prompt: object) -> None:
    body = json.dumps({"n": n, "prompt": prompt}).encode()
    state = {"caller": Caller(), "may_rename": False}
    hints = asyncio.run(read_hints(Request({"type": "http", "headers": [], "state": state}), body))
    try:
        request = CompletionRequest.model_validate(json.loads(body))
    except ValidationError:
        assert hints.num_completions <= 2, "it is refused by a replica"
        return
    assert hints.num_completions == max(1, request.n or 1) * len(request.prompt)


def test_shared_prompts_are_routed_to_the_replica_that_computed_them(
    http: httpx.Client, stand: GatewayStand
) -> None:
    """The engines' own counts are compared with random choice."""
    dice, pair = random.Random(4), stand.replicas[:2]

    def by_chance(body: dict[str, Any]) -> None:
        door = dice.choice(pair).door
        answer = http.post(f"{door.url}/v1/completions", json=body, headers={"x-manta-token": door.token})
        assert answer.is_success

    def routed(body: dict[str, Any]) -> None:
        assert http.post("/v1/completions", json=body).is_success

    def hits(send: Callable[[dict[str, Any]], None]) -> tuple[int, list[int]]:
        before = [(r.engine.stats().prefix_cache_hits, r.engine.stats().prompt_tokens) for r in pair]
        heads = [dice.randbytes(100).hex() for _ in range(20)]
        prompts = [head + dice.randbytes(8).hex() for head in heads for _ in range(2)]
        dice.shuffle(prompts)
        for prompt in prompts:
            send({"model": "tiny", "prompt": prompt, "max_tokens": 1})
        stats = [replica.engine.stats() for replica in pair]
        found = sum(now.prefix_cache_hits - b[0] for now, b in zip(stats, before, strict=True))
        return found, [now.prompt_tokens - b[1] for now, b in zip(stats, before, strict=True)]

    chance, _ = hits(by_chance)
    found, load = hits(routed)
    print(f"{chance=} {found=} {found / chance:.2f} x, {load=}")
    assert found >= 1.5 * chance
    assert max(load) <= 1.2 * sum(load) / 2


def test_a_request_has_one_id_at_gateway_and_replica_and_is_logged_once(
    http: httpx.Client, caplog: pytest.LogCaptureFixture
) -> None:
    body = {"model": "tiny", "prompt": "x", "max_tokens": 2, "request_id": "body"}
    cases: list[tuple[dict[str, Any], dict[str, str], int, str]] = [
        (body, {"X-Request-Id": "header"}, 200, "body"),
        ({**body, "n": 0}, {}, 400, "body"),  # a replica says it
        ({**body, "model": "none"}, {}, 404, "body"),  # the gateway does
        ({"prompt": "x"}, {"X-Request-Id": "header", "Authorization": "none"}, 401, "header"),
    ]
    for fields, headers, status, wanted in cases:
        caplog.clear()
        with caplog.at_level(logging.INFO, logger="manta.requests"):
            response = http.post("/v1/completions", json=fields, headers=headers)
        assert response.status_code == status and response.headers.get_list("x-request-id") == [wanted]
        wait_until(lambda: bool(caplog.records))
        (line,) = (json.loads(record.message) for record in caplog.records)
        assert line["request_id"] == wanted and line["status"] == status


def test_a_request_is_explained_by_the_replica_that_served_it(http: httpx.Client) -> None:
    names = [f"told-{i}" for i in range(4)]
    for name in names:
        http.post(
            "/v1/completions", json={"model": "tiny", "prompt": name, "max_tokens": 2, "request_id": name}
        )
    lives = [http.get("/explain", params={"id": name}).json()["data"] for name in names]
    assert [[life["request_id"] for life in found] for found in lives] == [[name] for name in names]
    assert {life["replica"] for found in lives for life in found} <= {"r0", "r1", "r2"}
    reports = http.get("/explain").json()["data"]
    assert {report["replica"] for report in reports} <= {"r0", "r1", "r2"}
    unknown = http.get("/explain", params={"id": "nobody"})
    assert unknown.status_code == 404 and unknown.json()["error"]["param"] == "id"


def test_an_incomplete_upload_is_its_clients_fault(
    http: httpx.Client, stand: GatewayStand, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bodies, "GRACE_S", 0.3)
    address = stand.url.removeprefix("http://").split(":")
    with socket.create_connection((address[0], int(address[1])), timeout=600) as connection:
        head = b"POST /tokenize HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer key\r\n"
        connection.sendall(head + b"Content-Length: 2000000\r\n\r\n-")
        assert connection.recv(100).startswith(b"HTTP/1.1 408")
    assert all(member.is_ready for member in stand.fleet.members)


def test_every_model_is_listed_and_answers_and_no_other(http: httpx.Client, stand: GatewayStand) -> None:
    assert [card["id"] for card in http.get("/v1/models").json()["data"]] == ["tiny", "other"]
    assert http.get("/v1/models/other").json()["max_model_len"] > 0
    before = [replica.engine.stats().generation_tokens for replica in stand.replicas]
    for model in ("tiny", "other"):
        answer = http.post("/v1/completions", json={"model": model, "prompt": "x", "max_tokens": 4}).json()
        assert answer["model"] == model
    grown = [r.engine.stats().generation_tokens - b for r, b in zip(stand.replicas, before, strict=True)]
    assert grown[2] > 0 and sum(grown[:2]) > 0
    wrong = http.post("/v1/completions", json={"model": "none", "prompt": "x"})
    assert wrong.status_code == 404 and "tiny, other" in wrong.json()["error"]["message"]


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/chat/completions", "/v1/responses", "/v1/completions"])
def test_a_body_nested_deeper_than_json_is_written_is_answered_by_a_replica(
    http: httpx.Client, path: str
) -> None:
    deep = b"[" * 300 + b'"x"' + b"]" * 300
    body = b'{"model": "tiny", "max_tokens": 4, "messages": [{"role": "user", "content": %b}]' % deep
    body += b', "prompt": %b, "input": %b}' % (deep, deep)
    answer = http.post(path, content=body, headers={"content-type": "application/json"})
    assert 400 <= answer.status_code < 500, answer.text


def test_wrong_requests_are_answered_by_a_replica_in_openais_form(http: httpx.Client) -> None:
    for content, param in ((b"{", None), (b'{"prompt": "x", "n": 0}', "n"), (b'{"prompt": {}}', "prompt")):
        wrong = http.post("/v1/completions", content=content, headers={"Content-Type": "application/json"})
        assert wrong.status_code == 400 and wrong.json()["error"]["param"] == param
    assert http.get("/v1/files").status_code == 501
    assert http.get("/nowhere").json()["error"]["code"] == 404
    assert http.post("/v1/completions", headers={"Authorization": "Bearer no"}).status_code == 401


def test_agents_routes_are_forwarded_and_keep_their_apis_form(
    http: httpx.Client, stand: GatewayStand
) -> None:
    before = stand.replicas[2].engine.stats().generation_tokens
    with openai.OpenAI(base_url=f"{stand.url}/v1", api_key="key", max_retries=0) as client:
        requested: dict[str, Any] = {"model": "other", "input": "x", "max_output_tokens": 4}
        whole = client.responses.create(**requested, temperature=0)
        *_, last = client.responses.create(**requested, temperature=0, stream=True)
        assert last.type == "response.incomplete" and last.response.output_text == whole.output_text
        with pytest.raises(openai.NotFoundError, match="stores none"):
            client.responses.retrieve(whole.id)
    talk = {
        "model": "other",
        "max_tokens": 4,
        "messages": [{"role": "user", "content": "x"}],
        "temperature": 0,
    }
    key = {"x-api-key": "key"}
    with httpx.Client(base_url=stand.url, headers=key, timeout=600) as client:
        message = client.post("/v1/messages", json=talk)
        assert message.json()["stop_reason"] == "max_tokens" and message.headers["request-id"]
        streamed = client.post("/v1/messages", json={**talk, "stream": True}).text
        assert streamed.endswith('event: message_stop\ndata: {"type":"message_stop"}\n\n')
        counted = client.post("/v1/messages/count_tokens", json=talk).json()["input_tokens"]
        usage = message.json()["usage"]
        assert counted == usage["input_tokens"] + usage["cache_read_input_tokens"]
        for body in (
            {**talk, "model": "none"},
            {**talk, "max_tokens": 0},
        ):  # the gateway's refusal, a replica's
            assert client.post("/v1/messages", json=body).json()["type"] == "error"
    load = http.get("/load").json()  # what replicas run is known from their beats, a moment late
    assert load["server_load"] == 0 and set(load) == {"server_load", "running", "waiting"}
    assert stand.replicas[2].engine.stats().generation_tokens > before


def test_a_replicas_endpoint_accepts_only_gateways(http: httpx.Client, stand: GatewayStand) -> None:
    door = stand.replicas[0].door
    body = {"model": "tiny", "prompt": "x", "max_tokens": 4, "stream": True}
    assert httpx.get(f"{door.url}/health").status_code == 403
    assert httpx.get(f"{door.url}/health", headers={"x-manta-token": "ä".encode()}).status_code == 403
    origin = ResumeOrigin(id="1", created_s=1, seed=1).header()
    smuggled = http.post(
        "/v1/completions", json=body, headers={"x-manta-origin": origin, "x-manta-token": "a"}
    )
    assert {event["id"] for event in events(smuggled)}.isdisjoint({"cmpl-1"})
    assert not [name for name in smuggled.headers if name.startswith("x-manta")]


def test_a_session_stays_with_one_replica(http: httpx.Client, stand: GatewayStand) -> None:
    for session in ("a", "b", "c"):
        before = [replica.engine.stats().prompt_tokens for replica in stand.replicas]
        for i in range(4):
            body = {"model": "tiny", "prompt": f"{i} {session}", "max_tokens": 1}
            assert http.post("/v1/completions", json=body, headers={"X-Session-Id": session}).is_success
        grown = [r.engine.stats().prompt_tokens > b for r, b in zip(stand.replicas, before, strict=True)]
        assert sum(grown) == 1
    assert 'model_name="tiny",reason="session"}' in http.get("/metrics").text


def test_a_request_that_its_replica_cannot_take_goes_to_one_that_reads_its_pages(
    config: EngineConfig, tmp_path: Path
) -> None:
    models = [
        (replace(config, kv_tier_path=str(tmp_path / node)), served("tiny")) for node in ("one", "two", "one")
    ]
    body = {"prompt": "what agents send first " * 9, "max_tokens": 8, "temperature": 0}
    with GatewayStand(models) as stand:
        first, other, neighbor = stand.replicas

        def answer() -> dict[str, Any]:
            response = stand.http.post("/v1/completions", json=body)
            assert response.is_success
            return response.json()

        computed = answer()
        wait_until(lambda: first.engine.stats().prompt_tokens and len(list(tmp_path.glob("one/*/0/*-*"))) > 4)
        stand.run(first.door.close())
        read = answer()
        assert other.engine.stats().prompt_tokens == 0 < neighbor.engine.stats().tier_hits
        assert read["choices"][0]["text"] == computed["choices"][0]["text"]
        assert 'reason="tier"} 1.0' in stand.http.get("/metrics").text


def test_one_metrics_page_has_the_samples_of_all_replicas(http: httpx.Client) -> None:
    text = http.get("/metrics").text
    running = [line for line in text.splitlines() if line.startswith("vllm:num_requests_running{")]
    assert len(running) == 3 and all('replica="r' in line for line in running)
    assert text.count("# TYPE vllm:num_requests_running gauge") == 1
    assert text.count("manta:gateway_replica_up{") == 3


BODIES: dict[str, dict[str, Any]] = {
    "chat": {"messages": [{"role": "user", "content": "def f("}], "temperature": 0},
    "sampled": {"messages": [{"role": "user", "content": "def g("}], "temperature": 1.5, "seed": 5},
    "stops": {"prompt": "x", "temperature": 1.2, "seed": 7, "stop": ["zzzzz", "qqqqqqqqq"], "min_tokens": 30},
}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", BODIES)
def test_a_stream_is_the_same_after_any_number_of_engine_deaths(config: EngineConfig, name: str) -> None:
    body = {
        "model": "tiny",
        "max_tokens": 150,
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
        "ignore_eos": True,
        **BODIES[name],
    }
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    with dying_stand(config, 3, 22) as stand:  # the second one when the stream has outlived its first death
        disturbed = httpx.post(stand.url + path, json=body, timeout=600)
        undisturbed = httpx.post(stand.url + path, json=body, timeout=600)
        text = httpx.get(f"{stand.url}/metrics").text
    assert 'manta:gateway_resumed_streams_total{gateway="0",model_name="tiny"} 2.0' in text
    assert len({(event["id"], event["created"]) for event in events(disturbed)}) == 1
    assert content(disturbed) == content(undisturbed)
    assert events(disturbed)[0]["choices"][0].get("delta", {"role": "assistant"})["role"] == "assistant"


def joined_deltas(found: list[str]) -> list[Any]:
    """Return what a stream's events say together: texts are joined, however blocks cut them."""
    chunks = [json.loads(event.removeprefix("data: ")) for event in found if event.startswith("data: {")]
    texts = [[c.get("text", c.get("delta", {}).get("content")) for c in each["choices"]] for each in chunks]
    ids = [token for each in chunks for choice in each["choices"] for token in choice.get("token_ids", ())]
    reasons = [c["finish_reason"] for each in chunks for c in each["choices"] if c["finish_reason"]]
    usage = [each["usage"]["completion_tokens"] for each in chunks if each.get("usage")]
    heads = {(each["id"], each["created"]) for each in chunks}
    return ["".join(text or "" for each in texts for text in each), ids, reasons, usage, len(heads)]


@pytest.mark.parametrize("name", [*BODIES, "unseeded"])
def test_a_stream_continues_at_any_gateway_from_the_last_id_of_an_event(
    config: EngineConfig, name: str
) -> None:
    """The second gateway has never heard of the stream, and other replicas."""
    bodies = BODIES | {"unseeded": {"messages": [{"role": "user", "content": "x"}], "temperature": 1.0}}
    body = {"model": "tiny", "max_tokens": 60, "stream": True, "ignore_eos": True, "return_token_ids": True}
    body |= {"stream_options": {"include_usage": True}, **bodies[name]}
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    with GatewayStand([(config, served("tiny"))]) as one, GatewayStand([(config, served("tiny"))]) as other:
        plain = httpx.post(one.url + path, json=body, timeout=600).text
        assert "\nid: " not in plain and not plain.startswith("id: ")
        whole, resumed = resumed_streams(one.url + path, other.url + path, body)
    assert whole[-1] == "data: [DONE]" and resumed
    for found in resumed:
        assert found[-1] == "data: [DONE]" and joined_deltas(found) == joined_deltas(whole)


def test_a_stream_that_cannot_be_continued_says_so(http: httpx.Client) -> None:
    body = {"model": "tiny", "prompt": "x", "max_tokens": 40, "stream": True, "ignore_eos": True}
    whole = http.post("/v1/completions", json=body, headers=RESUMABLE).text
    blocks = whole.split("\n\n")
    _, last_id, _ = events_with_ids("\n\n".join(blocks[: len(blocks) // 2]) + "\n\n")
    assert last_id
    for changes, sent in (
        ({"prompt": "another"}, last_id),
        ({"max_tokens": 2}, last_id),
        ({}, last_id[:-1] + ("0" if last_id[-1] != "0" else "1")),
    ):
        answer = http.post("/v1/completions", json=body | changes, headers={"Last-Event-ID": sent})
        error = _errors(answer)
        assert error["code"] == 400 and "the answer is another one" in error["message"]
    for headers in ({"Last-Event-ID": "7"}, {"Last-Event-ID": last_id.replace(".", "-")}):
        refused = http.post("/v1/completions", json=body, headers=headers)
        assert refused.status_code == 400 and refused.json()["error"]["param"] == "Last-Event-ID"
    several = http.post("/v1/completions", json=body | {"n": 2}, headers={"Last-Event-ID": last_id})
    assert several.status_code == 400 and "cannot be resumed" in several.json()["error"]["message"]


def test_one_position_may_be_resumed_several_times_at_once(http: httpx.Client) -> None:
    """The engine may still run the answer for the connection that broke."""
    body = {"model": "tiny", "prompt": "x", "max_tokens": 200, "stream": True, "ignore_eos": True}
    whole = http.post("/v1/completions", json=body, headers=RESUMABLE).text
    blocks = whole.split("\n\n")
    had, last_id, _ = events_with_ids("\n\n".join(blocks[: len(blocks) // 2]) + "\n\n")
    with ThreadPoolExecutor(4) as pool:
        again = [
            pool.submit(http.post, "/v1/completions", json=body, headers={"Last-Event-ID": last_id})
            for _ in range(4)
        ]
        found = [events_with_ids(answer.result().text) for answer in again]
    texts = {joined_deltas([*had, *more, *end])[0] for more, _, end in found}
    assert texts == {joined_deltas(events_with_ids(whole)[0])[0]}


def test_clients_of_the_sdk_read_streams_with_ids(stand: GatewayStand) -> None:
    with openai.OpenAI(base_url=f"{stand.url}/v1", api_key="key", default_headers=RESUMABLE) as client:
        chunks = client.completions.create(model="tiny", prompt="x", max_tokens=20, stream=True)
        assert "".join(chunk.choices[0].text for chunk in chunks)


POINTS = st.builds(
    ResumePoint,
    st.binary(min_size=16, max_size=16).map(bytes.hex),
    st.integers(0, 10**12 - 1),
    st.integers(0, MAX_SEED),
    st.integers(0, 10**9 - 1),
    st.integers(0, 10**9 - 1),
    st.integers(0, 10**9 - 1),
    st.binary(min_size=8, max_size=8).map(bytes.hex),
    st.booleans(),
)


@given(POINTS)
def test_a_position_is_read_as_it_was_written(point: ResumePoint) -> None:
    assert ResumePoint.parse(str(point)) == point


def test_reasoning_and_calls_continue_where_they_were_cut(tmp_path: Path) -> None:
    body = {"model": "tiny", "messages": [{"role": "user", "content": "Weather?"}], "temperature": 0}
    body |= {"stream": True, "tools": TOOLS, **saying(SAID)}
    with dying_stand(chat_config(tmp_path, HERMES), 4) as stand:
        disturbed = httpx.post(f"{stand.url}/v1/chat/completions", json=body, timeout=600)
        undisturbed = httpx.post(f"{stand.url}/v1/chat/completions", json=body, timeout=600)
        text = httpx.get(f"{stand.url}/metrics").text
    assert 'manta:gateway_resumed_streams_total{gateway="0",model_name="tiny"} 1.0' in text
    whole = said(disturbed)
    assert whole == said(undisturbed)
    assert whole["content"] == "I look." and whole["reasoning"] == "The user wants weather."
    assert whole["0.name"] == "get_weather" and whole["0.arguments"] == ARGUMENTS and whole["1.name"] == "now"


def said(response: httpx.Response) -> dict[str, str]:
    """Join the contents of a stream's deltas, without ids of calls, which are derived from the response's."""
    found: dict[str, str] = {}

    def add(name: str, text: str | None) -> None:
        found[name] = found.get(name, "") + (text or "")

    for event in events(response):
        delta = event["choices"][0]["delta"]
        for name in ("content", "reasoning"):
            add(name, delta.get(name))
        for call in delta.get("tool_calls", ()):
            add(f"{call['index']}.opened", "x" if "id" in call else "")
            for name, text in call["function"].items():
                add(f"{call['index']}.{name}", text)
    return found


def content(response: httpx.Response) -> tuple[str, list[int], int, list[Any], dict[str, int]]:
    """Return text, tokens, number of role events, finish reasons, usage."""
    text, ids, opened, reasons, usage = "", list[int](), 0, list[Any](), dict[str, int]()
    for event in events(response):
        for choice in event["choices"]:
            delta = choice.get("delta", choice)
            text += delta.get("content", delta.get("text", ""))
            ids += choice.get("token_ids", [])
            opened += "role" in delta
            if choice["finish_reason"]:
                reasons.append((choice["finish_reason"], choice["stop_reason"]))
        usage = event.get("usage") or usage
    assert ids and len(reasons) == 1
    return text, ids, opened, reasons, {n: usage[n] for n in ("prompt_tokens", "completion_tokens")}


def test_a_complete_answer_is_requested_again_and_several_streams_end_with_an_error(
    config: EngineConfig,
) -> None:
    body = {"model": "tiny", "prompt": "x", "max_tokens": 60, "ignore_eos": True, "seed": 1, "temperature": 1}
    with dying_stand(config, 4, 10**6, 6) as stand:  # the last one does not die
        whole = httpx.post(f"{stand.url}/v1/completions", json=body, timeout=600)  # r0 dies, r1 answers
        several = httpx.post(
            f"{stand.url}/v1/completions", json={**body, "n": 2, "stream": True}, timeout=240
        )  # r2
        again = httpx.post(f"{stand.url}/v1/completions", json=body, timeout=600)
    assert whole.status_code == 200 and whole.json()["choices"] == again.json()["choices"]
    last = events(several)[-1]["error"]
    assert last["code"] == 503 and "Retry" in last["message"]


POISON = "poison: kills"


class Poisoned(PassingExecutor):
    """A real executor that dies of a request with the prompt POISON, and on command.

    Args:
        token_ids: the beginning of such a prompt.
        num_tokens: tokens that the request gets before.
        killed: once set, it dies at the next step.
    """

    def __init__(
        self, config: EngineConfig, token_ids: list[int], num_tokens: int, killed: threading.Event
    ) -> None:
        super().__init__(make_executor(config))
        self._token_ids, self._num_tokens, self._killed = token_ids, num_tokens, killed
        self._slots: dict[int, int] = {}  # of poison: tokens at which it kills

    def submit(self, plan: SchedulerOutput) -> None:
        for request in plan.admitted:
            self._slots.pop(request.slot, None)
            begin = request.token_ids[: len(self._token_ids)].tolist()
            if begin == self._token_ids:
                self._slots[request.slot] = len(self._token_ids) + self._num_tokens
        for slot, computed in zip(plan.slots.tolist(), plan.num_computed.tolist(), strict=True):
            if computed >= self._slots.get(slot, 1 << 30) - 1:
                raise EngineDeadError("worker 1 (pid 4711) was killed by signal 11")
        if self._killed.is_set():
            raise EngineDeadError("worker 1 (pid 4711) was killed by signal 9")
        super().submit(plan)


def poisoned(
    config: EngineConfig, count: int, *, num_tokens: int = 0, settings: ServerSettings | None = None
) -> tuple[GatewayStand, list[threading.Event]]:
    """Replicas that die of POISON, and an event for each that kills it from outside."""
    token_ids = Tokenizer.load(Path(config.model)).encode(POISON)
    kills = [threading.Event() for _ in range(count)]
    makers = [partial(Poisoned, token_ids=token_ids, num_tokens=num_tokens, killed=kill) for kill in kills]
    return GatewayStand([(config, settings or served("tiny"))] * count, makers=makers), kills


def dead(stand: GatewayStand) -> list[str]:
    return [replica.name for replica in stand.replicas if not replica.engine.is_alive]


def long_stream(url: str, i: int, num_tokens: int) -> httpx.Response:
    body = {"model": "tiny", "prompt": f"{i} an innocent prompt", "seed": i, "temperature": i % 2}
    more = {"max_tokens": num_tokens, "ignore_eos": True, "stream": True, "return_token_ids": True}
    more["stream_options"] = {"include_usage": True}
    return httpx.post(f"{url}/v1/completions", json=body | more, timeout=600)


def metric(stand: GatewayStand, name: str) -> float:
    text = httpx.get(f"{stand.url}/metrics", timeout=600).text
    (value,) = [
        line.split()[-1] for line in text.splitlines() if line.startswith(f"manta:gateway_{name}_total")
    ]
    return float(value)


@pytest.mark.parametrize(
    ("num_tokens", "more"),
    [
        pytest.param(0, {}, id="whole", marks=pytest.mark.slow),
        pytest.param(12, {"stream": True}, id="stream, late"),
        pytest.param(12, {"stream": True, "n": 2}, id="several, late", marks=pytest.mark.slow),
    ],
)
def test_a_request_that_kills_gets_two_replicas_and_its_neighbors_lose_nothing(
    config: EngineConfig, num_tokens: int, more: dict[str, Any]
) -> None:
    body = {"model": "tiny", "prompt": POISON, "max_tokens": 60, "ignore_eos": True, "temperature": 0, **more}
    stand, _ = poisoned(config, 3, num_tokens=num_tokens)
    with stand, ThreadPoolExecutor(8) as pool:
        undisturbed = list(pool.map(lambda i: long_stream(stand.url, i, 200), range(6)))
        streams = [pool.submit(long_stream, stand.url, i, 200) for i in range(6)]
        wait_until(lambda: sum(replica.engine.stats().running for replica in stand.replicas) == 6)
        answers = [httpx.post(f"{stand.url}/v1/completions", json=body, timeout=600) for _ in range(3)]
        disturbed = [stream.result() for stream in streams]
        assert len(dead(stand)) == 2
        reported = [_errors(answer) for answer in answers]
        if "n" in more:  # it had started and cannot continue: its client retries
            assert [error["code"] for error in reported] == [503, 503, 422]
        else:
            assert [error["code"] for error in reported] == [422] * 3
        assert reported[-1]["type"] == "UnprocessableEntityError" and "retry-after" not in answers[-1].headers
        assert answers[-1].status_code == 422, "it is not tried at all"
        renamed = {**body, "user": "another", "request_id": "another"}
        assert httpx.post(f"{stand.url}/v1/completions", json=renamed, timeout=600).status_code == 422
        other = httpx.post(f"{stand.url}/v1/completions", json={**body, "prompt": "x"}, timeout=600)
        assert other.status_code == 200
        assert len(dead(stand)) == 2
        assert metric(stand, "poisonous_requests") == 1
    for before, after in zip(undisturbed, disturbed, strict=True):
        assert content(before) == content(after)


def test_a_key_that_kills_with_a_new_request_each_time_is_refused_and_another_key_is_answered(
    config: EngineConfig,
) -> None:
    settings = served("tiny", api_key=("killer", "other"))
    stand, _ = poisoned(config, 5, settings=settings)

    def ask(key: str, prompt: str) -> httpx.Response:
        body = {"model": "tiny", "prompt": prompt, "max_tokens": 20, "ignore_eos": True}
        headers = {"Authorization": f"Bearer {key}"}
        return httpx.post(f"{stand.url}/v1/completions", json=body, headers=headers, timeout=600)

    with stand:
        found: list[tuple[int, int]] = []
        for nonce in range(5):
            answer = ask("killer", f"{POISON} {nonce}")
            found.append((answer.status_code, len(dead(stand))))
            assert ask("other", f"{nonce}").status_code == 200
            assert ask("killer", "harmless").status_code == (200 if nonce < 2 else 429)
        assert found == [(422, 2), (422, 3), (422, 4), (429, 4), (429, 4)]
        refused = ask("killer", "harmless")
        assert "retry-after" in refused.headers and "422" in refused.json()["error"]["message"]
        assert ask("other", f"{POISON} 0").status_code == 503, "another key's equal request is tried"
        assert len(dead(stand)) == 5


def _errors(response: httpx.Response) -> dict[str, Any]:
    """Return the error of a response, or the one that ends its stream."""
    if response.status_code != 200:
        return response.json()["error"]
    return events(response)[-1]["error"]


@pytest.mark.slow
def test_streams_survive_two_deaths_with_another_cause(config: EngineConfig) -> None:
    stand, kills = poisoned(replace(config, max_num_seqs=16, num_pages=1024), 3)
    with stand, ThreadPoolExecutor(32) as pool:
        undisturbed = list(pool.map(lambda i: long_stream(stand.url, i, 250), range(12)))
        streams = [pool.submit(long_stream, stand.url, i, 250) for i in range(12)]
        wait_until(lambda: sum(replica.engine.stats().running for replica in stand.replicas) == 12)
        num_suspects = stand.replicas[0].engine.stats().running
        assert num_suspects
        kills[0].set()
        # A suspect whose test had begun when the second replica dies would be refused.
        wait_until(lambda: dead(stand) == ["r0"] and metric(stand, "isolated_requests") >= num_suspects)
        wait_until(lambda: not any(member.tests_suspect for member in stand.fleet.members))
        kills[1].set()
        disturbed = [stream.result() for stream in streams]
        assert metric(stand, "isolated_requests") >= 4
    for before, after in zip(undisturbed, disturbed, strict=True):
        assert content(before) == content(after)


@pytest.mark.parametrize(
    ("method", "path", "fields", "wanted", "counts"),
    [
        ("POST", "/v1/completions", {"prompt": "x"}, [422, 422, 422], [2, 2, 2]),
        ("POST", "/v1/messages", {"messages": [], "max_tokens": 1}, [422, 422, 422], [2, 2, 2]),
        ("POST", "/tokenize", {"prompt": "x"}, [503, 422, 422], [1, 2, 2]),
        ("GET", "/v1/files", None, [422, 422, 422], [2, 2, 2]),
    ],
)
def test_no_request_kills_more_than_two_replicas(
    method: str, path: str, fields: Any, wanted: list[int], counts: list[int]
) -> None:
    """Four replicas die of every request: they close the connection."""
    num_asked = 0

    async def die(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal num_asked
        await reader.readuntil(b"\r\n\r\n")
        num_asked += 1
        writer.transport.abort()

    async def ask() -> None:
        fleet = Fleet([ServedModel(("m",))], directory := LocalDirectory())
        for i in range(4):
            server = await asyncio.start_server(die, "127.0.0.1", 0)
            url = "http://{}:{}".format(*server.sockets[0].getsockname())
            directory.directory.heartbeat(replica_record(f"r{i}", 1, url=url, max_requests=9))
        fleet.update(directory.directory.replicas())
        gateway = create_gateway(fleet, served("m"))
        transport = httpx.ASGITransport(gateway)
        async with (
            gateway.router.lifespan_context(gateway),
            httpx.AsyncClient(transport=transport, base_url="http://m", timeout=600) as http,
        ):
            for status, count in zip(wanted, counts, strict=True):
                answer = await http.request(method, path, json=fields)
                assert (answer.status_code, num_asked) == (status, count), answer.text
                assert ("retry-after" in answer.headers) == (status == 503) and "error" in answer.json()

    asyncio.run(ask())


def test_a_gateway_reports_no_replicas_and_full_replicas(config: EngineConfig) -> None:
    with GatewayStand([(config, served("tiny"))], max_requests=0) as stand:
        full = httpx.post(f"{stand.url}/v1/completions", json={"prompt": "x"})
        assert full.status_code == 503 and full.headers["retry-after"] and "full" in full.text
        assert httpx.get(f"{stand.url}/health").status_code == 200
        for member in stand.fleet.members:
            member.record = replace(member.record, state="draining", beat=10**6)
        stand.fleet.update([])
    none = Fleet([ServedModel(("tiny",))], stand.directory)
    with pytest.raises(NoReplicaError, match="Retry"):
        none.choose(none.models[0])


def test_a_draining_replica_finishes_its_streams_and_gets_no_new_ones(config: EngineConfig) -> None:
    body = {"model": "tiny", "prompt": "x", "max_tokens": 200, "ignore_eos": True, "stream": True}
    with GatewayStand([(config, served("tiny"))] * 2) as stand:
        goes, stays = stand.replicas
        with httpx.stream("POST", f"{stand.url}/v1/completions", json=body, timeout=600) as response:
            lines = response.iter_lines()
            next(lines)
            closing = stand.start(goes.door.close())
            assert "data: [DONE]" in list(lines)
        assert goes.engine.stats().finished["length"] == 1, "it was not moved"
        closing.result(60)
        for _ in range(3):
            assert httpx.post(
                f"{stand.url}/v1/completions", json={**body, "stream": False}, timeout=240
            ).is_success
        assert stays.engine.stats().finished["length"] == 3


def test_waits_for_a_lost_replica_end() -> None:
    async def wait() -> None:
        member = Member(replica_record("a", 1), last_seen_s=0.0)
        with member.attempt() as until_lost:
            assert member.load == 1
            asyncio.get_running_loop().call_soon(member.expire)
            async with until_lost:
                await asyncio.sleep(60)

    with pytest.raises(TimeoutError):
        asyncio.run(wait())


def test_a_broken_replica_is_skipped_until_its_heartbeats_resume(stand: GatewayStand) -> None:
    fleet = Fleet([ServedModel(("m",))], stand.directory)
    model = fleet.models[0]
    fleet.update([replica_record("a", 1), replica_record("b", 1)])
    first, _ = fleet.choose(model)
    fleet.mark_broken(first)
    fleet.update([replica_record("a", 1), replica_record("b", 1)])
    assert first not in fleet.ready(model), "what was said before it broke is no news"
    fleet.update([replica_record(first.name, 2)])
    assert first in fleet.ready(model)


def test_a_full_replica_is_skipped_and_the_load_of_others_counts(stand: GatewayStand) -> None:
    fleet = Fleet([ServedModel(("m",))], stand.directory)
    fleet.update(
        [
            replica_record("a", 1, running=2),
            replica_record("b", 1, state="draining"),
            replica_record("c", 1, running=1),
        ]
    )
    assert fleet.choose(fleet.models[0])[0].name == "c"
    with pytest.raises(OverloadedError, match="full"):
        fleet.choose(fleet.models[0], without={"c"})


def test_requests_to_a_model_scaled_to_zero_wait_for_one_wake_up_call(stand: GatewayStand) -> None:
    calls: list[ServedModel] = []

    async def wake(model: ServedModel) -> None:
        calls.append(model)
        await asyncio.sleep(0.05)
        fleet.update([replica_record("a", 1)])

    async def start_none(model: ServedModel) -> None:
        raise OSError("no room")

    async def wake_model(fleet: Fleet) -> None:
        await asyncio.gather(*(fleet.wake_model(fleet.models[0]) for _ in range(5)))

    fleet = Fleet([ServedModel(("m",), sleeps=True)], stand.directory, wake)
    asyncio.run(wake_model(fleet))
    assert len(calls) == 1 and fleet.choose(fleet.models[0])[0].name == "a"
    without_replicas = Fleet(fleet.models, stand.directory, start_none)
    asyncio.run(wake_model(without_replicas))  # does not wait for ever
    with pytest.raises(NoReplicaError, match="Retry"):
        without_replicas.choose(without_replicas.models[0])


def test_the_registry_drops_silent_replicas() -> None:
    now_s = 0.0
    directory = Directory(lambda: now_s)
    directory.heartbeat(replica_record("a", 1))
    now_s = 2.0
    directory.heartbeat(replica_record("b", 1))
    assert [each.replica for each in directory.replicas()] == ["a", "b"]
    now_s = 4.0
    assert [each.replica for each in directory.replicas()] == ["b"] and not directory.is_unused
    directory.deregister("b")
    now_s = 60.0
    assert directory.is_unused and directory.replicas() == []


pieces = st.lists(
    st.tuples(
        st.sampled_from(["", "a", "é\\n\\n: tokens 1 2", "\n\n: tokens 3 4"]), st.lists(st.integers(0, 9))
    ),
    min_size=1,
)


@given(pieces, st.lists(st.integers(1, 40)), st.booleans())
def test_a_resumable_stream_releases_only_events_with_known_tokens(
    pieces: list[tuple[str, list[int]]], cuts: list[int], ends: bool
) -> None:
    num_chars, sent, shown, ids = 0, b"", b"", list[int]()
    for i, (text, tokens) in enumerate(pieces):
        num_chars += len(text)
        event = b"data: " + json.dumps({"text": text}).encode() + b"\n\n" if text else b""
        sent += event + token_comment(num_chars, tokens, end=ends and i == len(pieces) - 1) + KEEP_ALIVE
        shown, ids = shown + event + KEEP_ALIVE, ids + tokens
    sent += b'data: {"te'  # cut off
    stream, given_out = ResumableStream(), b""
    for cut in [*cuts, len(sent)]:
        given_out += stream.feed(sent[:cut])
        sent = sent[cut:]
    assert given_out == shown
    assert stream.resume_state == ResumeState(tuple(ids), num_chars) and stream.ended == ends
    assert stream.num_events == sum(bool(text) for text, _ in pieces)
    stream.next_replica()
    assert stream.feed(b': error {"error":{"message":"m","code":503}}\n\ndata: {}\n\n') == b""
    assert stream.error == {"message": "m", "code": 503} and stream.rest() == b"data: {}\n\n"


@given(st.lists(st.integers(0, 2**31 - 1)), st.integers(0, 2**31), st.integers(0, 2**31))
def test_a_resume_origin_survives_serialization(
    token_ids: list[int], num_chars: int, num_events: int
) -> None:
    state = ResumeState(tuple(token_ids), num_chars)
    fixed = {"id": "x", "created_s": 1, "seed": 2**63 - 1, "attempt": 2}
    origin = ResumeOrigin(**fixed, num_events=num_events, resume_state=state)
    assert ResumeOrigin.prefix_bytes(origin.header()) == len(origin.prefix())
    assert ResumeOrigin.read(origin.header(), origin.prefix()) == origin


def test_a_gateways_process_does_not_import_torch(tmp_path: Path) -> None:
    import subprocess
    import sys

    code = "import sys, manta.actors.gateway.app, manta.actors.gateway.deployment as d; assert d.Gateway\n"
    code += "assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=tmp_path)
