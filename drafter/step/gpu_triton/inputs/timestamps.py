"""Timestamps written by the device, so that parts of a step can be timed inside a CUDA graph.

Events would be graph nodes that the host queries one by one; a timestamp is part of the step's result. Called
by `actors/targets/runners/target_pass.py`.
"""

# pyright: reportCallIssue=false

from __future__ import annotations

import time

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import cuda


def stamp(times: Tensor, index: int) -> None:
    """Write the device clock in nanoseconds to `times` (int64) at `index`.

    On a CPU (Triton's interpreter) the host's clock is used.
    """
    if times.is_cuda:
        _stamp[1,](times, index, num_warps=1)
    else:
        times[index].fill_(time.perf_counter_ns())


@triton.jit(do_not_specialize=["index"])
def _stamp(times, index):
    tl.store(times + index, cuda.globaltimer())
