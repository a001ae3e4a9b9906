"""Tests whether a thread gets a core: polls the clock for a while, and counts gaps as interruptions.

Short interruptions are tolerated, because a serving machine always has some; a process that computes is not.
Used for suspended threads: `cpu_fused/threads/thread_team_size.py`, `actors/system/torch_threads.py`.
"""

# Numba's functions are typed when they are compiled, not by annotations.
# pyright: reportCallIssue=false, reportArgumentType=false, reportPrivateImportUsage=false

from __future__ import annotations

from time import CLOCK_MONOTONIC

import numpy as np
from numba import carray, types
from numba.core.typing import signature

from .element_ops import elements, pointer
from .llvm_intrinsics import stack_memory

_TRIAL_NS = 20_000_000  # longer than a scheduler quantum: a competitor for the core interrupts it by then
_GAP_NS = 50_000
_MAX_LOST = 3  # eighths of the trial; two competing processes take half and more

_clock_gettime = types.ExternalFunction("clock_gettime", signature(types.int32, types.int32, types.int64))
_timespec = stack_memory(64)


@elements
def now_ns():
    at = _timespec()
    _clock_gettime(CLOCK_MONOTONIC, at)
    seconds_and_ns = carray(pointer(at, np.int64(0)), (2,))
    return seconds_and_ns[0] * 1_000_000_000 + seconds_and_ns[1]


@elements
def finds_a_core():
    """Poll the clock for the trial period; return whether this thread ran nearly all the time."""
    begin_ns = last_ns = now_ns()
    lost_ns = 0
    while last_ns - begin_ns < _TRIAL_NS:
        at_ns = now_ns()
        if at_ns - last_ns > _GAP_NS:
            lost_ns += at_ns - last_ns
        last_ns = at_ns
    return 8 * lost_ns < _MAX_LOST * (last_ns - begin_ns)
