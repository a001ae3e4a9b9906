"""The engine actor of a batch job: gets leases of rows, and makes their results durable.

    leases ─▶ backlog ─ 1.25 x max_num_seqs at once ─▶ AsyncEngine ─▶ finished ─ every moment ─▶ RowWriter

A plain async Ray actor. It reads the rows of its leases and writes their results; the driver
(`engine_pool.py`) hands out leases and learns which rows are durable. An error of a row is its result. An
error of the engine, the input files or the output fails the calls of all leases, after finished rows are
durable.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import ray

from ...actors.batch.dataset.row_reader import Row, RowReader, RowSpans, record_of
from ...actors.batch.dataset.row_requests import RowSchema, prompt_column
from ...actors.batch.engine_meter import EngineMeter
from ...actors.batch.ledger.row_writer import OutputForm, RowWriter, flush_interval_s
from ...actors.batch.row_answerer import Result, RowAnswerer
from ...actors.batch.row_stats import Device, EngineTotals, RowStats
from ...actors.checkpoints.checkpoint_paths import target_folder
from ...actors.engine.async_engine import AsyncEngine
from ...actors.tokenization.generation_config import GenerationDefaults
from ...cluster.batch.row_ranges import RowRanges, from_rows, iterate_rows
from ...cluster.errors import MantaError, RequestError
from .messages import EngineSetup, EngineState, LeasedRows, RunTerms

logger = logging.getLogger(__name__)

SURPLUS = 1.25  # rows in the engine per row that it runs at once: the next ones are tokenized already
SHARED_CHARS = 64  # of a prompt's prefix that is worth sharing: about a page of tokens


@dataclass(slots=True)
class _LeaseState:
    """A lease of this engine. `open` are its rows that are neither durable nor returned."""

    lease: LeasedRows
    open: set[int]
    ended: asyncio.Future[None]
    unfinished: int  # rows without a result
    read: bool = False
    returned: list[int] = field(default_factory=list)


class BatchEngine:
    """One engine of a batch job on `devices`; `shard` is in its parts' names if order is free."""

    def __init__(
        self,
        setup: EngineSetup,
        num_threads: int | None,
        devices: tuple[Device, float],
        shard: int,
        writer: str,
    ) -> None:
        self._setup = setup
        self._config = replace(setup.config, num_threads=num_threads, max_num_queued_reqs=None)
        self._devices = devices
        self._began_s = time.monotonic()
        self._shard = shard
        self._writer_name = writer
        self._engine: AsyncEngine | None = None
        self._answerer: RowAnswerer | None = None
        self._reader = RowReader(setup.source, setup.row_schema)
        self._writer: RowWriter | None = None
        self._capacity = math.ceil(SURPLUS * setup.config.max_num_seqs)
        self._leases: dict[int, _LeaseState] = {}  # by lease
        self._lease_of: dict[int, _LeaseState] = {}  # by row
        self._backlog: deque[Row] = deque()
        self._running: dict[int, asyncio.Task[None]] = {}  # by row
        self._finished: list[Result] = []
        self._ended_shards: list[int] = []
        self._form: OutputForm | None = None
        self._is_draining = False
        self._failure: BaseException | None = None
        self._has_capacity = asyncio.Event()
        self._drained = asyncio.Event()  # no row runs: finished rows are flushed at once
        self._flushing = asyncio.Lock()
        self._tasks: list[asyncio.Task[None]] = []
        self._stats = RowStats()
        self._meter: EngineMeter | None = None

    async def start(self) -> str:
        """Load the models. Returns the id of the node. Raises ConfigError, CheckpointError, ..."""
        self._engine = AsyncEngine(self._config, self._setup.make)
        await self._engine.start()
        await self._engine.measure_steps()
        return ray.get_runtime_context().get_node_id()

    async def begin(self, terms: RunTerms) -> None:
        assert self._engine is not None, "start() the engine first"
        setup = self._setup
        generation = GenerationDefaults.load(target_folder(self._config))
        self._answerer = RowAnswerer(
            self._engine, setup.row_schema, generation, setup.model_name, terms.form.columns
        )
        self._writer = RowWriter(
            setup.output, terms.form, run=terms.run, shard=self._shard, writer=self._writer_name
        )
        self._form = terms.form
        self._meter = EngineMeter(self._engine.stats, *self._devices, self._began_s)
        self._tasks.append(asyncio.create_task(self._flush_forever()))
        self._has_capacity.set()

    async def wait_for_capacity(self) -> None:
        await self._has_capacity.wait()

    async def answer(self, lease: LeasedRows) -> RowRanges:
        """Answer the rows until all are durable or returned. Returns the returned ones."""
        if self._failure is not None:
            raise self._failure
        rows = set(iterate_rows(lease.rows))
        ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        lease_state = self._leases[lease.number] = _LeaseState(lease, rows, ended, len(rows))
        self._update_capacity()
        try:
            await self._take(lease_state)
            await ended
        finally:
            del self._leases[lease.number]
        return from_rows(lease_state.returned)

    async def return_backlog(self) -> dict[int, RowRanges]:
        rows = [row.number for row in self._backlog]
        rows += [
            row for lease_state in self._leases.values() if not lease_state.read for row in lease_state.open
        ]
        self._backlog.clear()
        given: dict[int, list[int]] = {}
        for row in rows:
            given.setdefault(self._return(row), []).append(row)
        self._update_capacity()
        return {lease: from_rows(rows) for lease, rows in given.items()}

    async def drain(self, within_s: float) -> None:
        """Accept no more rows, finish running ones within the time, make all durable. Idempotent."""
        self._is_draining = True
        self._has_capacity.set()
        await self.return_backlog()
        if self._running and within_s > 0:
            await asyncio.wait(self._running.values(), timeout=within_s)
        for task in list(self._running.values()):
            task.cancel()
        if self._running:
            await asyncio.wait(self._running.values())
        try:
            await self._flush(last=True)
        except MantaError as error:
            self._end_leases(error)
            raise
        for row in list(self._lease_of):  # cancelled rows
            self._return(row)

    async def state(self) -> EngineState:
        since_s = None if self._writer is None else self._writer.failing_since_s
        rows = RowStats()
        rows.merge(self._stats)  # a copy, because it is pickled while rows are counted
        return EngineState(
            rows=rows,
            engine=EngineTotals() if self._meter is None else self._meter.totals(),
            running=len(self._running),
            capacity=self._setup.config.max_num_seqs,
            waiting=self._num_waiting(),
            failing_s=None if since_s is None else time.monotonic() - since_s,
        )

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        self._reader.close()
        if self._engine is not None:
            await asyncio.to_thread(self._engine.close)

    async def _take(self, lease_state: _LeaseState) -> None:
        try:
            rows = await asyncio.to_thread(self._read, lease_state.lease.spans)
        except Exception as error:
            self._fail(error)
            return
        lease_state.read = True
        rows = [row for row in rows if row.number in lease_state.open]  # others were returned meanwhile
        self._lease_of.update((row.number, lease_state) for row in rows)
        self._backlog.extend(rows)
        if self._is_draining:
            await self.return_backlog()
        self._start_rows()

    def _read(self, spans: RowSpans) -> list[Row]:
        rows = self._reader.read(spans)
        return rows if self._form and self._form.ordered else by_shared_prefix(rows, self._setup.row_schema)

    def _start_rows(self) -> None:
        while self._backlog and len(self._running) < self._capacity and not self._is_draining:
            row = self._backlog.popleft()
            self._drained.clear()
            self._running[row.number] = asyncio.create_task(self._answer(row))
        self._update_capacity()

    def _update_capacity(self) -> None:
        if self._is_draining or self._num_waiting() < max(self._setup.config.max_num_seqs // 2, 1):
            self._has_capacity.set()
        else:
            self._has_capacity.clear()

    def _num_waiting(self) -> int:
        return len(self._backlog) + sum(
            len(lease_state.open) for lease_state in self._leases.values() if not lease_state.read
        )

    async def _answer(self, row: Row) -> None:
        assert self._answerer is not None and self._meter is not None, "begin() first"
        result, lease_state = None, self._lease_of[row.number]
        self._meter.row_started()
        try:
            result = await self._answerer.answer(row, attempts=lease_state.lease.attempts)
        except Exception as error:  # EngineDeadError, or a bug: not the row's fault
            self._fail(error)
        finally:
            self._meter.row_ended(result)
            if result is not None:
                self._finished.append(result)
                self._count_down(lease_state)
            del self._running[row.number]
            if not self._running:
                self._drained.set()
        self._start_rows()

    def _return(self, row: int) -> int:
        lease_state = self._lease_of.pop(row, None) or next(h for h in self._leases.values() if row in h.open)
        lease_state.returned.append(row)
        self._count_down(lease_state)
        self._close_row(row, lease_state)
        return lease_state.lease.number

    def _count_down(self, lease_state: _LeaseState) -> None:
        """Record that a row of the lease needs no more work. After the last one its shard is complete."""
        lease_state.unfinished -= 1
        if not lease_state.unfinished and lease_state.lease.shard is not None and self._writer is not None:
            self._ended_shards.append(lease_state.lease.shard)

    def _close_row(self, row: int, lease_state: _LeaseState) -> None:
        lease_state.open.discard(row)
        if not lease_state.open and not lease_state.ended.done():
            lease_state.ended.set_result(None)

    async def _flush_forever(self) -> None:
        every_s = flush_interval_s(self._setup.output)
        while self._failure is None:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._drained.wait(), every_s)
            self._drained.clear()
            try:
                await self._flush()
            except Exception as error:
                self._fail(error)

    async def _flush(self, *, last: bool = False) -> None:
        """Make finished rows durable, and end the leases that waited for them."""
        async with self._flushing:
            finished, self._finished = self._finished, []
            ended, self._ended_shards = self._ended_shards, []
            num_pending = 0 if self._writer is None else self._writer.num_pending
            if not finished and not ended and not num_pending and not last:
                return
            durable, stats = await asyncio.to_thread(self._write, finished, ended, last)
            self._stats.merge(stats)
            for row in iterate_rows(durable):
                if lease_state := self._lease_of.pop(row, None):
                    self._close_row(row, lease_state)

    def _write(
        self, finished: Sequence[Result], ended: Sequence[int], last: bool
    ) -> tuple[RowRanges, RowStats]:
        """Write results; runs in a thread. Returns the rows made durable, and the stats of the results."""
        writer, stats = self._writer, RowStats()
        if writer is None:
            return (), stats
        shards: dict[int | None, list[Result]] = {}
        for result in finished:
            shards.setdefault(self._lease_of[result["row"]].lease.shard, []).append(result)
        for shard, results in shards.items():
            stats.add(writer.add(results, shard=shard))
        for shard in ended:
            writer.end_shard(shard)
        return writer.close() if last else writer.flush(), stats

    def _fail(self, error: BaseException) -> None:
        if self._failure is None:
            if not isinstance(error, MantaError):
                logger.error("the engine ends by a bug", exc_info=error)
            self._failure = error
            self._tasks.append(asyncio.create_task(self._fail_leases(error)))

    async def _fail_leases(self, error: BaseException) -> None:
        self._is_draining = True
        with suppress(MantaError):
            await self._flush()
        self._end_leases(error)

    def _end_leases(self, error: BaseException) -> None:
        self._has_capacity.set()
        for lease_state in self._leases.values():
            if not lease_state.ended.done():
                lease_state.ended.set_exception(error)


