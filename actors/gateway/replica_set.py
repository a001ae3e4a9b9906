"""The replicas as a gateway sees them: who is there, how loaded each is, who has just died.

Filled from the directory twice a second; a replica whose socket fails is left out until its beats go on. A
directory that does not answer takes nobody away. Lives on the gateway's event loop.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from ...cluster.errors import ModelNotFoundError, NoReplicaError, OverloadedError, UnreachableError, shown
from ...cluster.fleet.router import LOAD_FACTOR, LOAD_SLACK, RouteChoice, Router
from .registry_records import BEAT_S, SILENT_S, DirectoryPort, ReplicaRecord

logger = logging.getLogger(__name__)

# A request to a model that sleeps waits so long for a replica, and looks so often.
WAKE_S = 600.0
LOOK_S = 0.2
# A replica that is silent for SILENT_S gets nothing new; after so long, its streams go elsewhere.
LOST_S = 10.0


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model behind the gateway.

    Attributes:
        names: that requests may use, the reported one first.
        sleeps: it may have no replica and be well; a request then gets one started, and waits for it.
    """

    names: tuple[str, ...]
    sleeps: bool = False


@dataclass(slots=True, eq=False)
class Member:
    """One replica.

    Attributes:
        record: its last beat.
        heard_s: when that came, monotonic.
        here: requests of this gateway that are there now.
        others: those of other gateways, by its last beat.
        broken: its socket failed and it has not been heard of since.
        tests_suspect: it serves a request under which another replica died (`isolation.py`).
    """

    record: ReplicaRecord
    heard_s: float
    here: int = 0
    others: int = 0
    broken: bool = False
    tests_suspect: bool = False
    _peaks: tuple[int, int] = (0, 0)  # most of ours, between the last two beats and since
    _attempts: set[asyncio.Timeout] = field(default_factory=set[asyncio.Timeout])

    @property
    def name(self) -> str:
        return self.record.replica

    @property
    def load(self) -> float:
        """Requests there: this gateway's, known at once, and others', known from beats."""
        return self.here + self.others

    @property
    def is_ready(self) -> bool:
        """As far as it has said."""
        return not self.broken and self.record.state == "ready"

    def hear(self, record: ReplicaRecord, now_s: float) -> None:
        """Take in what the directory has of it, news or not."""
        if record.beat != self.record.beat:
            self.heard_s, self.broken = now_s, False
            # Our own may have ended since it counted.
            self.others = max(0, record.running + record.waiting - max(self._peaks))
            self._peaks = self._peaks[1], self.here
        self.record = record

    @contextmanager
    def attempt(self) -> Iterator[asyncio.Timeout]:
        """A request is there. What is yielded, entered, ends in TimeoutError if the replica is lost."""
        bound = asyncio.timeout(None)
        self._attempts.add(bound)
        self.here += 1
        self._peaks = self._peaks[0], max(self._peaks[1], self.here)
        try:
            yield bound
        finally:
            self.here -= 1
            self._attempts.discard(bound)

    def lose(self) -> None:
        """End what waits for the replica."""
        now_s = asyncio.get_running_loop().time()
        for bound in self._attempts:
            bound.reschedule(now_s)


