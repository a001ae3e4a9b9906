"""Placement of a batch job's engines: one placement group each, and which nodes are about to leave.

Ray leaves actors that cannot be placed pending without a message. Here the job says what is missing while it
waits, takes fewer threads where cores are in use, and raises PlacementError after a bound. An engine starts
when its group is ready, while others wait. Once the job has an engine, pending groups wait silently for as
long as they are wanted; they also make Ray's autoscaler add nodes. The groups end with the job's driver.
`cluster/fleet/resources.py` computes what is claimed.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import ray
from ray._private import worker as ray_worker
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from ...actors.workers.base.ray_resources import may_grow, nodes
from ...cluster.config import EngineConfig
from ...cluster.errors import EngineDeadError, PlacementError
from ...cluster.fleet.placement import format_resources
from ...cluster.fleet.resources import (
    ResourceRequest,
    check_engines_fit,
    describe_shortfall,
    full_request,
    reduced_request,
)

PLACEMENT_TIMEOUT_S = 120.0
GROWTH_TIMEOUT_S = 900.0  # where nodes may be added: clouds take minutes to start one
REPORT_INTERVAL_S = 5.0
POLL_S = 0.1
NODES_INTERVAL_S = 2.0
GCS_TIMEOUT_S = 5
NO_DEADLINE_S = 60.0  # for nodes that leave without a deadline
MARGIN_S = 5.0  # before a node's end: rows must be durable by then


@dataclass(frozen=True, slots=True)
class Placement:
    group: PlacementGroup
    resources: ResourceRequest

    @property
    def strategy(self) -> PlacementGroupSchedulingStrategy:
        return PlacementGroupSchedulingStrategy(
            self.group, placement_group_bundle_index=0, placement_group_capture_child_tasks=False
        )

    def release(self) -> None:
        _remove(self.group)


class Placements:
    """Finds placements for a job's engines: at most `engines` at once, at least `needed`."""

    def __init__(self, config: EngineConfig, engines: int, needed: int, say: Callable[[str], None]) -> None:
        self._config = config
        self._engines = engines
        self._say = say
        everything = [node.resources for node in nodes()]
        try:
            check_engines_fit(config, needed, everything)
        except PlacementError:
            if not may_grow():
                raise
        self._resources = full_request(config, engines, everything)
        self._waiting: list[PlacementGroup] = []
        self._num_given = 0
        self._begin_s = self._reported_s = time.monotonic()
        self._timeout_s = PLACEMENT_TIMEOUT_S

    async def find_placement(self) -> Placement:
        """Wait for a placement for one engine. Raises PlacementError if no engine has found any in time."""
        if not self._waiting:
            self._begin_s = self._reported_s = time.monotonic()
        resources, group = self._request()
        try:
            while not await asyncio.to_thread(group.wait, POLL_S):
                if not self._num_given and time.monotonic() >= min(
                    self._reported_s + REPORT_INTERVAL_S, self._begin_s + self._timeout_s
                ):
                    self._reported_s = time.monotonic()
                    await asyncio.to_thread(self._adapt_request)
                if resources != self._resources:
                    self._withdraw(group)
                    resources, group = self._request()
        except BaseException:
            self._withdraw(group)
            raise
        self._waiting.remove(group)
        self._num_given += 1
        return Placement(group, resources)

    def _request(self) -> tuple[ResourceRequest, PlacementGroup]:
        group = placement_group([dict(bundle) for bundle in self._resources.bundles], strategy="STRICT_PACK")
        self._waiting.append(group)
        return self._resources, group

    def _withdraw(self, group: PlacementGroup) -> None:
        self._waiting.remove(group)
        _remove(group)

    def _adapt_request(self) -> None:
        """Say what is missing for the waiting engines, and take fewer threads where cores are in use.

        Raises PlacementError at the deadline, which is later where nodes may be added.
        """
        waiting = len(self._waiting)
        ours = {group.id.hex() for group in self._waiting}  # what they hold already counts as free
        found = nodes(lambda group: group["placement_group_id"] in ours)
        everything, free = [node.resources for node in found], [node.free for node in found]
        full = full_request(self._config, self._engines, everything)
        missing = describe_shortfall(full, waiting, everything, free)
        if time.monotonic() >= self._begin_s + self._timeout_s and may_grow():
            self._timeout_s = max(self._timeout_s, GROWTH_TIMEOUT_S)
        if time.monotonic() >= self._begin_s + self._timeout_s:
            fewer = "" if self._config.num_threads is None else ", lower num_threads"
            raise PlacementError(
                f"The job's engines did not fit within {self._timeout_s:g} s: it needs {missing}. Stop other "
                f"work on the cluster (`ray status` shows it){fewer}, or lower concurrency.",
                param="concurrency",
            )
        resources = reduced_request(self._config, waiting, free, full)
        if resources is None or resources == full:
            self._say(f"waiting for {missing}")
        else:
            instead = f"{format_resources(resources.needs)} in place of {format_resources(full.needs)}"
            self._say(f"not all CPUs are free: an engine takes {instead}")
        self._resources = resources or full


def _remove(group: PlacementGroup) -> None:
    if ray.is_initialized():  # the call would start Ray again
        remove_placement_group(group)


class NodeWatch:
    """Reads every NODES_INTERVAL_S which nodes leave the cluster (a spot notice, a scale-down)."""

    def __init__(self) -> None:
        self._read_s = time.monotonic()

    async def draining(self) -> Mapping[str, float]:
        """Return leaving nodes with the seconds that engines there have; EngineDeadError if no node lives."""
        if time.monotonic() - self._read_s < NODES_INTERVAL_S:
            return {}
        self._read_s = time.monotonic()
        if not await asyncio.to_thread(living_nodes):
            raise EngineDeadError("No node of the Ray cluster is alive. Run the same command again.")
        return await asyncio.to_thread(draining_nodes)


def living_nodes() -> set[str]:
    return {node["NodeID"] for node in ray.nodes() if node["Alive"]}


def draining_nodes() -> dict[str, float]:
    """Return leaving nodes, with the seconds that engines there still have."""
    client: Any = ray_worker.global_worker  # its attributes are set at run time
    found: Mapping[str, int] = client.gcs_client.get_draining_nodes(timeout=GCS_TIMEOUT_S)
    return {
        node: max(deadline_ms / 1e3 - time.time() - MARGIN_S, 0.0) if deadline_ms else NO_DEADLINE_S
        for node, deadline_ms in found.items()
    }
