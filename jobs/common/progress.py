"""Progress of long-running commands: lines with counts and remaining time, and work in threads."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Self, TypeVar

from ...actors.system.wait_messages import Report, StderrReport, say

Result = TypeVar("Result")

FIRST_S, INTERVAL_S = 2.0, 10.0
TERMINAL_S = 1.0


class TimeLeft:
    """Reports progress and remaining time, on a terminal in one line; a share without `unit`."""

    def __init__(
        self,
        what: str,
        total: float,
        unit: str | None = None,
        *,
        report: Report = say,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._what, self._total, self._unit = what, total, unit
        self._terminal = report if isinstance(report, StderrReport) and report.is_terminal else None
        self._report, self._clock = report, clock
        self._done = 0.0
        self._begin_s = clock()
        self._next_s = self._begin_s + FIRST_S

    def update(self, count: float = 1) -> None:
        """Add the work done since the last call, which may be 0. Call it often."""
        self._done = min(self._done + count, self._total)
        now_s = self._clock()
        if now_s >= self._next_s:
            self._next_s = now_s + (INTERVAL_S if self._terminal is None else TERMINAL_S)
            show = self._report if self._terminal is None else self._terminal.rewrite
            show(self._line(now_s - self._begin_s))

    def _line(self, spent_s: float) -> str:
        share = f"{100 * self._done / self._total:.0f} %"
        counts = f"{self._done:.0f} of {self._total:.0f} {self._unit}"
        if not self._done:
            return f"{self._what}: {counts if self._unit else share} ({format_duration(spent_s)})"
        left_s = spent_s * (self._total / self._done - 1)
        done = f"{counts} ({share})" if self._unit else share
        return f"{self._what}: {done}, about {format_duration(left_s)} left"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._terminal is not None:
            self._terminal.erase()


def format_duration(seconds: float) -> str:
    """Return a duration in its two largest units, such as "2 h 5 min"."""
    whole = round(seconds)
    for unit, name, below, part in (
        (86400, "d", 3600, "h"),
        (3600, "h", 60, "min"),
        (60, "min", 1, "s"),
    ):
        if whole >= unit:
            rest = whole % unit // below
            return f"{whole // unit} {name}" + (f" {rest} {part}" if rest else "")
    return f"{whole} s"


def in_thread(work: Callable[[], Result]) -> Future[Result]:
    """Run `work` in a daemon thread, which does not delay the exit of the process."""
    future = Future[Result]()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:  # raised by the reader of the future
            future.set_exception(error)

    threading.Thread(target=run, name="manta-beside", daemon=True).start()
    return future
