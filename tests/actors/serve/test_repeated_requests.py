"""Answers behind gateways that are asked for again: agents' streams, and requests with an Idempotency-Key."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import anthropic
import httpx
import numpy as np
import openai
import pytest
from manta.actors.engine.uniproc_executor import make_executor
from manta.actors.http.config.settings import ServerSettings
from manta.cluster.config import EngineConfig
from manta.cluster.step.scheduler_output import NOT_A_NUMBER, StepResult
from support.checkpoints.chat_pairs import ARGUMENTS, HERMES, SAID, TOOLS, chat_config, saying
from support.engines.passing_executor import PassingExecutor
from support.servers.gateway_stand import GatewayStand, dying_stand
from support.servers.server_probes import RESUMABLE, resumed_streams

_FUNCTIONS = [tool["function"] for tool in TOOLS]
_COMMON: dict[str, Any] = {"model": "tiny", "temperature": 0, "stream": True, **saying(SAID)}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/responses": {
        **_COMMON,
        "input": "Weather?",
        "tools": [{"type": "function", **each} for each in _FUNCTIONS],
    },
    "/v1/messages": {
        **_COMMON,
        "messages": [{"role": "user", "content": "Weather?"}],
        "max_tokens": 300,
        "tools": [{"name": each["name"], "input_schema": each["parameters"]} for each in _FUNCTIONS],
    },
}
# Fields that differ between two answers to one request, or between two runs of one answer.
_OWN = {"id", "item_id", "call_id", "created_at", "completed_at"}
_OF_RUN = {"completed_at", "metrics", "cached_tokens", "input_tokens", "cache_read_input_tokens"}


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> EngineConfig:
    return chat_config(tmp_path_factory.mktemp("pair"), HERMES)


def payloads(blocks: list[str]) -> list[dict[str, Any]]:
    """Return the JSON of events; each is named by its type."""
    found = [block.split("\n") for block in blocks if not block.startswith(":")]
    payloads = [json.loads(lines[1].removeprefix("data: ")) for lines in found]
    assert [lines[0] for lines in found] == [f"event: {each['type']}" for each in payloads]
    return payloads


def told(events: list[dict[str, Any]], without: set[str]) -> list[Any]:
    """Return what a stream says: deltas in a row are joined, however blocks cut them."""
    merged: list[Any] = []
    for event in events:
        rest, text = _split(_without(event, without | {"sequence_number"}))
        if merged and text is not None and merged[-1][0] == rest:
            merged[-1][1] += text
        else:
            merged.append([rest, text])
    return merged


def _split(event: dict[str, Any]) -> tuple[dict[str, Any], str | None]:
    """Return an event without the text of its delta, and that text; None if it has none."""
    delta = event.get("delta")
    if isinstance(delta, str):
        return {**event, "delta": ""}, delta
    if isinstance(delta, dict) and "type" in delta:
        (name,) = delta.keys() - {"type"}
        return {**event, "delta": delta["type"]}, delta[name]
    return event, None


def _without(value: Any, names: set[str]) -> Any:
    if isinstance(value, dict):
        return {name: _without(each, names) for name, each in value.items() if name not in names}
    return [_without(each, names) for each in value] if isinstance(value, list) else value


def is_numbered(events: list[dict[str, Any]]) -> bool:
    """Return whether events of /v1/responses count from 0; those of /v1/messages have no numbers."""
    numbers = [event["sequence_number"] for event in events if "sequence_number" in event]
    return numbers == list(range(len(events))) or not numbers


@pytest.mark.parametrize("path", BODIES)
def test_an_agents_stream_is_the_same_after_any_number_of_engine_deaths(
    config: EngineConfig, path: str
) -> None:
    with dying_stand(config, 4, 8) as stand:
        disturbed, undisturbed = (
            payloads(httpx.post(stand.url + path, json=BODIES[path], timeout=600).text.split("\n\n")[:-1])
            for _ in range(2)
        )
        text = httpx.get(f"{stand.url}/metrics").text
    assert 'manta:gateway_resumed_streams_total{gateway="0",model_name="tiny"} 2.0' in text
    assert is_numbered(disturbed) and is_numbered(undisturbed)
    without = _OWN | _OF_RUN
    assert told(disturbed, without) == told(undisturbed, without)
    assert ARGUMENTS.replace(" ", "") in json.dumps(disturbed).replace("\\", "").replace(" ", "")


@pytest.mark.parametrize("path", BODIES)
def test_an_agents_stream_continues_at_any_gateway_from_the_last_id_of_an_event(
    config: EngineConfig, path: str
) -> None:
    body, models = BODIES[path], [(config, ServerSettings(served_model_name="tiny"))]
    with GatewayStand(models) as one, GatewayStand(models) as other:
        whole, resumed = resumed_streams(one.url + path, other.url + path, body)
    assert resumed
    for found in map(payloads, resumed):
        assert is_numbered(found) and told(found, _OF_RUN) == told(payloads(whole), _OF_RUN)


SAMPLED: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}], "max_tokens": 30, "n": 2},
    "/v1/completions": {"prompt": ["x", "y"], "max_tokens": 30},
    "/v1/responses": {"input": "x", "max_output_tokens": 30},
}


def test_a_key_gets_the_same_answer_again_from_any_gateway(config: EngineConfig) -> None:
    """Also while an engine still runs the first one. Another key, body or caller gets another answer."""
    settings = ServerSettings(served_model_name="tiny", api_key=("a", "b"))
    with (
        GatewayStand([(config, settings)]) as one,
        GatewayStand([(config, settings)]) as other,
        ThreadPoolExecutor(3) as pool,
    ):

        def ask(stand: GatewayStand, path: str, *, key: str = "k", caller: str = "a", **more: Any) -> Any:
            body = {"model": "tiny", "temperature": 1.0, "ignore_eos": True, **SAMPLED[path], **more}
            headers = {"Idempotency-Key": key, "Authorization": f"Bearer {caller}"}
            answer = httpx.post(stand.url + path, json=body, headers=headers, timeout=600)
            assert answer.status_code == 200, answer.text
            return _without(answer.json(), {"created", "created_at", "usage"} | _OF_RUN)

        for path in SAMPLED:
            first, *repeated = pool.map(lambda stand, path=path: ask(stand, path), (one, one, other))
            assert repeated == [first, first]
            others: list[Any] = [
                ask(one, path, key="K"),
                ask(one, path, caller="b"),
                ask(one, path, temperature=1.1),
            ]
            assert len({each["id"] for each in (first, *others)}) == 4
        assert "manta:gateway_retried_requests_total{" not in _metrics(one), "no replica died"


def _metrics(stand: GatewayStand) -> str:
    return httpx.get(f"{stand.url}/metrics", headers={"Authorization": "Bearer a"}).text


def test_clients_of_the_sdks_read_agents_streams_with_ids(config: EngineConfig) -> None:
    with GatewayStand([(config, ServerSettings(served_model_name="tiny"))]) as stand:
        key: dict[str, Any] = {"api_key": "none", "default_headers": RESUMABLE}
        with openai.OpenAI(base_url=f"{stand.url}/v1", **key) as client:
            *_, last = client.responses.create(model="tiny", input="x", max_output_tokens=8, stream=True)
            assert last.type in ("response.incomplete", "response.completed")
        with anthropic.Anthropic(base_url=stand.url, **key) as client:
            talk: Any = [{"role": "user", "content": "x"}]
            *_, last = client.messages.create(model="tiny", messages=talk, max_tokens=8, stream=True)
            assert last.type == "message_stop"


@pytest.mark.parametrize("path", BODIES)
def test_an_agents_stream_that_nothing_continues_ends_in_its_apis_form(
    config: EngineConfig, path: str
) -> None:
    """The only replica dies, and another one does under the same request: it may be the cause."""
    with dying_stand(config, 4, 1) as stand:
        blocks = httpx.post(stand.url + path, json=BODIES[path], timeout=600).text.split("\n\n")[:-1]
    *_, last = payloads(blocks)
    assert last["type"] == "error" and "died" in last.get("error", last)["message"]


class BrokenExecutor(PassingExecutor):
    """A real executor whose logits are not numbers from its fourth step on."""

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(make_executor(config))
        self._left = 3

    def collect(self) -> StepResult:
        result = super().collect()
        self._left -= 1
        if self._left >= 0:
            return result
        token_ids = result.token_ids.copy()
        token_ids[:, 0] = NOT_A_NUMBER
        return replace(result, token_ids=token_ids, num_tokens=np.minimum(result.num_tokens, 1))


CHAT = {
    "model": "tiny",
    "stream": True,
    "messages": [{"role": "user", "content": "Weather?"}],
    **saying(SAID),
}


@pytest.mark.parametrize(
    ("path", "wanted"),
    [
        ("/v1/responses", 'event: response.failed\ndata: {"type":"response.failed"'),
        ("/v1/messages", 'event: error\ndata: {"type":"error","error":{"type":"api_error"'),
        ("/v1/chat/completions", 'data: {"error":{'),
    ],
)
def test_a_stream_that_its_replica_fails_ends_as_without_a_gateway(
    config: EngineConfig, path: str, wanted: str
) -> None:
    models = [(config, ServerSettings(served_model_name="tiny"))]
    with GatewayStand(models, makers=[BrokenExecutor]) as stand:
        text = httpx.post(stand.url + path, json=BODIES.get(path, CHAT), timeout=600).text
    assert ": error " not in text and ": tokens" not in text
    *begin, last = text.removesuffix("data: [DONE]\n\n").removesuffix("\n\n").split("\n\n")
    assert begin and last.startswith(wanted) and "not numbers" in last
