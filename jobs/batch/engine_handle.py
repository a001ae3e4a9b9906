"""One engine as the driver holds it: its placement, its actor, its last state, and recovery after its death.

Decides nothing; `engine_pool.py` does. What a dead engine had finished is moved into parts by tasks on the
cluster without a CPU of their own, because the driver writes no rows.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from collections.abc import Awaitable, Mapping
from typing import Any

import ray
from ray.exceptions import (
    ActorUnavailableError,
    ActorUnschedulableError,
    NodeDiedError,
    OutOfMemoryError,
    RayActorError,
    RayError,
    RayTaskError,
)

from ...actors.batch.dataset.row_reader import RowReader, RowSpans
from ...actors.batch.ledger.ledger import Ledger
from ...actors.batch.ledger.row_writer import RowWriter
from ...actors.batch.row_answerer import unanswered
from ...cluster.batch.row_ranges import RowRanges, union
from ...cluster.errors import EngineDeadError, MantaError
from .engine_actor import BatchEngine
from .messages import EngineSetup, EngineState, LeasedRows, RunTerms
from .placement import Placement

STATE_TIMEOUT_S = 5.0
CLOSE_TIMEOUT_S = 10.0
UNAVAILABLE_S = 30.0  # how long an unreachable actor may come back
POLL_S = 0.5
RECOVERY_ATTEMPTS = 3

Actor = Any  # ray.actor.ActorHandle of a dynamically wrapped class has no static methods
# No retries by Ray: what a dead task has left is read before the next one begins.
_light_task = ray.remote(num_cpus=0, max_retries=0)


class EngineHandle:
    """An engine from its placement to its end. `waits`: it would accept a lease, and there is none.

    `draining`: it is to leave within `drain_s`. `gone`: it has left, and all its finished rows are durable.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self.name = f"engine-{number:04d}-{uuid.uuid4().hex}"
        self.node_id = ""
        self.state = EngineState()
        self.working = False
        self.waits = False
        self.draining = asyncio.Event()
        self.gone = asyncio.Event()
        self.drain_s = 0.0
        self.start_s = 0.0
        self._placement: Placement | None = None
        self._actor: Actor = None

    @property
    def idle(self) -> bool:
        return self.state.running < self.state.capacity and not self.state.waiting

    def launch(self, placement: Placement, setup: ray.ObjectRef) -> None:
        """Create the engine's actor in its placement; `setup` is an `EngineSetup` in Ray's object store."""
        self._placement = placement
        resources = placement.resources
        actor = ray.remote(BatchEngine).options(
            num_cpus=resources.actor.get("CPU", 0.0),
            num_gpus=resources.actor.get("GPU"),
            scheduling_strategy=placement.strategy,
            name=f"manta-batch-engine-{self.number}-{self.name[-8:]}",  # shown by Ray's dashboard
        )
        # What the report counts device hours of: the GPUs of all the engine's processes, or else its cores.
        needs = resources.needs
        devices = ("GPU", needs["GPU"]) if "GPU" in needs else ("core", needs.get("CPU", 1.0))
        self._actor = actor.remote(setup, resources.num_threads, devices, self.number, self.name)

    async def start(self) -> str:
        begin_s = time.monotonic()
        self.node_id = await self._actor.start.remote()
        self.start_s = time.monotonic() - begin_s
        return self.node_id

    async def begin(self, terms: RunTerms) -> None:
        await self._actor.begin.remote(terms)
        self.working = True

    async def wait_for_capacity(self) -> None:
        await self._actor.wait_for_capacity.remote()

    def answer(self, lease: LeasedRows) -> Awaitable[RowRanges]:
        """Send a lease before returning. The returned rows are awaited."""
        return _result(self._actor.answer.remote(lease))

    async def return_backlog(self) -> dict[int, RowRanges]:
        with contextlib.suppress(RayError, TimeoutError):
            return await asyncio.wait_for(_result(self._actor.return_backlog.remote()), STATE_TIMEOUT_S)
        return {}

    async def drain_engine(self) -> None:
        await self._actor.drain.remote(self.drain_s)

    async def refresh(self) -> None:
        with contextlib.suppress(RayError, TimeoutError):
            self.state = await asyncio.wait_for(_result(self._actor.state.remote()), STATE_TIMEOUT_S)

    def drain(self, within_s: float) -> None:
        self.drain_s = within_s
        self.draining.set()

    async def has_died(self, error: BaseException) -> bool:
        """Return whether its process has died. An unavailable actor may come back."""
        deadline_s = time.monotonic() + UNAVAILABLE_S
        while isinstance(error, ActorUnavailableError) and time.monotonic() < deadline_s:
            await asyncio.sleep(POLL_S)
            try:
                await self._actor.state.remote()
            except RayActorError as again:
                error = again
            else:
                return False
        return not isinstance(error, ActorUnavailableError)

    async def shutdown(self) -> None:
        actor, self._actor = self._actor, None
        if actor is not None and ray.is_initialized():
            with contextlib.suppress(RayError, TimeoutError, MantaError):
                await asyncio.wait_for(_result(actor.close.remote()), CLOSE_TIMEOUT_S)
            ray.kill(actor)
        placement, self._placement = self._placement, None
        if placement is not None:
            placement.release()


