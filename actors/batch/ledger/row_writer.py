"""Writes the results of one engine: to segments immediately, to parts later.

    add -> (memory) -> flush -> segment -> enough rows, or a minute -> record, part; segments are removed

`add` never waits for a disk, everything else is called in threads. Failed writes are retried.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
import pyarrow as pa

from ....cluster.batch.row_ranges import RowRanges, contains, difference, from_rows, union
from ....cluster.errors import OutputError
from ..dataset.storage import Storage
from ..row_answerer import Result
from .job_runs import check_run, reason, remove_earlier
from .output_index import Segment, in_parallel, read_segment, row_numbers, segment_folder, write_segment
from .output_parts import OutputForm, Record, make_part, part_name, put

ROWS_PER_PART = 4096
PART_INTERVAL_S = 60.0
FLUSH_INTERVAL_S, REMOTE_FLUSH_INTERVAL_S = 0.25, 5.0
RETRY_S = 2.0  # between attempts to write
GIVE_UP_S = 60.0  # an output that cannot be written for this long ends the job

Done = TypeVar("Done")


def flush_interval_s(output: Storage) -> float:
    """Interval of making finished rows durable. A kill loses the rows since the last time."""
    return FLUSH_INTERVAL_S if output.local else REMOTE_FLUSH_INTERVAL_S


@dataclass(slots=True)
class _Gathered:
    """Rows of a shard in no part yet, and the segments that hold them."""

    tables: list[pa.Table] = field(default_factory=list)
    segments: list[str] = field(default_factory=list)
    since_s: float = field(default_factory=time.monotonic)

    @property
    def num_rows(self) -> int:
        return sum(table.num_rows for table in self.tables)


@dataclass(frozen=True, slots=True)
class _Batch:
    """Parts to write, and segments to remove after all of them."""

    parts: deque[tuple[Record, bytes | pa.Buffer]]
    segments: tuple[str, ...]


class RowWriter:
    """Writes the results of one engine.

    Args:
        run: the writer of an earlier run makes no parts once a later run has begun.
        shard: shard in the names of its parts if order is not preserved.
    """

    def __init__(self, output: Storage, form: OutputForm, *, run: int, shard: int, writer: str) -> None:
        self.failing_since_s: float | None = None  # monotonic
        self.num_durable = 0
        self._output = output
        self._form = form
        self._run = run
        self._shard = shard
        self._writer = writer
        self._adding = threading.Lock()  # held only while appending
        # The stages of a row, by shard: added, unsaved, gathered, and in a batch of unwritten parts.
        self._added: defaultdict[int, list[pa.Table]] = defaultdict(list)
        self._unsaved: deque[tuple[int, pa.Table]] = deque()  # to be written to a segment
        self._gathered: dict[int, _Gathered] = {}  # in segments, until a part is due
        self._unwritten: deque[_Batch] = deque()
        self._ended: set[int] = set()  # shards whose part is due, as they get no more rows
        self._writing = threading.RLock()  # held by all that writes
        self._num_segments = self._num_parts = 0
        self._attempted_s = 0.0
        self._earlier_gone = False

    @property
    def num_pending(self) -> int:
        with self._adding:
            added = sum(table.num_rows for tables in self._added.values() for table in tables)
        return added + sum(table.num_rows for _, table in tuple(self._unsaved))

    def add(self, results: Sequence[Result], *, shard: int | None = None) -> pa.Table:
        """Return added rows as a table; durable when `flush` returned them. Ordered ones need a `shard`."""
        assert (shard is not None) == self._form.ordered, "rows have a shard where order is preserved"
        table = self._form.table(results)
        with self._adding:
            self._added[self._shard if shard is None else shard].append(table)
        return table

    def end_shard(self, shard: int) -> None:
        """Make the shard's part at the next `flush`; no more rows of it are added."""
        with self._adding:
            self._ended.add(shard)

    def flush(self) -> RowRanges:
        """Make added rows durable and make the parts that are due. Return the rows made durable.

        Durable rows survive the death of any process, and a power failure once they are in a part. Later
        calls retry failed writes. Raises OutputError after a minute of failures, or if a later run has taken
        over the output.
        """
        durable: list[RowRanges] = []
        with self._writing:
            if self.failing_since_s is not None and time.monotonic() - self._attempted_s < RETRY_S:
                return ()
            self._attempted_s = time.monotonic()
            try:
                self._write_all(durable, self._due)
                self.failing_since_s = None
            except OSError as error:
                self._fail(error)
        return union(*durable)

    def take_over(self, writer: str, known: RowRanges) -> RowRanges:
        """Move a dead writer's segments here, without `known` rows; return the moved. Raises OutputError."""
        return self._until_written(lambda: self._take_over(writer, known))

    def close(self) -> RowRanges:
        """Make parts of all rows; return those made durable. Raises OutputError after GIVE_UP_S."""
        durable: list[RowRanges] = []
        with self._writing:
            self._until_written(lambda: self._write_all(durable, lambda *_: True))
            self._until_written(lambda: self._output.remove_folder(segment_folder(self._writer)))
        return union(*durable)

    def _until_written(self, write: Callable[[], Done]) -> Done:
        """Repeat `write` until it succeeds; raise OutputError after GIVE_UP_S."""
        with self._writing:
            while True:
                try:
                    self._attempted_s = time.monotonic()
                    done = write()
                except OSError as error:
                    self._fail(error)
                    time.sleep(RETRY_S)
                else:
                    self.failing_since_s = None
                    return done

    def _fail(self, error: OSError) -> None:
        self.failing_since_s = self.failing_since_s or self._attempted_s
        if time.monotonic() - self.failing_since_s > GIVE_UP_S:
            raise OutputError(
                f"output: {self._output.where} cannot be written ({reason(error)}): {self.num_durable} rows "
                f"of this engine are durable, {self.num_pending} could not be written and will be answered "
                "again. Fix the output, and run the same command again: it resumes.",
                param="output",
            ) from error

    def _write_all(self, durable: list[RowRanges], due: Callable[[int, _Gathered], bool]) -> None:
        """Write segments, then parts of ended shards and those that are `due`.

        May be repeated after an error, as a row leaves a stage only once the next one has it. Extends
        `durable` by the rows in new segments, also on an error.
        """
        with self._adding:
            added, self._added = self._added, defaultdict(list)
            ended = frozenset(self._ended)
        self._unsaved.extend((shard, pa.concat_tables(tables)) for shard, tables in added.items())
        while self._unsaved:
            self._save(*self._unsaved[0])
            durable.append(from_rows(row_numbers(self._unsaved.popleft()[1])))
        for shard in [shard for shard, rows in self._gathered.items() if shard in ended or due(shard, rows)]:
            self._unwritten.append(self._batch(shard, self._gathered.pop(shard)))
        with self._adding:
            self._ended -= ended
        while self._unwritten:
            self._put(self._unwritten[0])
            self._unwritten.popleft()

    def _save(self, shard: int, table: pa.Table) -> None:
        name = f"{segment_folder(self._writer)}/{self._num_segments:06d}.arrow"
        write_segment(self._output, name, table, run=self._run, shard=shard)
        self._num_segments += 1
        gathered = self._gathered.setdefault(shard, _Gathered())
        gathered.tables.append(table)
        gathered.segments.append(name)
        self.num_durable += table.num_rows

    def _take_over(self, writer: str, known: RowRanges) -> RowRanges:
        """Write segments of the rows, then remove the other writer's. May be repeated."""
        names = [entry.name for entry in self._output.entries(segment_folder(writer))]
        tables: defaultdict[int, list[pa.Table]] = defaultdict(list)
        for segment in in_parallel(lambda name: read_segment(self._output, name), names):
            if segment is not None and difference(segment.rows, known):
                shard = segment.shard if self._form.ordered else self._shard
                tables[shard].append(_fitting(_without(segment, known), self._form))
        for shard, several in tables.items():
            self._save(shard, pa.concat_tables(several))
        self._output.remove_folder(segment_folder(writer))
        return union(*(from_rows(row_numbers(table)) for several in tables.values() for table in several))

    def _due(self, _shard: int, gathered: _Gathered) -> bool:
        if self._form.ordered:
            return False
        return gathered.num_rows >= ROWS_PER_PART or time.monotonic() - gathered.since_s >= PART_INTERVAL_S

    def _batch(self, shard: int, gathered: _Gathered) -> _Batch:
        table, failed = _sorted(pa.concat_tables(gathered.tables))
        parts: deque[tuple[Record, bytes | pa.Buffer]] = deque()
        for kind, mask in (("part", ~failed), ("errors", failed)):
            if mask.any():
                self._num_parts += 1
                name = part_name(kind, shard, self._num_parts, self._form)
                rows = table.filter(pa.array(mask))
                parts.append(make_part(name, rows, self._form, run=self._run, writer=self._writer))
        return _Batch(parts, tuple(gathered.segments))

    def _put(self, batch: _Batch) -> None:
        """Write parts, then remove their segments: a row is always in one of them."""
        while batch.parts:
            check_run(self._output, self._run)
            if not self._earlier_gone:
                remove_earlier(self._output)
                self._earlier_gone = True
            put(self._output, *batch.parts[0])
            batch.parts.popleft()
        self._output.remove(*batch.segments)


def _without(segment: Segment, known: RowRanges) -> pa.Table:
    mask = [not contains(known, row) for row in row_numbers(segment.table)]
    return segment.table.filter(pa.array(mask, pa.bool_()))


def _fitting(table: pa.Table, form: OutputForm) -> pa.Table:
    """Convert results to this schema: another version may have written the segment."""
    return table if table.schema.equals(form.wire) else form.table(table.to_pylist())


def _sorted(table: pa.Table) -> tuple[pa.Table, np.ndarray]:
    """Sort by row number, each row once (an answer before a failure); also return which failed."""
    rows = table["row"].to_numpy()
    failed = table["error"].is_valid().to_numpy()
    order = np.lexsort((failed, rows))
    first = np.ones(len(order), dtype=bool)
    first[1:] = rows[order][1:] != rows[order][:-1]
    order = order[first]
    return table.take(pa.array(order)), failed[order]
