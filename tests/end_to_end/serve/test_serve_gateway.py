"""Two replicas behind a gateway in real Serve: one endpoint, a new drafter, a killed replica."""

from __future__ import annotations

import json
import os
import re
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from manta.actors.http.config.settings_mapping import split_models
from manta.actors.replica import build_app, build_application
from manta.cluster.errors import ConfigError
from support.engines.ray_engines import actor_pids
from support.servers.deployed import REPLICA, Cluster, deployed
from support.waiting import wait_until
from trials.serving.serving_load import Load

NUM_STREAMS = 16
GATEWAY = "ServeReplica:manta:gateway"


@pytest.fixture(scope="module")
def args(pair: tuple[Path, Path]) -> dict[str, Any]:
    return {"model": str(pair[0]), "dtype": "float32", "device": "cpu", "num_threads": 1, "replicas": 2}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    settings = {"served_model_name": "tiny", "max_num_seqs": 16, "num_pages": 512, "replicas": 2}
    with deployed(tmp_path_factory.mktemp("cluster"), **settings) as cluster:
        yield cluster


def test_one_replica_of_one_model_has_no_gateway(args: dict[str, Any]) -> None:
    def names(**more: Any) -> list[str]:
        return sorted(deployments(build_app({**args, **more})))

    assert names(replicas=1) == ["manta"]
    assert names() == ["gateway", "manta"]
    assert names(replicas="1:3") == ["gateway", "manta"]
    assert names(replicas="1:1") == ["gateway", "manta"], "so that its streams can wait for the next one"
    assert names(replicas="0:1") == ["gateway", "manta"], "somebody must answer while it sleeps"
    two = deployments(build_application(split_models(args), num_gateways=2))
    assert two["gateway"]._deployment_config.num_replicas == 2


def deployments(app: Any) -> dict[str, Any]:
    """The status of an application, by name."""
    found = {app._bound_deployment.name: app._bound_deployment}
    for argument in app._bound_deployment.init_args:
        for each in argument if isinstance(argument, list) else []:
            if hasattr(each, "_bound_deployment"):
                found |= deployments(each)
    return found


def test_several_models_are_several_deployments_with_common_settings(args: dict[str, Any]) -> None:
    common = {name: value for name, value in args.items() if name not in ("model", "served_model_name")}
    entries = [{"model": args["model"], "served_model_name": name} for name in ("a", "b")]
    found = deployments(build_app({**common, "models": entries}))
    assert sorted(found) == ["gateway", "manta", "manta-2"]
    assert found["manta"]._deployment_config.num_replicas == 2
    for wrong, said in (
        ([{**entries[0]}, {**entries[0]}], "another model"),
        ([{**entries[0], "api_key": "x"}], "next to `models`"),
        ([], "a list of mappings"),
    ):
        with pytest.raises(ConfigError, match=said):
            build_app({**common, "models": wrong})


def test_one_endpoint_serves_both_replicas(server: Cluster) -> None:
    (card,) = httpx.get(f"{server.url}/v1/models").json()["data"]
    assert card["id"] == "tiny" and card["max_model_len"] > 0
    unknown = httpx.post(f"{server.url}/v1/completions", json={"model": "no", "prompt": "x"})
    assert unknown.status_code == 404 and unknown.json()["error"]["param"] == "model"
    tokens = httpx.post(f"{server.url}/tokenize", json={"prompt": "def f("}).json()
    assert tokens["count"] == len(tokens["tokens"])
    wait_until(
        lambda: len(re.findall(r"manta:gateway_replica_up\{.*\} 1.0", scraped(server))) == 2, poll_s=0.1
    )
    wait_until(
        lambda: len(set(re.findall(r'requests_running\{.*?replica="([^"]+)"', scraped(server)))) == 2,
        poll_s=0.1,
    )


def scraped(server: Cluster) -> str:
    return httpx.get(f"{server.url}/metrics").text


def body(i: int) -> dict[str, Any]:
    """Half of the requests sample with their own seed; lengths differ."""
    return {
        "messages": [{"role": "user", "content": f"request {i}: def f("}],
        "temperature": i % 2,
        "seed": i,
        "max_tokens": 150 + 10 * (i % 4),
        "ignore_eos": True,
        "stream": True,
        "return_token_ids": True,
        "stream_options": {"include_usage": True},
    }


def read(server: Cluster, i: int, started: threading.Barrier | None = None) -> dict[str, Any]:
    """A whole stream, as its client sees it."""
    seen: dict[str, Any] = {"text": "", "token_ids": [], "ids": set(), "comments": 0, "done": False}
    with httpx.stream("POST", f"{server.url}/v1/chat/completions", json=body(i), timeout=600) as response:
        assert response.status_code == 200, response.read()
        for line in response.iter_lines():
            seen["comments"] += line.startswith(":")
            data = line.removeprefix("data: ")
            seen["done"] |= data == "[DONE]"
            if not line.startswith("data: ") or seen["done"]:
                continue
            event = json.loads(data)
            assert "error" not in event, event
            seen["ids"].add((event["id"], event["created"]))
            for choice in event["choices"]:
                seen["text"] += choice["delta"].get("content", "")
                seen["token_ids"] += choice.get("token_ids", [])
                seen["finish"] = choice["finish_reason"]
            if event["usage"] is not None:
                seen["usage"] = {
                    name: event["usage"][name] for name in ("prompt_tokens", "completion_tokens")
                }
            if started is not None and len(seen["token_ids"]) > 20:
                started.wait(600)
                started = None
    return seen


