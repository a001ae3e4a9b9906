"""Rows with an id that an earlier row has: refused, or numbered, never merged.

A survey knows 64 bits of every id. Rows that share them are read once more, in order, and told apart by 64
further bits. The later rows of an id get `-2`, `-3` and so on behind it, past whatever stands in the data: by
row order alone, so that a resumed job finds the same. Rows without an id of their own (equal content) are
always numbered: nobody gave them the same name.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError
from dataclasses import dataclass

import numpy as np

from ...cluster.errors import DatasetError, RequestError
from ...cluster.row_ranges import RowRanges, of_rows
from .reading import Row, id_of, record_of
from .rows import Layout, id_hash, own_id

ROWS_PER_READ = 4096
HASHES_PER_LOOK = 2**18


@dataclass(frozen=True, eq=False)
class Numbering:
    """Rows (int64, ascending) and what is put behind their ids (int32)."""

    rows: np.ndarray
    copies: np.ndarray

    def within(self, ranges: RowRanges) -> dict[int, int]:
        """The numbered rows of a set."""
        found: dict[int, int] = {}
        for begin, end in ranges if len(self.rows) else ():
            few = slice(*np.searchsorted(self.rows, (begin, end)))
            found |= zip(self.rows[few].tolist(), self.copies[few].tolist(), strict=True)
        return found


NOTHING_NUMBERED = Numbering(np.zeros(0, np.int64), np.zeros(0, np.int32))


def number_duplicates(
    hashes: np.ndarray,
    *,
    read: Callable[[RowRanges], list[Row]],
    place: Callable[[int], str],
    layout: Layout,
    refuse: bool,
    stop: Callable[[], bool],
) -> Numbering:
    """Find the rows whose ids are not their own, and write their new ids' bits into `hashes`.

    Args:
        hashes: `rows.id_hash` of each row's id, uint64.
        read: rows, in their order.
        place: where a row stands, in words.
        refuse: raise DatasetError for an id that the data gives twice.
        stop: asked now and then; when it says yes, CancelledError is raised.
    """
    ordered = np.sort(hashes)
    doubled = np.unique(ordered[1:][ordered[1:] == ordered[:-1]])
    books = _Books(doubled, ordered)
    rows: array[int] = array("q")
    copies: array[int] = array("i")
    for few in _holders(hashes, doubled):
        if stop():
            raise CancelledError
        groups = np.searchsorted(doubled, hashes[few]).tolist()
        for row, group in zip(read(of_rows(few.tolist())), groups, strict=True):
            name, own = _name(row, layout)
            first = books.first(group, name, row.number)
            if first == row.number:
                continue
            if refuse and own:
                raise _refused(name, place(first), place(row.number))
            copy = books.next_copy(group, name)
            rows.append(row.number)
            copies.append(copy)
            hashes[row.number] = id_hash(f"{name}-{copy}")
    return Numbering(np.array(rows, np.int64), np.array(copies, np.int32))


class _Books:
    """Who had an id first, and which numbers are given away behind it.

    By group: ids that share 64 bits, nearly always one. What shares them by chance is kept by name.
    """

    def __init__(self, doubled: np.ndarray, ordered: np.ndarray) -> None:
        self._ordered = ordered
        self._first = np.full(len(doubled), -1, np.int64)
        self._further = np.zeros(len(doubled), np.uint64)  # the other 64 bits of the first row's id
        self._copies = np.ones(len(doubled), np.int32)
        self._others: dict[str, list[int]] = {}  # first row and last copy

    def first(self, group: int, name: str, row: int) -> int:
        """The first row of this id; `row` if it is."""
        if self._first[group] < 0:
            self._first[group], self._further[group] = row, _further_bits(name)
        if self._further[group] == _further_bits(name):
            return int(self._first[group])
        return self._others.setdefault(name, [row, 1])[0]

    def next_copy(self, group: int, name: str) -> int:
        """The next number behind this id that makes no id of the data."""
        other = self._others.get(name)
        copy = (int(self._copies[group]) if other is None else other[1]) + 1
        while self._stands(f"{name}-{copy}"):
            copy += 1
        if other is None:
            self._copies[group] = copy
        else:
            other[1] = copy
        return copy

    def _stands(self, name: str) -> bool:
        wanted = np.uint64(id_hash(name))
        place = np.searchsorted(self._ordered, wanted)
        return bool(place < len(self._ordered) and self._ordered[place] == wanted)


def _holders(hashes: np.ndarray, doubled: np.ndarray) -> Iterator[np.ndarray]:
    """The rows that have one of the doubled hashes, a few at a time, in order."""
    for begin in range(0, len(hashes) if len(doubled) else 0, HASHES_PER_LOOK):
        few = hashes[begin : begin + HASHES_PER_LOOK].copy()
        nearest = np.minimum(np.searchsorted(doubled, few), len(doubled) - 1)
        rows = np.flatnonzero(doubled[nearest] == few) + begin
        for at in range(0, len(rows), ROWS_PER_READ):
            yield rows[at : at + ROWS_PER_READ]


def _name(row: Row, layout: Layout) -> tuple[str, bool]:
    """The row's id, and whether the data gives it."""
    try:
        own = own_id(record_of(row, layout), layout)
    except RequestError:
        own = None
    return (id_of(row, layout), False) if own is None else (own, True)


def _further_bits(name: str) -> np.uint64:
    digest = hashlib.blake2b(name.encode("utf-8", "surrogatepass"), digest_size=16).digest()
    return np.frombuffer(digest, np.uint64)[0]


def _refused(name: str, first: str, again: str) -> DatasetError:
    return DatasetError(
        f"input: the id {name!r} stands twice: {first}, and {again}. Give every row an id of its own, or let "
        "later rows be numbered with --duplicate-ids number.",
        param="duplicate_ids",
    )
