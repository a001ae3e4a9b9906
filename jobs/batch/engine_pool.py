"""The engines of a batch job on the cluster: starts them, hands out leases, replaces, scales and ends them.

    place ─▶ start ─▶ begin ─▶ capacity? a lease! ... ─▶ leave ─▶ gone
                 any of it ─ dies ─▶ recover its rows, lease the others again, start another engine

Each engine has a task from its placement to its end; one more task watches all of them. Everything runs on
one event loop, in the thread of `job.py`. `LeaseManager` knows which engine has which rows, the ledger which
rows are durable: nothing here is lost when the driver is killed.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TypeVar

import ray

from ...actors.batch.ledger.job_spec import JobSpec
from ...actors.batch.ledger.ledger import Ledger
from ...actors.batch.ledger.output_parts import OutputForm
from ...actors.batch.row_index import RowIndex
from ...actors.batch.row_stats import EngineTotals, RowStats
from ...cluster.batch.engine_pool_size import Concurrency, PoolSize
from ...cluster.batch.leases import Lease, LeaseManager
from ...cluster.batch.row_ranges import RowRanges, count, difference, iterate_rows
from ...cluster.errors import EngineDeadError, MantaError
from .engine_handle import CrashRecovery, EngineHandle, engine_died, root_cause
from .messages import EngineSetup, LeasedRows, RunTerms
from .placement import NodeWatch, Placements, draining_nodes, living_nodes

POLL_S = 0.25
REFRESH_INTERVAL_S = 1.0  # while all engines have rows: a refresh takes time of the cores they compute on
DRAIN_TIMEOUT_S = 90.0  # longer than a writer retries
MAX_DEATHS = 5  # of engines, with blame and in a row, without a row that became durable between them
MAX_QUARANTINE_DEATHS = 20  # the same while rows are bisected

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class EngineJob:
    """Rows, leases and output of a job. Dead writers may have finished some of `rows`.

    `largest` and `smallest` are rows of a lease.
    """

    spec: JobSpec
    index: RowIndex
    ledger: Ledger
    form: OutputForm
    rows: RowRanges
    num_rows: int
    largest: int
    smallest: int

    @property
    def terms(self) -> RunTerms:
        return RunTerms(self.ledger.run, self.form)


@dataclass(slots=True)
class RunProgress:
    """Work that engines have done in this run; `live` includes ended engines."""

    rows: RowStats = field(default_factory=RowStats)
    live: EngineTotals = field(default_factory=EngineTotals)
    engines: int = 0

    def add(self, rows: RowStats, live: EngineTotals) -> None:
        self.rows.merge(rows)
        self.live = self.live.merge(live)


class EnginePool:
    """Runs engines until all rows of a job are durable. Create it on a running event loop."""

    def __init__(
        self,
        setup: EngineSetup,
        bounds: Concurrency,
        say: Callable[[str], None],
        show: Callable[[RunProgress], None],
    ) -> None:
        self._setup = setup
        self._bounds = bounds
        self._say = say
        self._show = show
        self._shared = ray.put(setup)
        self._size = PoolSize(bounds)
        self._placements: Placements | None = None
        self._recovery: CrashRecovery | None = None
        self._engines: list[EngineHandle] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._num_opened = 0
        self._leases: LeaseManager | None = None
        self._job: asyncio.Future[EngineJob] = asyncio.get_running_loop().create_future()
        self._end: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._wake = asyncio.Event()  # the watch
        self._changed = asyncio.Event()  # engines that wait for rows; replaced each time
        self._deaths = 0
        self._output_fails = False
        self._past = RunProgress()  # of engines that are gone

    async def run(self, startup: Awaitable[EngineJob]) -> None:
        """Return when all rows are durable; after `stop` or an error, when all finished rows are."""
        tasks = [asyncio.create_task(self._guard(work)) for work in (self._watch(), self._begin(startup))]
        try:
            await self._end
        finally:
            for task in tasks:
                task.cancel()
            await self._drain_all()

    def stop(self) -> None:
        self._finish(None)

    async def close(self) -> None:
        while self._tasks:
            await asyncio.wait(self._tasks)

    def _finish(self, error: BaseException | None) -> None:
        if self._end.done():
            if isinstance(error, MantaError):
                self._say(error.message)
        elif error is None:
            self._end.set_result(None)
        else:
            self._end.set_exception(error)

    async def _guard(self, work: Awaitable[None]) -> None:
        try:
            await work
        except Exception as error:
            self._finish(root_cause(error))

    async def _drain_all(self) -> None:
        for engine in self._engines:
            engine.drain(0.0)
        draining = [asyncio.create_task(engine.gone.wait()) for engine in self._engines]
        if draining:
            await asyncio.wait(draining, timeout=DRAIN_TIMEOUT_S)
        for task in (*draining, *(self._tasks if not all(task.done() for task in draining) else ())):
            task.cancel()
        self._show(self._done())

    # All engines.

    async def _begin(self, startup: Awaitable[EngineJob]) -> None:
        self._placements = await asyncio.to_thread(
            Placements, self._setup.config, self._bounds.maximum, self._bounds.minimum, self._say
        )
        self._adjust()
        job = await startup
        self._recovery = CrashRecovery(self._shared, job.terms, job.ledger)
        rows = job.rows
        for writer in job.ledger.orphans:
            rows = difference(rows, await self._recovery.recover(writer))
        self._leases = LeaseManager(
            rows, largest=job.largest, smallest=job.smallest, ordered=job.form.ordered
        )
        self._job.set_result(job)
        self._notify()

    async def _watch(self) -> None:
        nodes, refreshed_s = NodeWatch(), time.monotonic()
        while True:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._wake.wait(), POLL_S)
            self._wake.clear()
            every_s = POLL_S if any(engine.waits for engine in self._engines) else REFRESH_INTERVAL_S
            if (passed_s := time.monotonic() - refreshed_s) >= every_s:
                refreshed_s += passed_s
                await self._refresh(nodes, passed_s)
            self._adjust()
            if self._leases is not None and self._leases.done:
                self._finish(None)

    async def _refresh(self, nodes: NodeWatch, passed_s: float) -> None:
        """Read the state of the engines, show it, and act on it.

        Engines whose node leaves are drained. If no row is left to lease and an engine has nothing to do, the
        one with the longest backlog returns it.
        """
        working = [engine for engine in self._engines if engine.working]
        await asyncio.gather(*(engine.refresh() for engine in working))
        self._size.record_work(len(working), passed_s)
        self._show(self._done())
        for node_id, within_s in (await nodes.draining()).items():
            for engine in working:
                if engine.node_id == node_id and not engine.draining.is_set():
                    self._say(f"engine {engine.number} leaves: its node is about to leave the cluster")
                    engine.drain(within_s)
        failing = any(engine.state.failing_s is not None for engine in working)
        if failing and not self._output_fails:
            self._say("the output cannot be written; answers are kept in memory and written later")
        elif self._output_fails and not failing:
            self._say("the output can be written again")
        self._output_fails = failing
        working = [engine for engine in working if not engine.draining.is_set()]
        if (
            self._leases is not None
            and not self._leases.num_unleased
            and any(engine.idle for engine in working)
        ):
            longest = max(working, key=lambda engine: engine.state.waiting)
            if longest.state.waiting:
                await self._return_backlog(longest)

    async def _return_backlog(self, engine: EngineHandle) -> None:
        assert self._leases is not None, "engines work when there are leases"
        for lease, rows in (await engine.return_backlog()).items():
            self._leases.return_rows(lease, rows)
        self._notify()

    def _adjust(self) -> None:
        if self._end.done() or self._placements is None:
            return
        leases, remaining = self._leases, self._remaining()
        free = [engine for engine in remaining if leases is not None and not leases.leases_of(engine.name)]
        num_unleased = None if leases is None else leases.num_unleased
        wanted = self._size.target_size(num_unleased, len(remaining), len(remaining) - len(free))
        for _ in range(wanted - len(remaining)):
            engine = EngineHandle(self._num_opened)
            self._num_opened += 1
            self._engines.append(engine)
            task = asyncio.create_task(self._run_engine(engine))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        free.sort(key=lambda engine: engine.working)  # drain engines without a placement first
        for engine in free[: max(len(remaining) - wanted, 0)]:
            engine.drain(0.0)

    def _remaining(self) -> list[EngineHandle]:
        return [engine for engine in self._engines if not engine.draining.is_set()]

    def _notify(self) -> None:
        self._wake.set()
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    def _done(self) -> RunProgress:
        done = RunProgress(engines=sum(engine.working for engine in self._engines))
        done.add(self._past.rows, self._past.live)
        for engine in self._engines:
            done.add(engine.state.rows, engine.state.engine)
        return done

    # One engine.

    async def _run_engine(self, engine: EngineHandle) -> None:
        try:
            await self._serve(engine)
        except Exception as error:
            await self._guard(self._on_error(engine, root_cause(error)))
        finally:
            engine.working = False
            self._past.add(engine.state.rows, engine.state.engine)
            self._engines.remove(engine)
            engine.gone.set()
            self._notify()
            await engine.shutdown()

    async def _serve(self, engine: EngineHandle) -> None:
        """Run an engine from its placement until it has left, or was drained before it began."""
        assert self._placements is not None, "engines are started when there are placements"
        if (placement := await _unless(engine.draining, self._placements.find_placement())) is None:
            return
        engine.launch(placement, self._shared)
        if await _unless(engine.draining, engine.start()) is None:
            return
        self._size.record_startup(engine.start_s)
        if (job := await _unless(engine.draining, asyncio.shield(self._job))) is None:
            return
        await engine.begin(job.terms)
        async with asyncio.TaskGroup() as calls:  # one that fails ends them all
            await self._hand_out(engine, job, calls)
            await engine.drain_engine()
        await engine.refresh()

    async def _hand_out(self, engine: EngineHandle, job: EngineJob, calls: asyncio.TaskGroup) -> None:
        assert self._leases is not None, "engines work when there are leases"
        while not engine.draining.is_set():
            changed = self._changed
            await _unless(engine.draining, engine.wait_for_capacity())
            if engine.draining.is_set():
                break
            if (lease := self._leases.acquire(engine.name, len(self._remaining()))) is None:
                engine.waits = True
                await _unless(engine.draining, changed.wait())
                engine.waits = False
                continue
            spans = await asyncio.to_thread(job.index.spans, lease.rows)
            call = engine.answer(LeasedRows(lease.number, lease.rows, spans, lease.shard, lease.deaths + 1))
            calls.create_task(self._end_lease(lease, call))
        if engine.drain_s:
            await self._return_backlog(engine)

    async def _end_lease(self, lease: Lease, call: Awaitable[RowRanges]) -> None:
        assert self._leases is not None, "engines work when there are leases"
        returned = await call
        answered = difference(lease.rows, returned)
        self._leases.mark_durable(lease.number, answered)
        self._leases.return_rows(lease.number, returned)
        self._count_durable(answered)
        self._notify()

    def _count_durable(self, rows: RowRanges) -> None:
        if rows:
            self._deaths = 0
            self._size.record_answered_rows(count(rows))

    async def _on_error(self, engine: EngineHandle, error: BaseException) -> None:
        """Recover from the death of an engine. Raises any other error, which ends the job."""
        if not engine_died(error):
            raise error
        blame = await engine.has_died(error) and await self._node_remains(engine)
        engine.working = False
        engine.drain(0.0)  # another is started
        await engine.shutdown()
        is_quarantined = await self._recover(engine, blame=blame) if self._leases is not None else False
        what = "died" if blame else "was lost with its node or its connection"
        self._say(f"engine {engine.number} {what}; its rows go to others")
        self._deaths += blame
        if self._deaths >= (MAX_QUARANTINE_DEATHS if is_quarantined else MAX_DEATHS):
            raise EngineDeadError(
                f"{self._deaths} engines have died one after the other, without a row answered between them. "
                f"The last one: {' '.join(str(error).split())}"
            )

    async def _node_remains(self, engine: EngineHandle) -> bool:
        if not engine.node_id:
            return True
        living, draining = await asyncio.to_thread(lambda: (living_nodes(), draining_nodes()))
        return engine.node_id in living and engine.node_id not in draining

    async def _recover(self, engine: EngineHandle, *, blame: bool) -> bool:
        """Recover the rows of a dead engine. Returns whether they were in quarantine."""
        assert self._leases is not None and self._recovery is not None, "there is a job"
        job = self._job.result()
        is_quarantined = any(lease.alone for lease in self._leases.leases_of(engine.name))
        durable = await self._recovery.recover(engine.name)
        poison = self._leases.on_engine_death(engine.name, durable, blame=blame)
        self._count_durable(durable)
        self._notify()
        if poison:
            deaths = {row: self._leases.poison[row] for row in iterate_rows(poison)}
            shards = {row: row // job.largest if job.form.ordered else None for row in deaths}
            spans = await asyncio.to_thread(job.index.spans, poison)
            await self._recovery.write_poison_rows(spans, deaths, shards)
        return is_quarantined


async def _unless(event: asyncio.Event, work: Awaitable[T]) -> T | None:
    """Return the result of `work`; cancel it and return None if the event comes first."""
    task, stop = asyncio.ensure_future(work), asyncio.ensure_future(event.wait())
    try:
        await asyncio.wait((task, stop), return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    finally:
        for each in (task, stop):
            each.cancel()
        await asyncio.gather(task, stop, return_exceptions=True)
