"""Threads that run one compiled task together: thread 0 is the caller, the others are workers.

A *task* is compiled code, called as task(args, thread, num_threads) on every thread at once; `barrier`
separates its phases. Phases are numbered over all tasks of a team: a thread knows which one it is in, since
others may have ended it without that thread (`shared_items.py`). Idle workers spin for some tens of
microseconds, because a step's passes follow each other closely, then sleep in the kernel (futex).

    caller:  publish the task, then a new epoch, wake sleepers ─▶ run as thread 0 ─▶ wait until all are done
    workers: new epoch? ─▶ run as thread i ─▶ done + 1 ─▶ spin, then sleep

A caller that finds the team busy runs its task alone, with the same result, since no task's result depends on
the number of threads. For the same reason a team may be smaller than requested: `thread_team_size.py` sets
its size when other processes use the cores.

An epoch is a count and, in its low bits, the number of threads it needs. Threads that are not needed read
nothing else; needed threads find the task in place, because the caller waits for all of them.
"""

# Numba's functions are typed when they are compiled, not by annotations.
# pyright: reportCallIssue=false, reportArgumentType=false, reportPrivateImportUsage=false

from __future__ import annotations

import os
import platform
import threading
from functools import cache

import numpy as np
from numba import types
from numba.core.typing import signature

from ...cpu_numba.element_ops import elements
from ...cpu_numba.llvm_intrinsics import (
    call_task,
    compare_and_swap,
    fetch_add,
    pause,
    read_shared,
    write_shared,
    yield_core,
)
from ...cpu_numba.thread_clock import now_ns
from .shared_items import LOOKS_BEFORE_YIELD, NUM_STATE_LINES
from .thread_team_size import LIMIT, NUM_SIZE_LINES, begin_sizes, judge, note_wait, size_now, try_out

# Words are 64 bytes apart, each in its own cache line, to avoid false sharing.
_EPOCH, _SLEEPERS, _DONE, _BUSY, _TASK, _ARGS, _FIRST, _ARRIVED, _CALL, _SIZES = (64 * i for i in range(10))
_STATES = _SIZES + 64 * NUM_SIZE_LINES
_NUM_LINES = 9 + NUM_SIZE_LINES + NUM_STATE_LINES
_MAX_THREADS = 1024
_LOOKS = 4000  # some 40 to 200 microseconds, depending on the CPU's pause
_LOOKS_BEFORE_HELP = 100  # some microseconds
_LOOKS_BEFORE_CLOCK = 250  # at a barrier

_FUTEX = 98 if platform.machine() == "aarch64" else 202  # Linux's system call number, the latter on x86-64
_FUTEX_WAIT, _FUTEX_WAKE = 128, 129  # private to the process
_int64 = types.int64
_system_call = types.ExternalFunction(
    "syscall", signature(_int64, _int64, _int64, _int64, _int64, _int64, _int64, _int64)
)


