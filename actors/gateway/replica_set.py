"""A gateway's view of the replicas: which are ready, how loaded each is, which have just died.

Updated from the directory twice a second. After its socket fails a replica gets no request until its next
heartbeat. If the directory does not answer, no replica is removed. Runs on the gateway's event loop.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from ...cluster.errors import ModelNotFoundError, NoReplicaError, OverloadedError, UnreachableError, brief
from ...cluster.fleet.router import LOAD_FACTOR, LOAD_SLACK, RouteChoice, Router
from .replica_registry import HEARTBEAT_S, SILENT_S, DirectoryClient, ReplicaRecord

logger = logging.getLogger(__name__)

# Seconds that a request to a model without replicas waits for one, and between two looks.
WAKE_S = 600.0
POLL_S = 0.2
# A replica without heartbeats for SILENT_S gets no new requests; after this time, its streams move elsewhere.
LOST_S = 10.0


@dataclass(frozen=True, slots=True)
class ServedModel:
    names: tuple[str, ...]  # names in requests; the first one is reported
    sleeps: bool = False  # the model may scale to zero replicas; a request then starts one and waits for it


@dataclass(slots=True, eq=False)
class Member:
    record: ReplicaRecord
    last_seen_s: float  # when that arrived, monotonic
    here: int = 0  # requests from this gateway in flight there
    others: int = 0  # requests from other gateways, by its last heartbeat
    broken: bool = False  # its socket failed, and no heartbeat has arrived since
    tests_suspect: bool = False  # it serves requests under which another replica died (`isolation.py`)
    _peaks: tuple[int, int] = (0, 0)  # peak of `here` between the last two heartbeats, and since the last
    _attempts: set[asyncio.Timeout] = field(default_factory=set[asyncio.Timeout])

    @property
    def name(self) -> str:
        return self.record.replica

    @property
    def load(self) -> float:
        """Requests there: this gateway's now, and others' as of the last heartbeat."""
        return self.here + self.others

    @property
    def is_ready(self) -> bool:
        return not self.broken and self.record.state == "ready"

    def update(self, record: ReplicaRecord, now_s: float) -> None:
        if record.beat != self.record.beat:
            self.last_seen_s, self.broken = now_s, False
            # Some of our own requests may have ended since the replica counted them.
            self.others = max(0, record.running + record.waiting - max(self._peaks))
            self._peaks = self._peaks[1], self.here
        self.record = record

    @contextmanager
    def attempt(self) -> Iterator[asyncio.Timeout]:
        """Count a request as in flight. The yielded timeout expires if the replica is lost."""
        bound = asyncio.timeout(None)
        self._attempts.add(bound)
        self.here += 1
        self._peaks = self._peaks[0], max(self._peaks[1], self.here)
        try:
            yield bound
        finally:
            self.here -= 1
            self._attempts.discard(bound)

    def expire(self) -> None:
        now_s = asyncio.get_running_loop().time()
        for bound in self._attempts:
            bound.reschedule(now_s)


class Fleet:
    """All replicas of all models, listed in this order. `wake` starts a replica of a sleeping model."""

    def __init__(
        self,
        models: Sequence[ServedModel],
        directory: DirectoryClient,
        wake: Callable[[ServedModel], Coroutine[Any, Any, None]] | None = None,
    ) -> None:
        self.models = models
        self._directory = directory
        self._wake = wake
        self._waking: dict[ServedModel, asyncio.Task[None]] = {}
        self._by_name = {name: model for model in models for name in model.names}
        self._routers = {model.names[0]: Router() for model in models}
        self._members: dict[str, Member] = {}
        self._answered_s = time.monotonic()  # when the directory last answered

    @property
    def members(self) -> Iterable[Member]:
        return self._members.values()

    def find(self, name: str | None) -> ServedModel:
        """Return a name's model; the first for None. Raises ModelNotFoundError."""
        if name is None:
            return self.models[0]
        if name in self._by_name:
            return self._by_name[name]
        served = ", ".join(self._by_name)
        raise ModelNotFoundError(
            f"The model {brief(name)} is not served here. Served: {served}.", param="model"
        )

    def ready(self, model: ServedModel) -> list[Member]:
        """Return the ready replicas with a recent heartbeat; without any, all ready ones."""
        name = model.names[0]
        found = [m for m in self._members.values() if m.record.names[0] == name and m.is_ready]
        recent = [member for member in found if self._answered_s - member.last_seen_s <= SILENT_S]
        return recent or found

    def check(self, model: ServedModel) -> list[Member]:
        """Return `ready(model)`. Raises NoReplicaError if that is empty."""
        found = self.ready(model)
        if not found:
            raise NoReplicaError(f"No replica of {model.names[0]} can answer at this moment. Retry.")
        return found

    def choose(
        self,
        model: ServedModel,
        chain: Sequence[int] = (),
        session: str | None = None,
        *,
        without: Iterable[str] = (),
    ) -> tuple[Member, RouteChoice]:
        """Choose the replica of a request. Raises OverloadedError if all are full, NoReplicaError.

        `chain`: hashes of the prompt's prefixes. `session`: its requests get the same replica. `without`:
        replicas that have refused the request.
        """
        there = self.check(model)
        able = {member.name: _weight(member) for member in self._able(model, there, without)}
        choice = self._routers[model.names[0]].choose(able, chain, session)
        return self._members[choice.replica], choice

    def choose_for_suspect(
        self,
        model: ServedModel,
        has_room: Callable[[Member], bool],
        chain: Sequence[int] = (),
        *,
        without: Iterable[str] = (),
    ) -> Member | None:
        """Choose a replica that has room for a suspect; None while there is none.

        Half of the model's replicas (at least one) may test suspects.
        """
        there = self.check(model)
        testing = [member for member in there if member.tests_suspect]
        allowed = testing if len(testing) >= max(1, len(there) // 2) else there
        able = {m.name: m.load for m in self._able(model, there, without) if m in allowed and has_room(m)}
        if not able:
            return None
        return self._members[self._routers[model.names[0]].choose(able, chain).replica]

    @staticmethod
    def _able(model: ServedModel, candidates: Sequence[Member], without: Iterable[str]) -> list[Member]:
        found = [m for m in candidates if m.load < m.record.max_requests and m.name not in without]
        if not found:
            raise OverloadedError(f"All {len(candidates)} replicas of {model.names[0]} are full. Retry.")
        return found

    async def wake_model(self, model: ServedModel) -> None:
        """Wait up to WAKE_S for a replica of a sleeping model; return without if none can be started."""
        deadline_s = time.monotonic() + WAKE_S
        while model.sleeps and not self.ready(model) and time.monotonic() < deadline_s:
            if (waking := self._wake_call(model)) is None:
                return
            await asyncio.wait({waking}, timeout=POLL_S)
            if waking.done():
                if (error := waking.exception()) is not None:
                    logger.warning("no replica of %s could be started: %r", model.names[0], error)
                    return
                await asyncio.sleep(POLL_S)  # the replica runs; its first heartbeat has not arrived yet

    def _wake_call(self, model: ServedModel) -> asyncio.Task[None] | None:
        """Return the one call that starts a replica for all waiting requests."""
        if self._wake is None:
            return None
        if model not in self._waking or self._waking[model].done():
            self._waking[model] = asyncio.create_task(self._wake(model))
        return self._waking[model]

    def mark_broken(self, member: Member) -> None:
        if not member.broken:
            logger.warning("replica %s does not answer", member.name)
        member.broken = True

    async def watch_forever(self) -> None:
        while True:
            try:
                self.update(await self._directory.replicas())
            except UnreachableError as error:
                logger.warning("%s", error)
            except Exception:  # top level of a task; known replicas stay known
                logger.exception("the directory of replicas could not be read")
            self._drop_lost()
            await asyncio.sleep(HEARTBEAT_S)

    def update(self, records: Iterable[ReplicaRecord]) -> None:
        now_s = time.monotonic()
        if now_s - self._answered_s > 2 * HEARTBEAT_S:  # the directory was silent or this loop blocked
            for member in self._members.values():
                member.last_seen_s = now_s
        self._answered_s = now_s
        for record in records:
            if record.names[0] not in self._routers:
                continue
            self._routers[record.names[0]].set_tier(record.replica, record.kv_tier)
            if record.replica in self._members:
                self._members[record.replica].update(record, now_s)
            else:
                self._members[record.replica] = Member(record, now_s, others=record.running + record.waiting)

    def _drop_lost(self) -> None:
        """Drop replicas that are silent while others are heard; their requests move elsewhere."""
        for name, member in list(self._members.items()):
            if self._answered_s - member.last_seen_s > LOST_S:
                member.expire()
                if not member.here:
                    del self._members[name]
                    self._routers[member.record.names[0]].remove_replica(name)


def _weight(member: Member) -> float:
    """Return the load for routing; higher while it tests a suspect, since it may die."""
    if not member.tests_suspect:
        return member.load
    return LOAD_FACTOR * member.load + LOAD_SLACK + 1.0
