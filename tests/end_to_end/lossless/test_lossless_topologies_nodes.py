"""Topologies over nodes with declared GPUs: an engine per node, the same tokens, clear refusals.

The GPUs are entries: one node has eight; two that come later have four. Groups hold them as on real ones; the
workers in them compute on CPUs.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import ray
from manta.actors.engine.uniproc_executor import InProcessExecutor
from manta.actors.replica import build_app
from manta.actors.workers.base import ray_resources as room
from manta.actors.workers.ray_executor import RayExecutor
from manta.cluster.config import EngineConfig, SpeculativeConfig
from manta.cluster.engine.engine_core import EngineCore
from manta.cluster.errors import PlacementError
from manta.cluster.fleet.placement import Topology, total
from manta.cluster.request.request import Request, SamplingParams
from ray import cloudpickle
from ray.cluster_utils import Cluster
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # actors do not find tests


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """One node of eight GPUs next to a head without resources."""
    head = {"num_cpus": 0, "object_store_memory": 80 * 2**20, "include_dashboard": False}
    with tempfile.TemporaryDirectory(prefix="mn-", ignore_cleanup_errors=True) as folder:
        cluster = Cluster(initialize_head=True, head_node_args={**head, "temp_dir": folder})
        add_node(cluster, 8)
        ray.init(address=cluster.address, log_to_driver=False)
        yield cluster
        ray.shutdown()
        cluster.shutdown()


def add_node(cluster: Cluster, gpus: int) -> None:
    cluster.add_node(num_gpus=gpus, num_cpus=16, object_store_memory=80 * 2**20)


@pytest.fixture(scope="module")
def config(tiny_qwen3: Path, tiny_drafter: Path) -> EngineConfig:
    return EngineConfig(
        model=str(tiny_qwen3),
        speculative_config=SpeculativeConfig(model=str(tiny_drafter), adaptive=False),
        skip_tokenizer_init=True,
        dtype="float32",
        device="cpu",
        max_model_len=96,
        max_num_seqs=4,
        max_num_batched_tokens=64,
        num_pages=32,
        num_threads=1,
    )


def with_topology(config: EngineConfig, ranks: int, *, split: bool = False) -> EngineConfig:
    assert config.speculative_config is not None
    spec = replace(config.speculative_config, placement="split" if split else "colocated")
    return replace(config, tensor_parallel_size=ranks, speculative_config=spec)


def requests() -> list[Request]:
    return [
        Request(
            request_id=str(i),
            prompt_token_ids=tuple(range(3 + i, 12 + 2 * i)),
            params=SamplingParams(temperature=float(i % 2), max_tokens=24, seed=i, ignore_eos=True),
        )
        for i in range(3)
    ]


def run_all(engine: EngineCore) -> list[list[int]]:
    tokens: dict[str, list[int]] = {}
    for request in requests():
        tokens[request.request_id] = []
        engine.add_request(request)
    while engine.has_unfinished:
        for update in engine.step():
            tokens[update.request_id] += update.token_ids
    return list(tokens.values())


class Host:
    """An engine in the first bundle of a group, as in a replica."""

    def __init__(self, config: EngineConfig) -> None:
        self._executor = RayExecutor(config)
        self._engine = EngineCore(config, self._executor)

    def run(self) -> tuple[list[list[int]], int]:
        """The tokens, and the number of accepted drafts."""
        return run_all(self._engine), self._engine.stats().num_accepted_tokens

    def borrows(self) -> bool:
        return not self._executor.owns_placement


def hold(config: EngineConfig) -> PlacementGroup:
    """A replica's claim on GPUs, and the CPUs on which its workers run here."""
    on_gpus = Topology.of(replace(config, device="cuda"), {}).replica_bundles()
    on_cpus = Topology.of(config, {}).worker_bundles()
    bundles = [total([gpus, cpus]) for gpus, cpus in zip(on_gpus, on_cpus, strict=True)]
    group = placement_group(bundles, strategy="STRICT_PACK")
    assert group.wait(600), bundles
    return group


def host(config: EngineConfig, group: PlacementGroup) -> Any:  # Any: an actor's handle
    strategy = PlacementGroupSchedulingStrategy(
        group, placement_group_bundle_index=0, placement_group_capture_child_tasks=True
    )
    return ray.remote(Host).options(num_cpus=1, scheduling_strategy=strategy).remote(config)


def node_of(group: PlacementGroup) -> str:
    (node,) = set(placement_group_table(group)["bundles_to_node_id"].values())
    return node


def refusal(config: EngineConfig) -> str:
    """The message about a replica that does not fit."""
    args = {"model": config.model, "device": "cuda", "tensor_parallel_size": config.tensor_parallel_size}
    assert config.speculative_config is not None
    spec = {name: getattr(config.speculative_config, name) for name in ("model", "placement")}
    with pytest.raises(PlacementError) as caught:
        build_app({**args, "speculative_config": spec})
    return caught.value.message


@pytest.mark.slow
def test_engines_of_every_topology_fill_their_nodes_and_change_no_token(
    cluster: Cluster, config: EngineConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(room, "FREE_WAIT_S", 0.2)
    plain = replace(config, speculative_config=None)
    expected = run_all(EngineCore(plain, InProcessExecutor(plain)))
    said = refusal(with_topology(config, 8, split=True))
    assert said.startswith(
        "tensor_parallel_size=8 and a split drafter on cuda needs 9 GPU (there is 8) on one"
    )

    on_one = [with_topology(config, 4), with_topology(config, 1)]
    groups = [hold(each) for each in on_one]
    others = hold(with_topology(config, 2, split=True))
    assert len({node_of(group) for group in [*groups, others]}) == 1
    assert "needs 1 GPU (there is 0) free on one node" in refusal(with_topology(config, 1))

    add_node(cluster, 4)
    add_node(cluster, 4)
    on_two = [with_topology(config, 2, split=True), with_topology(config, 2)]  # five GPUs
    groups += [hold(each) for each in on_two]
    assert len({node_of(group) for group in groups}) == 3  # each on one, these two not on the same
    assert "needs 4 GPU (there is 2) free on one node" in refusal(with_topology(config, 4))

    hosts = [host(each, group) for each, group in zip([*on_one, *on_two], groups, strict=True)]
    assert all(ray.get([each.borrows.remote() for each in hosts], timeout=600))
    for tokens, accepted in ray.get([each.run.remote() for each in hosts], timeout=600):
        assert tokens == expected and accepted > 0
