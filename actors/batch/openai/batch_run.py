"""Runs one batch of `/v1/batches` to its end, in the replica that holds its lock.

    read ─▶ answer (at most the service's slots at once) ─▶ RowWriter ─▶ parts ─▶ output and error file

Rows are read, answered, written and counted as in `manta batch`: a durable row is answered once, even if
another replica continues. At the end every line is in one of the two files; a line without a response with
the reason.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Literal, ParamSpec, TypeVar

from ....cluster.batch.leases import LeaseManager
from ....cluster.batch.row_ranges import RowRanges, count, difference, from_rows, split_off, union
from ....cluster.errors import EngineDeadError, OutputError, brief_name
from ...observability.telemetry import BatchLines
from ...system.key_slots import KeySlots
from ..dataset.row_reader import Row
from ..dataset.source import ERRORS
from ..ledger.output_parts import PART_NAME
from ..ledger.row_writer import RowWriter, flush_interval_s
from ..row_answerer import Result, RowAnswerer, unanswered
from ..row_stats import RowStats
from .batch_admission import FORM, LAYOUT, OpenBatch
from .batch_store import Batch, BatchStore
from .file_store import FileStore, JsonObject, ordered_id

logger = logging.getLogger(__name__)

ROWS_PER_READ = 256
SUSPECTS_PER_LEASE = 8  # rows given to the engine together after a death
TRIALS = 2  # deaths with a row alone, after two together with others, that make it a poison row
POLL_S = 2.0  # between two saves of the progress, and two checks for a cancellation
ENGINE = "replica"  # the only engine of the lease book

P = ParamSpec("P")
T = TypeVar("T")
End = Literal["completed", "expired", "cancelled", "failed"]
REASONS = {
    "expired": "The batch's completion window was over before this line was answered.",
    "cancelled": "The batch was cancelled before this line was answered.",
    "failed": "The batch failed before this line was answered; see the batch's errors.",
}
POISON = "The engine died whenever it computed this line, also when it was alone."


class BatchRun:
    """Runs one batch.

    Args:
        opened: closed by `run`.
        answerer: uses the replica's engine.
        slots: limit of running rows, shared by all batches of the replica; keys take turns.
        on_tail: called when all rows have been started, so slots will become free for another batch.
        count_lines: called with lines that became durable, on the event loop, as is `on_tail`.
    """

    def __init__(
        self,
        opened: OpenBatch,
        batches: BatchStore,
        files: FileStore,
        answerer: RowAnswerer,
        slots: KeySlots,
        on_tail: Callable[[], None],
        count_lines: Callable[[BatchLines], None],
    ) -> None:
        self.batch = opened.batch  # the batch as last saved
        self.all_started = False  # whether `on_tail` was called
        self._opened = opened
        self._batches, self._files = batches, files
        self._answerer = answerer
        self._slots = slots
        self._on_tail = on_tail
        self._count_lines = count_lines
        self._loop = asyncio.get_running_loop()
        self._output = batches.output(self.batch.id)
        run = opened.ledger.run
        self._writer = RowWriter(self._output, FORM, run=run, shard=0, writer=uuid.uuid4().hex)
        self._results: list[Result] = []  # answered, and not passed to the writer yet
        self._written = asyncio.Event()
        self._done: RowRanges = ()  # passed to the writer
        self._leases: LeaseManager | None = None
        self._leasing = threading.Lock()  # guards the book: rows are taken and answered in different threads
        self._counts = dict(self.batch.request_counts)
        self._polled_s = 0.0

    async def run(self) -> None:
        """Run the batch from its present state to its end.

        After EngineDeadError, OutputError or DatasetError durable rows stay, and another replica may
        continue.
        """
        try:
            await in_thread(self._begin)
            end = await self._answer_until_end()
            await in_thread(self._end, end)
        except EngineDeadError:
            raise
        except BaseException:  # the replica is stopping, or a disk is full: no row is the cause
            if self._leases is not None:
                self._leases.on_engine_death(ENGINE, (), blame=False)
            raise
        finally:
            await in_thread(self._close)

    def _begin(self) -> None:
        """Recover a dead replica's finished rows, and the rows its engine was running."""
        ledger = self._opened.ledger
        ledger.merge_orphans()
        self._done = union(ledger.answered, ledger.failed)
        self._counts |= {"completed": count(ledger.answered), "failed": count(ledger.failed)}
        self._leases, poison = LeaseManager.after_death(
            self._batches.leases(self.batch.id),
            self._unanswered,
            largest=ROWS_PER_READ,
            smallest=SUSPECTS_PER_LEASE,
            trials=TRIALS,
        )
        if poison:
            deaths = self._leases.poison
            self._write(
                [
                    unanswered(row, "engine_died", POISON, LAYOUT, attempts=deaths[row.number])
                    for row in self._read(poison)
                ]
            )

    @property
    def _unanswered(self) -> RowRanges:
        return difference(((0, self._opened.index.num_rows),), self._done)

    async def _answer_until_end(self) -> End:
        flush_s = flush_interval_s(self._output)
        work = asyncio.ensure_future(self._answer_all())
        try:
            while True:
                if (end := await in_thread(self._poll)) is not None:
                    return end
                done, _ = await asyncio.wait([work], timeout=flush_s)
                results, self._results = self._results, []
                await in_thread(self._write, results)
                self._written.set()
                if done:
                    work.result()
                    return "completed"
        finally:
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)

    async def _answer_all(self) -> None:
        assert self._leases is not None, "_begin() first"
        try:
            async with asyncio.TaskGroup() as group:
                while self._leases.num_unleased:
                    self._written.clear()
                    if not (rows := await in_thread(self._take)):  # suspected rows wait to run alone
                        await self._written.wait()
                    for row in rows:
                        await self._slots.acquire(self.batch.owner)
                        task = group.create_task(self._answer(row))
                        task.add_done_callback(lambda _: self._slots.release(self.batch.owner))
                        await asyncio.sleep(0)  # lets online requests run
                self.all_started = True
                self._on_tail()
        except ExceptionGroup as several:
            raise several.exceptions[0] from None

    def _take(self) -> list[Row]:
        """Return the next rows, after saving them as leased in case the engine dies."""
        assert self._leases is not None, "_begin() first"
        with self._leasing:
            lease = self._leases.acquire(ENGINE, 1)
            saved = self._leases.to_json()
        if lease is None:
            return []
        self._batches.save_leases(self.batch.id, saved)
        return self._read(lease.rows)

    async def _answer(self, row: Row) -> None:
        result = await self._answerer.answer(row)
        if error := result.get("error"):
            logger.info("request %s/%s failed: %s", self.batch.id, brief_name(result["id"]), error["type"])
        self._results.append(result)  # read the attribute now: earlier lists belong to the writer

    def _read(self, rows: RowRanges) -> list[Row]:
        return self._opened.reader.read(self._opened.index.spans(rows))

    def _poll(self) -> End | None:
        """Return how the batch must end early, or None; save progress periodically."""
        batch = self.batch
        if not self._unanswered:
            return None
        if batch.status == "cancelling":
            return "cancelled"
        if self._opened.given_up is not None:
            return "failed"
        if batch.expired_at is not None or batch.is_late:
            return "expired"
        if time.monotonic() - self._polled_s < POLL_S:
            return None
        self._polled_s = time.monotonic()
        if self._batches.cancel_requested_at(batch.id) is not None:
            return "cancelled"
        if self._counts != batch.request_counts:
            self._save(batch)
        return None

    def _write(self, results: list[Result]) -> None:
        if results:
            self._writer.add(results)
        self._writer.flush()
        rows = from_rows(result["row"] for result in results)
        self._done = union(self._done, rows)
        if self._leases is not None:
            with self._leasing:
                for lease in self._leases.leases_of(ENGINE):
                    self._leases.mark_durable(lease.number, rows)
        failed = sum(1 for result in results if result.get("error"))
        self._counts["failed"] += failed
        self._counts["completed"] += len(results) - failed
        self._loop.call_soon_threadsafe(self._count_lines, _lines(results, failed, self.batch.tenant))

    def _end(self, end: End) -> None:
        """End the batch. Another replica may repeat this, with the same files."""
        self._save(self._ending(end))
        remaining = self._unanswered
        while remaining:  # lines without a response get the reason
            some, remaining = split_off(remaining, ROWS_PER_READ)
            self._write([unanswered(row, f"batch_{end}", REASONS[end], LAYOUT) for row in self._read(some)])
        self._writer.close()
        ledger = self._opened.ledger
        ledger.refresh()
        if not ledger.complete:  # otherwise a replica was killed after it had completed it
            ledger.finish({"batch": self.batch.id, **ledger.stats.summary()})
        self._counts |= {"completed": count(ledger.answered), "failed": count(ledger.failed)}
        self._save(
            self.batch.moved(
                "expired" if self.batch.expired_at and end == "completed" else end,
                output_file_id=self._put("output"),
                error_file_id=self._put("error", ERRORS),
                errors=self._opened.given_up if end == "failed" else None,
                usage=_usage(ledger.stats),
            )
        )

    def _ending(self, end: End) -> Batch:
        batch = self.batch
        if batch.status != "in_progress":
            return batch
        if end == "cancelled":
            return batch.moved("cancelling", self._batches.cancel_requested_at(batch.id))
        return batch.moved("finalizing", expired_at=int(time.time()) if end == "expired" else None)

    def _put(self, kind: str, folder: str = "") -> str | None:
        """Make a file of the parts in a folder; return its id, None without parts."""
        entries = self._output.entries(folder)
        names = [entry.name for entry in entries if PART_NAME.fullmatch(entry.name)]
        if not names:
            return None
        batch = self.batch
        at = batch.finalizing_at or batch.cancelling_at
        assert at is not None, "a batch at its end is finalizing or cancelling"
        digest = hashlib.blake2b(f"{batch.id}/{kind}".encode()).hexdigest()
        file_id = ordered_id("file-", at, digest)  # the same if ending the batch is repeated
        pieces = [f"{self._batches.output_folder(batch.id)}/{name}" for name in names]
        self._files.put(
            file_id, f"{batch.id}_{kind}.jsonl", "batch_output", pieces, created_at=at, owner=batch.owner
        )
        return file_id

    def _save(self, batch: Batch) -> None:
        if not self._opened.lock.is_held:
            raise OutputError(f"{batch.id} is another replica's now.", param="batch_storage")
        self.batch = replace(batch, request_counts=dict(self._counts))
        self._batches.save(self.batch)

    def _close(self) -> None:
        """Make answered rows durable and unlock the batch."""
        try:
            if not self.batch.ended:
                self._write(self._results)
                self._writer.close()
                if self._leases is not None:
                    self._batches.save_leases(self.batch.id, self._leases.to_json())
        finally:
            self._opened.close()


