"""Items of a phase that any thread may compute, and one writes: so no thread waits for another's work.

A phase's items (panels of a product) are divided among the threads. One that has finished its own does those
of a thread that is late, from the last one down: the core of that thread may belong to another process for
longer than the whole phase takes. The item that the late thread has begun is computed twice; the *state* of
an item decides who writes it, so results are in memory of the thread until then:

    compute an item ─▶ claim(state)? ─ yes ─▶ write ─▶ publish(state)
                            └── no: another thread has written it, or is about to

A late thread goes on where it was, possibly phases behind. What it reads may be newer then than its phase,
and what it computes is not written: a state holds a number that grows with phases and is never reset.
Arrivals count for a thread's own phase alone (`thread_team.barrier`).

An item may have several parts (tiles of rows), which are claimed one after the other.
"""

# Numba's functions are typed when they are compiled, not by annotations.
# pyright: reportCallIssue=false, reportArgumentType=false, reportPrivateImportUsage=false

from __future__ import annotations

from ...cpu_numba.element_ops import elements
from ...cpu_numba.llvm_intrinsics import compare_and_swap, pause, read_shared, write_shared, yield_core

MOST_ITEMS = 2**14
_WORD = 8
_LINE_WORDS = 8  # a thread's states have cache lines of their own
_PARTS = 2**16  # more than twice an item's parts
LOOKS_BEFORE_YIELD = 2000  # the awaited thread may need this core
NUM_STATE_LINES = MOST_ITEMS // _LINE_WORDS


@elements
def states_per_thread(num_items, num_threads):
    """Return the words of each thread's states; 0 if there are too many items."""
    each = (num_items + num_threads - 1) // num_threads
    words = (each + _LINE_WORDS - 1) // _LINE_WORDS * _LINE_WORDS
    return words if words * num_threads <= MOST_ITEMS else 0


@elements
def state_of(states, index):
    """Return the address of a state; 0 if the items have none."""
    return states + _WORD * index if states != 0 else 0


@elements
def is_complete(state, phase):
    return state != 0 and read_shared(state) >= _complete(phase)


@elements
def _complete(phase):
    return phase * _PARTS + _PARTS - 1


@elements
def claim(state, phase, part):
    """Return whether the caller shall write this part, and `publish` it; always without a state.

    If another thread writes it or the part before, wait until it has been written.
    """
    if state == 0:
        return True
    before = phase * _PARTS + 2 * part  # the part before has been written
    seen, looks = read_shared(state), 0
    while seen < before + 2:
        may_claim = seen <= before if part == 0 else seen == before
        if may_claim and compare_and_swap(state, seen, before + 1):
            return True
        looks += 1
        if looks < LOOKS_BEFORE_YIELD:
            pause()
        else:
            yield_core()
        seen = read_shared(state)
    return False


@elements
def publish(state, phase, part, parts):
    """Say that a claimed part has been written."""
    if state != 0:
        write_shared(state, _complete(phase) if part == parts - 1 else phase * _PARTS + 2 * part + 2)
