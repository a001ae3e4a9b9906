"""Records of replicas: the heartbeat that each sends twice a second, and the table of the last heartbeats.

`replica_registry.py` transports them; `replica_set.py` is what a gateway derives from them.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

from ...cluster.errors import MantaError

if TYPE_CHECKING:
    from ..engine.async_engine import AsyncEngine

State = Literal["ready", "draining", "failed"]

BEAT_S = 0.5
# A replica whose last heartbeat is older than this gets no requests.
SILENT_S = 3.0
ALONE_S = 15.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaRecord:
    """One heartbeat of a replica.

    Attributes:
        replica: its id in Serve.
        names: names of its model; the first identifies the model.
        url: of its endpoint for gateways; requests must carry `token`.
        beat: number of this heartbeat.
        state: "failed" when its engine is dead.
        running, waiting: requests there.
        max_requests: requests that it should have at most.
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
    """The last heartbeat of each replica; the state of the directory actor."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._records: dict[str, tuple[ReplicaRecord, float]] = {}
        self._called_s = clock()

    def beat(self, record: ReplicaRecord) -> None:
        self._called_s = self._clock()
        self._records[record.replica] = record, self._called_s

    def leave(self, replica: str) -> None:
        """Remove a replica that has ended."""
        self._records.pop(replica, None)

    def replicas(self) -> list[ReplicaRecord]:
        """Return the replicas with a recent heartbeat."""
        self._called_s = self._clock()
        oldest_s = self._called_s - SILENT_S
        self._records = {name: seen for name, seen in self._records.items() if seen[1] >= oldest_s}
        return [record for record, _ in self._records.values()]

    @property
    def is_alone(self) -> bool:
        return self._clock() - self._called_s > ALONE_S


class DirectoryPort(Protocol):
    """Interface of a remote directory; calls raise UnreachableError while it does not answer."""

    async def beat(self, record: ReplicaRecord) -> None: ...

    async def leave(self, replica: str) -> None: ...

    async def replicas(self) -> list[ReplicaRecord]: ...


def state_of(engine: AsyncEngine) -> State:
    """Return the state of a replica with a started engine."""
    try:
        engine.check_health()
    except MantaError:
        return "failed"
    return "ready"
