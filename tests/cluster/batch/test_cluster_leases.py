"""Leases of rows: no row is lost or held twice, and rows that kill engines are found."""

from __future__ import annotations

import json
import math
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from manta.cluster.batch.leases import Lease, LeaseManager
from manta.cluster.batch.row_ranges import (
    RowRanges,
    contains,
    count,
    difference,
    from_rows,
    iterate_rows,
    union,
)

ENGINES = ("a", "b", "c")


def book_of(num_rows: int, *, smallest: int = 2, largest: int = 8, ordered: bool = False) -> LeaseManager:
    return LeaseManager(((0, num_rows),), largest=largest, smallest=smallest, ordered=ordered)


def some(data: st.DataObject, rows: RowRanges) -> RowRanges:
    return from_rows(data.draw(st.sets(st.sampled_from(sorted(iterate_rows(rows))))) if rows else ())


@settings(max_examples=60)
@given(st.data(), st.sets(st.integers(0, 60), min_size=1), st.booleans())
def test_every_row_is_in_one_place_and_the_job_ends_when_all_are_done(
    data: st.DataObject, rows: set[int], ordered: bool
) -> None:
    book = LeaseManager(from_rows(rows), largest=8, smallest=2, ordered=ordered)
    leases: dict[int, Lease] = {}
    done: set[int] = set()
    for _ in range(data.draw(st.integers(0, 40))):
        engine = data.draw(st.sampled_from(ENGINES))
        match data.draw(st.sampled_from(("take", "take", "mark_durable", "return_rows", "died"))):
            case "take":
                if lease := book.acquire(engine, len(ENGINES)):
                    leases[lease.number] = lease
                    assert not ordered or len({row // 8 for row in iterate_rows(lease.rows)}) == 1
            case "mark_durable" | "return_rows" as what if leases:
                number = data.draw(st.sampled_from(sorted(leases)))
                part = some(data, leases[number].rows)
                getattr(book, what)(number, part)
                done |= set(iterate_rows(part)) if what == "mark_durable" else set()
            case "died":
                lost = [lease for lease in leases.values() if lease.engine == engine]
                durable = some(data, from_rows(row for lease in lost for row in iterate_rows(lease.rows)))
                poison = book.on_engine_death(engine, durable, blame=data.draw(st.booleans()))
                assert set(iterate_rows(poison)) <= set(book.poison)
            case _:
                pass
        open_leases = {lease.number for name in ENGINES for lease in book.leases_of(name)}
        leases = {number: lease for number, lease in leases.items() if number in open_leases}
        book.check_invariants()
    for lease in [*leases.values()]:
        book.mark_durable(lease.number, lease.rows)
    while lease := book.acquire("last", 1):
        assert not book.done
        book.mark_durable(lease.number, lease.rows)
        book.check_invariants()
    assert book.done
    assert book.num_unleased == 0


@settings(max_examples=60)
@given(st.data(), st.integers(1, 80), st.sets(st.integers(0, 79), max_size=4), st.integers(1, 3))
def test_rows_that_kill_are_found_within_a_bounded_number_of_deaths(
    data: st.DataObject, num_rows: int, killers: set[int], num_engines: int
) -> None:
    """Engines hold several leases; a poison row kills its engine while some other rows are durable."""
    killers = {row for row in killers if row < num_rows}
    book = book_of(num_rows, smallest=4, largest=16)
    deaths = 0
    turn = 0
    while not book.done:
        engine = ENGINES[turn % num_engines]
        turn += 1
        while len(book.leases_of(engine)) < 3 and book.acquire(engine, num_engines):
            book.check_invariants()
        held = [row for lease in book.leases_of(engine) for row in iterate_rows(lease.rows)]
        if killers & set(held):
            deaths += 1
            durable = data.draw(st.sets(st.sampled_from(held))) - killers
            book.on_engine_death(engine, from_rows(durable), blame=True)
        else:
            for lease in book.leases_of(engine):
                book.mark_durable(lease.number, lease.rows)
        book.check_invariants()
        assert turn < 1000
    assert set(book.poison) == killers
    # Each death of a row's own makes it a suspect, then quarantined with at most `smallest`, then halves.
    assert deaths <= len(killers) * (3 + math.ceil(math.log2(4)) + 1)
    assert all(seen >= 3 for seen in book.poison.values())


def test_leases_shrink_near_the_end() -> None:
    book = book_of(100, smallest=2, largest=16)
    sizes = []
    while lease := book.acquire("a", 2):
        sizes.append(count(lease.rows))
    assert sizes == sorted(sizes, reverse=True)
    assert (sizes[0], sizes[-2]) == (16, 2)
    assert sum(sizes) == 100


def test_a_lost_node_makes_no_row_a_suspect() -> None:
    book = book_of(4, largest=4)
    for _ in range(9):
        lease = book.acquire("a", 1)
        assert lease is not None
        assert lease.deaths == 0
        assert book.on_engine_death("a", (), blame=False) == ()
    assert (book.num_unleased, book.poison) == (4, {})


def test_suspect_rows_run_after_all_others_and_alone() -> None:
    book = book_of(8, smallest=2, largest=2)
    first = book.acquire("a", 1)
    assert first is not None
    book.on_engine_death("a", (), blame=True)
    order = [book.acquire("b", 1) for _ in range(4)]
    assert [lease.rows[0][0] for lease in order if lease] == [2, 4, 6, 0]
    book.on_engine_death("b", ((2, 8),), blame=True)  # the suspects again
    assert book.acquire("c", 1) == Lease(5, "c", ((0, 2),), 2, None)
    assert book.acquire("c", 1) is None
    book.on_engine_death("c", (), blame=True)
    alone = book.acquire("c", 1)
    assert alone is not None
    assert alone.rows == ((0, 1),)
    assert book.on_engine_death("c", (), blame=True) == ((0, 1),)
    assert book.poison == {0: 4}
    last = book.acquire("c", 1)
    assert last is not None
    assert contains(last.rows, 1)
    book.mark_durable(last.number, last.rows)
    assert book.done


@settings(max_examples=60)
@given(
    data=st.data(),
    poison=st.sets(st.integers(0, 39), max_size=3),
    other_deaths=st.lists(st.booleans(), max_size=2),
    smallest=st.integers(1, 6),
)
def test_poison_rows_are_found_by_drivers_that_die_with_their_engines(
    data: st.DataObject, poison: set[int], other_deaths: list[bool], smallest: int
) -> None:
    """One engine runs, as in a replica; the leases are saved before rows go to the engine."""
    done: RowRanges = ()
    blamed: RowRanges = ()
    deaths = 0
    saved: dict[str, Any] = {}
    while left := difference(((0, 40),), union(done, blamed)):
        book, found = LeaseManager.after_death(saved, left, largest=16, smallest=smallest, trials=3)
        book.check_invariants()
        blamed = union(blamed, found)
        while not book.done:
            while len(book.leases_of("replica")) < 3 and book.acquire("replica", 1):
                book.check_invariants()
            saved = json.loads(json.dumps(book.to_json()))
            held = [row for lease in book.leases_of("replica") for row in iterate_rows(lease.rows)]
            if poison & set(held) or (other_deaths and other_deaths.pop()):
                deaths += 1
                done = union(done, from_rows(data.draw(st.sets(st.sampled_from(held))) - poison))
                break
            for lease in book.leases_of("replica"):
                book.mark_durable(lease.number, lease.rows)
            done = union(done, from_rows(held))
        else:
            saved = json.loads(json.dumps(book.to_json()))
    assert set(iterate_rows(blamed)) == poison and count(done) == 40 - len(poison)
    assert deaths <= len(poison) * (5 + math.ceil(math.log2(smallest)) + 1) + 2
