"""Keeps the latency of streams low on an event loop: garbage collection, thread switches, time slices.

A collection of the oldest generation visits all objects while every stream waits: a tenth of a second with
thousands of responses with log probabilities in flight. Requests contain no reference cycles, so they are
freed without the collector. The event loop releases the GIL at each system call. While another thread
computes, it gets the GIL back only after the switch interval, 5 ms by default: ten writes to clients would
take 50 ms.

Work that must run on the loop or consists of many small parts is split into time slices (`LoopYielder`). A
single long call goes into a thread instead if it releases the GIL there.
"""

from __future__ import annotations

import asyncio
import gc
import sys
import time

_SWITCH_INTERVAL_S = 0.001
# Collections of a generation per collection of the next; Python's default is 10 for both. The oldest
# generation is collected after about 7 million new objects.
_YOUNG, _MIDDLE = 10, 1000


def tune_gc() -> None:
    """Freeze all present objects, rarely collect the oldest others, switch threads sooner."""
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    gc.collect()
    gc.freeze()
    gc.set_threshold(gc.get_threshold()[0], _YOUNG, _MIDDLE)


TIME_SLICE_S = 0.005


class LoopYielder:
    """Measures the time since the work last yielded to the event loop."""

    def __init__(self) -> None:
        self._begin_s = time.monotonic()

    @property
    def is_over(self) -> bool:
        return time.monotonic() >= self._begin_s + TIME_SLICE_S

    async def yield_if_over(self) -> None:
        """Yield if this time slice is over; call it between two parts."""
        if self.is_over:
            await asyncio.sleep(0)
            self._begin_s = time.monotonic()
