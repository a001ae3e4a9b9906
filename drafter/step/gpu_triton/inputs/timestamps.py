"""The time on the device, written by the device: a step's parts are timed inside a CUDA graph.

Events would be nodes of the graph that the host has to ask one by one; a stamp is a number among those that a
step brings home. Called by `actors/targets/runners/target_pass.py`.
"""

# pyright: reportCallIssue=false

from __future__ import annotations

import time

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import cuda


def stamp(times: Tensor, index: int) -> None:
    """Write the time, in nanoseconds of the device's own clock, into `times` (int64) at `index`.

    On a CPU the interpreter has no such clock, and the host's is the device's.
    """
    if times.is_cuda:
        _stamp[1,](times, index, num_warps=1)
    else:
        times[index].fill_(time.perf_counter_ns())


@triton.jit(do_not_specialize=["index"])
def _stamp(times, index):
    tl.store(times + index, cuda.globaltimer())