class Fleet:
    """All replicas of all models.

    Args:
        models: in the order in which they are listed.
        directory: asked twice a second.
        wake: brings a replica to a model that sleeps; None if none does.
    """

    def __init__(
        self,
        models: Sequence[ServedModel],
        directory: DirectoryPort,
        wake: Callable[[ServedModel], Coroutine[Any, Any, None]] | None = None,
    ) -> None:
        self.models = models
        self._directory = directory
        self._wake = wake
        self._waking: dict[ServedModel, asyncio.Task[None]] = {}
        self._by_name = {name: model for model in models for name in model.names}
        self._routers = {model.names[0]: Router() for model in models}
        self._members: dict[str, Member] = {}
        self._answered_s = time.monotonic()  # when the directory last did

    @property
    def members(self) -> Iterable[Member]:
        return self._members.values()

    def find(self, name: str | None) -> ServedModel:
        """The model of a name; without one, the only or first model. Raises ModelNotFoundError."""
        if name is None:
            return self.models[0]
        if name in self._by_name:
            return self._by_name[name]
        served = ", ".join(self._by_name)
        raise ModelNotFoundError(
            f"The model {shown(name)} is not served here. Served: {served}.", param="model"
        )

    def ready(self, model: ServedModel) -> list[Member]:
        """Replicas that answer, as far as is known: those that were heard lately, or else those that were."""
        name = model.names[0]
        found = [m for m in self._members.values() if m.record.names[0] == name and m.is_ready]
        heard = [member for member in found if self._answered_s - member.heard_s <= SILENT_S]
        return heard or found

    def check(self, model: ServedModel) -> list[Member]:
        """`ready`; raises NoReplicaError if nobody is."""
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
        """Who gets a request.

        Args:
            without: replicas that have refused it.

        Raises:
            OverloadedError: all that are there are full.
            NoReplicaError: none is there.
        """
        there = self.check(model)
        able = {member.name: _weight(member) for member in self._able(model, there, without)}
        choice = self._routers[model.names[0]].choose(able, chain, session)
        return self._members[choice.replica], choice

    def choose_for_suspect(
        self, model: ServedModel, chain: Sequence[int] = (), *, without: Iterable[str] = ()
    ) -> Member | None:
        """Return a replica that tests no suspect; None while as many test one as may.

        Half of the model's replicas may, and at least one: the others serve whatever the suspects do.
        Raises as `choose`.
        """
        there = self.check(model)
        able = {m.name: m.load for m in self._able(model, there, without) if not m.tests_suspect}
        if not able or sum(member.tests_suspect for member in there) >= max(1, len(there) // 2):
            return None
        return self._members[self._routers[model.names[0]].choose(able, chain).replica]

    @staticmethod
    def _able(model: ServedModel, there: Sequence[Member], without: Iterable[str]) -> list[Member]:
        found = [m for m in there if m.load < m.record.max_requests and m.name not in without]
        if not found:
            raise OverloadedError(f"All {len(there)} replicas of {model.names[0]} are full. Retry.")
        return found

    async def rouse(self, model: ServedModel) -> None:
        """Wait for a replica of a model that sleeps; not for one that nobody can start, and not for ever."""
        deadline_s = time.monotonic() + WAKE_S
        while model.sleeps and not self.ready(model) and time.monotonic() < deadline_s:
            if (waking := self._call_awake(model)) is None:
                return
            await asyncio.wait({waking}, timeout=LOOK_S)
            if waking.done():
                if (error := waking.exception()) is not None:
                    logger.warning("no replica of %s could be started: %r", model.names[0], error)
                    return
                await asyncio.sleep(LOOK_S)  # it is there; its first beat is not yet

    def _call_awake(self, model: ServedModel) -> asyncio.Task[None] | None:
        """One call for all requests; it waits until there is a replica."""
        if self._wake is None:
            return None
        if model not in self._waking or self._waking[model].done():
            self._waking[model] = asyncio.create_task(self._wake(model))
        return self._waking[model]

    def mark_broken(self, member: Member) -> None:
        """Its socket failed."""
        if not member.broken:
            logger.warning("replica %s does not answer", member.name)
        member.broken = True

    async def watch_forever(self) -> None:
        """Follow the directory. Cancelled at the end."""
        while True:
            try:
                self.update(await self._directory.replicas())
            except UnreachableError as error:
                logger.warning("%s", error)
            except Exception:  # a task's edge: who is known stays known
                logger.exception("the directory of replicas could not be read")
            self._drop_lost()
            await asyncio.sleep(BEAT_S)

    def update(self, records: Iterable[ReplicaRecord]) -> None:
        """Take in what the directory says."""
        now_s = time.monotonic()
        if now_s - self._answered_s > 2 * BEAT_S:  # nobody was silent but the directory, or we were deaf
            for member in self._members.values():
                member.heard_s = now_s
        self._answered_s = now_s
        for record in records:
            if record.names[0] not in self._routers:
                continue
            if record.replica in self._members:
                self._members[record.replica].hear(record, now_s)
            else:
                self._members[record.replica] = Member(record, now_s, others=record.running + record.waiting)

    def _drop_lost(self) -> None:
        """Forget who is silent while others are heard; what waits for them goes elsewhere."""
        for name, member in list(self._members.items()):
            if self._answered_s - member.heard_s > LOST_S:
                member.lose()
                if not member.here:
                    del self._members[name]
                    self._routers[member.record.names[0]].forget(name)


def _weight(member: Member) -> float:
    """The load by which a replica is chosen. One that tests a suspect may die of it: others go first."""
    if not member.tests_suspect:
        return member.load
    return LOAD_FACTOR * member.load + LOAD_SLACK + 1.0
