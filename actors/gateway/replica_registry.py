"""The directory: which replicas of an application are there. A small named Ray actor without a CPU.

Replicas beat into it, gateways ask it; nobody else knows of it. It keeps nothing that the next beats do not
bring again, so it may die: Ray starts it anew wherever there is a node. It ends by itself when nobody has
called for a while.
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
    """The directory of one application, as replicas and gateways reach it: a `DirectoryPort`.

    After a call that failed the next one looks for the actor anew, or makes it.
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
        except (TimeoutError, RayError, ValueError) as error:  # ValueError: it went while it was looked for
            self._actor = None
            raise UnreachableError(f"The directory {self._name} does not answer: {error!r}.") from error

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
