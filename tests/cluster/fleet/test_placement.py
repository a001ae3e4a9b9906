"""Bundles and checks of placement are computed from settings, without Ray."""

from __future__ import annotations

from dataclasses import replace

import pytest
from manta.cluster.config import EngineConfig, SpeculativeConfig
from manta.cluster.errors import PlacementError
from manta.cluster.fleet.placement import (
    CPUS_PER_CPU_WORKER,
    DeploymentDemand,
    NodeResources,
    Topology,
    check_available,
    check_feasible,
    current_shortfall,
    shortfall,
    total,
)


def config(tp: int = 1, placement: str | None = None, **settings: object) -> EngineConfig:
    spec = SpeculativeConfig(model="drafter", placement=placement) if placement else None
    return EngineConfig(model="target", tensor_parallel_size=tp, speculative_config=spec, **settings)


@pytest.mark.parametrize(
    ("tp", "placement", "workers"),
    [(1, None, 1), (4, None, 4), (2, "colocated", 2), (1, "split", 2), (8, "split", 9), (2, "shared", 2)],
)
def test_there_is_one_gpu_bundle_per_target_rank_and_one_for_a_split_drafter(tp, placement, workers) -> None:
    topology = Topology.of(config(tp, placement), {"GPU": 16.0})
    assert topology.device == "cuda"
    assert topology.worker_bundles() == [{"GPU": 1.0}] * workers
    assert topology.drafter_rank == (tp if placement == "split" else None)
    assert topology.shared_drafter == (placement == "shared")
    assert config(tp, placement).needs_ray == (tp > 1 or placement in ("split", "shared"))


def test_device_auto_is_cpu_without_a_gpu_and_an_explicit_device_is_kept() -> None:
    assert Topology.of(config(), {"CPU": 4.0}).device == "cpu"
    assert Topology.of(config(device="cpu"), {"GPU": 4.0}).device == "cpu"
    assert Topology.of(config(device="cuda"), {"CPU": 4.0}).device == "cuda"


def test_a_replica_adds_its_own_cpu_to_the_first_bundle() -> None:
    gpu = Topology(2, True, "cuda").replica_bundles()
    assert gpu == [{"GPU": 1.0, "CPU": 1.0}, {"GPU": 1.0}, {"GPU": 1.0}]
    cpu = Topology(2, False, "cpu").replica_bundles(replica_cpus=0.5)
    assert cpu == [{"CPU": 0.5 + CPUS_PER_CPU_WORKER}, {"CPU": CPUS_PER_CPU_WORKER}]


def test_replica_bundles_hold_the_workers_and_smaller_ones_do_not() -> None:
    topology = Topology(2, False, "cuda")
    assert topology.fits(topology.replica_bundles())
    assert not topology.fits([{"GPU": 1.0}])
    assert not topology.fits([{"GPU": 1.0}, {"CPU": 8.0}])


def test_a_target_a_split_drafter_and_a_replica_fit_two_cores() -> None:
    assert total(Topology(1, True, "cpu").replica_bundles())["CPU"] <= 2.0


@pytest.mark.parametrize(
    ("topology", "node", "message", "param"),
    [
        (Topology(4, False, "cuda"), {"GPU": 2.0}, r"4 GPU \(there is 2\).*lower", "tensor_parallel_size"),
        (Topology(1, True, "cuda"), {"GPU": 1.0}, "colocate the drafter", "speculative_config.placement"),
        (Topology(1, False, "cuda"), {"CPU": 9.0}, r"there is 0\)", "device"),
        (Topology(8, True, "cpu"), {"CPU": 2.0}, r"4\.5 CPU \(there is 2\)", "tensor_parallel_size"),
    ],
)
def test_a_node_that_is_too_small_is_refused_by_name(topology, node, message, param) -> None:
    with pytest.raises(PlacementError, match=message) as caught:
        topology.check_node(node)
    assert caught.value.param == param


def test_a_node_that_is_large_enough_is_accepted() -> None:
    Topology(2, True, "cuda").check_node({"GPU": 3.0, "CPU": 1.0})
    assert shortfall({"GPU": 1.0}, {"GPU": 1.0}) == ""


