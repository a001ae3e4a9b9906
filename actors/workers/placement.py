"""A place for an engine's workers: a Ray placement group on the engine's own node, borrowed or owned.

A group that is given, or in which this process already runs (a Serve replica), is borrowed. Otherwise one
is made, STRICT_PACK on this node, and removed at the end. Ray leaves a group that cannot be placed pending
for ever without a word; here it ends in a PlacementError that says what is missing. What is needed is
decided in `cluster/placement.py`; workers are started by `ray_executor.py`.
"""

from __future__ import annotations

import uuid
from dataclasses import dataclass

import ray
from ray.util.placement_group import (
    PlacementGroup,
    get_current_placement_group,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from ...cluster.errors import PlacementError
from ...cluster.placement import Topology, shortfall, total

PLACEMENT_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class Placement:
    """A ready group whose bundle i holds worker i."""

    group: PlacementGroup
    owned: bool

    def strategy(self, rank: int) -> PlacementGroupSchedulingStrategy:
        """Puts worker `rank` into its bundle; what the worker starts goes elsewhere."""
        return PlacementGroupSchedulingStrategy(
            self.group, placement_group_bundle_index=rank, placement_group_capture_child_tasks=False
        )

    def release(self) -> None:
        """Remove the group if it is ours; its workers die with it."""
        if self.owned:
            remove_placement_group(self.group)


def node_resources() -> dict[str, float]:
    """All that Ray counts on this process's node, free or not."""
    node_id = ray.get_runtime_context().get_node_id()
    return next(node["Resources"] for node in ray.nodes() if node["NodeID"] == node_id)


def place(
    topology: Topology, group: PlacementGroup | None = None, timeout_s: float = PLACEMENT_TIMEOUT_S
) -> Placement:
    """Find room for the workers. Raises PlacementError if there is none in time."""
    if group is not None and not topology.fits(group.bundle_specs):
        raise PlacementError(
            f"The placement group's bundles {group.bundle_specs} do not hold {topology}: bundle i must hold "
            f"worker i. Make it of {topology.worker_bundles()}."
        )
    current = group or get_current_placement_group()
    if current is not None and topology.fits(current.bundle_specs):
        return _borrow(current, topology, timeout_s)
    return _make(topology, timeout_s)


def _borrow(group: PlacementGroup, topology: Topology, timeout_s: float) -> Placement:
    if not group.wait(timeout_s):
        raise PlacementError(f"The placement group for {topology} is still pending after {timeout_s:g} s.")
    here = ray.get_runtime_context().get_node_id()
    nodes = placement_group_table(group)["bundles_to_node_id"]
    if any(nodes[rank] != here for rank in range(topology.num_workers)):
        raise PlacementError(
            "The placement group's bundles are not all on the engine's node, and plans travel through shared "
            "memory. Make the group with strategy STRICT_PACK, and run the engine in its first bundle."
        )
    return Placement(group, owned=False)


def _make(topology: Topology, timeout_s: float) -> Placement:
    topology.check_node(node_resources())
    bundles = topology.worker_bundles()
    here = {"ray.io/node-id": ray.get_runtime_context().get_node_id()}
    group = placement_group(
        bundles,
        strategy="STRICT_PACK",
        bundle_label_selector=[here] * len(bundles),
        name=f"manta-engine-{uuid.uuid4().hex[:8]}",  # Ray has no two groups of one name
    )
    if not group.wait(timeout_s):
        remove_placement_group(group)
        lacking = shortfall(total(bundles), ray.available_resources())
        raise PlacementError(
            f"{topology} found no room within {timeout_s:g} s: {lacking or 'resources'} not free on the "
            "engine's node. End what else runs there, or use a smaller topology."
        )
    return Placement(group, owned=True)
