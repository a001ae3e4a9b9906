"""Reads the cluster's resources from Ray, and checks whether one more replica fits.

Ray silently leaves a placement group that no node can hold pending forever, and Serve waits with it. So
`build_app` checks first, `manta serve` again while a replica waits for resources, and batch jobs while they
wait (`jobs/batch/placement.py`).
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import ray
import ray._private.state as ray_state
from ray._private import worker as ray_worker
from ray._private.client_mode_hook import client_mode_wrap
from ray._private.ray_constants import RESOURCES_ENVIRONMENT_VARIABLE
from ray._private.utils import get_num_cpus
from ray.experimental.internal_kv import _internal_kv_get
from ray.util.placement_group import placement_group_table

from ....cluster.errors import PlacementError
from ....cluster.fleet.placement import (
    Bundle,
    DeploymentDemand,
    NodeResources,
    check_available,
    check_feasible,
    current_shortfall,
    total,
)

logger = logging.getLogger(__name__)

Group = dict[str, Any]  # Any: a placement group in Ray's table

# Ray briefly still counts resources of processes that have just ended.
FREE_WAIT_S = 5.0
# Ray's monitor reports every 5 s whether it can start nodes.
REPORT_WAIT_S = 10.0
POLL_S = 0.2


def check_resources(demands: Sequence[DeploymentDemand]) -> None:
    """Raise PlacementError unless all replicas fit, or the cluster may add nodes.

    Resources held by replicas of these deployments, in any application, count as free, as Serve frees them
    when it replaces the replicas; `describe_missing_resources` reports a replica that finds no room after
    all.
    """
    try:
        check_feasible(demands, nodes())
        _await_free(demands)
    except PlacementError as error:
        if not may_grow():
            raise
        logger.warning("%s Continuing, as the cluster's autoscaler may add a node.", error)


def describe_missing_resources(application: str, deployment: str) -> str | None:
    """Return what an unplaced replica lacks, in words; None if no replica is waiting."""
    for group in _groups():
        if group["state"] in ("PENDING", "RESCHEDULING") and _is_replica(group, deployment, application):
            return current_shortfall(list(group["bundles"].values()), nodes()) or None
    return None


def nodes(releases: Callable[[Group], bool] = lambda group: False) -> list[NodeResources]:
    """Return the living nodes; resources of groups for which `releases` is true count as free."""
    return list(_nodes_by_id(releases).values())


def this_node() -> NodeResources:
    return _nodes_by_id(lambda group: False)[ray.get_runtime_context().get_node_id()]


def _nodes_by_id(releases: Callable[[Group], bool]) -> dict[str, NodeResources]:
    """Return the living nodes as `nodes` does, with what other groups hold of each, by name."""
    free, groups = _free_by_node(), [group for group in _groups() if group["state"] == "CREATED"]
    nodes_by_id: dict[str, NodeResources] = {}
    for node in ray.nodes():
        node_id = node["NodeID"]
        if not node["Alive"] or node_id not in free:
            continue
        in_use: dict[str, Bundle] = {}
        available: list[Bundle] = [free[node_id]]
        for group in groups:
            places = group["bundles_to_node_id"]
            here = [bundle for i, bundle in group["bundles"].items() if places[i] == node_id]
            if not here:
                continue
            if releases(group):
                available.extend(here)
            else:
                name = group["name"] or "a placement group without a name"
                in_use[name] = total([in_use.get(name, {}), *here])
        nodes_by_id[node_id] = NodeResources(node["Resources"], total(available), in_use)
    return nodes_by_id


def may_grow(wait_s: float | None = None) -> bool:
    """Return whether an autoscaler may start nodes; also True if that is unknown.

    A Ray that this process started has none. Otherwise the monitor's report tells: without an autoscaler it
    names each node's type after the node. A cluster without Ray's own monitor (KubeRay runs the autoscaler
    separately) makes no such report, so nothing is refused there.

    Args:
        wait_s: for the first report; REPORT_WAIT_S by default.
    """
    node = ray_worker._global_node
    if node is not None and node.is_head():
        return False
    deadline_s = time.monotonic() + (REPORT_WAIT_S if wait_s is None else wait_s)
    while (report := _autoscaler_report()) is None:
        if time.monotonic() >= deadline_s:
            return True
        time.sleep(POLL_S)
    types = {kind.removeprefix("node_") for kind in report.get("active_nodes") or {}}
    return not types or not types <= {node["NodeID"] for node in ray.nodes()}


def warn_of_this_machine(demands: Sequence[DeploymentDemand]) -> None:
    """Warn if this machine cannot hold the replicas. Ray may be started elsewhere."""
    machine = machine_resources()
    try:
        check_feasible(demands, [NodeResources(machine, machine)])
    except PlacementError as error:
        logger.warning("If Ray runs only on this machine: %s", error)


def machine_resources(num_cpus: int | None = None) -> dict[str, float]:
    """Return the resources that a Ray started on this machine, with `num_cpus` or all CPUs, would have.

    Ray takes those that its environment variable names instead.
    """
    gpus = len(list(Path("/dev").glob("nvidia[0-9]*")))
    named = json.loads(os.environ.get(RESOURCES_ENVIRONMENT_VARIABLE) or "{}")
    found = {"CPU": num_cpus or get_num_cpus(), "GPU": gpus}
    return {kind: float(named.get(kind, count)) for kind, count in found.items()}


def _await_free(demands: Sequence[DeploymentDemand]) -> None:
    def is_replaced(group: Group) -> bool:
        return any(_is_replica(group, each.deployment) for each in demands)

    deadline_s = time.monotonic() + FREE_WAIT_S
    while True:
        try:
            return check_available(demands, nodes(is_replaced))
        except PlacementError:
            if time.monotonic() > deadline_s:
                raise
            time.sleep(POLL_S)


@client_mode_wrap
def _free_by_node() -> dict[str, dict[str, float]]:
    return ray_state.available_resources_per_node()


def _groups() -> Iterable[Group]:
    return placement_group_table().values()


def _is_replica(group: Group, deployment: str, application: str | None = None) -> bool:
    """Serve names a replica's group SERVE_REPLICA::application#deployment#id."""
    kind, _, rest = group["name"].partition("::")
    parts = rest.split("#")
    return (
        kind == "SERVE_REPLICA"
        and len(parts) == 3
        and parts[1] == deployment
        and application in (None, parts[0])
    )


@client_mode_wrap
def _autoscaler_report() -> dict[str, Any] | None:  # Any: JSON that Ray's monitor writes.
    status = _internal_kv_get("__autoscaling_status")
    return json.loads(status).get("autoscaler_report") if status else None
