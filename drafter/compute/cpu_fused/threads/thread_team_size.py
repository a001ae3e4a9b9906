"""Sets how many threads a team runs with: as many as requested, fewer if some of them get no core.

A barrier costs half a microsecond while all threads run, and a scheduler quantum if one of them does not
because another process has its core or a quota is used up. A team that waits a large share of its time
suspends threads. After a rest, suspended threads test whether they would run: each polls the clock for a
while, concurrently with the team's work. If one is interrupted for long, the trial fails and the next rest is
twice as long. Single interruptions do not count: an engine's own event loop causes some in every step.

    all ──▶ waits are recorded (`note_wait`) ──▶ fewer (`judge`) ──▶ rest ──▶ a trial (`size_now`, `try_out`)
     ▲                                                                ▲                │          │
     └──────────────────────────── passed ────────────────────────────┼────────────────┘          │
                                                                      └──── twice as long ◀───────┘

`thread_team.py` has the threads, and holds these words.
"""

# Numba's functions are typed when they are compiled, not by annotations.
# pyright: reportCallIssue=false, reportArgumentType=false, reportPrivateImportUsage=false

from __future__ import annotations

from ...cpu_numba.element_ops import elements
from ...cpu_numba.llvm_intrinsics import fetch_add, read_shared, write_shared
from ...cpu_numba.thread_clock import finds_a_core, now_ns

# Offsets of the words; times are in nanoseconds. Any thread writes the first three; the others, in a cache
# line of their own, only the caller of tasks writes.
_WAITED = 0  # long waits since the last decision
_PASSED, _FAILED = 8, 16  # threads that have finished their trial
LIMIT = 64  # threads that a task may get
_TRYING = 72  # threads on trial: LIMIT and the following
_SPENT = 80  # in tasks on several threads since the last decision
_PAUSE, _TRIAL = 88, 96  # rest before a trial; time at which the next one may begin
NUM_SIZE_LINES = 2

# Of tasks: minimum time to judge waits by, and after which rests become shorter.
_WINDOW_NS = 300_000_000
_MIN_PAUSE_NS, _MAX_PAUSE_NS = 10_000_000, 1_000_000_000


@elements
def begin_sizes(words, maximum):
    write_shared(words + LIMIT, maximum)
    write_shared(words + _PAUSE, _MIN_PAUSE_NS)


@elements
def note_wait(words, waited_ns):
    fetch_add(words + _WAITED, waited_ns)


@elements
def judge(words, size, spent_ns):
    """Decide after a task on `size` > 1 threads whether to suspend some of them.

    Suspended threads cost at most their share of the speed; so they are suspended if waiting costs somewhat
    more, for long: a server's own processes take their cores in short turns.
    """
    spent_ns += read_shared(words + _SPENT)
    write_shared(words + _SPENT, spent_ns)
    waited_ns = read_shared(words + _WAITED) // (size - 1)  # per waiting thread
    fewer = _step(size - 1)
    pause_ns = read_shared(words + _PAUSE)
    if 5 * size * waited_ns > 6 * fewer * max(spent_ns, _WINDOW_NS):
        write_shared(words + LIMIT, size - fewer)
        _extend_pause(words)
    elif spent_ns > _WINDOW_NS:
        write_shared(words + _PAUSE, max(pause_ns // 2, _MIN_PAUSE_NS))
        _begin_window(words)


@elements
def size_now(words, num_threads):
    """Return the number of threads for the next task, and whether to wake threads for a trial."""
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
        _extend_pause(words)
        return limit, False
    write_shared(words + LIMIT, limit + trying)
    _begin_window(words)
    return min(num_threads, limit + trying), True


@elements
def try_out(words, thread):
    """Run the trial of a suspended thread, if it is on trial: test whether it gets a core."""
    limit = read_shared(words + LIMIT)
    if not limit <= thread < limit + read_shared(words + _TRYING):
        return
    fetch_add(words + (_PASSED if finds_a_core() else _FAILED), 1)


@elements
def _extend_pause(words):
    pause_ns = read_shared(words + _PAUSE)
    write_shared(words + _TRIAL, now_ns() + pause_ns)
    write_shared(words + _PAUSE, min(2 * pause_ns, _MAX_PAUSE_NS))
    _begin_window(words)


@elements
def _begin_window(words):
    write_shared(words + _SPENT, 0)
    write_shared(words + _WAITED, 0)


@elements
def _step(limit):
    """Return how many threads to suspend or resume at once."""
    return max(1, limit // 8)
