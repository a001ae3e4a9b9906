"""Whether another replica fits: a real Ray with two CPUs, their holders, and their release."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import ray
from manta.actors.replica import DEPLOYMENT, build_app
from manta.actors.system.host_resources import free_port
from manta.actors.workers.base import ray_resources as room
from manta.cluster.errors import PlacementError
from manta.jobs.serve import server as serving
from manta.jobs.serve.server import ServeOptions, start_server
from ray import serve
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group


@pytest.fixture(scope="module")
def args(pair: tuple[Path, Path]) -> dict[str, Any]:
    target, drafter = pair
    return {
        "model": str(target),
        "speculative_config": {"model": str(drafter)},
        "dtype": "float32",
        "device": "cpu",
        "max_num_seqs": 4,
        "num_pages": 64,
        "num_threads": 1,
    }


@pytest.fixture(scope="module")
def two_cpus() -> Iterator[None]:
    folder = tempfile.mkdtemp(prefix="mr-")
    ray.init(
        address="local",
        namespace="serve",
        num_cpus=2,
        include_dashboard=False,
        object_store_memory=100 * 2**20,
        log_to_driver=False,
        _temp_dir=folder,
    )
    yield
    serve.shutdown()
    ray.shutdown()
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def held(two_cpus: None) -> Iterator[Callable[..., PlacementGroup]]:
    groups: list[PlacementGroup] = []

    def hold(cpus: float, name: str) -> PlacementGroup:
        groups.append(placement_group([{"CPU": cpus}], strategy="STRICT_PACK", name=name))
        return groups[-1]

    yield hold
    for group in groups:
        remove_placement_group(group)


def test_serving_on_too_small_a_machine_ends_immediately_and_names_the_setting(
    args: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serve, "run_many", lambda *_, **__: pytest.fail("something was placed"))
    options = ServeOptions(port=free_port(), num_cpus=2)
    with pytest.raises(PlacementError) as caught:
        start_server({**args, "speculative_config": None, "tensor_parallel_size": 4}, options)
    assert caught.value.message == (
        "tensor_parallel_size=4 on cpu needs 3 CPU (there is 2) on one node. Run it on a node with enough "
        "CPUs, or lower tensor_parallel_size."
    )
    assert caught.value.param == "tensor_parallel_size"
    assert not ray.is_initialized()


def test_a_driver_without_ray_gets_a_warning(
    args: dict[str, Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(room, "get_num_cpus", lambda: 2)
    assert not ray.is_initialized()
    build_app({**args, "tensor_parallel_size": 4})
    assert "needs 3 CPU (there is 2) on one node" in caplog.text


def test_the_resources_that_rays_variable_names_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_OVERRIDE_RESOURCES", '{"CPU": 96}')
    assert room.machine_resources(4)["CPU"] == 96.0
    monkeypatch.delenv("RAY_OVERRIDE_RESOURCES")
    assert room.machine_resources(4)["CPU"] == 4.0


def test_a_cluster_with_an_autoscaler_is_not_refused(
    args: dict[str, Any], two_cpus: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(room.ray_worker, "_global_node", None)  # as in a driver that has connected
    node_id = ray.nodes()[0]["NodeID"]
    settings = {**args, "tensor_parallel_size": 4}
    monkeypatch.setattr(room, "_autoscaler_report", lambda: {"active_nodes": {"ray.head.default": 1}})
    build_app(settings)
    monkeypatch.setattr(room, "_autoscaler_report", lambda: {"active_nodes": {f"node_{node_id}": 1}})
    with pytest.raises(PlacementError):
        build_app(settings)
    monkeypatch.setattr(room, "_autoscaler_report", lambda: None)  # unknown
    monkeypatch.setattr(room, "REPORT_WAIT_S", 0.1)
    build_app(settings)
    monkeypatch.setattr(room, "REPORT_WAIT_S", 1e9)
    assert room.may_grow(wait_s=0.0), "a replica that has loaded does not wait for a report"


def test_ray_itself_reports_that_it_has_no_autoscaler(
    two_cpus: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(room.ray_worker, "_global_node", None)
    assert not room.may_grow()


def test_resources_held_by_others_are_named_and_not_free(
    args: dict[str, Any], held: Callable[..., PlacementGroup], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(room, "FREE_WAIT_S", 0.5)
    group = held(1.0, "manta-batch")
    assert group.wait(600)
    with pytest.raises(
        PlacementError, match=r"1\.5 CPU \(there is 1\) free on one node; held by manta-batch: 1"
    ):
        build_app(args)
    monkeypatch.setattr(room, "FREE_WAIT_S", 30.0)
    remove_placement_group(group)
    build_app(args)  # what ends now is waited for


def test_replicas_or_models_that_do_not_fit_are_refused_immediately(
    args: dict[str, Any], two_cpus: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(room, "FREE_WAIT_S", 0.5)
    with pytest.raises(PlacementError, match=r"replicas=2: each needs 1\.5 CPU .*Lower replicas to 1"):
        build_app({**args, "replicas": 2})
    build_app({**args, "replicas": "0:2"})
    model, common = ("model", "speculative_config"), {"device": "cpu"}
    entries = [{**{name: args[name] for name in model}, "served_model_name": name} for name in "ab"]
    with pytest.raises(PlacementError, match="of 2 models need 3 CPU together, and the nodes have 2 CPU"):
        build_app({**common, "models": entries})


def test_a_replica_that_waits_for_resources_names_them_and_gives_up(
    held: Callable[..., PlacementGroup], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert held(1.0, "somebody").wait(600)
    held(1.5, f"SERVE_REPLICA::mine#{DEPLOYMENT}#abc")
    options = ServeOptions(name="mine")
    wanted = (
        "waiting for resources: the replica needs 1.5 CPU (there is 1) free on one node; "
        "held by somebody: 1 CPU"
    )
    deadline_s = time.monotonic() + 120
    while serving._loading_state(options, 1.0) != wanted:
        assert time.monotonic() < deadline_s, serving._loading_state(options, 1.0)
        time.sleep(0.1)
    assert serving._loading_state(ServeOptions(name="other"), 1.0) == "loading the models"
    with pytest.raises(PlacementError, match="did not fit within 61 s"):
        serving._loading_state(options, 61.0)


@pytest.mark.slow
def test_an_application_is_redeployed_if_only_one_replica_fits(
    args: dict[str, Any], two_cpus: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    port = free_port()
    serve.start(proxy_location="HeadOnly", http_options={"host": "127.0.0.1", "port": port})
    for name in ("first", "second"):
        settings = {**args, "tensor_parallel_size": 2, "served_model_name": name}
        serve.run(build_app(settings), name="mine", route_prefix="/")
        models = httpx.get(f"http://127.0.0.1:{port}/v1/models", timeout=600).json()
        assert [model["id"] for model in models["data"]] == [name]
    monkeypatch.setenv("RAY_ADDRESS", ray.get_runtime_context().gcs_address)
    with pytest.raises(PlacementError):  # a refusal leaves alone what runs under the name
        start_server({**args, "tensor_parallel_size": 4}, ServeOptions(port=port, name="mine"))
    assert httpx.get(f"http://127.0.0.1:{port}/health", timeout=600).status_code == 200
    assert serve.status().applications["mine"].status == "RUNNING"
