"""The number of engines of a job: as many as shorten it, fewer when no rows are left."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from manta.cluster.batch.engine_pool_size import MIN_SOON_S, Concurrency, PoolSize
from manta.cluster.errors import ConfigError


@pytest.mark.parametrize(("text", "minimum", "maximum"), [("3", 3, 3), (" 1:4 ", 1, 4), ("2:2", 2, 2)])
def test_concurrency_is_a_number_or_a_range(text: str, minimum: int, maximum: int) -> None:
    assert Concurrency.parse(text) == Concurrency(minimum, maximum)
    assert Concurrency.parse(str(Concurrency.parse(text))) == Concurrency(minimum, maximum)


@pytest.mark.parametrize("text", ["", "0", "4:1", "0:2", "a", "1:2:3", "-1", "1:"])
def test_invalid_concurrency_is_refused_by_name(text: str) -> None:
    with pytest.raises(ConfigError, match="concurrency"):
        Concurrency.parse(text)


def worked(bounds: Concurrency, rows_per_s: float, *, seconds: float = 10.0) -> PoolSize:
    """Return the size with one engine that started in 3 s and has worked for a while."""
    size = PoolSize(bounds)
    size.record_startup(3.0)
    size.record_work(1, seconds)
    size.record_answered_rows(round(rows_per_s * seconds))
    return size


def test_another_engine_starts_if_the_remaining_rows_take_longer_than_two_starts() -> None:
    size = worked(Concurrency(1, 4), rows_per_s=10.0)
    assert [size.target_size(left, engines=1, busy=1) for left in (50, 61, 130, 9999)] == [1, 2, 3, 4]


def test_rows_without_answers_count_as_slow() -> None:
    size = PoolSize(Concurrency(1, 4))
    size.record_work(1, 0.1)
    assert size.target_size(50, engines=1, busy=1) == 1
    size.record_work(1, 2 * MIN_SOON_S)
    assert size.target_size(50, engines=1, busy=1) == 4


def test_idle_engines_stop_when_no_row_is_left_but_not_below_the_minimum() -> None:
    size = worked(Concurrency(2, 4), rows_per_s=10.0)
    assert size.target_size(0, engines=4, busy=3) == 3
    assert size.target_size(0, engines=4, busy=0) == 2
    assert size.target_size(1, engines=4, busy=3) == 4  # an engine may still be needed


def test_no_engine_starts_for_rows_that_others_have() -> None:
    assert worked(Concurrency(3, 3), rows_per_s=10.0).target_size(0, engines=1, busy=1) == 1


@given(
    st.integers(1, 4),
    st.integers(0, 4),
    st.one_of(st.none(), st.integers(0, 10**6)),
    st.integers(0, 8),
    st.integers(0, 8),
)
def test_the_number_of_engines_keeps_its_bounds(
    minimum: int, more: int, left: int | None, engines: int, busy: int
) -> None:
    size = worked(Concurrency(minimum, minimum + more), rows_per_s=2.0)
    wanted = size.target_size(left, engines, min(busy, engines))
    assert wanted <= max(minimum + more, engines if left == 0 else 0)
    assert left == 0 or wanted >= minimum
