"""The resources that a job's engines claim on a cluster's nodes; no Ray."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from manta.cluster.config import EngineConfig, SpeculativeConfig
from manta.cluster.errors import PlacementError
from manta.cluster.fleet.placement import CPUS_PER_CPU_WORKER
from manta.cluster.fleet.resources import (
    check_engines_fit,
    describe_shortfall,
    full_request,
    reduced_request,
    with_task_cpus,
)


def config(tp: int = 1, *, split: bool = False, **settings: object) -> EngineConfig:
    spec = SpeculativeConfig(model="d", placement="split") if split else None
    return EngineConfig(model="t", tensor_parallel_size=tp, speculative_config=spec, **settings)  # type: ignore[arg-type]


def cpus(*counts: float) -> list[dict[str, float]]:
    return [{"CPU": float(count)} for count in counts]


@pytest.mark.parametrize(
    ("nodes", "engines", "threads"),
    [
        (cpus(2), 1, 2),
        (cpus(8), 3, 2),
        (cpus(8, 8), 1, 8),  # not 16: an engine is on one node
        (cpus(8, 8), 3, 4),
        (cpus(0, 4), 1, 4),
    ],
)
def test_an_engine_takes_its_share_of_a_nodes_cores(
    nodes: list[dict[str, float]], engines: int, threads: int
) -> None:
    claim = full_request(config(), engines, nodes)
    assert (claim.actor, claim.num_threads) == ({"CPU": threads}, threads)
    check_engines_fit(config(), engines, nodes)


def test_configured_threads_are_claimed_up_to_a_nodes_cores() -> None:
    assert full_request(config(num_threads=2), 1, cpus(8)).actor == {"CPU": 2.0}
    claim = full_request(config(num_threads=6), 1, cpus(4, 4))
    assert (claim.actor, claim.num_threads) == ({"CPU": 4.0}, 6)


def test_more_engines_than_cores_share_them() -> None:
    assert full_request(config(), 4, cpus(2)).actor == {"CPU": CPUS_PER_CPU_WORKER}
    with pytest.raises(PlacementError, match=r"hold 4 of them\. Lower concurrency to 4"):
        check_engines_fit(config(), 5, cpus(2))


def test_fewer_threads_are_used_if_cores_are_taken_unless_their_number_is_set() -> None:
    nodes = cpus(4)
    full = full_request(config(), 1, nodes)
    assert reduced_request(config(), 1, cpus(4), full) == full
    taken = reduced_request(config(), 1, cpus(1.5), full)
    assert taken is not None
    assert (taken.actor, taken.num_threads) == ({"CPU": 1.0}, 1)
    assert reduced_request(config(), 1, cpus(0), full) is None
    fixed = config(num_threads=4)
    assert reduced_request(fixed, 1, cpus(3), full_request(fixed, 1, nodes)) is None


def test_a_gpu_engine_takes_one_and_waits_for_it() -> None:
    nodes = [{"CPU": 2.0, "GPU": 1.0}]
    full = full_request(config(), 1, nodes)
    assert full.actor == {"CPU": 1.0, "GPU": 1.0}
    assert reduced_request(config(), 1, [{"CPU": 2.0, "GPU": 0.0}], full) is None
    assert (
        describe_shortfall(full, 1, nodes, [{"CPU": 2.0}])
        == "1 CPU and 1 GPU; 2 of 2 CPU are free, 0 of 1 GPU are free"
    )
    with pytest.raises(PlacementError, match="Lower concurrency to 1") as refused:
        check_engines_fit(config(), 2, nodes)
    assert refused.value.param == "concurrency"


def test_separate_workers_must_fit_one_node() -> None:
    two_by_two = [{"CPU": 8.0, "GPU": 2.0}] * 2
    claim = full_request(config(2), 2, two_by_two)
    assert (claim.bundles, claim.actor) == (({"GPU": 1.0}, {"GPU": 1.0}), {})
    check_engines_fit(config(2), 2, two_by_two)
    with pytest.raises(PlacementError, match=r"needs 4 GPU on one node; the most that a node has is 2 GPU"):
        check_engines_fit(config(4), 1, two_by_two)
    with pytest.raises(PlacementError, match="colocate the drafter"):
        check_engines_fit(config(split=True, device="cuda"), 1, [{"CPU": 8.0, "GPU": 1.0}])


def test_missing_resources_are_named_while_waiting() -> None:
    claim = full_request(config(), 1, cpus(2))
    assert describe_shortfall(claim, 1, cpus(2), cpus(0)) == "2 CPU; 0 of 2 are free"
    claim = full_request(config(num_threads=2), 1, cpus(2, 2))
    assert (
        describe_shortfall(claim, 1, cpus(2, 2), cpus(1, 1)) == "2 CPU; 2 of 4 are free, but not on one node"
    )


@given(st.lists(st.integers(0, 9), min_size=1, max_size=4), st.integers(1, 6))
def test_claimed_resources_fit_or_are_refused(counts: list[int], engines: int) -> None:
    nodes, claim = cpus(*counts), full_request(config(), engines, cpus(*counts))
    if claim.num_fitting(nodes) >= engines:
        check_engines_fit(config(), engines, nodes)
    else:
        with pytest.raises(PlacementError):
            check_engines_fit(config(), engines, nodes)


@pytest.mark.parametrize(
    ("nodes", "engines", "booked"),
    [
        (cpus(2), 1, 1.0),  # of 2 that it computes on
        (cpus(2), 2, 0.5),
        (cpus(1), 1, 0.0),
        (cpus(8, 8), 2, 7.0),
        (cpus(8, 2), 1, 7.0),
        (cpus(0), 1, 0.0),
    ],
)
def test_an_engine_with_parallel_tasks_reserves_less_than_it_uses(
    nodes: list[dict[str, float]], engines: int, booked: float
) -> None:
    assert with_task_cpus(full_request(config(), engines, nodes), nodes) == {"CPU": booked}


@given(st.lists(st.integers(1, 64), min_size=1, max_size=4), st.integers(1, 6), st.integers(0, 2))
def test_engines_leave_a_cpu_to_parallel_tasks(sizes: list[int], engines: int, num_gpus: int) -> None:
    nodes = [{"CPU": float(size), "GPU": float(num_gpus)} for size in sizes]
    claim = full_request(config(device="cuda" if num_gpus else "cpu"), engines, nodes)
    if claim.num_fitting(nodes) >= engines:
        booked = with_task_cpus(claim, nodes)
        held = min(engines, max(claim.num_fitting([node]) for node in nodes))
        assert max(sizes) - held * booked["CPU"] >= 1.0
        assert booked.get("GPU") == claim.actor.get("GPU")
