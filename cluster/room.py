"""Room for a job's engines on a cluster's nodes: what each claims, and whether all fit. Arithmetic, no Ray.

An engine lives on one node. One whose workers are processes of their own claims their bundles
(`placement.py`) and nothing for itself; any other claims what it computes on. `jobs/batch/placement.py`
requests the claims from Ray, and less where a node's cores are taken.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from .config import EngineConfig
from .errors import PlacementError
from .placement import CPUS_PER_CPU_WORKER, Bundle, Topology, num_fitting, spell, total

Resources = Mapping[str, float]  # of one node, by Ray's names


@dataclass(frozen=True, slots=True)
class Claim:
    """What one engine takes of a node.

    Attributes:
        bundles: of its placement group; the engine's own process is in the first.
        actor: what that process takes of it; nothing when workers of its own do the computing.
        num_threads: for the engine's settings; None leaves them to whoever computes.
    """

    bundles: tuple[Bundle, ...]
    actor: Bundle
    num_threads: int | None

    @property
    def needs(self) -> Bundle:
        return total(list(self.bundles))

    def num_fitting(self, nodes: Sequence[Resources]) -> int:
        """How many engines of this claim the nodes hold together; none is spread over two."""
        return num_fitting(self.needs, nodes)


def full_claim(config: EngineConfig, engines: int, nodes: Sequence[Resources]) -> Claim:
    """What an engine takes when all of the nodes is there for the job."""
    topology = Topology.of(config, total([dict(node) for node in nodes]))
    if config.needs_ray:
        return Claim(tuple(topology.worker_bundles()), {}, config.num_threads)
    if topology.device == "cuda":
        return _alone({"CPU": 1.0, "GPU": 1.0}, config.num_threads)
    if config.num_threads is not None:
        most = max((node.get("CPU", 0.0) for node in nodes), default=0.0)
        return _alone({"CPU": min(float(config.num_threads), most) or 1.0}, config.num_threads)
    return _share(engines, nodes)


def smaller_claim(config: EngineConfig, engines: int, free: Sequence[Resources], full: Claim) -> Claim | None:
    """What fits what is free now: the same engines with fewer threads, unless their number was set."""
    if full.num_fitting(free) >= engines:
        return full
    if config.num_threads is not None or full.num_threads is None or "GPU" in full.needs:
        return None
    claim = _share(engines, free)
    return claim if claim.num_fitting(free) >= engines else None


def check_room(config: EngineConfig, engines: int, nodes: Sequence[Resources]) -> None:
    """Raise PlacementError unless the nodes, all free, hold the engines."""
    claim = full_claim(config, engines, nodes)
    fitting = claim.num_fitting(nodes)
    if fitting >= engines:
        return
    if fitting == 0:
        largest = {name: max((node.get(name, 0.0) for node in nodes), default=0.0) for name in claim.needs}
        there = ", ".join(f"{amount:g} {name}" for name, amount in largest.items())
        topology = Topology.of(config, total([dict(node) for node in nodes]))
        raise PlacementError(
            f"{topology} needs {spell(claim.needs)} on one node; the most that a node has is {there}. "
            f"{topology.remedy()}",
            param=topology.param(),
        )
    raise PlacementError(
        f"concurrency={engines}: each engine needs {spell(claim.needs)} on one node, and the cluster's nodes "
        f"hold {fitting} of them. Lower concurrency to {fitting}, or add nodes.",
        param="concurrency",
    )


def leaving_a_cpu(nodes: Sequence[Resources]) -> list[Resources]:
    """The nodes without a CPU each, for tasks that must run beside the engines."""
    return [{**node, "CPU": max(0.0, node.get("CPU", 0.0) - 1.0)} for node in nodes]


def beside_tasks(claim: Claim, nodes: Sequence[Resources]) -> Bundle:
    """What an engine of this claim books where a CPU of every node must stay free for tasks.

    Nodes may hold the claim itself and nothing beside it: then less is booked than is computed on, as tasks
    take cores for moments only.
    """
    if "CPU" not in claim.actor:
        return claim.actor
    after = leaving_a_cpu(nodes)
    held = [(claim.num_fitting([node]), left["CPU"]) for node, left in zip(nodes, after, strict=True)]
    shares = [cpus / engines for engines, cpus in held if engines]
    cpus = min([claim.actor["CPU"], *shares]) if shares else 0.0
    return {**claim.actor, "CPU": math.floor(cpus * 1e4) / 1e4}  # as fine as Ray counts


def lacking(claim: Claim, engines: int, nodes: Sequence[Resources], free: Sequence[Resources]) -> str:
    """What is waited for, e.g. "2 CPU; 0 of 2 are free"."""
    wanted = f"{engines} x ({spell(claim.needs)})" if engines > 1 else spell(claim.needs)
    there = ", ".join(_free_of(name, nodes, free, only=len(claim.needs) == 1) for name in claim.needs)
    apart = claim.num_fitting([total([dict(node) for node in free])]) >= engines
    return f"{wanted}; {there}{', but not on one node' if apart else ''}"


def _free_of(name: str, nodes: Sequence[Resources], free: Sequence[Resources], *, only: bool) -> str:
    there, all_ = (sum(node.get(name, 0.0) for node in side) for side in (free, nodes))
    return f"{there:g} of {all_:g} {'' if only else name + ' '}are free"


def _share(engines: int, nodes: Sequence[Resources]) -> Claim:
    """The most threads that all engines can have, a core for each; less than a core is one thread's too."""
    most = math.floor(max((node.get("CPU", 0.0) for node in nodes), default=0.0) + 1e-6)
    for threads in range(most, 0, -1):
        claim = _alone({"CPU": float(threads)}, threads)
        if claim.num_fitting(nodes) >= engines:
            return claim
    return _alone({"CPU": CPUS_PER_CPU_WORKER}, 1)


def _alone(needs: Bundle, num_threads: int | None) -> Claim:
    """The claim of an engine that is one process."""
    return Claim((needs,), needs, num_threads)
