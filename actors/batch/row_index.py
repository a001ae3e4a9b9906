"""Index of all input rows, made before any row is answered: where each row is, and whether its id is unique.

    files -> records -> 64-bit hash of each id, byte offset of every 64th record -> duplicate ids -> RowIndex

The index takes 8 bytes per row. Only the id column of Parquet is read. Files are hashed, so that a later run
recognizes the same input whatever the files' times are. A malformed row becomes an error row when it is
answered; a file that cannot be read to its end is an error here.
"""

from __future__ import annotations

import bisect
import hashlib
import itertools
from array import array
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import CancelledError
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from ...cluster.batch.row_ranges import RowRanges, from_rows
from ...cluster.errors import DatasetError, RequestError
from .dataset.passthrough_columns import ColumnTypes, of_parquet
from .dataset.row_reader import Row, RowReader, RowSpans, Span, id_of, own_record, partition_of
from .dataset.row_requests import (
    ID_COLUMNS,
    Record,
    RowSchema,
    content_id,
    id_hash,
    own_id,
    parse_line,
    row_id,
)
from .dataset.source import Dataset, SourceFile, open_parquet
from .dataset.text_records import NOT_UTF8, BadRecordError, BadTextError, Raw, TextFile, TextFormat
from .row_answerer import WIRE_SCHEMA

MARK_EVERY = 64  # records of a text file between two known offsets
FOOTER_BYTES = 2**16  # end of a Parquet file: its schema, and the sizes and bounds of its columns
ROWS_PER_READ = 8192  # for Parquet; for text, between two calls of `stop`
DUPLICATES_PER_READ = 4096
HASHES_PER_POLL = 2**18
Duplicates = Literal["refuse", "number"]
Stop = Callable[[], bool]


@dataclass(frozen=True, eq=False)
class DuplicateIds:
    """Rows with the id of an earlier row (int64, ascending), and the number appended to each id (int32)."""

    rows: np.ndarray
    copies: np.ndarray

    def within(self, ranges: RowRanges) -> dict[int, int]:
        found: dict[int, int] = {}
        for begin, end in ranges if len(self.rows) else ():
            some = slice(*np.searchsorted(self.rows, (begin, end)))
            found |= zip(self.rows[some].tolist(), self.copies[some].tolist(), strict=True)
        return found


@dataclass(frozen=True, eq=False)
class RowIndex:
    num_rows: int
    columns: pa.Schema  # names and types of the columns that are passed through (`RowSchema.columns`)
    duplicates: DuplicateIds
    # for each file, `sha256` of its content; for a Parquet file in an object store `sampled` (footer and
    # ids), because reading the whole file would read all data twice
    digests: tuple[Mapping[str, str], ...]
    _begins: tuple[int, ...]  # number of the first row of each file
    _marks: tuple[np.ndarray, ...]  # int64, per text file: offsets of its records 0, 64, 128, ...
    _hashes: np.ndarray  # uint64, per row

    def spans(self, rows: RowRanges) -> RowSpans:
        spans = [span for begin, end in rows for span in self._spans(begin, end)]
        return RowSpans(tuple(spans), self.duplicates.within(rows))

    def id_hashes(self) -> np.ndarray:
        """`row_requests.id_hash` of each row's id, uint64."""
        return self._hashes

    def location(self, row: int, source: Dataset) -> str:
        """Return file and line of a row (file and row of Parquet) for messages. Reads the file."""
        (span,) = self._spans(row, row + 1)
        file = source.files[span.file]
        if source.format == "parquet":
            return f"{file}, row {span.begin + 1}"
        with file.reading(), file.open_text(source.format) as text:
            offset, _ = next(itertools.islice(text.raw_records(span.begin), span.skip, None))
        return f"{file}, line {file.line_number(offset)}"

    def _spans(self, begin: int, end: int) -> Iterator[Span]:
        while begin < end:
            file = bisect.bisect_right(self._begins, begin) - 1
            file_end = self._begins[file + 1] if file + 1 < len(self._begins) else self.num_rows
            num_rows, in_file = min(end, file_end) - begin, begin - self._begins[file]
            if self._marks:
                mark, skip = divmod(in_file, MARK_EVERY)
                yield Span(file, begin, num_rows, int(self._marks[file][mark]), skip)
            else:
                yield Span(file, begin, num_rows, in_file)
            begin += num_rows


