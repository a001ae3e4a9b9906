"""One look at all rows before any is answered: how many there are, where they stand, whose ids are double.

    files -> records -> 64 bits of each id, every 64th offset -> duplicates (`numbering.py`) -> Survey

What is read is hashed, so that a later run knows the same input again whatever its files' times are.

Memory is 8 bytes a row. No row fails a survey, however malformed: it becomes an error row where it is
answered. What fails it is a file that cannot be read to its end. Runs in the driver, beside the start of the
engines.
"""

from __future__ import annotations

import bisect
import hashlib
import itertools
from array import array
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import CancelledError
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from ...cluster.errors import DatasetError, RequestError
from ...cluster.row_ranges import RowRanges
from .answering import WIRE_SCHEMA
from .columns import ColumnTypes, of_parquet
from .finding import SourceFile
from .numbering import NOTHING_NUMBERED, Numbering, number_duplicates
from .reading import RowReader, Span, Work
from .rows import ID_COLUMNS, Layout, content_id, id_hash, own_id, parse_line, row_id
from .source import InputFormat, Source, bad_text, chunks, line_number, open_parquet
from .text_records import (
    NOT_UTF8,
    BadRecordError,
    BadTextError,
    Raw,
    TextFormat,
    TextRecords,
    checked_header,
    raw_records,
    split_lines,
)

MARK_EVERY = 64  # records of a file of text from one known offset to the next
FOOTER_BYTES = 2**16  # of a Parquet file: its schema, and the sizes and bounds of its columns
ROWS_PER_READ = 8192  # of Parquet
Duplicates = Literal["refuse", "number"]


@dataclass(frozen=True, eq=False)
class Survey:
    """Where the rows of a source are, and their ids.

    Attributes:
        num_rows: of all files.
        columns: names and types of the columns that are handed on (`Layout.columns`).
        numbered: rows whose id is an earlier row's, with what is put behind it.
        digests: of each file: `sha256` of its content; or `sampled`, of a Parquet file in an object store,
            where reading more than the footer and the ids would read all data twice.
    """

    num_rows: int
    columns: pa.Schema
    numbered: Numbering
    digests: tuple[Mapping[str, str], ...]
    _begins: tuple[int, ...]  # number of the first row of each file
    _marks: tuple[np.ndarray, ...]  # int64, per file of text: offsets of its records 0, 64, 128, ...
    _hashes: np.ndarray  # uint64, per row

    def work(self, rows: RowRanges) -> Work:
        """What a reader needs to bring these rows."""
        spans = [span for begin, end in rows for span in self._spans(begin, end)]
        return Work(tuple(spans), self.numbered.within(rows))

    def id_hashes(self) -> np.ndarray:
        """`rows.id_hash` of each row's id. uint64."""
        return self._hashes

    def file_of(self, row: int) -> int:
        """The place of a row's file in `Source.files`."""
        return bisect.bisect_right(self._begins, row) - 1

    def place(self, row: int, source: Source) -> str:
        """Where a row stands, in words: file and line, or file and row of it. Reads in the file."""
        number = self.file_of(row)
        file, (span,) = source.files[number], self._spans(row, row + 1)
        if source.format == "parquet":
            return f"{file}, row {span.begin + 1}"
        return f"{file}, line {line_number(file, _offset(file, source.format, span))}"

    def _spans(self, begin: int, end: int) -> Iterator[Span]:
        while begin < end:
            file = self.file_of(begin)
            file_end = self._begins[file + 1] if file + 1 < len(self._begins) else self.num_rows
            num_rows, in_file = min(end, file_end) - begin, begin - self._begins[file]
            if self._marks:
                mark, skip = divmod(in_file, MARK_EVERY)
                yield Span(file, begin, num_rows, int(self._marks[file][mark]), skip)
            else:
                yield Span(file, begin, num_rows, in_file)
            begin += num_rows


def survey(
    source: Source,
    layout: Layout,
    *,
    duplicates: Duplicates = "refuse",
    stop: Callable[[], bool] = lambda: False,
) -> Survey:
    """Look at all rows.

    Args:
        duplicates: what becomes of rows with an id of their own that an earlier row has; those without one
            are numbered in any case.
        stop: asked now and then; when it says yes, CancelledError is raised.

    Raises:
        DatasetError: a file cannot be read, there is no row, ids are double, columns are not as they must be.
    """
    scan = _Scan(source, layout, stop)
    for file in source.files:
        scan.add(file)
    hashes = np.frombuffer(scan.hashes, dtype=np.uint64) if scan.hashes else np.zeros(0, np.uint64)
    if not len(hashes):
        raise DatasetError(f"input: {', '.join(map(str, source.files[:3]))} holds no rows.", param="input")
    columns = _checked(scan.columns())
    found = Survey(
        len(hashes),
        columns,
        NOTHING_NUMBERED,
        tuple(scan.digests),
        tuple(scan.begins),
        tuple(scan.marks),
        hashes,
    )
    reader = RowReader(source, layout)
    try:
        numbered = number_duplicates(
            hashes,
            read=lambda rows: reader.read(found.work(rows)),
            place=lambda row: found.place(row, source),
            layout=layout,
            refuse=duplicates == "refuse",
            stop=stop,
        )
    finally:
        reader.close()
    return replace(found, numbered=numbered)


