"""The directory of an application's replicas: a small named Ray actor without a CPU.

Replicas send it heartbeats and gateways query it. Its whole state is rebuilt by the next heartbeats, so it
may die: Ray restarts it on any node. It ends itself when it has not been called for a while.
"""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from ...cluster.errors import UnreachableError
from .registry_records import Directory, ReplicaRecord

CALL_TIMEOUT_S = 5.0
NAMESPACE = "manta"


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
    """Client of one application's directory for replicas and gateways: a `DirectoryPort`.

    After a failed call, the next one looks up the actor again, or creates it.
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
        except (TimeoutError, RayError, ValueError) as error:  # ValueError: the actor ended during the lookup
            self._actor = None
            raise UnreachableError(f"The directory {self._name} does not answer: {error!r}.") from error

    def _find(self) -> Any:
        """Get or create the actor. In no placement group: it must outlive the replica that created it."""
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
