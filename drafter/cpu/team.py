"""Threads that run one compiled task together: thread 0 is the caller's, the others wait here.

A *task* is compiled code, called as task(args, thread, num_threads) on every thread at once; within it
`barrier` separates what must not overlap. Threads that have nothing to do look for work for some tens of
microseconds, as a step's passes follow each other closely, then sleep in the kernel. Python sees one call.

    caller: publish the task, then a new epoch, wake who sleeps ─▶ run as thread 0 ─▶ wait until all are done
    others: new epoch? ─▶ run as thread i ─▶ done + 1 ─▶ look, then sleep

One task at a time: who finds the team at work runs its task alone, with the same result, since no task's
result depends on the number of threads.

An epoch is a count and, in its low bits, how many threads it wants: who is not wanted reads nothing else, and
who is wanted finds the task in place, for its caller waits for all of them.
"""

# Numba's functions are typed when they are compiled, not by annotations.
# pyright: reportCallIssue=false, reportArgumentType=false, reportPrivateImportUsage=false

from __future__ import annotations

import os
import threading
from functools import cache

import numpy as np
from numba import types
from numba.core.typing import signature

from .elements import elements
from .llvm import call_task, fetch_add, pause, read_shared, write_shared

# Words are 64 bytes apart: a line that one thread writes is not one that another reads.
_EPOCH, _SLEEPERS, _DONE, _BUSY, _TASK, _ARGS, _ARRIVED, _PHASE = (64 * i for i in range(8))
_NUM_WORDS = 8 * 8
_MAX_THREADS = 1024
_LOOKS = 4000  # some 40 to 200 microseconds, as long as a CPU pauses
_LOOKS_BEFORE_YIELD = 2000  # at a barrier; the thread waited for may need this core

_FUTEX, _FUTEX_WAIT, _FUTEX_WAKE = 202, 128, 129  # Linux on x86-64; private to the process
_int64 = types.int64
_system_call = types.ExternalFunction(
    "syscall", signature(_int64, _int64, _int64, _int64, _int64, _int64, _int64, _int64)
)
_yield = types.ExternalFunction("sched_yield", signature(types.int32))


class Team:
    """The process's threads; they live as long as it does. Grows to what is asked of it."""

    def __init__(self) -> None:
        _work.compile((types.int64, types.int64))  # now: a caller must not wait for it in a task
        self._words = np.zeros(_NUM_WORDS + 8, dtype=np.int64)
        self.address = -(-self._words.ctypes.data // 64) * 64
        self._num_threads = 1
        self._lock = threading.Lock()

    def of(self, num_threads: int) -> int:
        """The team's address, once it has so many threads."""
        if num_threads > self._num_threads:
            with self._lock:
                for thread in range(self._num_threads, num_threads):
                    args = (self.address, thread)
                    threading.Thread(target=_work, args=args, name=f"team-{thread}", daemon=True).start()
                self._num_threads = max(num_threads, self._num_threads)
        return self.address


@cache
def process_team() -> Team:
    """There are as many cores as there are, however many models: one team serves all."""
    return Team()


os.register_at_fork(after_in_child=process_team.cache_clear)  # a child has none of these threads


@elements
def run(team, task, args, num_threads):
    """Run the task on all threads of the team, or alone if the team is at work."""
    if num_threads == 1 or fetch_add(team + _BUSY, 1) != 0:
        if num_threads != 1:
            fetch_add(team + _BUSY, -1)
        call_task(task, args, 0, 1)
        return
    write_shared(team + _TASK, task)
    write_shared(team + _ARGS, args)
    write_shared(team + _DONE, 0)
    count = read_shared(team + _EPOCH) // _MAX_THREADS + 1
    write_shared(team + _EPOCH, count * _MAX_THREADS + num_threads)
    if read_shared(team + _SLEEPERS) > 0:
        _system_call(_FUTEX, team + _EPOCH, _FUTEX_WAKE, 1 << 30, 0, 0, 0)
    call_task(task, args, 0, num_threads)
    _wait_for(team + _DONE, num_threads - 1)
    fetch_add(team + _BUSY, -1)


@elements
def barrier(team, num_threads):
    """Go on when all threads of the task are here."""
    if num_threads == 1:
        return
    phase = read_shared(team + _PHASE)
    if fetch_add(team + _ARRIVED, 1) == num_threads - 1:
        write_shared(team + _ARRIVED, 0)
        write_shared(team + _PHASE, phase + 1)
        return
    _wait_for(team + _PHASE, phase + 1)


@elements
def _wait_for(word, value):
    looks = 0
    while read_shared(word) != value:
        pause()
        looks += 1
        if looks % _LOOKS_BEFORE_YIELD == 0:
            _yield()


@elements
def _work(team, thread):
    """The life of a thread beside the caller's."""
    epoch = 0
    while True:
        looks = 0
        while read_shared(team + _EPOCH) == epoch:
            pause()
            looks += 1
            if looks >= _LOOKS:
                fetch_add(team + _SLEEPERS, 1)
                _system_call(_FUTEX, team + _EPOCH, _FUTEX_WAIT, epoch & 0xFFFFFFFF, 0, 0, 0)
                fetch_add(team + _SLEEPERS, -1)
        epoch = read_shared(team + _EPOCH)
        size = epoch % _MAX_THREADS
        if thread < size:
            call_task(read_shared(team + _TASK), read_shared(team + _ARGS), thread, size)
            fetch_add(team + _DONE, 1)
