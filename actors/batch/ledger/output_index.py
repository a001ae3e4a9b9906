"""Index of an output: which parts and segments count, and which row is where.

A part counts if its record and the part itself exist. A row in several parts (written by an abandoned writer
too, or failed and answered by a later run) counts in one: an answer before a failure, a later run before an
earlier one.

Segments are Arrow files with finished rows that are in no part yet. They are not synced: they survive the
death of any process, and rows lost in a power failure are answered again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
import pyarrow as pa

from ....cluster.batch.row_ranges import RowRanges, count, from_rows, union
from ..dataset.source import ERRORS
from ..dataset.storage import NUM_REQUESTS, Entry, Storage
from ..row_stats import RowStats, restrict_failures
from .output_parts import PART_NAME, PENDING, RECORDS, Record, part_of

Given = TypeVar("Given")
Taken = TypeVar("Taken")


@dataclass(frozen=True, slots=True)
class Segment:
    """`rows` are in the order of the table."""

    name: str
    run: int
    shard: int
    table: pa.Table

    @property
    def rows(self) -> RowRanges:
        return from_rows(row_numbers(self.table))

    @property
    def writer(self) -> str:
        return self.name.removeprefix(f"{PENDING}/").partition("/")[0]


def row_numbers(table: pa.Table) -> list[int]:
    return table["row"].to_pylist()


def segment_folder(writer: str) -> str:
    return f"{PENDING}/{writer}"


def write_segment(output: Storage, name: str, table: pa.Table, *, run: int, shard: int) -> None:
    schema = table.schema.with_metadata({b"run": str(run).encode(), b"shard": str(shard).encode()})
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, schema) as file:
        file.write_table(table.cast(schema))
    output.write(name, sink.getvalue(), synced=False)


def read_segment(output: Storage, name: str, *, only_rows: bool = False) -> Segment | None:
    """Read a segment, or only its row numbers. None if it is gone, or damaged by a power failure."""
    try:
        content = output.read(name)
        options = pa.ipc.IpcReadOptions(included_fields=[0] if only_rows else None)
        table = pa.ipc.open_file(pa.BufferReader(content), options=options).read_all()
    except (FileNotFoundError, pa.ArrowInvalid):
        return None
    metadata = table.schema.metadata
    return Segment(name, int(metadata[b"run"]), int(metadata[b"shard"]), table.replace_schema_metadata())


class OutputIndex:
    """Records and segments of an output at the last `refresh`."""

    def __init__(self, output: Storage, *, first_run: int, numbering: int) -> None:
        # sizes of the files in the output's folder and in the folder of failed rows, by name
        self.files: dict[str, int] = {}
        self.records: dict[str, Record] = {}  # records of the parts that count, by part name
        self.stale: dict[str, Record] = {}  # records of parts with row numbers of an earlier input
        self.segments: dict[str, Segment] = {}  # segments that count, by name; row numbers only
        self._output = output
        self._first_run = first_run
        self._numbering = numbering
        self._read: dict[str, Record | None] = {}  # every record that was read, by part name; immutable
        self._owned: dict[str, RowRanges] | None = None

    def set_numbering(self, numbering: int) -> None:
        self._numbering = numbering
        self._count()

    def refresh(self, writer: str | None = None) -> None:
        """Read new entries; segments first: a row that moves into a part is seen twice, not never."""
        self._refresh_segments(segment_folder(writer) if writer else PENDING)
        self.files = {entry.name: entry.size for entry in results_in(self._output)}
        names = [entry.name for entry in self._output.entries(RECORDS)]
        new = [name for name in names if part_of(name) not in self._read]
        for name, record in zip(new, in_parallel(self._read_record, new), strict=True):
            self._read[part_of(name)] = record
        self._count()

    def forget(self, part: str) -> None:
        self._read.pop(part, None)
        self.files.pop(part, None)
        self._count()

    def add(self, record: Record) -> None:
        self._read[record.part] = record
        self.files[record.part] = record.num_bytes
        self._count()

    @property
    def unrecorded(self) -> list[str]:
        return [name for name in self.files if PART_NAME.fullmatch(name) and name not in self._read]

    @property
    def uncommitted(self) -> list[Record]:
        """Records without an existing part of this job."""
        return [record for record in self._read.values() if record and record.part not in self.records]

    @property
    def owned(self) -> dict[str, RowRanges]:
        if self._owned is None:
            self._owned = _owned(self.records.values())
        return self._owned

    @property
    def answered(self) -> RowRanges:
        return self._rows("part")

    @property
    def failed(self) -> RowRanges:
        return self._rows("errors")

    def failed_since(self, run: int) -> RowRanges:
        records = self.records.values()
        return union(*(each.rows for each in records if each.kind == "errors" and each.run >= run))

    @property
    def stats(self) -> RowStats:
        """Stats of all parts. Each row is counted once; work is counted wherever it was done."""
        return stats_of(self.records.values(), self.owned)

    @property
    def writers(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(segment.writer for segment in self.segments.values()))

    def durable(self, writer: str) -> RowRanges:
        parts = (record.rows for record in self.records.values() if record.writer == writer)
        segments = (segment.rows for segment in self.segments.values() if segment.writer == writer)
        return union(*parts, *segments)

    def run_of(self, writer: str) -> int:
        """Return the run of a writer; 0 if it has no segments."""
        runs = (segment.run for segment in self.segments.values() if segment.writer == writer)
        return max(runs, default=0)

    def _rows(self, kind: str) -> RowRanges:
        return union(*(self.owned[part] for part, record in self.records.items() if record.kind == kind))

    def _refresh_segments(self, folder: str) -> None:
        listed = {entry.name for entry in self._output.entries(folder, recursive=True)}
        for name in [name for name in self.segments if name.startswith(f"{folder}/") and name not in listed]:
            del self.segments[name]
        new = sorted(listed - self.segments.keys())
        for segment in in_parallel(lambda name: read_segment(self._output, name, only_rows=True), new):
            if segment is not None and segment.run >= max(self._first_run, self._numbering):
                self.segments[segment.name] = segment

    def _read_record(self, name: str) -> Record | None:
        """Return None if the record has been removed. Raises ValueError if it is invalid."""
        try:
            record = Record.decoded(self._output.read(name))
            if record.name != name:
                raise ValueError(f"it is the record of {record.part}")
            return record
        except FileNotFoundError:
            return None
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{name} is no record of a part: {error!r}") from error

    def _count(self) -> None:
        there = {
            part: record
            for part, record in self._read.items()
            if record and part in self.files and record.run >= self._first_run
        }
        replaced = {part for record in there.values() for part in record.replaces}
        counts = {part: record for part, record in there.items() if part not in replaced}
        self.records = {part: each for part, each in counts.items() if each.numbering >= self._numbering}
        self.stale = {part: each for part, each in counts.items() if each.numbering < self._numbering}
        self._owned = None


def results_in(output: Storage) -> list[Entry]:
    return [*output.entries(), *output.entries(ERRORS)]


def stats_of(records: Iterable[Record], owned: Mapping[str, RowRanges]) -> RowStats:
    """Sum the stats of parts, counting only the rows in `owned`, but the work for all rows."""
    stats = RowStats()
    for record in records:
        rows, of_part = owned[record.part], record.row_stats()
        if record.failures and rows != record.rows:
            of_part = restrict_failures(of_part, record.failures, rows)
        failed = count(rows) if record.kind == "errors" else 0
        stats.merge(replace(of_part, rows=count(rows), failed=failed))
    return stats


def in_parallel(read: Callable[[Given], Taken], given: Sequence[Given]) -> list[Taken]:
    if not given:
        return []
    with ThreadPoolExecutor(NUM_REQUESTS, thread_name_prefix="manta-output") as readers:
        return list(readers.map(read, given))


def _owned(records: Iterable[Record]) -> dict[str, RowRanges]:
    """Assign each row to the part with the highest priority."""
    weakest_first = sorted(records, key=lambda each: (each.kind == "part", each.run, each.part))
    num_rows = max((record.rows[-1][1] for record in weakest_first if record.rows), default=0)
    holder = np.full(num_rows, -1, dtype=np.int32)
    for place, record in enumerate(weakest_first):
        for begin, end in record.rows:
            holder[begin:end] = place
    held = np.bincount(holder[holder >= 0], minlength=len(weakest_first))
    return {
        record.part: record.rows if held[place] == count(record.rows) else _ranges(holder == place)
        for place, record in enumerate(weakest_first)
    }


def _ranges(mask: np.ndarray) -> RowRanges:
    edges = np.flatnonzero(np.diff(mask.astype(np.int8), prepend=0, append=0)).tolist()
    return tuple(zip(edges[::2], edges[1::2], strict=True))
