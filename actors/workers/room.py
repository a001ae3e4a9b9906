"""What room the cluster has, read from Ray's books; whether there is enough for one more replica.

Ray leaves a placement group that nothing can hold pending for ever, and Serve waits with it, without a word.
So `build_app` asks here first, and `manta serve` asks again while a replica is waiting for its place; batch
jobs look here while they wait (`jobs/batch/placement.py`). What the numbers mean is decided in
`cluster/placement.py`; placing an engine's workers is `placement.py`'s part.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import ray
import ray._private.state as ray_state
from ray._private import worker as ray_worker
from ray._private.client_mode_hook import client_mode_wrap
from ray._private.utils import get_num_cpus
from ray.experimental.internal_kv import _internal_kv_get
from ray.util.placement_group import placement_group_table

from ...cluster.errors import PlacementError
from ...cluster.placement import Bundle, Demand, NodeRoom, check_ever, check_free, lacking_now, total

logger = logging.getLogger(__name__)

Group = dict[str, Any]  # Any: a placement group in Ray's table

# What has just ended is still in Ray's books for a moment.
FREE_WAIT_S = 5.0
# Ray's monitor reports every 5 s whether it can start nodes.
REPORT_WAIT_S = 10.0
POLL_S = 0.2


def check_room(demands: Sequence[Demand]) -> None:
    """Raise PlacementError unless there is room for all replicas, or the cluster may bring nodes.

    What replicas of the deployments hold counts as free: Serve gives it back when it replaces them. Which
    application is built is not known here, so that is true for each one's; a replica that finds no room
    nevertheless is reported by `waiting_for_room`.
    """
    try:
        check_ever(demands, nodes())
        _await_free(demands)
    except PlacementError as error:
        if not may_grow():
            raise
        logger.warning("%s The cluster's autoscaler may bring a node; going on.", error)


def waiting_for_room(application: str, deployment: str) -> str | None:
    """What a replica that Ray could not place is waiting for, in words; None if none is waiting."""
    for group in _groups():
        if group["state"] in ("PENDING", "RESCHEDULING") and _is_replica(group, deployment, application):
            return lacking_now(list(group["bundles"].values()), nodes()) or None
    return None


def nodes(gives_back: Callable[[Group], bool] = lambda group: False) -> list[NodeRoom]:
    """The living nodes; what placement groups that `gives_back` names hold is counted as free."""
    return list(_rooms(gives_back).values())


def this_node() -> NodeRoom:
    """The one that this process runs on."""
    return _rooms(lambda group: False)[ray.get_runtime_context().get_node_id()]


def _rooms(gives_back: Callable[[Group], bool]) -> dict[str, NodeRoom]:
    """By the node's id."""
    free, groups = _free_by_node(), [group for group in _groups() if group["state"] == "CREATED"]
    rooms: dict[str, NodeRoom] = {}
    for node in ray.nodes():
        node_id = node["NodeID"]
        if not node["Alive"] or node_id not in free:
            continue
        held: dict[str, Bundle] = {}
        given: list[Bundle] = [free[node_id]]
        for group in groups:
            here = [b for i, b in group["bundles"].items() if group["bundles_to_node_id"][i] == node_id]
            if not here:
                continue
            if gives_back(group):
                given.extend(here)
            else:
                name = group["name"] or "a placement group without a name"
                held[name] = total([held.get(name, {}), *here])
        rooms[node_id] = NodeRoom(node["Resources"], total(given), held)
    return rooms


def may_grow() -> bool:
    """Whether an autoscaler may start nodes; True also where that cannot be told.

    A Ray that this process started has none. Elsewhere the monitor's report tells: without an autoscaler it
    names each node's type after the node. A cluster without a monitor of Ray's own (KubeRay runs the
    autoscaler beside it) makes no such report: nothing is refused there.
    """
    node = ray_worker._global_node
    if node is not None and node.is_head():
        return False
    deadline_s = time.monotonic() + REPORT_WAIT_S
    while time.monotonic() < deadline_s:
        report = _autoscaler_report()
        if report is not None:
            types = {kind.removeprefix("node_") for kind in report.get("active_nodes") or {}}
            return not types or not types <= {node["NodeID"] for node in ray.nodes()}
        time.sleep(POLL_S)
    return True


def warn_of_this_machine(demands: Sequence[Demand]) -> None:
    """Without a Ray to ask: warn if this machine cannot hold the replicas. Ray may be started elsewhere."""
    machine = machine_resources()
    try:
        check_ever(demands, [NodeRoom(machine, machine)])
    except PlacementError as error:
        logger.warning("If Ray is to run on this machine alone: %s", error)


def machine_resources() -> dict[str, float]:
    """What a Ray started here would count."""
    gpus = len(list(Path("/dev").glob("nvidia[0-9]*")))
    return {"CPU": float(get_num_cpus()), "GPU": float(gpus)}


def _await_free(demands: Sequence[Demand]) -> None:
    def given_back(group: Group) -> bool:
        return any(_is_replica(group, each.deployment) for each in demands)

    deadline_s = time.monotonic() + FREE_WAIT_S
    while True:
        try:
            return check_free(demands, nodes(given_back))
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
