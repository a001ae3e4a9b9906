"""The thread team on few cores: fewer threads, the same bits, and all threads again."""

from __future__ import annotations

import subprocess
import sys
import time

import numpy as np
import pytest
from manta.drafter.compute.cpu_fused.threads.thread_team_size import (
    LIMIT,
    NUM_SIZE_LINES,
    begin_sizes,
    judge,
    note_wait,
    size_now,
    try_out,
)
from manta.drafter.compute.cpu_numba.cpu_features import bf16_instructions

pytestmark = [
    pytest.mark.quiet,
    pytest.mark.skipif(bf16_instructions() is None, reason="this CPU has no products of bf16"),
]

MS = 1_000_000


class Sizes:
    """Results of a team with a given number of threads."""

    def __init__(self, maximum: int) -> None:
        self._words = np.zeros(8 * NUM_SIZE_LINES, dtype=np.int64)
        self.at = self._words.ctypes.data
        begin_sizes(self.at, maximum)

    @property
    def limit(self) -> int:
        return int(self._words[LIMIT // 8])

    def after_a_task(self, size: int, spent_ns: int, waited_ns: int) -> int:
        note_wait(self.at, waited_ns)
        judge(self.at, size, spent_ns)
        return self.limit

    def begin_trial(self, requested: int) -> None:
        deadline_s = time.monotonic() + 60.0
        while not size_now(self.at, requested)[1]:
            assert time.monotonic() < deadline_s, "a rest ends"
            time.sleep(0.001)


@pytest.mark.parametrize(("size", "left"), [(2, 1), (8, 7), (16, 15), (64, 57)])
def test_a_team_that_waits_more_than_it_works_gives_up_threads(size: int, left: int):
    assert Sizes(size).after_a_task(size, 10 * MS, 9 * MS * (size - 1)) == left


@pytest.mark.parametrize(
    ("spent_ns", "waited_ns"),
    [(4 * MS, 3 * MS), (20 * MS, 7 * MS), (4 * MS, 0)],
    ids=["one quantum", "little", "none"],
)
def test_a_team_keeps_its_threads_if_waits_are_short(spent_ns: int, waited_ns: int):
    assert Sizes(2).after_a_task(2, spent_ns, waited_ns) == 2


def test_waits_of_several_tasks_add_up_for_a_limited_time():
    sizes = Sizes(2)
    for _ in range(100):  # a quantum in each window
        assert sizes.after_a_task(2, 21 * MS, 4 * MS) == 2
    for _ in range(9):
        sizes.after_a_task(2, 2 * MS, MS)
    assert sizes.limit == 1


def test_a_thread_resumes_when_its_trial_passes_and_pauses_when_it_fails():
    sizes = Sizes(2)
    assert size_now(sizes.at, 2) == (2, False)
    sizes.after_a_task(2, 10 * MS, 9 * MS)
    assert size_now(sizes.at, 2) == (1, False), "it rests first"
    for _ in range(3):  # a busy machine fails some trials
        sizes.begin_trial(2)
        assert size_now(sizes.at, 2) == (1, False), "the trial is under way"
        try_out(sizes.at, 0)  # a thread that was not given up is not on trial
        try_out(sizes.at, 2)
        assert size_now(sizes.at, 2) == (1, False)
        try_out(sizes.at, 1)
        size, called = size_now(sizes.at, 2)
        assert (size, sizes.limit) == ((2, 2) if called else (1, 1))
        if called:
            return
        assert size_now(sizes.at, 2) == (1, False), "it rests again"


def test_fewer_threads_than_the_limit_are_granted():
    sizes = Sizes(16)
    sizes.after_a_task(8, 4 * MS, 30 * MS)
    assert sizes.limit == 7
    assert size_now(sizes.at, 4) == (4, False)
    assert size_now(sizes.at, 1) == (1, False)


SCRIPT = """
import os, time, torch
cores = os.sched_getaffinity(0)
os.sched_setaffinity(0, {min(cores)})  # threads that are made from here on have this core alone
from manta.drafter.compute.cpu_fused.operators import PackedLinear
from manta.drafter.compute.cpu_fused.threads.thread_team import process_team
torch.set_num_threads(1)
layer = PackedLinear(torch.randn(2048, 1024).bfloat16(), None, 2)
x = torch.randn(16, 1024).bfloat16()
expected = PackedLinear.__call__(layer, x)

def run_until(limit):
    deadline_s = time.monotonic() + 120.0
    while process_team().limit != limit:
        assert time.monotonic() < deadline_s, f"the team has {process_team().limit} threads"
        assert layer(x).equal(expected)
        time.sleep(0.0005)  # leaves the core to a thread on trial

process_team().of(2)
most = process_team().limit
assert most >= 2
run_until(1)
for thread in os.listdir("/proc/self/task"):
    os.sched_setaffinity(int(thread), cores)
if len(cores) > 1:
    run_until(2)
assert all(layer(x).equal(expected) for _ in range(200))
"""


def test_two_threads_on_one_core_become_one_and_two_again_with_equal_bits():
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], timeout=280, check=False, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
