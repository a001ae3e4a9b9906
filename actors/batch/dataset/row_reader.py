"""Reads rows where they are answered: engine actors read spans of the input files themselves.

The dataset crosses the network once and no process holds it. The files must be visible to driver and engines.
"""

from __future__ import annotations

import bisect
import itertools
import threading
from collections import OrderedDict, deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

import pyarrow as pa

from ....cluster.errors import RequestError
from .row_requests import Record, RowSchema, content_id, read_record, row_id
from .source import Dataset, SourceFile, open_parquet
from .text_records import BadRecordError, BadTextError, Raw, TextFormat

ROWS_PER_READ = 1024  # for Parquet
CACHED_READS = 4  # cached Parquet reads, as calls come slightly out of order
OPEN_FILES = 4
BUFFER_BYTES = 2 * 2**20  # for text: one request to an object store


@dataclass(frozen=True, slots=True)
class Span:
    """Consecutive rows of a file."""

    file: int  # index in `Dataset.files`
    row: int  # number of the first row
    num_rows: int
    begin: int  # index of the first row in its file (Parquet), or offset of a record at or before it (text)
    skip: int = 0  # records between `begin` and the first row


@dataclass(frozen=True, slots=True)
class RowSpans:
    """Locations of some rows. `copies`: `-<copy>` is appended to the id of a row with an earlier row's."""

    spans: tuple[Span, ...]
    copies: Mapping[int, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Row:
    number: int  # 0-based, in the whole dataset
    record: Record  # as read; for JSON lines `{"text": line}`, which is parsed where the row is answered
    id: str | None = None  # assigned by the job; None if the row's own id is used
    fault: str | None = None  # why there is no record; `record` then contains the text
    partition: Record = field(default_factory=dict)  # columns from the names of its file's folders


def record_of(row: Row, row_schema: RowSchema) -> Record:
    """Return the row's parsed record. Raises RequestError when there is none."""
    own = own_record(row, row_schema)
    return {**own, **row.partition} if row.partition else own


def own_record(row: Row, row_schema: RowSchema) -> Record:
    """Return the record as its file has it, from which the row's id is made."""
    if row.fault is not None:
        raise RequestError(row.fault)
    return read_record(row.record, row_schema)


def partition_of(file: SourceFile, row_schema: RowSchema) -> Record:
    return dict(file.partition) if row_schema.version > 1 else {}


def id_of(row: Row, row_schema: RowSchema) -> str:
    """Return the row's id, also for a malformed row."""
    if row.id is not None:
        return row.id
    try:
        return row_id(own_record(row, row_schema), row_schema)
    except RequestError:
        return content_id(row.record["text"])


class RowReader:
    """Reads rows, fastest in order. Thread-safe. Keeps a few files open and a few MB of each in memory."""

    def __init__(self, source: Dataset, row_schema: RowSchema) -> None:
        self._source = source
        self._row_schema = row_schema
        self._lock = threading.Lock()
        self._open: OrderedDict[int, _TextRows | _ParquetRows] = OrderedDict()  # most recently used last

    def read(self, wanted: RowSpans) -> list[Row]:
        """Return the rows in order, repeated ids numbered. Raises DatasetError when a file has changed."""
        with self._lock:
            rows = [row for span in wanted.spans for row in self._read(span)]
        if not wanted.copies:
            return rows
        return [
            row
            if (copy := wanted.copies.get(row.number)) is None
            else replace(row, id=f"{id_of(row, self._row_schema)}-{copy}")
            for row in rows
        ]

    def close(self) -> None:
        with self._lock:
            while self._open:
                self._open.popitem()[1].close()

    def _read(self, span: Span) -> list[Row]:
        file = self._source.files[span.file]
        try:
            rows = self._open_file(span.file, file).read(span)
        except (OSError, ValueError, pa.ArrowException) as error:
            raise file.unreadable(error, still=" any more") from None
        except BadTextError:
            raise file.changed() from None
        if len(rows) != span.num_rows:
            raise file.changed()
        partition = partition_of(file, self._row_schema)
        return [replace(row, partition=partition) for row in rows] if partition else rows

    def _open_file(self, index: int, file: SourceFile) -> _TextRows | _ParquetRows:
        if index in self._open:
            self._open.move_to_end(index)
            return self._open[index]
        now = file.storage.entry(file.name)
        if now is None or (now.size, now.modified_s) != (file.size, file.modified_s):
            raise file.changed()
        format = self._source.format
        self._open[index] = _ParquetRows(file) if format == "parquet" else _TextRows(file, format)
        if len(self._open) > OPEN_FILES:
            self._open.popitem(last=False)[1].close()
        return self._open[index]


class _TextRows:
    def __init__(self, file: SourceFile, format: TextFormat) -> None:
        self._file = file.open_text(format, BUFFER_BYTES)
        self.close = self._file.close

    def read(self, span: Span) -> list[Row]:
        """Return the rows; fewer if the file ends before them."""
        raws = itertools.islice(self._file.raw_records(span.begin), span.skip, span.skip + span.num_rows)
        return [self._row(number, raw) for number, (_, raw) in enumerate(raws, span.row)]

    def _row(self, number: int, raw: Raw) -> Row:
        try:
            return Row(number, self._file.record(raw))
        except BadRecordError as error:
            return Row(number, {"text": error.text}, None, error.why)


class _ParquetRows:
    """Reads rows of one Parquet file by index. Continues from the last read and caches recent reads."""

    def __init__(self, file: SourceFile) -> None:
        self._file = open_parquet(file)
        metadata = self._file.metadata
        sizes = [metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)]
        self._group_begins = [0, *itertools.accumulate(sizes)][:-1]
        self._next = 0
        self._reads: Iterator[pa.RecordBatch] = iter(())
        self._cached_reads: deque[tuple[int, pa.RecordBatch]] = deque(maxlen=CACHED_READS)

    def read(self, span: Span) -> list[Row]:
        records: list[Record] = []
        while len(records) < span.num_rows:
            found = self._batch_at(span.begin + len(records))
            if found is None:
                break
            offset, batch = found
            records += batch.slice(offset, span.num_rows - len(records)).to_pylist()
        return [Row(number, record) for number, record in enumerate(records, span.row)]

    def close(self) -> None:
        self._file.close(force=True)

    def _batch_at(self, row: int) -> tuple[int, pa.RecordBatch] | None:
        """Return a batch that contains the row, and the row's index in it; None after the last row."""
        for begin, batch in self._cached_reads:
            if begin <= row < begin + batch.num_rows:
                return row - begin, batch
        group = self._group_of(row)
        if row < self._next or group > self._group_of(self._next) or not self._cached_reads:
            groups = list(range(group, len(self._group_begins)))
            self._reads = self._file.iter_batches(ROWS_PER_READ, row_groups=groups)
            self._next = self._group_begins[group]
        for batch in self._reads:
            begin, self._next = self._next, self._next + batch.num_rows
            self._cached_reads.append((begin, batch))
            if row < self._next:
                return row - begin, batch
        return None

    def _group_of(self, row: int) -> int:
        return bisect.bisect_right(self._group_begins, row) - 1