def test_a_shared_drafter_needs_its_own_resources_on_the_engines_node() -> None:
    topology = Topology.of(config(2, "shared"), {"GPU": 4.0})
    topology.check_drafter(NodeResources({"GPU": 4.0}, {"GPU": 1.0}))
    said = r"shared drafter needs 1 GPU \(there is 0\).*held by x: 4 GPU"
    with pytest.raises(PlacementError, match=said) as caught:
        topology.check_drafter(NodeResources({"GPU": 4.0}, {"GPU": 0.0}, {"x": {"GPU": 4.0}}))
    assert caught.value.param == "speculative_config.placement"


TWO_OF_FOUR = Topology(2, False, "cuda").replica_bundles()


def test_one_node_must_hold_all_bundles_whatever_the_cluster_has_together() -> None:
    small = {"GPU": 1.0, "CPU": 8.0}
    with pytest.raises(PlacementError, match=r"2 GPU \(there is 1\) on one node.*lower") as caught:
        Topology(2, False, "cuda").check_feasible(TWO_OF_FOUR, [NodeResources(small, small)] * 4)
    assert caught.value.param == "tensor_parallel_size"
    nodes = [NodeResources(small, small), NodeResources({"GPU": 2.0, "CPU": 1.0}, {})]
    Topology(2, False, "cuda").check_feasible(TWO_OF_FOUR, nodes)


def test_an_empty_cluster_holds_nothing() -> None:
    with pytest.raises(PlacementError, match=r"there is 0\) on one node"):
        Topology(2, False, "cuda").check_feasible(TWO_OF_FOUR, [])


def test_resources_in_use_are_named_with_their_holders() -> None:
    small, large, free = {"GPU": 1.0, "CPU": 64.0}, {"GPU": 4.0, "CPU": 8.0}, {"GPU": 1.0, "CPU": 8.0}
    # The small one is free, but can never hold two.
    nodes = [NodeResources(small, small), NodeResources(large, free, {"manta-engine": {"GPU": 2.0}})]
    with pytest.raises(PlacementError) as caught:
        Topology(2, False, "cuda").check_available(TWO_OF_FOUR, nodes)
    assert caught.value.message == (
        "tensor_parallel_size=2 on cuda needs 2 GPU (there is 1) free on one node; held by manta-engine: "
        "2 GPU, other actors and tasks: 1 GPU. Stop other work there, or lower tensor_parallel_size."
    )
    assert current_shortfall(TWO_OF_FOUR, [*nodes, NodeResources(large, {"GPU": 2.0, "CPU": 1.0})]) == ""


ONE_GPU = Topology(1, False, "cuda")


@pytest.mark.parametrize(
    ("replicas", "gpus", "free", "said", "param"),
    [
        (3, 1.5, 1.5, r"replicas=3: each needs 1 CPU and 1 GPU on one node, .* hold 2\.", "replicas"),
        (2, 1.0, 0.0, r"room for 1 now; held by a: 1 GPU\. .*or lower replicas to 1", "replicas"),
        (1, 0.5, 0.5, r"needs 1 GPU \(there is 0\.5\) on one node", "device"),
    ],
)
def test_every_replica_must_fit_on_one_node(replicas, gpus, free, said, param) -> None:
    """All nodes are empty, except that a deployment holds resources of the first one."""
    has = {"GPU": gpus, "CPU": 4.0}
    first = NodeResources(has, {"GPU": free, "CPU": 4.0}, {"a": {"GPU": gpus - free}})
    nodes = [first, NodeResources(has, has)]
    demands = [DeploymentDemand("manta", ONE_GPU, ONE_GPU.replica_bundles(), replicas)]
    with pytest.raises(PlacementError, match=said) as caught:
        check_feasible(demands, nodes)
        check_available(demands, nodes)
    assert caught.value.param == param
    if replicas > 1:
        check_available([replace(demands[0], replicas=replicas - 1)], nodes)


def test_models_that_fit_one_by_one_must_fit_together() -> None:
    node = NodeResources({"GPU": 2.0, "CPU": 8.0}, {"GPU": 2.0, "CPU": 8.0})
    demands = [DeploymentDemand(name, ONE_GPU, ONE_GPU.replica_bundles(), 1) for name in "abc"]
    check_available(demands[:2], [node])
    said = "of 3 models need 3 CPU and 3 GPU together.* have 8 CPU and 2 GPU"
    with pytest.raises(PlacementError, match=said):
        check_feasible(demands, [node])


def test_threads_are_the_setting_or_an_equal_share_of_the_cores() -> None:
    topology = Topology(2, True, "cpu")
    assert topology.num_threads(config(num_threads=5), 2) == 5
    assert topology.num_threads(config(), 16) == 5
    assert topology.num_threads(config(), 2) == 1
