"""All orders in which ranks can sum, and one can die (`support/explorer`).

What the explorer runs is recorded from the product. Each planted fault must be found.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from manta.actors.workers.ray_executor import STEP_TIMEOUT_S
from manta.drafter.compute.memory.peer_buffers import MAX_SPINS
from support.engines.devices import ON_GPU
from support.explorer.machine import Explorer, Meet, Op, Read, Signal, Thread, Wait, Write, changed

pytest.importorskip("triton")
if ON_GPU:
    pytest.skip("operations are recorded in Triton's interpreter", allow_module_level=True)

from support.explorer.recorded_sums import looks, sums_of_ranks

A_LOOK_S = 2e-7  # at least, of a program that looks at a counter: it reads the L2 cache


@pytest.fixture(scope="module")
def two_ranks() -> list[Thread]:
    """Three launches: the third uses the half of the first again."""
    return sums_of_ranks(2, 3)


def ranks_of(threads: Sequence[Thread]) -> frozenset[str]:
    return frozenset(thread.process for thread in threads if thread.process.startswith("rank"))


def without_barrier(place: int) -> Callable[[list[Thread]], list[Thread]]:
    """Leave out one of a launch's barriers, in all launches: the kernel's first or second, or the end."""

    def apply(threads: list[Thread]) -> list[Thread]:
        numbers = [op.number for op in threads[0].ops if isinstance(op, Meet)]
        gone = set(numbers[place::3])
        return changed(threads, lambda op: None if isinstance(op, Meet) and op.number in gone else op)

    return apply


def in_one_half(op: Op) -> Op:
    if isinstance(op, Read | Write) and op.place.startswith("values"):
        _, place, *of_rank = op.place.split()
        return op._replace(place=" ".join(("values", str(int(place) % 4), *of_rank)))
    return op


def of_signals(op: Op, **how: object) -> Op:
    return op._replace(**how) if isinstance(op, Wait) and op.counter.startswith("signals") else op


FAULTS_OF_SUMS: dict[str, tuple[Callable[[list[Thread]], list[Thread]], str]] = {
    "no barrier before the signals": (without_barrier(0), "a race"),
    "no barrier after the wait": (without_barrier(1), "a race"),
    "relaxed signals": (
        lambda threads: changed(
            threads, lambda op: op._replace(releases=False) if isinstance(op, Signal) else op
        ),
        "a race",
    ),
    "a relaxed wait": (
        lambda threads: changed(threads, lambda op: of_signals(op, acquires=False)),
        "a race",
    ),
    "one half of the buffers": (lambda threads: changed(threads, in_one_half), "a race"),
    "a wait for the signals of the launch before": (
        lambda threads: changed(
            threads, lambda op: of_signals(op, at_least=op.at_least - 1) if isinstance(op, Wait) else op
        ),
        "a race",
    ),
    "a missing signal": (
        lambda threads: changed(threads, lambda op: None if op == Signal("signals 1 of rank 0") else op),
        "a deadlock",
    ),
    "few looks": (
        lambda threads: changed(threads, lambda op: of_signals(op, gives_up=True)),
        "delivers a wrong result of rank 0",
    ),
}


@pytest.mark.parametrize("waits_at_once", [False, True])
def test_two_ranks_sum_what_both_have_written(two_ranks: list[Thread], waits_at_once: bool) -> None:
    """In any order, also if one dies at any time; then the engine ends."""
    found = Explorer(two_ranks, ranks_of(two_ranks), waits_at_once=waits_at_once).explore()
    assert found.fault is None and found.num_states > (300 if waits_at_once else 3000)


def test_launches_of_sums_need_no_order_of_the_stream(two_ranks: list[Thread]) -> None:
    """Those of a row are in order by the kernel's own barriers."""
    threads = without_barrier(2)(two_ranks)
    assert Explorer(threads, ranks_of(threads), waits_at_once=True).explore().fault is None


@pytest.mark.if_changed
def test_three_ranks_sum_what_all_have_written() -> None:
    threads = sums_of_ranks(3, 3)
    found = Explorer(threads, ranks_of(threads), waits_at_once=True).explore()
    assert found.fault is None and found.num_states > 20_000


@pytest.mark.parametrize("waits_at_once", [False, pytest.param(True, marks=pytest.mark.if_changed)])
@pytest.mark.parametrize("fault", FAULTS_OF_SUMS)
def test_faults_of_sums_are_found(fault: str, waits_at_once: bool, two_ranks: list[Thread]) -> None:
    plant, words = FAULTS_OF_SUMS[fault]
    found = Explorer(plant(two_ranks), ranks_of(two_ranks), waits_at_once=waits_at_once).explore()
    assert found.fault is not None and words in found.fault, found


def test_without_a_watcher_the_death_of_a_rank_is_a_deadlock(two_ranks: list[Thread]) -> None:
    found = Explorer(two_ranks, ranks_of(two_ranks), watched=False).explore()
    assert found.fault is not None and found.fault.startswith("a deadlock") and "dies" in found.path[-2]


def test_a_launch_waits_for_as_many_signals_as_there_were_launches() -> None:
    """As recorded sums assume."""
    for launch in range(3):
        assert [looks(2, launch, signals) > 1 for signals in range(5)] == [n <= launch for n in range(5)]


def test_a_rank_looks_longer_than_the_engine_waits_for_a_step() -> None:
    """So that it gives up, and reads something wrong, only after the engine has."""
    assert MAX_SPINS * A_LOOK_S > STEP_TIMEOUT_S
