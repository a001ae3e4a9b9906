"""Reading a dataset's rows where they are answered: the engine actors read spans of its files themselves.

Ray Data hands out spans, not records: a reading stage of its own would need CPUs that the engines hold, and
would bring records of files that differ into one table. The driver makes spans (`spans`), an actor reads
them (`SpanReader`); the folder must be visible to both.
"""

from __future__ import annotations

import bisect
import functools
import itertools
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from ...cluster.errors import DatasetError

ROWS_PER_READ = 1024
READS_KEPT = 4  # calls come a little out of order
OPEN_FILES = 4

Record = dict[str, Any]  # Any: whatever a row of the user's dataset holds.


@dataclass(frozen=True, slots=True)
class Span:
    """Neighbouring rows of a file. `begin` is a row's number in Parquet, else the first line's offset."""

    file: str
    begin: int
    num_rows: int


def line_spans(file: Path, rows_per_span: int) -> Iterator[Span]:
    """Spans of the lines of a file that are not blank."""
    offset = begin = num_rows = 0
    with file.open("rb") as lines:
        for line in lines:
            if line.strip():
                begin = begin if num_rows else offset
                num_rows += 1
            offset += len(line)
            if num_rows == rows_per_span:
                yield Span(str(file), begin, num_rows)
                num_rows = 0
    if num_rows:
        yield Span(str(file), begin, num_rows)


def parquet_spans(file: Path, rows_per_span: int) -> Iterator[Span]:
    num_rows = pq.ParquetFile(file).metadata.num_rows
    for begin in range(0, num_rows, rows_per_span):
        yield Span(str(file), begin, min(rows_per_span, num_rows - begin))


class SpanReader:
    """Reads spans, mostly in order; safe to call from several threads.

    Args:
        lines: records are the unparsed lines of a file, in a column `text`.
    """

    def __init__(self, *, lines: bool) -> None:
        self._lines = lines
        self._lock = threading.Lock()
        self._parquet = functools.lru_cache(maxsize=OPEN_FILES)(_ParquetRows)

    def read(self, spans: Sequence[Span]) -> list[Record]:
        """The records of the spans. Raises DatasetError when a file is not what it was."""
        with self._lock:
            return [record for span in spans for record in self._read(span)]

    def _read(self, span: Span) -> list[Record]:
        try:
            if self._lines:
                rows = _read_lines(span)
            else:
                rows = self._parquet(span.file).read(span.begin, span.num_rows)
        except (OSError, ValueError, pa.ArrowException) as error:
            raise DatasetError(
                f"input: {span.file} cannot be read any more: {error}.", param="input"
            ) from None
        if len(rows) != span.num_rows:
            raise DatasetError(
                f"input: {span.file} has changed while it was read. Run the job again.", param="input"
            )
        return rows


def _read_lines(span: Span) -> list[Record]:
    with Path(span.file).open("rb") as lines:
        lines.seek(span.begin)
        wanted = itertools.islice((line for line in lines if line.strip()), span.num_rows)
        return [{"text": line.decode("utf-8").rstrip("\r\n")} for line in wanted]


class _ParquetRows:
    """Rows of one Parquet file by number. Reads on from where it stands; what it read last stays at hand."""

    def __init__(self, file: str) -> None:
        self._file = pq.ParquetFile(file)
        metadata = self._file.metadata
        sizes = [metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)]
        self._group_begins = [0, *itertools.accumulate(sizes)][:-1]
        self._next = 0
        self._reads: Iterator[pa.RecordBatch] = iter(())
        self._kept: deque[tuple[int, pa.RecordBatch]] = deque(maxlen=READS_KEPT)

    def read(self, begin: int, num_rows: int) -> list[Record]:
        rows: list[Record] = []
        while len(rows) < num_rows:
            found = self._at(begin + len(rows))
            if found is None:
                break
            offset, batch = found
            rows += batch.slice(offset, num_rows - len(rows)).to_pylist()
        return rows

    def _at(self, row: int) -> tuple[int, pa.RecordBatch] | None:
        """A batch that holds the row, and where in it; None behind the end."""
        for begin, batch in self._kept:
            if begin <= row < begin + batch.num_rows:
                return row - begin, batch
        if row < self._next or self._group_of(row) > self._group_of(self._next) or not self._kept:
            self._jump(self._group_of(row))
        for batch in self._reads:
            begin, self._next = self._next, self._next + batch.num_rows
            self._kept.append((begin, batch))
            if row < self._next:
                return row - begin, batch
        return None

    def _jump(self, group: int) -> None:
        groups = list(range(group, len(self._group_begins)))
        self._reads = self._file.iter_batches(ROWS_PER_READ, row_groups=groups)
        self._next = self._group_begins[group]

    def _group_of(self, row: int) -> int:
        return bisect.bisect_right(self._group_begins, row) - 1
