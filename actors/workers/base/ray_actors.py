"""Places and starts the actors of workers and drafters, and waits for the results of their calls.

A given placement group, or the one in which this process runs (a Serve replica), is borrowed. Otherwise one
is created, STRICT_PACK on this node, and removed at the end. Ray silently leaves a group that cannot be
placed pending forever; here that ends in a PlacementError that says what is missing. Called by
`ray_executor.py` and `drafter_process.py`.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError
from ray.util.placement_group import (
    PlacementGroup,
    get_current_placement_group,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from ....cluster.errors import EngineDeadError, MantaError, PlacementError
from ....cluster.fleet.placement import Topology, shortfall, total

Actor = Any  # ray.actor.ActorHandle of a dynamically wrapped class has no static methods


def start_actor(kind: type, topology: Topology, **options: Any) -> Actor:  # Any: Ray's options
    """Start an actor with a worker's resources, which Ray does not restart."""
    if topology.device == "cuda":
        # Hidden devices prevent peer access between processes (a 2400 times slower all-reduce, or a hang).
        options["runtime_env"] = {"env_vars": {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}}
    resources = topology.worker_resources
    options |= {"num_cpus": resources.get("CPU", 0.0), "num_gpus": resources.get("GPU", 0.0)}
    return ray.remote(kind).options(max_restarts=0, **options).remote()


def gather(calls: Sequence[ray.ObjectRef], timeout_s: float) -> list[Any]:  # Any: what workers return.
    """Return all results by rank. The first failure is raised at once, without waiting for others."""
    deadline_s = time.monotonic() + timeout_s
    waiting = list(calls)
    while waiting:
        ended, waiting = ray.wait(waiting, timeout=max(0.0, deadline_s - time.monotonic()))
        if not ended:
            ranks = sorted(calls.index(call) for call in waiting)
            raise PlacementError(
                f"The workers of ranks {ranks} did not start within {timeout_s:g} s. See their logs; "
                "other actors may use their bundles."
            )
        for call in ended:
            _result(call, calls.index(call))
    return ray.get(list(calls))


def _result(call: ray.ObjectRef, rank: int) -> Any:  # Any: what workers return.
    """Raise a worker's own errors unwrapped."""
    try:
        return ray.get(call)
    except RayTaskError as error:
        if isinstance(error.cause, MantaError):
            raise error.cause from None
        raise
    except RayError as error:
        raise EngineDeadError(f"The worker of rank {rank} died while starting: {error}") from None


def cause(call: ray.ObjectRef) -> str:
    """Return why a call ended, for a log line."""
    try:
        return str(ray.get(call, timeout=1.0))
    except RayTaskError as error:
        return f"{type(error.cause).__name__}: {error.cause}"
    except RayError as error:
        return type(error).__name__


PLACEMENT_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class WorkerPlacement:
    """A ready group; its bundle i holds worker i."""

    group: PlacementGroup
    owned: bool

    def strategy(self, rank: int) -> PlacementGroupSchedulingStrategy:
        """Put worker `rank` into its bundle, but not what the worker starts."""
        return PlacementGroupSchedulingStrategy(
            self.group, placement_group_bundle_index=rank, placement_group_capture_child_tasks=False
        )

    def release(self) -> None:
        """Remove the group if it is owned; its workers die with it."""
        if self.owned:
            remove_placement_group(self.group)


def node_resources() -> dict[str, float]:
    node_id = ray.get_runtime_context().get_node_id()
    return next(node["Resources"] for node in ray.nodes() if node["NodeID"] == node_id)


def create_placement(
    topology: Topology, group: PlacementGroup | None = None, timeout_s: float = PLACEMENT_TIMEOUT_S
) -> WorkerPlacement:
    """Raises PlacementError if there is no room in time."""
    if group is not None and not topology.fits(group.bundle_specs):
        raise PlacementError(
            f"The placement group's bundles {group.bundle_specs} do not hold {topology}: bundle i must hold "
            f"worker i. Create it with {topology.worker_bundles()}."
        )
    current = group or get_current_placement_group()
    if current is not None and topology.fits(current.bundle_specs):
        return _borrow(current, topology, timeout_s)
    return _make(topology, timeout_s)


def _borrow(group: PlacementGroup, topology: Topology, timeout_s: float) -> WorkerPlacement:
    if not group.wait(timeout_s):
        raise PlacementError(f"The placement group for {topology} is still pending after {timeout_s:g} s.")
    here = ray.get_runtime_context().get_node_id()
    nodes = placement_group_table(group)["bundles_to_node_id"]
    if any(nodes[rank] != here for rank in range(topology.num_workers)):
        raise PlacementError(
            "The placement group's bundles are not all on the engine's node, and plans travel through shared "
            "memory. Make the group with strategy STRICT_PACK, and run the engine in its first bundle."
        )
    return WorkerPlacement(group, owned=False)


def _make(topology: Topology, timeout_s: float) -> WorkerPlacement:
    topology.check_node(node_resources())
    bundles = topology.worker_bundles()
    this_node = {"ray.io/node-id": ray.get_runtime_context().get_node_id()}
    group = placement_group(
        bundles,
        strategy="STRICT_PACK",
        bundle_label_selector=[this_node] * len(bundles),
        name=f"manta-engine-{uuid.uuid4().hex[:8]}",  # Ray requires unique names
    )
    if not group.wait(timeout_s):
        remove_placement_group(group)
        missing = shortfall(total(bundles), ray.available_resources())
        raise PlacementError(
            f"{topology} did not fit within {timeout_s:g} s: {missing or 'resources'} not free on the "
            "engine's node. Stop other work there, or use a smaller topology."
        )
    return WorkerPlacement(group, owned=True)
