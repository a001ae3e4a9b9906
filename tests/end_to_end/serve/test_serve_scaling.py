"""Real Serve, real replicas: their number follows the load up and down, and no request fails."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import httpx
import pytest
import ray
from manta.actors.replica import DEPLOYMENT
from manta.actors.system.host_resources import free_port
from manta.cluster.fleet.autoscaling import ScalingRules
from manta.cluster.metrics.fleet_metrics import SCALING_CATALOGUE
from manta.jobs.common.http_client import ServerClient, await_ready
from manta.jobs.serve.server import ServeOptions, start_server
from prometheus_client.parser import text_string_to_metric_families
from ray import serve
from support.engines.ray_engines import actor_pids
from support.waiting import wait_until


@pytest.mark.slow
def test_load_adds_a_replica_and_idleness_removes_all_without_a_failed_request(
    pair: tuple[Path, Path],
) -> None:
    settings = {
        "model": str(pair[0]),
        "speculative_config": {"model": str(pair[1])},
        "served_model_name": "tiny",
        "dtype": "float32",
        "device": "cpu",
        "max_num_seqs": 4,
        "num_pages": 256,
        "num_threads": 1,
        "replicas": "0:2",
        "scaling": asdict(ScalingRules(up_after_s=0.5, down_after_s=3.0, idle_s=5.0)),
    }
    options = ServeOptions(port=free_port(), num_cpus=5)
    num_requests, serving = 0, list[int]()
    reported: dict[str, set[float]] = defaultdict(set)
    with start_server(settings, options) as server, watching(options.name, serving, reported):
        wait_until(lambda: len(actor_pids("ServeReplica:manta:gateway")) == 2)
        for clients, replicas in ((1, 1), (8, 2), (1, 1), (0, 0), (1, 1)):
            with asking(server.url, clients) as answered:
                wait_until(lambda wanted=replicas: serving[-1:] == [wanted], 300, f"{replicas} do not serve")
                if replicas == 0:
                    await_ready(server.url, 0.5)
                time.sleep(2.0)
            num_requests += sum(answered)
    assert [n for i, n in enumerate(serving) if i == 0 or n != serving[i - 1]] == [1, 2, 1, 0, 1]
    assert num_requests > 20
    assert reported["ray_manta_autoscaler_wanted_replicas"] >= {0.0, 1.0, 2.0}
    assert reported.keys() == {
        f"ray_{metric.name}{'_total' if metric.kind == 'counter' else ''}" for metric in SCALING_CATALOGUE
    }


@contextmanager
def asking(url: str, count: int) -> Iterator[list[int]]:
    """Clients that send one stream after another; yield a list for the numbers of their streams."""
    over, answered = threading.Event(), list[int]()
    body = {"model": "tiny", "max_tokens": 100, "temperature": 0, "ignore_eos": True}

    def ask(client: int) -> int:
        number = 0
        with ServerClient(url) as http:
            while not over.is_set():
                text = f"Client {client} asks {number} times."
                list(http.stream_chat({**body, "messages": [{"role": "user", "content": text}]}))
                number += 1
        return number

    with ThreadPoolExecutor(max(count, 1)) as pool:
        clients = [pool.submit(ask, client) for client in range(count)]
        try:
            yield answered
        finally:
            over.set()
    answered += [client.result() for client in clients]


@contextmanager
def watching(application: str, serving: list[int], reported: dict[str, set[float]]) -> Iterator[None]:
    """Record the numbers of replicas that serve, and all values of the autoscaler's metrics by name."""
    over = threading.Event()

    def watch() -> None:
        while not over.wait(0.5):
            states = serve.status().applications[application].deployments[DEPLOYMENT].replica_states
            serving.append({str(state): count for state, count in states.items()}.get("RUNNING", 0))
            with contextlib.suppress(Exception):  # its exporter is not up yet
                (node,) = ray.nodes()
                url = f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics"
                for family in text_string_to_metric_families(httpx.get(url).text):
                    for sample in family.samples:
                        if sample.name.startswith("ray_manta_autoscaler_"):
                            assert sample.labels["deployment"] == "manta"
                            reported[sample.name].add(sample.value)

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
