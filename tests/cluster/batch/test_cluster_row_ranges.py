"""Sets of row numbers behave like Python's sets."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st
from manta.cluster.batch import row_ranges as sets

ROWS = st.sets(st.integers(0, 30))


def as_set(ranges: sets.RowRanges) -> set[int]:
    rows = list(sets.iterate_rows(ranges))
    assert rows == sorted(set(rows))
    assert all(a[1] < b[0] for a, b in itertools.pairwise(ranges)), "ranges touch"
    return set(rows)


@given(ROWS, ROWS, st.integers(0, 40))
def test_row_ranges_behave_like_sets(a: set[int], b: set[int], num_rows: int) -> None:
    one, other = sets.from_rows(a), sets.from_rows(b)
    assert as_set(one) == a
    assert sets.count(one) == len(a)
    assert as_set(sets.union(one, other)) == a | b
    assert as_set(sets.difference(one, other)) == a - b
    assert as_set(sets.intersection(one, other)) == a & b
    assert {row for row in range(32) if sets.contains(one, row)} == a
    first, rest = sets.split_off(one, num_rows)
    assert as_set(first) == set(sorted(a)[:num_rows])
    assert as_set(first) | as_set(rest) == a
    assert not as_set(first) & as_set(rest)


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20))))
def test_ranges_in_any_order_make_the_same_value(ranges: list[tuple[int, int]]) -> None:
    rows = {row for begin, end in ranges for row in range(begin, end)}
    assert sets.row_ranges(ranges) == sets.from_rows(rows)
