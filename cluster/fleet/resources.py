"""Resources of a batch job's engines on a cluster's nodes, and whether all fit. Arithmetic, without Ray.

An engine runs on one node. If its workers are separate processes it claims their bundles (`placement.py`) and
nothing for itself; otherwise it claims what it computes on. `jobs/batch/placement.py` requests the claims
from Ray, and smaller ones if a node's cores are in use.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..config import EngineConfig
from ..errors import PlacementError
from .placement import CPUS_PER_CPU_WORKER, Bundle, Topology, format_resources, num_fitting, total

Resources = Mapping[str, float]  # of one node, by Ray's names


@dataclass(frozen=True, slots=True)
class ResourceRequest:
    """The resources of one engine; without `num_threads` workers choose.

    Attributes:
        bundles: of its placement group, for all its processes.
        actor: for the process that drives it: one of the bundles, or nothing if workers have them all.
    """

    bundles: tuple[Bundle, ...]
    actor: Bundle
    num_threads: int | None

    @property
    def needs(self) -> Bundle:
        """Sum of all bundles."""
        return total(list(self.bundles))

    def num_fitting(self, nodes: Sequence[Resources]) -> int:
        """Return how many engines of this claim the nodes hold together; none is split over nodes."""
        return num_fitting(self.needs, nodes)


def full_request(config: EngineConfig, engines: int, nodes: Sequence[Resources]) -> ResourceRequest:
    """Return an engine's claim if the job has all nodes to itself."""
    topology = Topology.of(config, total([dict(node) for node in nodes]))
    if config.needs_ray:
        return ResourceRequest(tuple(topology.worker_bundles()), {}, config.num_threads)
    if topology.device == "cuda":
        return _single_process({"CPU": 1.0, "GPU": 1.0}, config.num_threads)
    if config.num_threads is not None:
        maximum = max((node.get("CPU", 0.0) for node in nodes), default=0.0)
        return _single_process({"CPU": min(float(config.num_threads), maximum) or 1.0}, config.num_threads)
    return _equal_share(engines, nodes)


def reduced_request(
    config: EngineConfig, engines: int, free: Sequence[Resources], full: ResourceRequest
) -> ResourceRequest | None:
    """Return a claim that fits what is free now, with fewer threads unless they were set, or None."""
    if full.num_fitting(free) >= engines:
        return full
    if config.num_threads is not None or full.num_threads is None or "GPU" in full.needs:
        return None
    request = _equal_share(engines, free)
    return request if request.num_fitting(free) >= engines else None


def check_engines_fit(config: EngineConfig, engines: int, nodes: Sequence[Resources]) -> None:
    """Raise PlacementError unless the nodes, if all free, hold the engines."""
    request = full_request(config, engines, nodes)
    fitting = request.num_fitting(nodes)
    if fitting >= engines:
        return
    if fitting == 0:
        largest = {name: max((node.get(name, 0.0) for node in nodes), default=0.0) for name in request.needs}
        largest_text = ", ".join(f"{amount:g} {name}" for name, amount in largest.items())
        topology = Topology.of(config, total([dict(node) for node in nodes]))
        raise PlacementError(
            f"{topology} needs {format_resources(request.needs)} on one node; the most that a node has is "
            f"{largest_text}. "
            f"{topology.remedy()}",
            param=topology.param(),
        )
    raise PlacementError(
        f"concurrency={engines}: each engine needs {format_resources(request.needs)} on one node, and the "
        "cluster's nodes "
        f"hold {fitting} of them. Lower concurrency to {fitting}, or add nodes.",
        param="concurrency",
    )


def reserve_cpu_per_node(nodes: Sequence[Resources]) -> list[Resources]:
    return [{**node, "CPU": max(0.0, node.get("CPU", 0.0) - 1.0)} for node in nodes]


def with_task_cpus(request: ResourceRequest, nodes: Sequence[Resources]) -> Bundle:
    """Return what an engine reserves so that a CPU of every node stays free for tasks, which are brief."""
    if "CPU" not in request.actor:
        return request.actor
    after = reserve_cpu_per_node(nodes)
    engines_and_cpus = [
        (request.num_fitting([node]), left["CPU"]) for node, left in zip(nodes, after, strict=True)
    ]
    shares = [cpus / engines for engines, cpus in engines_and_cpus if engines]
    cpus = min([request.actor["CPU"], *shares]) if shares else 0.0
    return {**request.actor, "CPU": math.floor(cpus * 1e4) / 1e4}  # Ray's resolution


def describe_shortfall(
    request: ResourceRequest, engines: int, nodes: Sequence[Resources], free: Sequence[Resources]
) -> str:
    """Return what a job is waiting for, e.g. "2 CPU; 0 of 2 are free"."""
    wanted = (
        f"{engines} x ({format_resources(request.needs)})" if engines > 1 else format_resources(request.needs)
    )
    free_text = ", ".join(_free_of(name, nodes, free, only=len(request.needs) == 1) for name in request.needs)
    is_fragmented = request.num_fitting([total([dict(node) for node in free])]) >= engines
    return f"{wanted}; {free_text}{', but not on one node' if is_fragmented else ''}"


def _free_of(name: str, nodes: Sequence[Resources], free: Sequence[Resources], *, only: bool) -> str:
    num_free, num_all = (sum(node.get(name, 0.0) for node in side) for side in (free, nodes))
    return f"{num_free:g} of {num_all:g} {'' if only else name + ' '}are free"


def _equal_share(engines: int, nodes: Sequence[Resources]) -> ResourceRequest:
    """Return the claim with the most threads with which all engines fit; at least one thread."""
    maximum = math.floor(max((node.get("CPU", 0.0) for node in nodes), default=0.0) + 1e-6)
    for threads in range(maximum, 0, -1):
        request = _single_process({"CPU": float(threads)}, threads)
        if request.num_fitting(nodes) >= engines:
            return request
    return _single_process({"CPU": CPUS_PER_CPU_WORKER}, 1)


def _single_process(needs: Bundle, num_threads: int | None) -> ResourceRequest:
    return ResourceRequest((needs,), needs, num_threads)
