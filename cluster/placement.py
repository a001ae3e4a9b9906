"""Which devices an engine's workers need, as Ray bundles. Arithmetic only: no Ray here.

One bundle per worker: the target ranks, then the drafter if it is split. All on the engine's node
(STRICT_PACK): plans travel through shared memory. `actors/placement.py` asks Ray for them, and the Serve
deployment in `actors/replica.py` is given the same bundles.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from .config import EngineConfig
from .errors import PlacementError

Device = Literal["cpu", "cuda"]
Bundle = dict[str, float]

# A CPU worker reserves this much of Ray's books, however many threads it runs: a target, a drafter and a
# replica then fit a two-core machine. Threads are set by `num_threads`, not by Ray.
CPUS_PER_CPU_WORKER = 0.5


@dataclass(frozen=True, slots=True)
class Topology:
    """The workers of one engine. Rank i < tensor_parallel_size is a target's; the split drafter is last."""

    tensor_parallel_size: int
    split_drafter: bool
    device: Device

    @classmethod
    def of(cls, config: EngineConfig, node: Mapping[str, float]) -> Topology:
        """The topology that `config` asks for; a device of "auto" is CUDA where Ray's `node` has GPUs."""
        device: Device = "cpu" if config.device == "cpu" else "cuda"
        if config.device == "auto" and node.get("GPU", 0.0) < 1.0:
            device = "cpu"
        spec = config.speculative_config
        split = spec is not None and spec.placement == "split"
        return cls(config.tensor_parallel_size, split, device)

    @property
    def num_workers(self) -> int:
        return self.tensor_parallel_size + self.split_drafter

    @property
    def drafter_rank(self) -> int | None:
        return self.tensor_parallel_size if self.split_drafter else None

    @property
    def worker_resources(self) -> Bundle:
        """What each worker takes: a whole GPU, or a share of the CPUs."""
        return {"GPU": 1.0} if self.device == "cuda" else {"CPU": CPUS_PER_CPU_WORKER}

    def worker_bundles(self) -> list[Bundle]:
        """One bundle per worker, by rank."""
        return [self.worker_resources for _ in range(self.num_workers)]

    def replica_bundles(self, replica_cpus: float = 1.0) -> list[Bundle]:
        """The same with room for the Serve replica itself in the first bundle, where Serve puts it."""
        first, *others = self.worker_bundles()
        first["CPU"] = first.get("CPU", 0.0) + replica_cpus
        return [first, *others]

    def num_threads(self, config: EngineConfig, num_cores: int) -> int:
        """Threads of each worker: the setting, or an even share of the cores."""
        return config.num_threads or max(1, num_cores // self.num_workers)

    def fits(self, bundles: list[Bundle]) -> bool:
        """Whether a placement group's bundles hold the workers, rank by rank."""
        wanted = self.worker_bundles()
        return len(bundles) >= len(wanted) and all(
            not shortfall(needs, has) for needs, has in zip(wanted, bundles, strict=False)
        )

    def check_node(self, node: Mapping[str, float]) -> None:
        """Raise PlacementError unless the node's resources could ever hold the workers."""
        lacking = shortfall(total(self.worker_bundles()), node)
        if lacking:
            raise PlacementError(
                f"{self} needs {lacking} on the engine's node. {self.remedy()}", param=self.param()
            )

    def __str__(self) -> str:
        drafter = " and a split drafter" if self.split_drafter else ""
        return f"tensor_parallel_size={self.tensor_parallel_size}{drafter} on {self.device}"

    def remedy(self) -> str:
        """What to change where it does not fit."""
        noun = "GPUs" if self.device == "cuda" else "CPUs"
        smaller = "lower tensor_parallel_size" if self.tensor_parallel_size > 1 else "colocate the drafter"
        if self.num_workers == 1:
            return f"Run it on a node with enough {noun}, or choose another device."
        return f"Run it on a node with enough {noun}, or {smaller}."

    def param(self) -> str:
        """The setting to change."""
        if self.num_workers == 1:
            return "device"
        return "tensor_parallel_size" if self.tensor_parallel_size > 1 else "speculative_config.placement"


def total(bundles: list[Bundle]) -> Bundle:
    """The sum of bundles, by resource."""
    names = {name for bundle in bundles for name in bundle}
    return {name: sum(bundle.get(name, 0.0) for bundle in bundles) for name in sorted(names)}


def shortfall(needed: Mapping[str, float], available: Mapping[str, float]) -> str:
    """What is missing, e.g. "2 GPU (there is 1)"; empty if all is there."""
    return ", ".join(
        f"{amount:g} {name} (there is {available.get(name, 0.0):g})"
        for name, amount in needed.items()
        if available.get(name, 0.0) < amount - 1e-6
    )
