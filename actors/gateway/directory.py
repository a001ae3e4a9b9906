"""The directory: which replicas of an application are there. A small named Ray actor without a CPU.

Replicas beat into it, gateways ask it; nobody else knows of it. It keeps nothing that the next beats do not
bring again, so it may die: Ray starts it anew wherever there is a node. It ends by itself when nobody has
called for a while.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

State = Literal["ready", "draining", "failed"]

BEAT_S = 0.5
# A replica that has not been heard of for so long gets no requests.
SILENT_S = 3.0
CALL_TIMEOUT_S = 5.0
ALONE_S = 15.0
NAMESPACE = "manta"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaRecord:
    """One beat of a replica.

    Attributes:
        replica: its id in Serve.
        names: under which its model is served; the first stands for the model.
        url: of its door; `token` opens it.
        beat: counts its beats.
        state: "failed" when its engine is dead.
        running, waiting: requests there.
        max_requests: more than that it should not get at once.
        max_model_len, created_s: for the model's card.
    """

    replica: str
    names: tuple[str, ...]
    url: str
    token: str
    beat: int
    state: State
    running: int
    waiting: int
    max_requests: int
    max_model_len: int
    created_s: int


class Directory:
    """What the actor holds: the last beat of each replica."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._records: dict[str, tuple[ReplicaRecord, float]] = {}
        self._called_s = clock()

    def beat(self, record: ReplicaRecord) -> None:
        self._called_s = self._clock()
        self._records[record.replica] = record, self._called_s

    def leave(self, replica: str) -> None:
        """The replica has ended."""
        self._records.pop(replica, None)

    def replicas(self) -> list[ReplicaRecord]:
        """Those that were heard of lately."""
        self._called_s = self._clock()
        oldest_s = self._called_s - SILENT_S
        self._records = {name: seen for name, seen in self._records.items() if seen[1] >= oldest_s}
        return [record for record, _ in self._records.values()]

    @property
    def is_alone(self) -> bool:
        return self._clock() - self._called_s > ALONE_S


class DirectoryActor(Directory):
    """A directory in a process of its own."""

    def __init__(self) -> None:
        super().__init__()
        threading.Thread(target=self._end_when_alone, daemon=True).start()

    def _end_when_alone(self) -> None:
        while not self.is_alone:
            time.sleep(1.0)
        ray.kill(ray.get_runtime_context().current_actor, no_restart=True)


class DirectoryClient:
    """The directory of one application, as replicas and gateways reach it.

    A call that fails raises TimeoutError or one of Ray's errors (`UNREACHABLE`), and the next one looks for
    the actor anew, or makes it.
    """

    def __init__(self, application: str) -> None:
        self._name = f"manta-directory-{application}"
        self._actor: Any = None  # Any: Ray's handle

    async def beat(self, record: ReplicaRecord) -> None:
        await self._call("beat", record)

    async def leave(self, replica: str) -> None:
        await self._call("leave", replica)

    async def replicas(self) -> list[ReplicaRecord]:
        return await self._call("replicas")

    async def _call(self, method: str, *arguments: object) -> Any:  # Any: what the method returns
        try:
            async with asyncio.timeout(CALL_TIMEOUT_S):
                if self._actor is None:
                    self._actor = await asyncio.to_thread(self._find)
                return await getattr(self._actor, method).remote(*arguments)
        except UNREACHABLE:
            self._actor = None
            raise

    def _find(self) -> Any:
        """Whoever comes first makes it. In no placement group: it must outlive the replica that made it."""
        return (
            ray.remote(DirectoryActor)
            .options(
                name=self._name,
                namespace=NAMESPACE,
                get_if_exists=True,
                lifetime="detached",
                num_cpus=0,
                max_restarts=-1,
                scheduling_strategy=PlacementGroupSchedulingStrategy(None),  # type: ignore[arg-type]
            )
            .remote()
        )


UNREACHABLE = (TimeoutError, RayError, ValueError)
