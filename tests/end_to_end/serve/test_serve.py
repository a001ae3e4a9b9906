"""One engine of two target ranks in real Ray Serve behind HAProxy: answers, and the death of a worker."""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import ray
import yaml
from manta.actors.replica import build_app
from manta.actors.system.host_resources import free_port
from manta.actors.workers import local_ray
from manta.cluster.errors import CheckpointError, ConfigError
from manta.jobs.serve import server as serving
from manta.jobs.serve.server import ServeOptions, Server, start_server
from prometheus_client.parser import text_string_to_metric_families
from ray.serve.schema import ServeDeploySchema
from support.engines.ray_engines import actor_pids
from support.paths import ROOT
from support.waiting import wait_until

BODY: dict[str, Any] = {
    "model": "tiny",
    "temperature": 0,
    "max_tokens": 24,
    "extra_body": {"ignore_eos": True},
}


@pytest.fixture(scope="module")
def args(pair: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return {
        "model": str(pair[0]),
        "speculative_config": {"model": str(pair[1])},
        "served_model_name": "tiny",
        "tensor_parallel_size": 2,
        "dtype": "float32",
        "device": "cpu",
        "max_num_seqs": 8,
        "num_pages": 256,
        "num_threads": 1,
        "batch_storage": str(tmp_path_factory.mktemp("batches")),
        "log_format": "json",
    }


@pytest.fixture(scope="module")
def server(args: dict[str, Any]) -> Iterator[Server]:
    options = ServeOptions(port=free_port(), num_cpus=4, ready_timeout_s=240)
    with pytest.MonkeyPatch.context() as patch:
        # Ray's workers export no metrics if the agent needs half a minute to start, as on a busy machine.
        patch.setattr(local_ray, "AGENT_NICENESS", 0)
        with start_server(args, options) as server:
            yield server
    assert not ray.is_initialized()


@pytest.fixture(scope="module")
def client(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=600)


def test_ray_config_is_a_valid_serve_config() -> None:
    config = ServeDeploySchema.model_validate(yaml.safe_load((ROOT / "ray_config.yaml").read_text()))
    (application,) = config.applications
    assert application.import_path == "manta.actors.replica:build_app"
    deployment = build_app(application.args)._bound_deployment
    # HAProxy accepts connections even without bodies: the replica itself refuses the excess.
    assert deployment.max_ongoing_requests >= 4096
    assert deployment.max_queued_requests > 0


def test_an_unknown_setting_is_refused_before_anything_starts() -> None:
    with pytest.raises(ConfigError, match="Did you mean max_num_seqs"):
        build_app({"model": "m", "max_num_seq": 1})


def test_a_replicas_bundles_hold_its_workers(args: dict[str, Any]) -> None:
    options = build_app(args)._bound_deployment._replica_config
    assert (
        len(options.placement_group_bundles or ()) == 2 and options.placement_group_strategy == "STRICT_PACK"
    )
    alone = build_app({**args, "tensor_parallel_size": 1})._bound_deployment._replica_config
    assert len(alone.placement_group_bundles or ()) == 1


def test_impossible_settings_are_reported_before_ray_starts(args: dict[str, Any]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(ConfigError) as caught:
        start_server(args, ServeOptions(port=taken.getsockname()[1]))
    assert caught.value.param == "port" and "--port" in caught.value.message
    with pytest.raises(CheckpointError) as caught:
        start_server({**args, "model": "/nowhere/at/all"}, ServeOptions(port=free_port()))
    assert caught.value.param == "model"
    for place, said in (("/proc/nothing", "cannot be written"), ("ftp://x", "ftp"), ("relative", "absolute")):
        with pytest.raises(ConfigError, match=said) as caught:
            start_server({**args, "batch_storage": place}, ServeOptions(port=free_port()))
        assert caught.value.param == "batch_storage"
    assert not ray.is_initialized()


def test_another_address_on_the_same_ray_is_refused(server: Server) -> None:
    port = int(server.url.rpartition(":")[2])
    serving._check_address(ServeOptions(port=port))
    with pytest.raises(ConfigError, match=rf"serves at 127\.0\.0\.1:{port} already") as caught:
        serving._check_address(ServeOptions(port=free_port()))
    assert caught.value.param == "port"


def test_a_server_listens_on_loopback_only(server: Server) -> None:
    assert httpx.get(f"{server.url}/health").status_code == 200
    mine = {os.getpid()}
    parents = {pid: int(stat.rpartition(")")[2].split()[1]) for pid, stat in stats().items()}
    while grown := {pid for pid, parent in parents.items() if parent in mine} - mine:
        mine |= grown
    assert len(mine) > 5, "Ray, Serve, HAProxy"
    sockets = {target: pid for pid in mine for target in descriptors(pid)}
    listening = [
        (local, stats()[sockets[f"socket:[{inode}]"]].partition(")")[0])
        for local, state, inode in connections()
        if state == "0A" and f"socket:[{inode}]" in sockets
    ]
    open_ones = [each for each in listening if not each[0].startswith(LOOPBACK)]
    assert len(listening) > 5 and not open_ones, open_ones


# As the kernel writes addresses: 127.0.0.1, the same in IPv6, ::1.
LOOPBACK = ("0100007F:", "0000000000000000FFFF00000100007F:", "00000000000000000000000001000000:")


def stats() -> dict[int, str]:
    """The sockets of all processes, from the kernel."""
    found = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            found[int(path.parent.name)] = path.read_text()
    return found


def descriptors(pid: int) -> Iterator[str]:
    """The targets of a process's open files."""
    with contextlib.suppress(OSError):
        for path in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                yield str(path.readlink())


def connections() -> Iterator[tuple[str, str, str]]:
    """Local address, state and inode of each TCP socket."""
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            words = line.split()
            yield words[1], words[3], words[9]


def test_the_openai_client_is_served_complete_and_streamed(server: Server, client: openai.OpenAI) -> None:
    whole = client.completions.create(prompt="def f(", **BODY)
    pieces = list(client.completions.create(prompt="def f(", stream=True, **BODY))
    assert "".join(piece.choices[0].text for piece in pieces) == whole.choices[0].text
    response = httpx.get(f"{server.url}/v1/models", headers={"X-Request-Id": "mine"})
    assert response.headers.get_list("x-request-id") == ["mine"]
    body = {"prompt": "x", "n": 0, "request_id": "body"}
    wrong = httpx.post(f"{server.url}/v1/completions", json=body, headers={"X-Request-Id": "mine"})
    assert wrong.status_code == 400 and wrong.json()["error"]["param"] == "n"
    assert wrong.headers.get_list("x-request-id") == ["body"]
    long = httpx.get(f"{server.url}/health", headers={"X-Request-Id": "x" * 5000})
    assert [len(each) < 40 for each in long.headers.get_list("x-request-id")] == [True]


def running(server: Server) -> float:
    lines = httpx.get(f"{server.url}/metrics", timeout=600).text.splitlines()
    return float(next(line for line in lines if line.startswith("vllm:num_requests_running")).split()[-1])


def test_a_disconnect_frees_its_request_through_the_proxy(server: Server) -> None:
    body = {"prompt": "x", "max_tokens": 400, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=600) as response:
        next(response.iter_lines())
    wait_until(lambda: running(server) == 0, poll_s=0.1)


@pytest.mark.slow  # one rank in `test_serve_chaos.py`, two ranks without a server in `test_ray_executor.py`
def test_after_a_workers_death_the_stream_ends_and_the_replica_is_replaced(
    server: Server, client: openai.OpenAI
) -> None:
    before = actor_pids("TargetWorker")
    assert len(before) == 2
    pieces = client.completions.create(prompt="x", stream=True, **{**BODY, "max_tokens": 400})
    next(iter(pieces))
    os.kill(max(before), signal.SIGKILL)
    with pytest.raises((openai.APIError, httpx.RemoteProtocolError)):  # an error event, or a cut stream
        list(pieces)
    patient = client.with_options(max_retries=0, timeout=10)

    def answers() -> bool:
        with contextlib.suppress(openai.APIError):
            return bool(patient.completions.create(prompt="x", **BODY).choices[0].text)
        return False

    wait_until(answers, 240, poll_s=0.1)
    after = actor_pids("TargetWorker")
    assert len(after) == 2 and not after & before


def test_a_request_is_found_in_the_logs_of_all_processes(server: Server, client: openai.OpenAI) -> None:
    from ray._private import worker

    answer = client.completions.create(prompt="x", extra_headers={"X-Request-Id": "logged-7"}, **BODY)
    files = list(Path(worker.global_worker.node.get_logs_dir_path()).glob("worker-*.err"))

    def lines() -> list[dict[str, Any]]:
        texts = (line for file in files for line in file.read_text(errors="replace").splitlines())
        return [json.loads(line) for line in texts if line.startswith('{"time"')]

    wait_until(lambda: any(line.get("id") == answer.id for line in lines()))
    (mine,) = [line for line in lines() if line.get("id") == answer.id]
    ranks = {line["rank"] for line in lines() if line["process"] == "worker"}
    assert ranks == {0, 1} and {line["engine"] for line in lines()} == {"tiny"}
    assert mine["replica"] in {line["replica"] for line in lines() if line["process"] == "worker"}
    assert mine["request_id"] == "logged-7" and mine["finish_reason"] == "length"


@pytest.mark.slow
def test_a_batch_continues_after_the_death_of_its_replica(
    args: dict[str, Any], client: openai.OpenAI
) -> None:
    names = [f"row-{i}" for i in range(60)]
    body = {"model": "tiny", "prompt": "x", "max_tokens": 60, "ignore_eos": True}
    line = {"method": "POST", "url": "/v1/completions", "body": body}
    content = "".join(json.dumps({**line, "custom_id": name}) + "\n" for name in names)
    file = client.files.create(file=("in.jsonl", content.encode()), purpose="batch")
    batch = client.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h")
    wait_until(lambda: any(Path(args["batch_storage"]).glob("work/*/out/_manta/pending/*/*.arrow")))
    (replica,) = actor_pids("ServeReplica")
    os.kill(replica, signal.SIGKILL)

    def ended() -> bool:
        with contextlib.suppress(openai.APIError):
            return client.batches.retrieve(batch.id).status == "completed"
        return False

    wait_until(ended, 240, poll_s=0.1)
    output = client.batches.retrieve(batch.id).output_file_id
    lines = client.files.content(output or "").text.splitlines()
    assert sorted(json.loads(each)["custom_id"] for each in lines) == sorted(names)


def test_rays_exporter_shows_what_the_replica_does(server: Server) -> None:
    """The metrics of Ray's agent on the node, which Prometheus scrapes, ten seconds late.

    RAY_metrics_report_interval_ms would change how soon Ray's agent forgets a gauge (after two intervals),
    but not how often a replica sends it, and gauges would be missing most of the time.
    """
    body = {"model": "tiny", "prompt": "x" * 400, "max_tokens": 24, "ignore_eos": True}
    for _ in range(2):
        httpx.post(f"{server.url}/v1/completions", json=body, timeout=600).raise_for_status()
    (node,) = ray.nodes()
    url = f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics"

    reported: dict[str, list[float]] = {}  # polled, because audits continue in idle steps
    differs: dict[str, tuple[float, list[float]]] = {}

    def shows_all() -> bool:
        for name, value in samples(f"{server.url}/metrics").items():
            if (value or in_ray(name) in reported) and not name.startswith(("http_", "manta:")):
                reported.setdefault(in_ray(name), []).append(value)
        assert len(reported) > 60
        shown = samples(url)
        differs.clear()
        for name, values in reported.items():
            if not min(values) <= (found := shown.get(name, math.nan)) <= max(values):
                differs[name] = found, values
        return not differs

    wait_until(shows_all, 240, differs, poll_s=0.5)


def in_ray(name: str) -> str:
    return f"ray_{name.replace(':', '_')}"


def samples(url: str) -> dict[str, float]:
    """The model's metrics by name, summed over labels (in any order, with the same result)."""
    found: dict[str, list[float]] = {}
    for family in text_string_to_metric_families(httpx.get(url, timeout=600).text):
        for sample in family.samples:
            if sample.labels.get("model_name") == "tiny":
                found.setdefault(sample.name, []).append(sample.value)
    return {name: math.fsum(values) for name, values in found.items()}
