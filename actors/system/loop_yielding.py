"""Long work on an event loop, done in turns: streams beside it wait for one of them, not for all.

For what must happen on the loop, or is of many small parts. What is one long call goes into a thread
(`actors/tokenization/async_prompt_encoder.py`), if it leaves Python's lock alone there. Used by the engine
and by HTTP.
"""

from __future__ import annotations

import asyncio
import time

TURN_S = 0.005


class LoopYielder:
    """Counts the time since others had theirs."""

    def __init__(self) -> None:
        self._begin_s = time.monotonic()

    @property
    def is_over(self) -> bool:
        return time.monotonic() >= self._begin_s + TURN_S

    async def yield_if_over(self) -> None:
        """Called between two parts: lets others on if this turn has been long enough."""
        if self.is_over:
            await asyncio.sleep(0)
            self._begin_s = time.monotonic()
