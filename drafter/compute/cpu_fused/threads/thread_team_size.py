"""How many threads a team runs with: as many as asked, fewer while some of them find no core.

A barrier costs half a microsecond while all threads run, and a scheduler's quantum when one of them does not:
other processes have its core, or a quota is used up. A team that waits a large share of its time gives up
threads: the others have their work done sooner. After a rest, threads that were given up try whether they
would run: each looks at the clock for a while, beside the team's work and in nobody's way. Whoever is
interrupted for long fails, and the next rest is twice as long. Single interruptions are no reason: the event
loop of an engine's own process makes some in every step.

    all ──▶ waits are noted (`note_wait`) ──▶ fewer (`judge`) ──▶ rest ──▶ a trial (`size_now`, `try_out`)
     ▲                                                             ▲                 │          │
     └─────────────────────────── nobody was interrupted ──────────┼─────────────────┘          │
                                                                   └──── twice as long ◀────────┘

Not the threads themselves (`thread_team.py`, among whose words these are). No task's result depends on any of
it.
"""

# Numba's functions are typed when they are compiled, not by annotations.
# pyright: reportCallIssue=false, reportArgumentType=false, reportPrivateImportUsage=false

from __future__ import annotations

from ...cpu_numba.element_ops import elements
from ...cpu_numba.llvm_intrinsics import fetch_add, read_shared, write_shared
from ...cpu_numba.thread_clock import finds_a_core, now_ns

# Offsets of the words; times are in nanoseconds. Any thread writes the first three, then come those that only
# the caller of tasks writes, in a line of their own.
_WAITED = 0  # long waits since the last verdict
_PASSED, _FAILED = 8, 16  # threads that have ended their trial
LIMIT = 64  # threads that a task may get
_TRYING = 72  # threads on trial: LIMIT and the following
_SPENT = 80  # in tasks on several threads since the last verdict
_REST, _TRIAL = 88, 96  # before a trial; when the next one may begin
NUM_SIZE_LINES = 2

_WINDOW_NS = 20_000_000  # of tasks: what waits are a share of, and after which rests become shorter
_SHORTEST_REST_NS, _LONGEST_REST_NS = 10_000_000, 1_000_000_000


@elements
def begin_sizes(words, most):
    """The words of a new team."""
    write_shared(words + LIMIT, most)
    write_shared(words + _REST, _SHORTEST_REST_NS)


@elements
def note_wait(words, waited_ns):
    """A thread has waited so long for another one, and a running one had come sooner."""
    fetch_add(words + _WAITED, waited_ns)


@elements
def judge(words, size, spent_ns):
    """After a task on `size` > 1 threads: fewer, if that is where its time went.

    Threads given up cost at most their share of the speed; so they go when waiting costs nearly as much.
    """
    spent_ns += read_shared(words + _SPENT)
    write_shared(words + _SPENT, spent_ns)
    waited_ns = read_shared(words + _WAITED) // (size - 1)  # of each thread but the one that is waited for
    fewer = _step(size - 1)
    rest_ns = read_shared(words + _REST)
    if 5 * size * waited_ns > 4 * fewer * max(spent_ns, _WINDOW_NS):
        write_shared(words + LIMIT, size - fewer)
        _rest_longer(words)
    elif spent_ns > _WINDOW_NS:
        write_shared(words + _REST, max(rest_ns // 2, _SHORTEST_REST_NS))
        _begin_window(words)


@elements
def size_now(words, num_threads):
    """Threads that the next task gets of those asked for, and whether threads shall be called to a trial."""
    limit, trying = read_shared(words + LIMIT), read_shared(words + _TRYING)
    if num_threads <= limit:
        return num_threads, False
    if trying == 0:
        if now_ns() < read_shared(words + _TRIAL):
            return limit, False
        write_shared(words + _PASSED, 0)
        write_shared(words + _FAILED, 0)
        write_shared(words + _TRYING, min(_step(limit), num_threads - limit))
        return limit, True
    failed = read_shared(words + _FAILED)
    if failed + read_shared(words + _PASSED) < trying:
        return limit, False
    write_shared(words + _TRYING, 0)
    if failed > 0:
        _rest_longer(words)
        return limit, False
    write_shared(words + LIMIT, limit + trying)
    _begin_window(words)
    return min(num_threads, limit + trying), True


@elements
def try_out(words, thread):
    """The trial of a thread that was given up, if it is called to one: is there a core for it?"""
    limit = read_shared(words + LIMIT)
    if not limit <= thread < limit + read_shared(words + _TRYING):
        return
    fetch_add(words + (_PASSED if finds_a_core() else _FAILED), 1)


@elements
def _rest_longer(words):
    rest_ns = read_shared(words + _REST)
    write_shared(words + _TRIAL, now_ns() + rest_ns)
    write_shared(words + _REST, min(2 * rest_ns, _LONGEST_REST_NS))
    _begin_window(words)


@elements
def _begin_window(words):
    write_shared(words + _SPENT, 0)
    write_shared(words + _WAITED, 0)


@elements
def _step(limit):
    """How many threads come or go at once."""
    return max(1, limit // 8)