def index_rows(
    source: Dataset, row_schema: RowSchema, *, duplicates: Duplicates = "refuse", stop: Stop = lambda: False
) -> RowIndex:
    """Read all rows and index them.

    Raises DatasetError if a file cannot be read, there are no rows, an id is duplicated, or a column cannot
    be passed through. Raises CancelledError once `stop`, which is polled, returns True.

    `duplicates`: what to do if an id occurs twice. Rows without an id get a hash of their content as id and
    are always numbered.
    """
    scan = _Scan(source, row_schema, stop)
    for file in source.files:
        scan.add(file)
    hashes = np.frombuffer(scan.hashes, dtype=np.uint64) if scan.hashes else np.zeros(0, np.uint64)
    if not len(hashes):
        raise DatasetError(f"input: {', '.join(map(str, source.files[:3]))} holds no rows.", param="input")
    index = RowIndex(
        len(hashes),
        scan.columns(),
        DuplicateIds(np.zeros(0, np.int64), np.zeros(0, np.int32)),
        tuple(scan.digests),
        tuple(scan.begins),
        tuple(scan.marks),
        hashes,
    )
    with closing(RowReader(source, row_schema)) as reader:
        return replace(
            index, duplicates=_find_duplicates(index, source, row_schema, reader, duplicates, stop)
        )


