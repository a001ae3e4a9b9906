"""Room for a batch job's engines: a placement group for each, waited for with words and within a bound.

Ray leaves actors that cannot be placed pending for ever without a word. Here what is lacking is said while
the job waits, fewer threads are taken where cores are in use, and an end in vain is a PlacementError. What is
claimed is decided in `cluster/room.py`. An engine whose group is ready starts while others wait: a job that
has one engine has room, and what waits then does so quietly and for as long as it is wanted (a pending group
is also what makes Ray's autoscaler bring nodes). The groups die with the job's driver.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from ...actors.workers.room import may_grow, nodes
from ...cluster.config import EngineConfig
from ...cluster.errors import PlacementError
from ...cluster.placement import spell
from ...cluster.room import Claim, check_room, full_claim, lacking, smaller_claim

ROOM_TIMEOUT_S = 120.0
GROWTH_TIMEOUT_S = 900.0  # where new nodes may come: clouds take minutes to start one
TOLD_EVERY_S = 5.0
LOOK_EVERY_S = 0.1


@dataclass(frozen=True, slots=True)
class Place:
    """A group that one engine may run in. Release it when the engine is gone."""

    group: PlacementGroup
    claim: Claim

    @property
    def strategy(self) -> PlacementGroupSchedulingStrategy:
        """Puts the engine's own process into the first bundle; its workers find the others."""
        return PlacementGroupSchedulingStrategy(
            self.group, placement_group_bundle_index=0, placement_group_capture_child_tasks=False
        )

    def release(self) -> None:
        if ray.is_initialized():  # it would start anew for whoever calls it
            remove_placement_group(self.group)


class Rooms:
    """Finds places for the engines of a job. Owned by its `EnginePool`.

    Args:
        engines: how many there may be at once.
        needed: how many of them the job cannot do without.
        say: takes a line for the user.

    Raises:
        PlacementError: the engines that there must be can never fit.
    """

    def __init__(self, config: EngineConfig, engines: int, needed: int, say: Callable[[str], None]) -> None:
        self._config = config
        self._engines = engines
        self._say = say
        everything = [node.resources for node in nodes()]
        try:
            check_room(config, needed, everything)
        except PlacementError:
            if not may_grow():
                raise
        self._claim = full_claim(config, engines, everything)
        self._waiting: list[PlacementGroup] = []
        self._num_given = 0
        self._begin_s = self._told_s = time.monotonic()
        self._timeout_s = ROOM_TIMEOUT_S

    async def place(self) -> Place:
        """Wait for room for one engine. Raises PlacementError if none has found any in time."""
        if not self._waiting:
            self._begin_s = self._told_s = time.monotonic()
        claim, group = self._ask()
        try:
            while not await asyncio.to_thread(group.wait, LOOK_EVERY_S):
                await self._look()
                if claim != self._claim:
                    self._withdraw(group)
                    claim, group = self._ask()
        except BaseException:
            self._withdraw(group)
            raise
        self._waiting.remove(group)
        self._num_given += 1
        return Place(group, claim)

    def _ask(self) -> tuple[Claim, PlacementGroup]:
        group = placement_group([dict(bundle) for bundle in self._claim.bundles], strategy="STRICT_PACK")
        self._waiting.append(group)
        return self._claim, group

    def _withdraw(self, group: PlacementGroup) -> None:
        self._waiting.remove(group)
        if ray.is_initialized():
            remove_placement_group(group)

    async def _look(self) -> None:
        """Now and then: say what is lacking, and make do with less or give up while there is no engine."""
        if self._num_given or time.monotonic() < min(self._told_s + TOLD_EVERY_S, self._deadline_s):
            return
        self._told_s = time.monotonic()
        await asyncio.to_thread(self._make_do)

    @property
    def _deadline_s(self) -> float:
        return self._begin_s + self._timeout_s

    def _make_do(self) -> None:
        waiting = len(self._waiting)
        ours = {group.id.hex() for group in self._waiting}  # what they have got meanwhile counts as free
        found = nodes(lambda group: group["placement_group_id"] in ours)
        everything, free = [node.resources for node in found], [node.free for node in found]
        full = full_claim(self._config, self._engines, everything)
        if time.monotonic() >= self._deadline_s and self._timeout_s < GROWTH_TIMEOUT_S and may_grow():
            self._timeout_s = GROWTH_TIMEOUT_S
        if time.monotonic() >= self._deadline_s:
            raise _no_room(self._config, lacking(full, waiting, everything, free), self._timeout_s)
        claim = smaller_claim(self._config, waiting, free, full)
        self._say(_news(claim, full) or f"waiting for {lacking(full, waiting, everything, free)}")
        self._claim = claim or full


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
