"""Sets of row numbers as ranges, such as the answered, leased or remaining rows of a dataset.

A set is a tuple of half-open ranges `(begin, end)`, sorted, disjoint and not touching, so that equal sets are
equal values. A job's sets have few ranges, as rows are handed out in runs.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator

RowRanges = tuple[tuple[int, int], ...]


def row_ranges(ranges: Iterable[tuple[int, int]]) -> RowRanges:
    """Return the set of ranges in any order; they may overlap, touch or be empty."""
    merged: list[tuple[int, int]] = []
    for begin, end in sorted(ranges):
        if begin >= end:
            continue
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((begin, end))
    return tuple(merged)


def from_rows(rows: Iterable[int]) -> RowRanges:
    return row_ranges((row, row + 1) for row in rows)


def count(ranges: RowRanges) -> int:
    return sum(end - begin for begin, end in ranges)


def iterate_rows(ranges: RowRanges) -> Iterator[int]:
    for begin, end in ranges:
        yield from range(begin, end)


def contains(ranges: RowRanges, row: int) -> bool:
    place = bisect_right(ranges, row, key=lambda each: each[0]) - 1
    return place >= 0 and row < ranges[place][1]


def union(*sets: RowRanges) -> RowRanges:
    return row_ranges(each for ranges in sets for each in ranges)


def difference(ranges: RowRanges, removed: RowRanges) -> RowRanges:
    left: list[tuple[int, int]] = []
    place = 0
    for begin, end in ranges:
        while place < len(removed) and removed[place][1] <= begin:
            place += 1
        at = place
        while at < len(removed) and removed[at][0] < end:
            if begin < removed[at][0]:
                left.append((begin, removed[at][0]))
            begin = removed[at][1]
            at += 1
        if begin < end:
            left.append((begin, end))
    return tuple(left)


def intersection(a: RowRanges, b: RowRanges) -> RowRanges:
    return difference(a, difference(a, b))


def split_off(ranges: RowRanges, num_rows: int) -> tuple[RowRanges, RowRanges]:
    first: list[tuple[int, int]] = []
    for place, (begin, end) in enumerate(ranges):
        if end - begin > num_rows:
            if num_rows:
                first.append((begin, begin + num_rows))
            return tuple(first), ((begin + num_rows, end), *ranges[place + 1 :])
        first.append((begin, end))
        num_rows -= end - begin
    return tuple(first), ()
