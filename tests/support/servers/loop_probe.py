"""How long an event loop is blocked, and by which calls: `LoopProbe`.

A task on the loop takes note of how late its turns come; a thread looks, while one is late, at where the
loop's thread is. Others' work on a busy machine is not counted: a pause is never longer than the CPU time
that this process has spent in it. Not a profiler. Used by `probed_server.py`.
"""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from types import FrameType

TURN_S = 0.001
LATE_S = 0.015  # Python gives a thread its turn after 5 ms


@dataclass
class Pauses:
    """Pauses of a loop since the last call, in seconds.

    Attributes:
        longest_s: the longest time between two turns, without the intended wait.
        total_s: the sum of all longer than LATE_S.
        held_by: where the loop's thread was in those, and in how many samples.
    """

    longest_s: float = 0.0
    total_s: float = 0.0
    held_by: Counter[str] = field(default_factory=Counter)


class LoopProbe:
    """Watch the running loop. End it with `close`."""

    def __init__(self) -> None:
        self._pauses = Pauses()
        self._turn_s = time.monotonic()
        self._thread_id = threading.get_ident()
        self._closed = threading.Event()
        self._task = asyncio.create_task(self._turns())
        self._looker = threading.Thread(target=self._poll, name="loop-probe", daemon=True)
        self._looker.start()

    def take(self) -> Pauses:
        """The measurements since the last call; call it from the loop."""
        found, self._pauses = self._pauses, Pauses()
        return found

    def close(self) -> None:
        self._closed.set()
        self._task.cancel()

    async def _turns(self) -> None:
        while True:
            self._turn_s, spent_s = time.monotonic(), time.process_time()
            await asyncio.sleep(TURN_S)
            late_s = min(time.monotonic() - self._turn_s, time.process_time() - spent_s) - TURN_S
            self._pauses.longest_s = max(self._pauses.longest_s, late_s)
            self._pauses.total_s += late_s if late_s > LATE_S else 0.0

    def _poll(self) -> None:
        while not self._closed.wait(LATE_S / 3):
            if time.monotonic() - self._turn_s > LATE_S:
                frame = sys._current_frames().get(self._thread_id)
                self._pauses.held_by[_place(frame)] += 1


def _place(frame: FrameType | None) -> str:
    """The innermost two calls, ours marked by their path inside the package."""
    names: list[str] = []
    while frame is not None and len(names) < 3:
        code = frame.f_code
        names.append(f"{'/'.join(code.co_filename.split('/')[-2:])}:{frame.f_lineno} {code.co_name}")
        frame = frame.f_back
    return " < ".join(names)
