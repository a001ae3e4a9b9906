"""What is known of replicas: the record that each beats twice a second, and the book of who was heard of.

Neither who carries them about (`replica_registry.py`) nor what a gateway makes of them (`replica_set.py`).
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
# A replica that has not been heard of for so long gets no requests.
SILENT_S = 3.0
ALONE_S = 15.0


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


class DirectoryPort(Protocol):
    """A directory somewhere else; calls raise UnreachableError while it cannot be had."""

    async def beat(self, record: ReplicaRecord) -> None: ...

    async def leave(self, replica: str) -> None: ...

    async def replicas(self) -> list[ReplicaRecord]: ...


def state_of(engine: AsyncEngine) -> State:
    """Of a started engine."""
    try:
        engine.check_health()
    except MantaError:
        return "failed"
    return "ready"
