"""Room for a batch job's engines: a placement group for each, waited for with words and within a bound.

Ray leaves actors that cannot be placed pending for ever without a word. Here what is lacking is said while
the job waits, fewer threads are taken where cores are in use, and an end in vain is a PlacementError. What is
claimed is decided in `cluster/room.py`. The groups die with the job's driver.
"""

from __future__ import annotations

import contextlib
import threading
import time
import uuid
from collections.abc import Callable
from typing import Any

import ray
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from ...actors.workers.room import may_grow, nodes
from ...cluster.config import EngineConfig
from ...cluster.errors import PlacementError
from ...cluster.placement import NodeRoom
from ...cluster.room import Claim, check_room, full_claim, lacking, smaller_claim, spell

ROOM_TIMEOUT_S = 120.0
GROWTH_TIMEOUT_S = 900.0  # where new nodes may come: clouds take minutes to start one
TOLD_EVERY_S = 5.0
LOOK_EVERY_S = 0.5


class Room:
    """Placement groups, one per engine. Release it when the engines are done."""

    def __init__(self, claim: Claim, engines: int) -> None:
        self.claim = claim
        bundles = [dict(bundle) for bundle in claim.bundles]
        self._groups = [placement_group(bundles, strategy="STRICT_PACK") for _ in range(engines)]
        self._names: list[str] = []  # of the engines' actors
        self._lock = threading.Lock()

    def next_actor(self) -> dict[str, Any]:  # Any: Ray's options for actors
        """Where the next engine goes, and its name; Ray Data asks once per actor."""
        group = self._groups[len(self._names) % len(self._groups)]
        self._names.append(f"manta-batch-{uuid.uuid4().hex}")
        strategy = PlacementGroupSchedulingStrategy(
            group, placement_group_bundle_index=0, placement_group_capture_child_tasks=False
        )
        return {"scheduling_strategy": strategy, "name": self._names[-1]}

    def wait(self, timeout_s: float, stopping: threading.Event) -> bool:
        """Whether all groups are ready in time."""
        deadline_s = time.monotonic() + timeout_s
        while not stopping.is_set() and (left_s := deadline_s - time.monotonic()) > 0:
            pending = [group for group in self._groups if not group.wait(0)]
            if not pending:
                return True
            pending[0].wait(min(LOOK_EVERY_S, left_s))
        return False

    def nodes(self) -> list[NodeRoom]:
        """The cluster's; what groups of this room hold already counts as free."""
        ours = {group.id.hex() for group in self._groups}
        return nodes(lambda group: group["placement_group_id"] in ours)

    def kill_engines(self) -> None:
        """End the engines that were started so far, and with them whoever waits for their answers."""
        with self._lock:
            if self._groups:
                for name in self._names:
                    with contextlib.suppress(ValueError):  # not there yet, or not any more
                        ray.kill(ray.get_actor(name))

    def release(self) -> None:
        """Give the room back. Once: Ray may be left afterwards, and would start anew for whoever calls it."""
        with self._lock:
            groups, self._groups = self._groups, []
            for group in groups:
                remove_placement_group(group)


def find_room(
    config: EngineConfig, engines: int, say: Callable[[str], None], stopping: threading.Event
) -> Room | None:
    """Wait for room for the engines; None when `stopping` is set meanwhile.

    Raises:
        PlacementError: they can never fit, or did not in time.
    """
    everything = [node.resources for node in nodes()]
    try:
        check_room(config, engines, everything)
    except PlacementError:
        if not may_grow():
            raise
    room = Room(full_claim(config, engines, everything), engines)
    begin_s, timeout_s = time.monotonic(), ROOM_TIMEOUT_S
    try:
        while not room.wait(min(TOLD_EVERY_S, begin_s + timeout_s - time.monotonic()), stopping):
            if stopping.is_set():
                room.release()
                return None
            found = room.nodes()
            everything, free = [node.resources for node in found], [node.free for node in found]
            full = full_claim(config, engines, everything)
            if time.monotonic() >= begin_s + timeout_s and timeout_s < GROWTH_TIMEOUT_S and may_grow():
                timeout_s = GROWTH_TIMEOUT_S
            if time.monotonic() >= begin_s + timeout_s:
                raise _no_room(config, lacking(full, engines, everything, free), timeout_s)
            claim = smaller_claim(config, engines, free, full)
            say(_news(claim, full) or f"waiting for {lacking(full, engines, everything, free)}")
            if (claim or full) != room.claim:
                room.release()
                room = Room(claim or full, engines)
    except BaseException:
        room.release()
        raise
    return room


def _news(claim: Claim | None, full: Claim) -> str | None:
    if claim is None or claim == full:
        return None
    return f"not all CPUs are free: an engine takes {spell(claim.needs)} in place of {spell(full.needs)}"


def _no_room(config: EngineConfig, what: str, timeout_s: float) -> PlacementError:
    fewer = "" if config.num_threads is None else ", lower num_threads"
    return PlacementError(
        f"No room for the job's engines within {timeout_s:g} s: it needs {what}. End what else runs on the "
        f"cluster (`ray status` shows it){fewer}, or lower concurrency.",
        param="concurrency",
    )
