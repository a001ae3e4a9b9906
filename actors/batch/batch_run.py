"""One batch of `/v1/batches` on its way to its end, in the replica that holds its lock.

    read ─▶ answer (at most the service's slots at once) ─▶ RowWriter ─▶ parts ─▶ output and error file

The rows are read, answered, written and counted as those of `manta batch`: what is durable is answered
once, whoever goes on. The paper says how far it is, now and then and whenever its status changes. At its end
every line stands in one of the two files; a line without an answer with the reason.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Literal, ParamSpec, TypeVar

from ...cluster.errors import EngineDeadError, OutputError, shown_name
from ...cluster.row_ranges import RowRanges, count, minus, of_rows, split_off, union
from ...cluster.trials import ATTEMPTS, Trials
from ..telemetry import BatchLines
from .answering import Result, RowAnswerer, unanswered
from .batch_store import Batch, BatchStore
from .file_store import FileStore, JsonObject, derived_id
from .opening import FORM, LAYOUT, OpenBatch
from .parts import PART_NAME
from .row_reader import Row
from .row_stats import RowStats
from .source import ERRORS
from .writer import RowWriter, flush_interval_s

logger = logging.getLogger(__name__)

ROWS_PER_READ = 256
LOOK_INTERVAL_S = 2.0  # between two papers, and two looks for a cancellation

P = ParamSpec("P")
T = TypeVar("T")
End = Literal["completed", "expired", "cancelled", "failed"]
REASONS = {
    "expired": "The batch's completion window was over before this line was answered.",
    "cancelled": "The batch was cancelled before this line was answered.",
    "failed": "The batch was given up before this line was answered; its errors say why.",
}
POISON = "Whenever this line was answered, alone too, the engine died."


class BatchRun:
    """Works one batch off.

    Args:
        opened: ours from now on; `run` closes it.
        answerer: on the replica's engine.
        slots: for rows in flight, those of all batches of the replica.
        on_tail: called when all rows are under way, so that slots will be left for another batch.
        count_lines: told of those that have become durable; on the event loop, like `on_tail`.

    Attributes:
        batch: as its paper was last written.
        all_begun: whether `on_tail` was called.
    """

    def __init__(
        self,
        opened: OpenBatch,
        batches: BatchStore,
        files: FileStore,
        answerer: RowAnswerer,
        slots: asyncio.Semaphore,
        on_tail: Callable[[], None],
        count_lines: Callable[[BatchLines], None],
    ) -> None:
        self.batch = opened.batch
        self.all_begun = False
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
        self._results: list[Result] = []  # answered, and not with the writer yet
        self._written = asyncio.Event()
        self._done: RowRanges = ()  # with the writer
        self._trials = Trials()
        self._counts = dict(self.batch.request_counts)
        self._looked_s = 0.0

    async def run(self) -> None:
        """Go on from where the batch stands, to its end.

        Raises:
            EngineDeadError, OutputError, DatasetError: what is durable stays; another may go on.
        """
        try:
            await whole(self._begin)
            end = await self._answer_until_end()
            await whole(self._end, end)
        except EngineDeadError:
            raise
        except BaseException:  # the replica stops, or a disk is full: no row is to blame
            self._trials = replace(self._trials, flight=())
            raise
        finally:
            await whole(self._close)

    def _begin(self) -> None:
        """Count what is done; rows that a replica left behind when it died are taken over first."""
        ledger = self._opened.ledger
        ledger.adopt_orphans()
        self._done = union(ledger.answered, ledger.failed)
        self._counts |= {"completed": count(ledger.answered), "failed": count(ledger.failed)}
        self._trials, poison = self._batches.trials(self.batch.id).after_death(self._done)
        if poison:
            rows = self._read(poison)
            self._write([unanswered(row, "engine_died", POISON, LAYOUT, attempts=ATTEMPTS) for row in rows])

    @property
    def _left(self) -> RowRanges:
        return minus(((0, self._opened.index.num_rows),), self._done)

    async def _answer_until_end(self) -> End:
        flush_s = flush_interval_s(self._output)
        work = asyncio.ensure_future(self._answer_all(self._left))
        try:
            while True:
                if (end := await whole(self._look)) is not None:
                    return end
                done, _ = await asyncio.wait([work], timeout=flush_s)
                results, self._results = self._results, []
                await whole(self._write, results)
                self._written.set()
                if done:
                    work.result()
                    return "completed"
        finally:
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)

    async def _answer_all(self, left: RowRanges) -> None:
        try:
            async with asyncio.TaskGroup() as group:
                while left:
                    alone = bool(self._trials.suspects)
                    flight, rows = await whole(self._next, left)
                    left = minus(left, flight)
                    for row in rows:
                        await self._slots.acquire()
                        task = group.create_task(self._answer(row))
                        task.add_done_callback(lambda _: self._slots.release())
                        await asyncio.sleep(0)  # online requests do not wait for many rows to be begun
                    while alone and minus(flight, self._done):
                        self._written.clear()
                        await self._written.wait()
                self.all_begun = True
                self._on_tail()
        except ExceptionGroup as several:
            raise several.exceptions[0] from None

    def _next(self, left: RowRanges) -> tuple[RowRanges, list[Row]]:
        """The rows that the engine gets now. Whoever comes after its death learns which they were."""
        self._trials, flight = self._trials.after_flight(self._done).begin(left, ROWS_PER_READ)
        self._batches.save_trials(self.batch.id, self._trials)
        return flight, self._read(flight)

    async def _answer(self, row: Row) -> None:
        result = await self._answerer.answer(row)
        if error := result.get("error"):
            logger.info("request %s/%s failed: %s", self.batch.id, shown_name(result["id"]), error["type"])
        self._results.append(result)  # to the list that stands there now: others are with the writer

    def _read(self, rows: RowRanges) -> list[Row]:
        return self._opened.reader.read(self._opened.index.spans(rows))

    def _look(self) -> End | None:
        """Whether the batch is to end early; now and then, how far it is for its users to see."""
        batch = self.batch
        if not self._left:
            return None
        if batch.status == "cancelling":
            return "cancelled"
        if self._opened.given_up is not None:
            return "failed"
        if batch.expired_at is not None or batch.is_late:
            return "expired"
        if time.monotonic() - self._looked_s < LOOK_INTERVAL_S:
            return None
        self._looked_s = time.monotonic()
        if self._batches.cancel_asked_at(batch.id) is not None:
            return "cancelled"
        if self._counts != batch.request_counts:
            self._save(batch)
        return None

    def _write(self, results: list[Result]) -> None:
        """Make durable what is answered. Raises OutputError when that fails for long."""
        if results:
            self._writer.add(results)
        self._writer.flush()
        self._done = union(self._done, of_rows(result["row"] for result in results))
        failed = sum(1 for result in results if result.get("error"))
        self._counts["failed"] += failed
        self._counts["completed"] += len(results) - failed
        self._loop.call_soon_threadsafe(self._count_lines, _lines(results, failed))

    def _end(self, end: End) -> None:
        """Bring the batch to its end. May be done again by another: the same files come of it."""
        self._save(self._ending(end))
        self._refuse_left(end)
        self._writer.close()
        ledger = self._opened.ledger
        ledger.refresh()
        if not ledger.complete:  # whoever completed it was killed before the paper said so
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
        """The batch in the status before its last one."""
        batch = self.batch
        if batch.status != "in_progress":
            return batch
        if end == "cancelled":
            return batch.moved("cancelling", self._batches.cancel_asked_at(batch.id))
        return batch.moved("finalizing", expired_at=int(time.time()) if end == "expired" else None)

    def _refuse_left(self, end: End) -> None:
        """A line that gets no answer any more says why."""
        left = self._left
        while left:
            some, left = split_off(left, ROWS_PER_READ)
            self._write([unanswered(row, f"batch_{end}", REASONS[end], LAYOUT) for row in self._read(some)])

    def _put(self, kind: str, folder: str = "") -> str | None:
        """A file of the parts that the ledger counted; None where there are none."""
        entries = self._output.entries(folder)
        names = [entry.name for entry in entries if PART_NAME.fullmatch(entry.name)]
        if not names:
            return None
        batch = self.batch
        at = batch.finalizing_at or batch.cancelling_at
        assert at is not None, "a batch at its end is finalizing or cancelling"
        file_id = derived_id("file-", at, hashlib.blake2b(f"{batch.id}/{kind}".encode()).hexdigest())
        pieces = [f"{self._batches.output_folder(batch.id)}/{name}" for name in names]
        self._files.put(
            file_id, f"{batch.id}_{kind}.jsonl", "batch_output", pieces, created_at=at, owner=batch.owner
        )
        return file_id

    def _save(self, batch: Batch) -> None:
        if not self._opened.lock.held:
            raise OutputError(f"{batch.id} is another replica's now.", param="batch_storage")
        self.batch = replace(batch, request_counts=dict(self._counts))
        self._batches.save(self.batch)

    def _close(self) -> None:
        """Whatever happened: what is answered becomes durable, and others may go on."""
        try:
            if not self.batch.ended:
                self._write(self._results)
                self._writer.close()
                self._batches.save_trials(self.batch.id, self._trials)
        finally:
            self._opened.close()


async def whole(call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """What a call in a thread returns; a cancellation waits for its end: nothing goes on behind us."""
    work = asyncio.ensure_future(asyncio.to_thread(call, *args, **kwargs))
    try:
        return await asyncio.shield(work)
    except asyncio.CancelledError:
        await asyncio.wait([work])
        raise


def _lines(results: Sequence[Result], failed: int) -> BatchLines:
    """For metrics."""
    by_category: dict[str | None, tuple[int, int]] = {}
    for result in results:
        category = result.get("counted_as")
        num_drafts, num_accepted = by_category.get(category, (0, 0))
        num_drafts += result.get("num_steps") or 0
        num_accepted += result.get("num_accepted_tokens") or 0
        by_category[category] = num_drafts, num_accepted
    return BatchLines(
        completed=len(results) - failed,
        failed=failed,
        prompt_tokens=sum(result.get("prompt_tokens") or 0 for result in results),
        generation_tokens=sum(result.get("completion_tokens") or 0 for result in results),
        by_category=by_category,
    )


def _usage(figures: RowStats) -> JsonObject:
    return {
        "input_tokens": figures.prompt_tokens,
        "input_tokens_details": {"cached_tokens": figures.cached_prompt_tokens},
        "output_tokens": figures.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},  # no answer is split into reasoning and rest
        "total_tokens": figures.prompt_tokens + figures.completion_tokens,
    }
