"""What an output holds: parts that count, segments that wait, and which row stands where.

A part counts when its record and itself are there. Where a row stands in several parts (a writer that was
given up had written it too; it failed, and was answered by a later run) it counts in one: an answer before a
failure, a later run before an earlier one. Reads, and changes nothing; used by `ledger.py` and `sweep.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TypeVar

import numpy as np

from ...cluster.row_ranges import RowRanges, count, union
from .failures import standing
from .figures import RowFigures
from .parts import PART_NAME, PENDING, RECORDS, Record, part_of
from .segments import Segment, read_segment, segment_folder, writer_of
from .source import ERRORS
from .storage import NUM_REQUESTS, Entry, Storage

Given = TypeVar("Given")
Taken = TypeVar("Taken")


class Contents:
    """Records and segments of an output, as of the last `refresh`.

    Attributes:
        files: sizes of the files in the output's folder, and of failed rows', by name.
        records: by part name; of parts that are there and count.
        stale: of parts whose row numbers are those of an earlier input.
        segments: that count, by name, row numbers only.
    """

    def __init__(self, output: Storage, *, first_run: int, numbering: int) -> None:
        self.files: dict[str, int] = {}
        self.records: dict[str, Record] = {}
        self.stale: dict[str, Record] = {}
        self.segments: dict[str, Segment] = {}
        self._output = output
        self._first_run = first_run
        self._numbering = numbering
        self._read: dict[str, Record | None] = {}  # all that were read, by part name; they do not change
        self._owned: dict[str, RowRanges] | None = None

    def renumber(self, numbering: int) -> None:
        """From here on only what is numbered since this run counts."""
        self._numbering = numbering
        self._count()

    def refresh(self, writer: str | None = None) -> None:
        """Read what is new. Segments first: a row that moves on meanwhile is seen twice rather than never.

        Args:
            writer: only its segments are looked at.
        """
        self._refresh_segments(segment_folder(writer) if writer else PENDING)
        self.files = {entry.name: entry.size for entry in results_in(self._output)}
        names = [entry.name for entry in self._output.entries(RECORDS)]
        new = [name for name in names if part_of(name) not in self._read]
        for name, record in zip(new, in_parallel(self._record, new), strict=True):
            self._read[part_of(name)] = record
        self._count()

    def forget(self, part: str) -> None:
        """A part is gone, with its record."""
        self._read.pop(part, None)
        self.files.pop(part, None)
        self._count()

    def learn(self, record: Record) -> None:
        """A part has been written, or its record anew."""
        self._read[record.part] = record
        self.files[record.part] = record.num_bytes
        self._count()

    @property
    def unrecorded(self) -> list[str]:
        """Files named as parts that no record names."""
        return [name for name in self.files if PART_NAME.fullmatch(name) and name not in self._read]

    @property
    def uncommitted(self) -> list[Record]:
        """Records whose part is not there, or that are another job's."""
        return [record for record in self._read.values() if record and record.part not in self.records]

    @property
    def owned(self) -> dict[str, RowRanges]:
        """Which rows of each part count there."""
        if self._owned is None:
            self._owned = _owned(self.records.values())
        return self._owned

    @property
    def answered(self) -> RowRanges:
        return union(*(self.owned[record.part] for record in self.records.values() if record.kind == "part"))

    @property
    def failed(self) -> RowRanges:
        return union(
            *(self.owned[record.part] for record in self.records.values() if record.kind == "errors")
        )

    def failed_since(self, run: int) -> RowRanges:
        """Rows that failed in this run or a later one."""
        records = self.records.values()
        return union(*(each.rows for each in records if each.kind == "errors" and each.run >= run))

    @property
    def figures(self) -> RowFigures:
        """Of all parts; rows are counted once, the work for them wherever it was done."""
        return figures_of(self.records.values(), self.owned)

    @property
    def writers(self) -> tuple[str, ...]:
        """Of whom there are segments."""
        return tuple(dict.fromkeys(writer_of(name) for name in self.segments))

    def durable(self, writer: str) -> RowRanges:
        """Rows of a writer, in parts or segments."""
        parts = (record.rows for record in self.records.values() if record.writer == writer)
        segments = (each.rows for each in self.segments.values() if writer_of(each.name) == writer)
        return union(*parts, *segments)

    def run_of(self, writer: str) -> int:
        """The run that a writer of segments belongs to; 0 if there are none."""
        runs = (each.run for each in self.segments.values() if writer_of(each.name) == writer)
        return max(runs, default=0)

    def _refresh_segments(self, folder: str) -> None:
        listed = {entry.name for entry in self._output.entries(folder, recursive=True)}
        gone = [name for name in self.segments if name.startswith(f"{folder}/") and name not in listed]
        for name in gone:
            del self.segments[name]
        new = sorted(listed - self.segments.keys())
        for segment in in_parallel(self._segment, new):
            if segment is not None and segment.run >= max(self._first_run, self._numbering):
                self.segments[segment.name] = segment

    def _segment(self, name: str) -> Segment | None:
        return read_segment(self._output, name, only_rows=True)

    def _record(self, name: str) -> Record | None:
        """None if it has gone meanwhile. Raises ValueError if it is no record."""
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
    """The files in which a user finds results, and whatever stands beside them."""
    return [*output.entries(), *output.entries(ERRORS)]


def figures_of(records: Iterable[Record], owned: Mapping[str, RowRanges]) -> RowFigures:
    """The figures of parts together.

    Args:
        owned: by part, the rows that count there. Only they are rows, and only they have failed; the work of
            all is counted.
    """
    figures = RowFigures()
    for record in records:
        rows, of_part = owned[record.part], record.row_figures()
        if record.failures and rows != record.rows:
            of_part = standing(of_part, record.failures, rows)
        failed = count(rows) if record.kind == "errors" else 0
        figures.merge(replace(of_part, rows=count(rows), failed=failed))
    return figures


def in_parallel(read: Callable[[Given], Taken], given: Sequence[Given]) -> list[Taken]:
    """Many small requests at once."""
    if not given:
        return []
    with ThreadPoolExecutor(NUM_REQUESTS, thread_name_prefix="manta-output") as readers:
        return list(readers.map(read, given))


def _owned(records: Iterable[Record]) -> dict[str, RowRanges]:
    """Rows in one part only are that part's; of others the strongest part has them."""
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
