"""Placement groups for those engines of a Ray dataset that have workers: none outlives its engine.

Ray Data starts its actors when and as often as it likes, and says nothing when one has ended. Ray removes a
group only when the whole driver has left: a group of an engine that is gone would hold its resources until
then, and the next dataset would wait for ever. So a thread looks which engines live, while there are groups.
Used by `processor.py`, as the `ray_remote_args_fn` of its pool.
"""

from __future__ import annotations

import logging
import math
import threading
import time
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util import list_named_actors
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

logger = logging.getLogger(__name__)

LOOK_EVERY_S = 0.5
UNUSED_TIMEOUT_S = 5.0  # of a group for an engine that Ray Data asked for and did not start


class EngineGroups:
    """A group for every engine that is started. Called by Ray Data for each, where the dataset is executed.

    Args:
        bundles: of one engine's workers; the engine itself is in the first.
        most: engines of the pool.
    """

    def __init__(self, bundles: Sequence[Mapping[str, float]], most: int) -> None:
        self._bundles = [dict(bundle) for bundle in bundles]
        self._most = most
        self._lock = threading.Lock()
        self._groups: dict[str, PlacementGroup] = {}  # by the engine's name
        self._unseen: dict[str, float] = {}  # engines that Ray has not listed yet: since when (monotonic)

    def __reduce__(self) -> tuple[object, ...]:
        """Datasets are copied; each copy has groups of its own."""
        return EngineGroups, (self._bundles, self._most)

    def __call__(self) -> dict[str, Any]:  # Any: Ray's options for actors
        living = set(list_named_actors())
        with self._lock:
            self._remove_gone(living)
            # Ray Data also asks without starting an actor; one that is started has its name before the next.
            name = next((name for name in self._unseen if name not in living), None)
            if name is None and len(self._groups) < self._most:
                name = self._make()
            if name is None:
                return {}
            strategy = PlacementGroupSchedulingStrategy(
                self._groups[name], placement_group_bundle_index=0, placement_group_capture_child_tasks=False
            )
        return {"scheduling_strategy": strategy, "name": name}

    def _make(self) -> str:
        """A new engine's name; its group has the same."""
        name = f"manta-engine-{uuid.uuid4().hex}"
        if not self._groups:
            threading.Thread(target=self._watch, name="manta-groups", daemon=True).start()
        self._groups[name] = placement_group(self._bundles, strategy="STRICT_PACK", name=name)
        self._unseen[name] = time.monotonic()
        return name

    def _watch(self) -> None:
        """Remove groups whose engine is gone; ends with the last one, and with Ray."""
        while True:
            time.sleep(LOOK_EVERY_S)
            try:
                living = set(list_named_actors()) if ray.is_initialized() else set[str]()
                with self._lock:
                    if ray.is_initialized():
                        self._remove_gone(living)
                    else:
                        self._groups.clear()
                    if not self._groups:
                        return
            except RayError as error:  # a busy head answers late; it is asked again
                logger.warning("the engines' placement groups cannot be looked after: %s", error)

    def _remove_gone(self, living: set[str]) -> None:
        """Those of engines that live no more, or never did. An engine that is being restarted lives."""
        for name in living & self._unseen.keys():
            del self._unseen[name]
        for name in self._groups.keys() - living:
            if time.monotonic() - self._unseen.get(name, -math.inf) > UNUSED_TIMEOUT_S:
                self._unseen.pop(name, None)
                remove_placement_group(self._groups.pop(name))