class ThreadTeam:
    """The process's threads, which live as long as it does. Grows on demand."""

    def __init__(self) -> None:
        _work.compile((types.int64, types.int64))  # compile now: a task's caller must not wait for it
        self._words = np.zeros(8 * (_NUM_LINES + 1), dtype=np.int64)
        self.address = -(-self._words.ctypes.data // 64) * 64
        begin_sizes(self.address + _SIZES, _MAX_THREADS)
        self._num_threads = 1
        self._lock = threading.Lock()

    @property
    def limit(self) -> int:
        """Number of threads that a task may get at present (`thread_team_size.py`)."""
        return int(self._words[(self.address - self._words.ctypes.data + _SIZES + LIMIT) // 8])

    def of(self, num_threads: int) -> int:
        """Return the team's address, after growing it to `num_threads` threads."""
        if num_threads > self._num_threads:
            with self._lock:
                for thread in range(self._num_threads, num_threads):
                    args = (self.address, thread)
                    threading.Thread(target=_work, args=args, name=f"team-{thread}", daemon=True).start()
                self._num_threads = max(num_threads, self._num_threads)
        return self.address


def process_team() -> ThreadTeam:
    """Return the process's team. All models share it, because they share the cores."""
    with _MAKING:
        return _team()


@cache
def team_address(num_threads: int) -> int:
    """Return the address of the process's team, which has at least so many threads."""
    return process_team().of(num_threads)


@cache
def _team() -> ThreadTeam:
    return ThreadTeam()


# Of two teams made at once one would be dropped, and its memory freed under its threads.
_MAKING = threading.Lock()


def _forget_team() -> None:
    """Drop the team in a forked child, which has none of its threads."""
    _team.cache_clear()
    team_address.cache_clear()
    _MAKING.release()


os.register_at_fork(before=_MAKING.acquire, after_in_parent=_MAKING.release, after_in_child=_forget_team)


@elements
def run(team, task, args, num_threads):
    """Run the task on the team's available threads, or alone if the team is busy."""
    if num_threads == 1 or fetch_add(team + _BUSY, 1) != 0:
        if num_threads != 1:
            fetch_add(team + _BUSY, -1)
        call_task(task, args, 0, 1)
        return
    size, call = size_now(team + _SIZES, num_threads)
    if call:
        _wake_suspended(team)
    if size == 1:
        call_task(task, args, 0, 1)
    else:
        begin_ns = now_ns()
        _run_together(team, task, args, size)
        judge(team + _SIZES, size, now_ns() - begin_ns)
    fetch_add(team + _BUSY, -1)


@elements
def _run_together(team, task, args, size):
    write_shared(team + _TASK, task)
    write_shared(team + _ARGS, args)
    write_shared(team + _DONE, 0)
    write_shared(team + _FIRST, read_shared(team + _ARRIVED) // _MAX_THREADS)
    _begin_epoch(team, size)
    call_task(task, args, 0, size)
    _wait_for(team, team + _DONE, size - 1)


@elements
def _begin_epoch(team, size):
    count = read_shared(team + _EPOCH) // _MAX_THREADS + 1
    write_shared(team + _EPOCH, count * _MAX_THREADS + size)
    if read_shared(team + _SLEEPERS) > 0:
        _wake_all(team + _EPOCH)


@elements
def _wake_suspended(team):
    """Wake suspended threads, for a trial or to rejoin; they sleep on `_CALL`, or still on the epoch."""
    fetch_add(team + _CALL, 1)
    _wake_all(team + _CALL)
    _begin_epoch(team, 1)


@elements
def _wake_all(word):
    _system_call(_FUTEX, word, _FUTEX_WAKE, 1 << 30, 0, 0, 0)


@elements
def _sleep(word, value):
    """Sleep until the word is woken; return at once if it no longer has this value."""
    _system_call(_FUTEX, word, _FUTEX_WAIT, value & 0xFFFFFFFF, 0, 0, 0)


@elements
def first_phase(team):
    """Return the number of a task's first phase."""
    return read_shared(team + _FIRST)


@elements
def item_states(team):
    """Return the address of the states of a phase's items (`shared_items.py`), MOST_ITEMS words."""
    return team + _STATES


@elements
def barrier(team, num_threads, phase):
    """Wait until all threads of the task have ended this phase; return the next one's number."""
    if num_threads == 1:
        return phase
    arrive(team, num_threads, phase)
    wait_for_end(team, phase)
    return phase + 1


@elements
def arrive(team, num_threads, phase):
    """Count this thread as one that has ended its part of the phase, unless the phase has ended without it.

    The word is a phase's number and, in its low bits, how many threads have ended their parts of it.
    """
    seen = read_shared(team + _ARRIVED)
    while seen // _MAX_THREADS == phase:
        is_last = seen % _MAX_THREADS == num_threads - 1
        following = (phase + 1) * _MAX_THREADS if is_last else seen + 1
        if compare_and_swap(team + _ARRIVED, seen, following):
            return
        seen = read_shared(team + _ARRIVED)


@elements
def end_phase(team, phase):
    """End a phase all of whose parts are done, whichever threads have arrived."""
    seen = read_shared(team + _ARRIVED)
    while seen // _MAX_THREADS == phase:
        if compare_and_swap(team + _ARRIVED, seen, (phase + 1) * _MAX_THREADS):
            return
        seen = read_shared(team + _ARRIVED)


@elements
def ends_soon(team, phase):
    """Return whether the phase ends while one would wait for threads that are not late."""
    for _ in range(_LOOKS_BEFORE_HELP):
        if has_ended(team, phase):
            return True
        pause()
    return False


@elements
def has_ended(team, phase):
    return read_shared(team + _ARRIVED) // _MAX_THREADS > phase


@elements
def wait_for_end(team, phase):
    _wait_for(team, team + _ARRIVED, (phase + 1) * _MAX_THREADS)


@elements
def _wait_for(team, word, value):
    """Spin until the word is at least this value; after a long wait yield the core, and record its length."""
    looks, begin_ns = 0, 0
    while read_shared(word) < value:
        pause()
        looks += 1
        if looks == _LOOKS_BEFORE_CLOCK:
            begin_ns = now_ns()
        if looks >= LOOKS_BEFORE_YIELD:
            yield_core()
    if looks >= LOOKS_BEFORE_YIELD:
        note_wait(team + _SIZES, now_ns() - begin_ns)


@elements
def _work(team, thread):
    epoch, seen_epoch = 0, 0
    while True:
        while thread >= read_shared(team + _SIZES + LIMIT):  # suspended
            call = read_shared(team + _CALL)
            if call != seen_epoch:
                try_out(team + _SIZES, thread)
            seen_epoch = call
            _sleep(team + _CALL, call)
        epoch = _next_epoch(team, epoch)
        size = epoch % _MAX_THREADS
        if thread < size:
            call_task(read_shared(team + _TASK), read_shared(team + _ARGS), thread, size)
            fetch_add(team + _DONE, 1)


@elements
def _next_epoch(team, epoch):
    # Spins first, as the next call usually comes within microseconds; then sleeps on the futex, so that an
    # idle engine leaves its cores to others. The caller wakes threads only if SLEEPERS is not 0: it is raised
    # before the futex compares the epoch, so a call between the last look and the sleep ends the sleep.
    looks = 0
    while read_shared(team + _EPOCH) == epoch:
        pause()
        looks += 1
        if looks >= _LOOKS:
            fetch_add(team + _SLEEPERS, 1)
            _sleep(team + _EPOCH, epoch)
            fetch_add(team + _SLEEPERS, -1)
    return read_shared(team + _EPOCH)
