"""The nodes below a job's engines: which of them leave the cluster (a spot notice, a scale-down), and when.

Asked of Ray's GCS now and then. Called by `pool.py`, which lets the engines there go in time.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from typing import Any

import ray
from ray._private import worker as ray_worker

from ...cluster.errors import EngineDeadError

LOOK_EVERY_S = 2.0
GCS_TIMEOUT_S = 5
NO_DEADLINE_S = 60.0  # for nodes that leave without saying when
MARGIN_S = 5.0  # before a node's end: rows must be durable by then


class NodeWatch:
    """Looks at the cluster's nodes, but not all the time."""

    def __init__(self) -> None:
        self._looked_s = time.monotonic()

    async def draining(self) -> Mapping[str, float]:
        """Nodes that leave, with the seconds that engines there still have; nothing between two looks.

        Raises EngineDeadError when no node of the cluster lives any more.
        """
        if time.monotonic() - self._looked_s < LOOK_EVERY_S:
            return {}
        self._looked_s = time.monotonic()
        if not await asyncio.to_thread(living_nodes):
            raise EngineDeadError("No node of the Ray cluster lives any more. Run the same command again.")
        return await asyncio.to_thread(draining_nodes)


def living_nodes() -> set[str]:
    return {node["NodeID"] for node in ray.nodes() if node["Alive"]}


def draining_nodes() -> dict[str, float]:
    """Nodes that leave, with the seconds that engines there still have."""
    client: Any = ray_worker.global_worker  # its attributes are made at run time
    found: Mapping[str, int] = client.gcs_client.get_draining_nodes(timeout=GCS_TIMEOUT_S)
    return {
        node: max(deadline_ms / 1e3 - time.time() - MARGIN_S, 0.0) if deadline_ms else NO_DEADLINE_S
        for node, deadline_ms in found.items()
    }
