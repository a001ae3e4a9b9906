"""Reading a dataset's rows where they are answered: engine actors read spans of its files themselves.

Rows do not cross the network twice, and nobody's memory holds the dataset. `survey.py` makes `Work`, which
says where rows are; a reader brings them, in any order. The files must be visible to both.
"""

from __future__ import annotations

import bisect
import itertools
import threading
from collections import OrderedDict, deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import pyarrow as pa

from ...cluster.errors import DatasetError, RequestError
from .finding import SourceFile
from .rows import Layout, Record, content_id, read_record, row_id
from .source import Source, csv_header, has_changed, open_parquet
from .text_records import BadRecordError, BadTextError, TextFormat, TextRecords, raw_records, split_lines

ROWS_PER_READ = 1024
READS_KEPT = 4  # calls come a little out of order
OPEN_FILES = 4
BLOCK_BYTES = 2 * 2**20  # of text: one request to an object store
BLOCKS_KEPT = 4  # per file
PIECE_BYTES = 2**16  # of a block, cut into lines at once: a few rows are asked for


@dataclass(frozen=True, slots=True)
class Span:
    """Neighbouring rows of a file.

    Attributes:
        file: its place in `Source.files`.
        row: number of the first row.
        begin: of the first row in its file (Parquet), or the offset of a record at or before it (text).
        skip: records from there to the first row.
    """

    file: int
    row: int
    num_rows: int
    begin: int
    skip: int = 0


@dataclass(frozen=True, slots=True)
class Work:
    """What a reader needs to bring rows.

    Attributes:
        copies: by row: the id is the row's own with `-<copy>` behind it, as an earlier row has its own.
    """

    spans: tuple[Span, ...]
    copies: Mapping[int, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Row:
    """A row to be answered.

    Attributes:
        number: over the whole dataset, 0-based.
        record: as read: of JSON lines `{"text": line}`, which is parsed where it is answered.
        id: given by the job; None where the row's own stands.
        fault: why there is no record; `record` then holds the text.
    """

    number: int
    record: Record
    id: str | None = None
    fault: str | None = None


def record_of(row: Row, layout: Layout) -> Record:
    """The row's record, parsed. Raises RequestError when there is none."""
    if row.fault is not None:
        raise RequestError(row.fault)
    return read_record(row.record, layout)


def id_of(row: Row, layout: Layout) -> str:
    """The row's id, whatever the row is."""
    if row.id is not None:
        return row.id
    try:
        return row_id(record_of(row, layout), layout)
    except RequestError:
        return content_id(row.record["text"])


class RowReader:
    """Reads rows, mostly in order; safe to call from several threads.

    Few files are open at a time, and a few MB of each are kept.
    """

    def __init__(self, source: Source, layout: Layout) -> None:
        self._source = source
        self._layout = layout
        self._lock = threading.Lock()
        self._open: OrderedDict[int, _FileRows] = OrderedDict()  # used last at the end

    def read(self, work: Work) -> list[Row]:
        """The rows of the spans, in their order. Raises DatasetError when a file is not what it was."""
        with self._lock:
            rows = [row for span in work.spans for row in self._read(span)]
        return [self._numbered(row, work.copies) for row in rows] if work.copies else rows

    def close(self) -> None:
        """Close the files. Idempotent; a reader can be used on."""
        with self._lock:
            while self._open:
                self._open.popitem()[1].close()

    def _numbered(self, row: Row, copies: Mapping[int, int]) -> Row:
        if (copy := copies.get(row.number)) is None:
            return row
        return Row(row.number, row.record, f"{id_of(row, self._layout)}-{copy}", row.fault)

    def _read(self, span: Span) -> list[Row]:
        file = self._source.files[span.file]
        try:
            rows = self._rows_of(span.file).read(span)
        except (OSError, ValueError, pa.ArrowException) as error:
            raise DatasetError(f"input: {file} cannot be read any more: {error}.", param="input") from None
        except BadTextError:
            raise has_changed(file) from None
        if len(rows) != span.num_rows:
            raise has_changed(file)
        return rows

    def _rows_of(self, place: int) -> _FileRows:
        if place in self._open:
            self._open.move_to_end(place)
            return self._open[place]
        file = self._source.files[place]
        now = file.storage.entry(file.name)
        if now is None or (now.size, now.modified_s) != (file.size, file.modified_s):
            raise has_changed(file)
        format = self._source.format
        self._open[place] = _ParquetRows(file) if format == "parquet" else _TextRows(file, format)
        if len(self._open) > OPEN_FILES:
            self._open.popitem(last=False)[1].close()
        return self._open[place]


class _FileRows(Protocol):
    """Rows of one open file."""

    def read(self, span: Span) -> list[Row]:
        """Fewer than asked for where the file ends before."""
        ...

    def close(self) -> None: ...


class _TextRows:
    """Rows of one file of text by their offsets. What it read last stays at hand, in blocks."""

    def __init__(self, file: SourceFile, format: TextFormat) -> None:
        self._format: TextFormat = format
        self._records = TextRecords(format, csv_header(file) if format == "csv" else None)
        self._reader = file.open()
        self._blocks: OrderedDict[int, bytes] = OrderedDict()

    def read(self, span: Span) -> list[Row]:
        raws = raw_records(split_lines(self._bytes_from(span.begin), span.begin), self._format)
        wanted = itertools.islice(raws, span.skip, span.skip + span.num_rows)
        return [self._row(number, raw) for number, (_, raw) in enumerate(wanted, span.row)]

    def close(self) -> None:
        self._reader.close()

    def _row(self, number: int, raw: bytes | list[str]) -> Row:
        try:
            return Row(number, self._records.record(raw))
        except BadRecordError as error:
            return Row(number, {"text": error.text}, None, error.why)

    def _bytes_from(self, offset: int) -> Iterator[bytes]:
        place, skip = divmod(offset, BLOCK_BYTES)
        while block := self._block(place):
            for begin in range(skip, len(block), PIECE_BYTES):
                yield block[begin : begin + PIECE_BYTES]
            place, skip = place + 1, 0

    def _block(self, place: int) -> bytes:
        if place not in self._blocks:
            self._blocks[place] = self._reader.read_at(BLOCK_BYTES, place * BLOCK_BYTES)
            if len(self._blocks) > BLOCKS_KEPT:
                self._blocks.popitem(last=False)
        return self._blocks[place]


class _ParquetRows:
    """Rows of one Parquet file by number. Reads on from where it stands; what it read last stays at hand."""

    def __init__(self, file: SourceFile) -> None:
        self._file = open_parquet(file)
        metadata = self._file.metadata
        sizes = [metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)]
        self._group_begins = [0, *itertools.accumulate(sizes)][:-1]
        self._next = 0
        self._reads: Iterator[pa.RecordBatch] = iter(())
        self._kept: deque[tuple[int, pa.RecordBatch]] = deque(maxlen=READS_KEPT)

    def read(self, span: Span) -> list[Row]:
        records: list[Record] = []
        while len(records) < span.num_rows:
            found = self._at(span.begin + len(records))
            if found is None:
                break
            offset, batch = found
            records += batch.slice(offset, span.num_rows - len(records)).to_pylist()
        return [Row(number, record) for number, record in enumerate(records, span.row)]

    def close(self) -> None:
        self._file.close(force=True)

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