async def in_thread(call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Call in a thread. A cancellation waits until it has returned."""
    work = asyncio.ensure_future(asyncio.to_thread(call, *args, **kwargs))
    try:
        return await asyncio.shield(work)
    except asyncio.CancelledError:
        await asyncio.wait([work])
        raise


def _lines(results: Sequence[Result], failed: int, tenant: str | None) -> BatchLines:
    by_category: dict[str | None, tuple[int, int, int]] = {}
    for result in results:
        sums = by_category.get(result.get("counted_as"), (0, 0, 0))
        counts = (result.get(name) or 0 for name in ("completion_tokens", "num_steps", "num_accepted_tokens"))
        tokens, drafts, accepted = (a + b for a, b in zip(sums, counts, strict=True))
        by_category[result.get("counted_as")] = tokens, drafts, accepted
    return BatchLines(
        completed=len(results) - failed,
        failed=failed,
        prompt_tokens=sum(result.get("prompt_tokens") or 0 for result in results),
        generation_tokens=sum(result.get("completion_tokens") or 0 for result in results),
        tenant=tenant,
        by_category=by_category,
    )


def _usage(stats: RowStats) -> JsonObject:
    return {
        "input_tokens": stats.prompt_tokens,
        "input_tokens_details": {"cached_tokens": stats.cached_prompt_tokens},
        "output_tokens": stats.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},  # output is not split into reasoning and content
        "total_tokens": stats.prompt_tokens + stats.completion_tokens,
    }
