"""Which devices an engine's workers need, as Ray bundles. Arithmetic only, without Ray.

There is one bundle per worker: the target's ranks, then the drafter if it is split. All are on the engine's
node (STRICT_PACK), as plans use shared memory. A shared drafter belongs to no engine: the first engine that
needs it requests its resources in addition to its bundles, on the same node.
`actors/workers/base/ray_actors.py` requests bundles from Ray. The Serve deployment in
`actors/replica.py` gets the same bundles, after `actors/workers/base/ray_resources.py` has checked what is
free.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from ..config import EngineConfig
from ..errors import PlacementError

Device = Literal["cpu", "cuda"]
Bundle = dict[str, float]

# CPUs that a worker reserves in Ray, however many threads it runs, so that a target, a drafter and a replica
# fit a two-core machine. `num_threads` sets threads, not Ray.
CPUS_PER_CPU_WORKER = 0.5
REPLICA_CPUS = 1.0  # of the replica itself: tokenization, scheduling, HTTP


@dataclass(frozen=True, slots=True)
class NodeResources:
    resources: Mapping[str, float]
    free: Mapping[str, float]
    in_use: Mapping[str, Bundle] = field(default_factory=dict[str, Bundle])


@dataclass(frozen=True, slots=True)
class Topology:
    """The workers of one engine: the target's ranks, then the split drafter; a shared one is no worker."""

    tensor_parallel_size: int
    split_drafter: bool
    device: Device
    shared_drafter: bool = False

    @classmethod
    def of(cls, config: EngineConfig, node: Mapping[str, float]) -> Topology:
        """Return the topology for `config`; "auto" as the device means CUDA if Ray's `node` has GPUs."""
        device: Device = "cpu" if config.device == "cpu" else "cuda"
        if config.device == "auto" and node.get("GPU", 0.0) < 1.0:
            device = "cpu"
        spec = config.speculative_config
        placement = spec.placement if spec is not None else None
        return cls(config.tensor_parallel_size, placement == "split", device, placement == "shared")

    @property
    def num_workers(self) -> int:
        return self.tensor_parallel_size + self.split_drafter

    @property
    def drafter_rank(self) -> int | None:
        return self.tensor_parallel_size if self.split_drafter else None

    @property
    def worker_resources(self) -> Bundle:
        return {"GPU": 1.0} if self.device == "cuda" else {"CPU": CPUS_PER_CPU_WORKER}

    def worker_bundles(self) -> list[Bundle]:
        return [self.worker_resources for _ in range(self.num_workers)]

    def replica_bundles(self, replica_cpus: float = REPLICA_CPUS) -> list[Bundle]:
        """Return the bundles with the Serve replica added to the first one, where Serve puts it."""
        first, *others = self.worker_bundles()
        first["CPU"] = first.get("CPU", 0.0) + replica_cpus
        return [first, *others]

    def num_threads(self, config: EngineConfig, num_cores: int) -> int:
        """Return the threads of each worker: the setting, or an even share of the cores."""
        return config.num_threads or max(1, num_cores // (self.num_workers + self.shared_drafter))

    def fits(self, bundles: list[Bundle]) -> bool:
        """Return whether a placement group's bundles hold the workers, rank by rank."""
        wanted = self.worker_bundles()
        return len(bundles) >= len(wanted) and all(
            not shortfall(needs, has) for needs, has in zip(wanted, bundles, strict=False)
        )

    def check_node(self, node: Mapping[str, float]) -> None:
        """Raise PlacementError unless the node's total resources hold the workers."""
        missing = shortfall(total(self.worker_bundles()), node)
        if missing:
            raise PlacementError(
                f"{self} needs {missing} on the engine's node. {self.remedy()}", param=self.param()
            )

    def check_feasible(
        self, bundles: list[Bundle], nodes: Sequence[NodeResources], replicas: int = 1
    ) -> None:
        """Raise PlacementError unless the nodes, if empty, hold all replicas, each on one node."""
        needs = total(bundles)
        missing = shortfall(needs, _closest_node(needs, [node.resources for node in nodes]))
        if missing:
            raise PlacementError(f"{self} needs {missing} on one node. {self.remedy()}", param=self.param())
        if (fitting := num_fitting(needs, [node.resources for node in nodes])) < replicas:
            raise PlacementError(
                f"replicas={replicas}: each needs {format_resources(needs)} on one node, and the nodes "
                f"hold {fitting}. "
                f"Lower replicas to {fitting}, or add nodes.",
                param="replicas",
            )

    def check_available(
        self, bundles: list[Bundle], nodes: Sequence[NodeResources], replicas: int = 1
    ) -> None:
        """Raise PlacementError unless the nodes have room for all replicas now."""
        missing = current_shortfall(bundles, nodes)
        if missing:
            raise PlacementError(
                f"{self} needs {missing}. {self.remedy('Stop other work there')}", param=self.param()
            )
        needs = total(bundles)
        if (fitting := num_fitting(needs, [node.free for node in nodes])) < replicas:
            raise PlacementError(
                f"replicas={replicas}: each needs {format_resources(needs)} free on one node, and there "
                "is room for "
                f"{fitting} now{_describe_holders(_merge(nodes), needs)}. Stop other work there, or lower "
                "replicas "
                f"to {fitting}.",
                param="replicas",
            )

    def check_drafter(self, node: NodeResources) -> None:
        """Raise PlacementError unless a shared drafter has room on the engine's node now."""
        missing = current_shortfall([self.worker_resources], [node])
        if missing:
            raise PlacementError(
                f"The shared drafter needs {missing}. Stop other work there, or colocate the drafter.",
                param="speculative_config.placement",
            )

    def __str__(self) -> str:
        drafter = " and a split drafter" if self.split_drafter else ""
        drafter = " with a shared drafter" if self.shared_drafter else drafter
        return f"tensor_parallel_size={self.tensor_parallel_size}{drafter} on {self.device}"

    def remedy(self, first: str | None = None) -> str:
        """Return what to change if it does not fit; `first` replaces the proposal of a larger node."""
        noun = "GPUs" if self.device == "cuda" else "CPUs"
        first = first or f"Run it on a node with enough {noun}"
        smaller = "lower tensor_parallel_size" if self.tensor_parallel_size > 1 else "colocate the drafter"
        return f"{first}, or {'choose another device' if self.num_workers == 1 else smaller}."

    def param(self) -> str:
        if self.num_workers == 1:
            return "device"
        return "tensor_parallel_size" if self.tensor_parallel_size > 1 else "speculative_config.placement"


@dataclass(frozen=True, slots=True)
class DeploymentDemand:
    """The replicas of one deployment that a cluster should hold; `bundles` are of one replica."""

    deployment: str
    topology: Topology
    bundles: list[Bundle]
    replicas: int


def check_feasible(demands: Sequence[DeploymentDemand], nodes: Sequence[NodeResources]) -> None:
    """Raise PlacementError unless the nodes, if empty, hold each deployment and all of them together."""
    for each in demands:
        each.topology.check_feasible(each.bundles, nodes, each.replicas)
    _check_sum(demands, [node.resources for node in nodes], "have")


def check_available(demands: Sequence[DeploymentDemand], nodes: Sequence[NodeResources]) -> None:
    """Raise PlacementError unless the nodes have room now for each deployment and all of them together."""
    for each in demands:
        each.topology.check_available(each.bundles, nodes, each.replicas)
    _check_sum(demands, [node.free for node in nodes], "have free")


def _check_sum(demands: Sequence[DeploymentDemand], nodes: Sequence[Mapping[str, float]], have: str) -> None:
    needs = total([total(each.bundles * each.replicas) for each in demands])
    available = total([dict(node) for node in nodes])
    if shortfall(needs, available):
        has = {name: available.get(name, 0.0) for name in needs}
        raise PlacementError(
            f"The replicas of {len(demands)} models need {format_resources(needs)} together, and the "
            f"nodes {have} "
            f"{format_resources(has)}. Serve fewer models or replicas, or add nodes.",
            param="models",
        )


def num_fitting(needs: Mapping[str, float], nodes: Sequence[Mapping[str, float]]) -> int:
    """Return how many units with these needs the nodes hold together; no unit is split over nodes."""
    return sum(
        min(math.floor(node.get(name, 0.0) / need + 1e-6) for name, need in needs.items()) for node in nodes
    )


def format_resources(resources: Mapping[str, float]) -> str:
    return " and ".join(f"{amount:g} {name}" for name, amount in resources.items())


def current_shortfall(bundles: list[Bundle], nodes: Sequence[NodeResources]) -> str:
    """Return what is missing on the best node, and its holders; empty if one node has room."""
    needs = total(bundles)
    candidates = [node for node in nodes if not shortfall(needs, node.resources)] or list(nodes)
    free = _closest_node(needs, [node.free for node in candidates])
    missing = shortfall(needs, free)
    if not missing:
        return ""
    holders = next((node for node in candidates if node.free is free), NodeResources({}, {}))
    return f"{missing} free on one node{_describe_holders(holders, needs)}"


def _describe_holders(node: NodeResources, needs: Mapping[str, float]) -> str:
    """Return the holders of needed resources, e.g. "; held by manta-engine: 1 CPU"."""
    in_use = {name: {k: v for k, v in bundle.items() if k in needs} for name, bundle in node.in_use.items()}
    rest = {
        k: node.resources.get(k, 0.0) - node.free.get(k, 0.0) - sum(b.get(k, 0.0) for b in in_use.values())
        for k in needs
    }
    holders = {**in_use, "other actors and tasks": {k: v for k, v in rest.items() if v > 1e-6}}
    texts = [f"{name}: {format_resources(bundle)}" for name, bundle in holders.items() if bundle]
    return f"; held by {', '.join(texts)}" if texts else ""


def _merge(nodes: Sequence[NodeResources]) -> NodeResources:
    names = {name for node in nodes for name in node.in_use}
    in_use = {name: total([node.in_use.get(name, {}) for node in nodes]) for name in sorted(names)}
    resources = total([dict(node.resources) for node in nodes])
    return NodeResources(resources, total([dict(node.free) for node in nodes]), in_use)


def _closest_node(needs: Mapping[str, float], nodes: Sequence[Mapping[str, float]]) -> Mapping[str, float]:
    """Return the node that lacks least, with each resource relative to its need."""

    def missing_share(node: Mapping[str, float]) -> float:
        return sum(max(0.0, 1.0 - node.get(name, 0.0) / amount) for name, amount in needs.items() if amount)

    return min(nodes, key=missing_share) if nodes else {}


def total(bundles: list[Bundle]) -> Bundle:
    names = {name for bundle in bundles for name in bundle}
    return {name: sum(bundle.get(name, 0.0) for bundle in bundles) for name in sorted(names)}


def shortfall(needed: Mapping[str, float], available: Mapping[str, float]) -> str:
    """Return what is missing, e.g. "2 GPU (there is 1)"; empty if nothing is."""
    return ", ".join(
        f"{amount:g} {name} (there is {available.get(name, 0.0):g})"
        for name, amount in needed.items()
        if available.get(name, 0.0) < amount - 1e-6
    )