class _Scan:
    def __init__(self, source: Dataset, row_schema: RowSchema, stop: Stop) -> None:
        self.hashes: array[int] = array("Q")
        self.begins: list[int] = []
        self.marks: list[np.ndarray] = []
        self.digests: list[Mapping[str, str]] = []
        self._source = source
        self._row_schema = row_schema
        self._stop = stop
        self._types = ColumnTypes(row_schema) if row_schema.columns else None
        self._schemas: list[pa.Schema] = []

    def add(self, file: SourceFile) -> None:
        self.begins.append(len(self.hashes))
        if self._source.format == "parquet":
            self._add_parquet(file)
        else:
            self._add_text(file, self._source.format)

    def columns(self) -> pa.Schema:
        if self._types is None:
            return pa.schema([])
        columns = of_parquet(self._schemas, self._row_schema) if self._schemas else self._types.schema()
        if taken := next((name for name in columns.names if name in WIRE_SCHEMA.names), None):
            raise DatasetError(
                f"columns: results have a column {taken!r} of their own. Rename it in the data, or name the "
                "columns to pass through without it.",
                param="columns",
            )
        return columns

    def _add_text(self, file: SourceFile, format: TextFormat) -> None:
        marks: array[int] = array("q")
        digest = hashlib.sha256()
        partition = partition_of(file, self._row_schema)
        with file.reading(), file.open_text(format) as text:
            for number, (offset, raw) in enumerate(text.raw_records(digest=digest)):
                if number % MARK_EVERY == 0:
                    marks.append(offset)
                    if number % ROWS_PER_READ == 0:
                        self._poll()
                try:
                    self.hashes.append(self._hash(text, raw, partition))
                except UnicodeDecodeError:
                    raise BadTextError(offset, NOT_UTF8) from None
            if file.codec is None and text.offset != file.size:
                raise file.changed()
        self.marks.append(np.frombuffer(marks, dtype=np.int64) if marks else np.zeros(0, np.int64))
        self.digests.append({"sha256": digest.hexdigest()})

    def _hash(self, text: TextFile, raw: Raw, partition: Record) -> int:
        try:
            record = parse_line(raw) if self._source.lines and isinstance(raw, bytes) else text.record(raw)
        except BadRecordError as error:
            return id_hash(content_id(error.text))
        except RequestError:
            assert isinstance(raw, bytes)
            return id_hash(content_id(raw.decode("utf-8").rstrip("\r")))
        if self._types is not None:
            self._types.add({**record, **partition})
        return id_hash(row_id(record, self._row_schema))

    def _add_parquet(self, file: SourceFile) -> None:
        """Read the ids, and all columns only for rows without one."""
        with file.reading(), open_parquet(file) as parquet:
            self._schemas.append(_with_columns(parquet.schema_arrow, partition_of(file, self._row_schema)))
            wanted = (self._row_schema.id_column,) if self._row_schema.id_column else ID_COLUMNS
            columns = [name for name in wanted if name in parquet.schema_arrow.names]
            try:
                without_id = self._add_ids(parquet, columns)
                if len(without_id):
                    self._hash_contents(parquet, without_id)
            except ValueError as error:
                raise DatasetError(f"input: {file} cannot be read: {error}.", param="input") from None
        self.digests.append(self._parquet_digest(file))

    def _add_ids(self, parquet: pq.ParquetFile, columns: list[str]) -> np.ndarray:
        begin = len(self.hashes)
        if not columns:
            self.hashes.frombytes(bytes(8 * parquet.metadata.num_rows))
            return np.arange(parquet.metadata.num_rows)
        without_id: array[int] = array("q")
        for batch in parquet.iter_batches(ROWS_PER_READ, columns=columns):
            self._poll()
            for record in batch.to_pylist():
                row = own_id(record, self._row_schema)
                if row is None:
                    without_id.append(len(self.hashes) - begin)
                self.hashes.append(0 if row is None else id_hash(row))
        return np.array(without_id, dtype=np.int64)

    def _hash_contents(self, parquet: pq.ParquetFile, rows: np.ndarray) -> None:
        file_begin, begin = self.begins[-1], 0
        for batch in parquet.iter_batches(ROWS_PER_READ):
            self._poll()
            some = rows[np.searchsorted(rows, begin) : np.searchsorted(rows, begin + batch.num_rows)] - begin
            records = batch.take(pa.array(some)) if len(some) < batch.num_rows else batch
            for place, record in zip(some.tolist(), records.to_pylist(), strict=True):
                self.hashes[file_begin + begin + place] = id_hash(row_id(record, self._row_schema))
            begin += batch.num_rows

    def _parquet_digest(self, file: SourceFile) -> Mapping[str, str]:
        digest, num_bytes = hashlib.sha256(), 0
        if file.storage.local:
            for chunk in file.chunks():
                self._poll()
                digest.update(chunk)
                num_bytes += len(chunk)
            if num_bytes != file.size:
                raise file.changed()
            return {"sha256": digest.hexdigest()}
        with file.reading(), file.open() as reader:
            reader.seek(max(file.size - FOOTER_BYTES, 0))
            digest.update(reader.read())
        digest.update(memoryview(self.hashes)[self.begins[-1] :])
        return {"sampled": digest.hexdigest()}

    def _poll(self) -> None:
        if self._stop():
            raise CancelledError


def _with_columns(schema: pa.Schema, partition: Record) -> pa.Schema:
    own = [each for each in schema if each.name not in partition]
    kinds = {int: pa.int64(), str: pa.string(), type(None): pa.null()}
    return pa.schema([*own, *(pa.field(name, kinds[type(value)]) for name, value in partition.items())])


