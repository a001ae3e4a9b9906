"""The clock of an engine: its executor owns it, and the engine times steps and queues by it.

An executor that computes has the machine's clock. A simulated one has a virtual clock, so that no decision
depends on the speed of the machine that simulates; or the machine's clock, and then its steps take real time.
"""

from __future__ import annotations

import time
from typing import Final, Protocol


class EngineClock(Protocol):
    """A monotonic clock; its call returns the time in seconds."""

    def __call__(self) -> float: ...

    def wait_until(self, time_s: float) -> None:
        """Return once the time is `time_s` or later."""
        ...


class MachineClock:
    """The clock of the machine, `time.monotonic`; `wait_until` sleeps."""

    def __call__(self) -> float:
        return time.monotonic()

    def wait_until(self, time_s: float) -> None:
        time.sleep(max(time_s - time.monotonic(), 0.0))


MACHINE_CLOCK: Final = MachineClock()


class VirtualClock:
    """A clock that begins at 0 and only advances when told to."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s

    def wait_until(self, time_s: float) -> None:
        self.now_s = max(self.now_s, time_s)

    def advance(self, seconds: float) -> None:
        self.now_s += seconds
