"""Splits long work on an event loop into time slices, so that other streams wait for one slice only.

For work that must run on the loop or consists of many small parts. A single long call goes into a thread
instead (`actors/tokenization/async_prompt_encoder.py`) if it releases the GIL there. Used by the engine and
by HTTP.
"""

from __future__ import annotations

import asyncio
import time

TURN_S = 0.005


class LoopYielder:
    """Measures the time since the work last yielded to the event loop."""

    def __init__(self) -> None:
        self._begin_s = time.monotonic()

    @property
    def is_over(self) -> bool:
        return time.monotonic() >= self._begin_s + TURN_S

    async def yield_if_over(self) -> None:
        """Yield to the event loop if this time slice is over; call it between two parts."""
        if self.is_over:
            await asyncio.sleep(0)
            self._begin_s = time.monotonic()