def _find_duplicates(
    index: RowIndex,
    source: Dataset,
    row_schema: RowSchema,
    reader: RowReader,
    duplicates: Duplicates,
    stop: Stop,
) -> DuplicateIds:
    """Find the rows with the id of an earlier row, and write the hashes of their new ids into the index.

    Rows that share 64 bits are read again, in order, and compared by 64 further bits. `-2`, `-3`, ... is
    appended to the id of later rows, skipping ids in the data. This depends only on the order of rows, so a
    resumed job finds the same ids.
    """
    hashes = index.id_hashes()
    ordered = np.sort(hashes)
    shared = np.unique(ordered[1:][ordered[1:] == ordered[:-1]])
    ids = _SharedIds(shared, ordered)
    rows: array[int] = array("q")
    copies: array[int] = array("i")
    for some in _rows_with(hashes, shared):
        if stop():
            raise CancelledError
        groups = np.searchsorted(shared, hashes[some]).tolist()
        for row, group in zip(reader.read(index.spans(from_rows(some.tolist()))), groups, strict=True):
            name, is_own = _id(row, row_schema)
            first = ids.first_row(group, name, row.number)
            if first == row.number:
                continue
            if duplicates == "refuse" and is_own:
                raise DatasetError(
                    f"input: the id {name!r} occurs twice: {index.location(first, source)}, and "
                    f"{index.location(row.number, source)}. Give every row a unique id, or number later rows "
                    "with --duplicate-ids number.",
                    param="duplicate_ids",
                )
            copy = ids.next_copy(group, name)
            rows.append(row.number)
            copies.append(copy)
            hashes[row.number] = id_hash(f"{name}-{copy}")
    return DuplicateIds(np.array(rows, np.int64), np.array(copies, np.int32))


class _SharedIds:
    """First row and last number of each shared id. A group is the ids that share 64 bits, rarely several."""

    def __init__(self, shared: np.ndarray, ordered: np.ndarray) -> None:
        self._ordered = ordered
        self._first = np.full(len(shared), -1, np.int64)
        self._further_bits = np.zeros(len(shared), np.uint64)  # of the first row's id
        self._copies = np.ones(len(shared), np.int32)
        self._others: dict[str, list[int]] = {}  # [first row, last copy] by id

    def first_row(self, group: int, name: str, row: int) -> int:
        digest = hashlib.blake2b(name.encode("utf-8", "surrogatepass"), digest_size=16).digest()
        further_bits = np.frombuffer(digest, np.uint64)[0]
        if self._first[group] < 0:
            self._first[group], self._further_bits[group] = row, further_bits
        if self._further_bits[group] == further_bits:
            return int(self._first[group])
        return self._others.setdefault(name, [row, 1])[0]

    def next_copy(self, group: int, name: str) -> int:
        other = self._others.get(name)
        copy = (int(self._copies[group]) if other is None else other[1]) + 1
        while self._is_in_data(f"{name}-{copy}"):
            copy += 1
        if other is None:
            self._copies[group] = copy
        else:
            other[1] = copy
        return copy

    def _is_in_data(self, name: str) -> bool:
        wanted = np.uint64(id_hash(name))
        place = np.searchsorted(self._ordered, wanted)
        return bool(place < len(self._ordered) and self._ordered[place] == wanted)


def _rows_with(hashes: np.ndarray, shared: np.ndarray) -> Iterator[np.ndarray]:
    """Yield the rows that have one of the shared hashes, a few at a time, in order."""
    for begin in range(0, len(hashes) if len(shared) else 0, HASHES_PER_POLL):
        some = hashes[begin : begin + HASHES_PER_POLL].copy()
        nearest = np.minimum(np.searchsorted(shared, some), len(shared) - 1)
        rows = np.flatnonzero(shared[nearest] == some) + begin
        for at in range(0, len(rows), DUPLICATES_PER_READ):
            yield rows[at : at + DUPLICATES_PER_READ]


def _id(row: Row, row_schema: RowSchema) -> tuple[str, bool]:
    try:
        own = own_id(own_record(row, row_schema), row_schema)
    except RequestError:
        own = None
    return (id_of(row, row_schema), False) if own is None else (own, True)