class _Scan:
    """The pass over all files."""

    def __init__(self, source: Source, layout: Layout, stop: Callable[[], bool]) -> None:
        self.hashes: array[int] = array("Q")
        self.begins: list[int] = []
        self.marks: list[np.ndarray] = []
        self.digests: list[Mapping[str, str]] = []
        self._format: InputFormat = source.format
        self._layout = layout
        self._stop = stop
        self._types = ColumnTypes(layout) if layout.columns else None
        self._schemas: list[pa.Schema] = []

    def add(self, file: SourceFile) -> None:
        self.begins.append(len(self.hashes))
        match self._format:
            case "parquet":
                self._add_parquet(file)
            case format:
                self._add_text(file, format)

    def columns(self) -> pa.Schema:
        if self._types is None:
            return pa.schema([])
        return of_parquet(self._schemas, self._layout) if self._schemas else self._types.schema()

    def _add_text(self, file: SourceFile, format: TextFormat) -> None:
        marks: array[int] = array("q")
        hashes, digest = self.hashes, hashlib.sha256()
        raws = raw_records(split_lines(_hashed(chunks(file), digest)), format)
        try:
            header = None
            if format == "csv":
                header = checked_header(next(raws, (0, None))[1], str(file))
            hash_of = self._hash_of_line if format in ("jsonl", "openai") else self._hasher(format, header)
            for number, (offset, raw) in enumerate(raws):
                if number % MARK_EVERY == 0:
                    marks.append(offset)
                    if number % ROWS_PER_READ == 0:
                        self._look_up()
                try:
                    hashes.append(hash_of(raw))
                except UnicodeDecodeError:
                    raise BadTextError(offset, NOT_UTF8) from None
        except BadTextError as error:
            raise bad_text(file, error) from None
        self.marks.append(np.frombuffer(marks, dtype=np.int64) if marks else np.zeros(0, np.int64))
        self.digests.append({"sha256": digest.hexdigest()})

    def _hash_of_line(self, raw: Raw) -> int:
        assert isinstance(raw, bytes)
        try:
            record = parse_line(raw)
        except RequestError:
            return id_hash(content_id(raw.decode("utf-8").rstrip("\r")))
        if self._types is not None:
            self._types.add(record)
        return id_hash(row_id(record, self._layout))

    def _hasher(self, format: TextFormat, header: list[str] | None) -> Callable[[Raw], int]:
        records = TextRecords(format, header)

        def hash_of(raw: Raw) -> int:
            try:
                record = records.record(raw)
            except BadRecordError as error:
                return id_hash(content_id(error.text))
            if self._types is not None:
                self._types.add(record)
            return id_hash(row_id(record, self._layout))

        return hash_of

    def _add_parquet(self, file: SourceFile) -> None:
        """Only the ids are read; of rows without one all columns are."""
        with open_parquet(file) as parquet:
            schema = parquet.schema_arrow
            self._schemas.append(schema)
            wanted = (self._layout.id_column,) if self._layout.id_column else ID_COLUMNS
            columns = [name for name in wanted if name in schema.names]
            try:
                nameless = self._add_ids(parquet, columns)
                if len(nameless):
                    self._hash_contents(parquet, nameless)
            except (OSError, ValueError, pa.ArrowException) as error:
                raise DatasetError(f"input: {file} cannot be read: {error}.", param="input") from None
        self.digests.append(self._parquet_digest(file))

    def _parquet_digest(self, file: SourceFile) -> Mapping[str, str]:
        digest = hashlib.sha256()
        if file.storage.local:
            for _ in _hashed(chunks(file), digest):
                self._look_up()
            return {"sha256": digest.hexdigest()}
        with file.open() as reader:
            reader.seek(max(file.size - FOOTER_BYTES, 0))
            digest.update(reader.read())
        digest.update(memoryview(self.hashes)[self.begins[-1] :])
        return {"sampled": digest.hexdigest()}

    def _add_ids(self, parquet: pq.ParquetFile, columns: list[str]) -> np.ndarray:
        """Returns the rows of the file that have none, int64."""
        begin = len(self.hashes)
        if not columns:
            self.hashes.frombytes(bytes(8 * parquet.metadata.num_rows))
            return np.arange(parquet.metadata.num_rows)
        nameless: array[int] = array("q")
        for batch in parquet.iter_batches(ROWS_PER_READ, columns=columns):
            self._look_up()
            for record in batch.to_pylist():
                row = own_id(record, self._layout)
                if row is None:
                    nameless.append(len(self.hashes) - begin)
                self.hashes.append(0 if row is None else id_hash(row))
        return np.array(nameless, dtype=np.int64)

    def _hash_contents(self, parquet: pq.ParquetFile, rows: np.ndarray) -> None:
        file_begin, begin = self.begins[-1], 0
        for batch in parquet.iter_batches(ROWS_PER_READ):
            self._look_up()
            ours = rows[np.searchsorted(rows, begin) : np.searchsorted(rows, begin + batch.num_rows)] - begin
            records = batch.take(pa.array(ours)) if len(ours) < batch.num_rows else batch
            for place, record in zip(ours.tolist(), records.to_pylist(), strict=True):
                self.hashes[file_begin + begin + place] = id_hash(row_id(record, self._layout))
            begin += batch.num_rows

    def _look_up(self) -> None:
        if self._stop():
            raise CancelledError


def _hashed(pieces: Iterator[bytes], digest: hashlib._Hash) -> Iterator[bytes]:
    for piece in pieces:
        digest.update(piece)
        yield piece


def _checked(columns: pa.Schema) -> pa.Schema:
    if taken := next((name for name in columns.names if name in WIRE_SCHEMA.names), None):
        raise DatasetError(
            f"columns: results have a column {taken!r} of their own. Rename it in the data, or name the "
            "columns to hand on without it.",
            param="columns",
        )
    return columns


def _offset(file: SourceFile, format: TextFormat, span: Span) -> int:
    """Of a span's first record."""
    raws = raw_records(split_lines(chunks(file, span.begin), span.begin), format)
    return next(itertools.islice(raws, span.skip, None))[0]