def by_shared_prefix(rows: Sequence[Row], row_schema: RowSchema) -> list[Row]:
    """Return the rows in the order in which to start them. It changes no answer.

    Rows with a common prefix follow each other, for the prefix cache. Longer prompts go first, so that a
    lease ends with its cheapest rows.
    """
    prompts = sorted(((_prompt(row, row_schema), row.number, row) for row in rows), key=lambda each: each[:2])
    families: list[list[tuple[str, int, Row]]] = []
    for each in prompts:
        prefix = each[0][:SHARED_CHARS]
        if families and len(prefix) == SHARED_CHARS and families[-1][-1][0].startswith(prefix):
            families[-1].append(each)
        else:
            families.append([each])
    families.sort(key=lambda family: -max(len(prompt) for prompt, _, _ in family))
    return [row for family in families for _, _, row in family]


def _prompt(row: Row, row_schema: RowSchema) -> str:
    """Return about what the model will read; empty for a malformed row, which fails later."""
    try:
        record: Mapping[str, Any] = record_of(row, row_schema)  # Any: whatever a row of the dataset holds
    except RequestError:
        return ""
    if row_schema.kind == "openai":
        body = record.get("body")
        record = body if isinstance(body, Mapping) else {}
    present = [name for name, value in record.items() if value is not None]
    column = None if row_schema.template else prompt_column(present, row_schema)
    value = record if column is None else record[column]
    return value if isinstance(value, str) else json.dumps(value, default=str, ensure_ascii=False)