def test_a_drafter_is_swapped_under_load_and_a_wrong_one_refused(server: Cluster) -> None:
    text, pids = server.ask(), actor_pids(REPLICA)
    before = server.replicas()
    with server.load() as answers:
        server.deploy({"drafter": str(server.other_drafter)})
        wait_until(lambda: server.logged(f"drafting with {server.other_drafter} from now on") == 2)
        server.deploy({"drafter": "/nowhere/at/all"})
        wait_until(lambda: server.logged("user_config is refused, and nothing changes") == 2)
    assert set(answers) == {text}
    assert actor_pids(REPLICA) == pids, "no replica was replaced"
    after: dict[str, float] = {}

    def all_answer() -> bool:  # one that is busy may miss a scrape
        after.clear()
        after.update(server.replicas())
        return after.keys() == before.keys()

    wait_until(all_answer, poll_s=0.1)
    assert all(after[replica] >= before[replica] for replica in after)


def test_streams_outlive_their_replica(server: Cluster) -> None:
    with ThreadPoolExecutor(NUM_STREAMS) as pool:
        undisturbed = list(pool.map(lambda i: read(server, i), range(NUM_STREAMS)))
        started = threading.Barrier(NUM_STREAMS + 1)
        streams = [pool.submit(read, server, i, started) for i in range(NUM_STREAMS)]
        started.wait(600)
        pids = actor_pids(REPLICA)
        assert len(pids) == 2
        os.kill(min(pids), signal.SIGKILL)
        disturbed = [stream.result() for stream in streams]
    for before, after in zip(undisturbed, disturbed, strict=True):
        assert (after["done"], after["comments"], len(after["ids"])) == (True, 0, 1)
        for name in ("text", "token_ids", "finish", "usage"):
            assert after[name] == before[name], name
    (resumed,) = re.findall(r"manta:gateway_resumed_streams_total\{.*\} (.*)", scraped(server))
    assert float(resumed) > 0
    assert httpx.get(f"{server.url}/health").status_code == 200, "the other replica answers"


def test_streams_of_clients_that_reconnect_outlive_the_gateway(server: Cluster) -> None:
    undisturbed = Load(server.url, NUM_STREAMS, 200).join()
    load = Load(server.url, NUM_STREAMS, 200, resumes=True)
    load.wait_for_tokens()
    (pid,) = actor_pids(GATEWAY)
    os.kill(pid, signal.SIGKILL)
    disturbed = load.join()
    assert {stream.end for stream in disturbed} == {"whole"}
    assert [stream.text for stream in disturbed] == [stream.text for stream in undisturbed]
    assert any(stream.resumed for stream in disturbed)


def ask_until_answered(server: Cluster, i: int) -> tuple[int, dict[str, Any]]:
    """Return the number of tries that a whole, sampled answer took, and what repeats of it have in common."""
    request = {**body(i), "stream": False, "stream_options": None, "temperature": 1.0, "seed": None}
    answer, num_tries = None, 0
    with httpx.Client(base_url=server.url, headers={"Idempotency-Key": f"request {i}"}, timeout=600) as http:
        while answer is None or answer.status_code == 503:
            num_tries += 1
            try:
                answer = http.post("/v1/chat/completions", json=request)
            except httpx.HTTPError:
                time.sleep(0.1)
    assert answer.status_code == 200, answer.text
    return num_tries, {name: answer.json()[name] for name in ("id", "choices")}


def test_a_key_gets_the_same_whole_answer_after_the_gateways_death(server: Cluster) -> None:
    before = server.replicas()
    with ThreadPoolExecutor(NUM_STREAMS) as pool:
        asked = [pool.submit(ask_until_answered, server, i) for i in range(NUM_STREAMS)]
        wait_until(lambda: sum(server.replicas().values()) > sum(before.values()) + NUM_STREAMS)
        (pid,) = actor_pids(GATEWAY)
        os.kill(pid, signal.SIGKILL)
        answers = [each.result() for each in asked]
        again = [
            answer for _, answer in pool.map(lambda i: ask_until_answered(server, i), range(NUM_STREAMS))
        ]
    assert max(num_tries for num_tries, _ in answers) > 1
    assert [answer for _, answer in answers] == again


def test_a_second_gateway_answers_at_once_after_the_firsts_death(server: Cluster) -> None:
    undisturbed = Load(server.url, NUM_STREAMS, 200).join()
    (first,) = actor_pids(GATEWAY)
    server.deploy(num_gateways=2)
    wait_until(lambda: len({*re.findall(r'gateway_replica_up\{gateway="(\w+)"', scraped(server))}) == 2)
    load = Load(server.url, NUM_STREAMS, 200, resumes=True)
    load.wait_for_tokens()
    os.kill(first, signal.SIGKILL)
    wait_until(lambda: not Path(f"/proc/{first}").exists())
    assert not server.ask().startswith("failed"), "no new request is refused"
    disturbed = load.join()
    assert {stream.end for stream in disturbed} == {"whole"}
    assert [stream.text for stream in disturbed] == [stream.text for stream in undisturbed]
    assert all(stream.resumed for stream in disturbed), "the first one had all"