class CrashRecovery:
    """Recovers what dead writers of a job leave: finished rows, and rows that killed their engines."""

    def __init__(self, setup: ray.ObjectRef, terms: RunTerms, ledger: Ledger) -> None:
        self._setup = setup
        self._terms = terms
        self._ledger = ledger
        self._reading = asyncio.Lock()  # of the ledger

    async def recover(self, writer: str) -> RowRanges:
        """Move what a dead writer has finished into parts. Returns those rows. Raises OutputError."""
        for attempt in range(1, RECOVERY_ATTEMPTS + 1):
            async with self._reading:
                await asyncio.to_thread(self._ledger.refresh)
                durable = self._ledger.durable(writer)
                if writer not in self._ledger.orphans:  # it left no segments
                    return durable
                known = self._ledger.already_merged(writer)
            try:
                return union(durable, await _take_over.remote(self._setup, self._terms, writer, known))
            except RayError as error:
                if isinstance(error, RayTaskError) or attempt == RECOVERY_ATTEMPTS:
                    raise
        raise AssertionError("the last attempt returns or raises")

    async def write_poison_rows(
        self, spans: RowSpans, deaths: Mapping[int, int], shards: Mapping[int, int | None]
    ) -> None:
        """Write error rows for rows that killed engines; `deaths` and `shards` are by row."""
        await _write_poison_rows.remote(self._setup, self._terms, spans, deaths, shards)


@_light_task
def _take_over(setup: EngineSetup, terms: RunTerms, writer: str, known: RowRanges) -> RowRanges:
    heir = _recovery_writer(setup, terms)
    rows = heir.take_over(writer, known)
    heir.close()
    return rows


@_light_task
def _write_poison_rows(
    setup: EngineSetup,
    terms: RunTerms,
    spans: RowSpans,
    deaths: Mapping[int, int],
    shards: Mapping[int, int | None],
) -> None:
    writer, row_schema = _recovery_writer(setup, terms), setup.row_schema
    with contextlib.closing(RowReader(setup.source, row_schema)) as reader:
        for row in reader.read(spans):
            num_deaths = deaths[row.number]
            message = (
                f"Every engine with this row died: {num_deaths} times, the last time with this row alone. "
                "All other rows continue without it."
            )
            kind, columns = EngineDeadError.__name__, terms.form.columns
            result = unanswered(row, kind, message, row_schema, columns, attempts=num_deaths)
            writer.add([result], shard=shards[row.number])
    writer.close()


def _recovery_writer(setup: EngineSetup, terms: RunTerms) -> RowWriter:
    name = f"recovery-{uuid.uuid4().hex}"
    return RowWriter(setup.output, terms.form, run=terms.run, shard=0, writer=name)


def root_cause(error: BaseException) -> BaseException:
    """Return the error inside wrappers of Ray and of task groups; a MantaError if there is one."""
    found = list(_inside(error))
    ours = [each for each in found if isinstance(each, MantaError)]
    fatal = [each for each in ours if not isinstance(each, EngineDeadError)]
    return (fatal or ours or found)[0]


def engine_died(error: BaseException) -> bool:
    """Return whether the error says only that an engine has ended, so that another may replace it."""
    if isinstance(error, RayActorError):
        return not error.actor_init_failed
    return isinstance(error, (EngineDeadError, OutOfMemoryError, NodeDiedError, ActorUnschedulableError))


def _inside(error: BaseException) -> list[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        return [inner for each in error.exceptions for inner in _inside(each)]
    if isinstance(error, RayTaskError) and isinstance(error.cause, BaseException):
        return _inside(error.cause)
    return [error]


async def _result(ref: ray.ObjectRef) -> Any:
    return await ref
