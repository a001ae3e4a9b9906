"""The directory of an application's replicas: a small named Ray actor without a CPU.

Replicas send it heartbeats and gateways query it. The next heartbeats rebuild its whole state, so it may die:
Ray restarts it on any node. It ends itself when it has not been called for a while.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from ...cluster.errors import MantaError, UnreachableError

if TYPE_CHECKING:
    from ..engine.async_engine import AsyncEngine

State = Literal["ready", "draining", "failed"]

HEARTBEAT_S = 0.5
# A replica whose last heartbeat is older than this gets no requests.
SILENT_S = 3.0
IDLE_EXIT_S = 15.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaRecord:
    """One heartbeat of a replica.

    Attributes:
        names: names of its model; the first identifies the model.
        url: of its endpoint for gateways; requests must carry `token`.
        state: "failed" when its engine is dead.
        max_requests: requests that it should have at most.
        max_model_len, created_s: for the model's card.
        kv_tier: name of the files of K/V pages that it reads and writes, equal for replicas that share them.
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
    kv_tier: str | None = None


class Directory:
    """The last heartbeat of each replica; the state of the directory actor."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._records: dict[str, tuple[ReplicaRecord, float]] = {}
        self._called_s = clock()

    def heartbeat(self, record: ReplicaRecord) -> None:
        self._called_s = self._clock()
        self._records[record.replica] = record, self._called_s

    def deregister(self, replica: str) -> None:
        self._records.pop(replica, None)

    def replicas(self) -> list[ReplicaRecord]:
        self._called_s = self._clock()
        oldest_s = self._called_s - SILENT_S
        self._records = {name: seen for name, seen in self._records.items() if seen[1] >= oldest_s}
        return [record for record, _ in self._records.values()]

    @property
    def is_unused(self) -> bool:
        return self._clock() - self._called_s > IDLE_EXIT_S


def state_of(engine: AsyncEngine) -> State:
    try:
        engine.check_health()
    except MantaError:
        return "failed"
    return "ready"


CALL_TIMEOUT_S = 5.0
NAMESPACE = "manta"


class DirectoryActor(Directory):
    def __init__(self) -> None:
        super().__init__()
        threading.Thread(target=self._exit_when_unused, args=(os.getppid(),), daemon=True).start()

    def _exit_when_unused(self, raylet: int) -> None:
        while not self.is_unused:
            time.sleep(1.0)
        if os.getppid() != raylet:  # it has died, and Ray has restarted this actor on another node
            os._exit(0)
        ray.kill(ray.get_runtime_context().current_actor, no_restart=True)


class DirectoryClient:
    """Raises UnreachableError while the directory does not answer; the next call finds or creates it."""

    def __init__(self, application: str) -> None:
        self._name = f"manta-directory-{application}"
        self._actor: Any = None  # Any: Ray's handle

    async def heartbeat(self, record: ReplicaRecord) -> None:
        await self._call("heartbeat", record)

    async def deregister(self, replica: str) -> None:
        await self._call("deregister", replica)

    async def replicas(self) -> list[ReplicaRecord]:
        return await self._call("replicas")

    async def _call(self, method: str, *arguments: object) -> Any:  # Any: what the method returns
        try:
            async with asyncio.timeout(CALL_TIMEOUT_S):
                if self._actor is None:
                    self._actor = await asyncio.to_thread(self._find)
                return await getattr(self._actor, method).remote(*arguments)
        except (TimeoutError, RayError, ValueError) as error:  # ValueError: the actor ended during the lookup
            self._actor = None
            raise UnreachableError(f"The directory {self._name} does not answer: {error!r}.") from error

    def _find(self) -> Any:
        """Get or create the actor, in no placement group: it must outlive its creator."""
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
