"""Two replicas behind HAProxy, changed and killed under load: what clients see, and Prometheus."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from manta.actors.machine import free_port
from manta.jobs.serve_environment import ServeEnvironment
from prometheus_client.parser import text_string_to_metric_families
from small_ray import small_ray
from text_pair import VOCAB, make_text_pair
from tiny import make_tiny_drafter

BODY = {"prompt": "def f(", "max_tokens": 40, "temperature": 0, "ignore_eos": True, "stream": True}
WAIT_S = 150.0


class Cluster:
    """Two replicas; `deploy` is what `serve deploy` does."""

    def __init__(self, folder: Path) -> None:
        self.target, self.drafter = make_text_pair(folder)
        self.other_drafter = make_tiny_drafter(folder / "other", vocab_size=VOCAB, seed=2)
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"

    def deploy(
        self, user_config: dict[str, Any] | None = None, *, num_replicas: int = 2, **changed: Any
    ) -> None:
        from ray.serve.context import _get_global_client
        from ray.serve.schema import ServeDeploySchema

        args = {
            "model": str(self.target),
            "speculative_config": {"model": str(self.drafter)},
            "dtype": "float32",
            "device": "cpu",
            "max_num_seqs": 8,
            "num_pages": 256,
            "num_threads": 1,
            **changed,
        }
        deployment = {"name": "manta", "num_replicas": num_replicas, "user_config": user_config or {}}
        application = {
            "name": "manta",
            "import_path": "manta.actors.replica:build_app",
            "args": args,
            "deployments": [deployment],
        }
        _get_global_client().deploy_apps(ServeDeploySchema.model_validate({"applications": [application]}))

    def pids(self, kind: str) -> set[int]:
        from ray._private.state import actors  # the public listing needs the dashboard

        return {
            actor["Pid"]
            for actor in actors().values()
            if actor["ActorClassName"].startswith(kind) and actor["State"] == "ALIVE"
        }

    def logged(self, words: str) -> int:
        """How often replicas have said so."""
        from ray._private import worker

        logs = Path(worker.global_worker.node.get_logs_dir_path()).glob("worker-*.err")
        return sum(log.read_text(errors="replace").count(words) for log in logs)

    def replicas(self) -> dict[str, float]:
        """Tokens that each has generated, by the one scrape of all."""
        families = text_string_to_metric_families(httpx.get(f"{self.url}/metrics", timeout=10).text)
        (tokens,) = (family for family in families if family.name == "vllm:generation_tokens")
        return {s.labels["replica"]: s.value for s in tokens.samples if s.name.endswith("_total")}

    def ask(self) -> str:
        """The text of a stream; what went wrong, if anything did."""
        try:
            answer = httpx.post(f"{self.url}/v1/completions", json=BODY, timeout=60)
        except httpx.HTTPError as error:
            return f"failed: {type(error).__name__}"
        if answer.status_code != 200:
            return f"failed: {answer.status_code} {answer.text[:200]}"
        *events, last = [line[6:] for line in answer.text.splitlines() if line]
        chunks = [json.loads(event) for event in events]
        if last != "[DONE]" or any("error" in chunk for chunk in chunks):
            return "error event" if last == "[DONE]" else "failed: cut"
        return "".join(chunk["choices"][0]["text"] for chunk in chunks)

    @contextmanager
    def load(self) -> Iterator[list[str]]:
        """What streams of three clients were, at the end of the block."""
        answers: list[str] = []
        ended = threading.Event()

        def work() -> None:
            while not ended.is_set():
                answers.append(self.ask())

        threads = [threading.Thread(target=work) for _ in range(3)]
        for thread in threads:
            thread.start()
        try:
            yield answers
        finally:
            ended.set()
            for thread in threads:
                thread.join(WAIT_S)


def until(true: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + WAIT_S
    while not true():
        assert time.monotonic() < deadline_s, "it did not happen"
        time.sleep(0.1)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    from ray import serve

    cluster = Cluster(tmp_path_factory.mktemp("cluster"))
    environment = ServeEnvironment(plain_proxy=False)
    try:
        with small_ray(6, namespace="serve"):
            serve.start(proxy_location="HeadOnly", http_options={"host": "127.0.0.1", "port": cluster.port})
            cluster.deploy()
            until(lambda: len(cluster.pids("ServeReplica")) == 2)
            until(lambda: httpx.get(f"{cluster.url}/health", timeout=10).status_code == 200)
            until(lambda: len(cluster.replicas()) == 2)
            yield cluster
            serve.shutdown()
    finally:
        environment.restore()


def test_a_drafter_is_swapped_under_load_and_a_wrong_one_refused(cluster: Cluster) -> None:
    text, pids = cluster.ask(), cluster.pids("ServeReplica")
    before = cluster.replicas()
    with cluster.load() as answers:
        cluster.deploy({"drafter": str(cluster.other_drafter)})
        until(lambda: cluster.logged(f"drafting with {cluster.other_drafter} from now on") == 2)
        cluster.deploy({"drafter": "/nowhere/at/all"})
        until(lambda: cluster.logged("user_config is refused, and all stays as it was") == 2)
    assert set(answers) == {text}
    assert cluster.pids("ServeReplica") == pids, "no replica was replaced"
    after: dict[str, float] = {}

    def all_answer() -> bool:  # one that is busy may miss a scrape
        after.clear()
        after.update(cluster.replicas())
        return after.keys() == before.keys()

    until(all_answer)
    assert all(after[replica] >= before[replica] for replica in after)


@pytest.mark.slow
def test_a_rolling_update_fails_no_request(cluster: Cluster) -> None:
    text, before = cluster.ask(), cluster.pids("ServeReplica")
    with cluster.load() as answers:
        cluster.deploy(shutdown_timeout=60)
        until(lambda: len(cluster.pids("ServeReplica") - before) == 2)
        until(lambda: not cluster.pids("ServeReplica") & before)
    assert set(answers) == {text}


@pytest.mark.slow
def test_replicas_go_and_come_by_a_number_that_is_changed(cluster: Cluster) -> None:
    text, before = cluster.ask(), cluster.pids("ServeReplica")
    with cluster.load() as answers:
        cluster.deploy(num_replicas=1, shutdown_timeout=60)
        until(lambda: len(cluster.pids("ServeReplica")) == 1)
        (stays,) = cluster.pids("ServeReplica")
        cluster.deploy(num_replicas=2, shutdown_timeout=60)
        until(lambda: len(cluster.replicas()) == 2)
    assert set(answers) == {text}
    assert stays in before and stays in cluster.pids("ServeReplica"), "it was not replaced"


@pytest.mark.slow  # `test_serve_gateway.py` has a shorter form
def test_of_a_dead_engine_only_its_own_streams_are_told(cluster: Cluster) -> None:
    cluster.deploy({"drafter": "/nowhere/at/all"})  # is refused, and keeps no replica from starting
    text, before = cluster.ask(), cluster.pids("ServeReplica")
    until(lambda: len(cluster.replicas()) == 2)
    with cluster.load() as answers:
        until(lambda: len(answers) > 3)
        os.kill(min(cluster.pids("TargetWorker")), signal.SIGKILL)
        until(lambda: bool(cluster.pids("ServeReplica") - before))
        until(lambda: len(cluster.replicas()) == 2)
    assert set(answers) <= {text, "error event"}
    assert answers.count("error event") <= 3, "each client had one stream there"
