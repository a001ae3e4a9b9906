"""Reports long waits: the work in progress, repeated periodically with the elapsed time."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

Report = Callable[[str], None]

REPORT_INTERVAL_S = 2.0


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


class Wait:
    """`what`: the work in progress; may change."""

    def __init__(self, what: str, report: Report, every_s: float = REPORT_INTERVAL_S) -> None:
        self.what, self._every_s = what, every_s
        self._report, self._ended, self._begin_s = report, threading.Event(), time.monotonic()

    def set_stage(self, what: str) -> None:
        """Report the next work, and count its seconds from now."""
        self.what, self._begin_s = what, time.monotonic()
        self._report(what)

    def report_forever(self) -> None:
        while not self._ended.wait(self._every_s):
            self._report(f"{self.what} ({time.monotonic() - self._begin_s:.0f} s)")

    def end(self) -> None:
        self._ended.set()


@contextmanager
def counting(
    what: str, report: Report, *, begin: bool = True, every_s: float = REPORT_INTERVAL_S
) -> Iterator[Wait]:
    """Report `what` at the beginning, unless not `begin`, and every `every_s` with the elapsed seconds."""
    if begin:
        report(what)
    wait = Wait(what, report, every_s)
    threading.Thread(target=wait.report_forever, name="manta-wait", daemon=True).start()
    try:
        yield wait
    finally:
        wait.end()


def counting_on_terminal(what: str, every_s: float = REPORT_INTERVAL_S) -> AbstractContextManager[object]:
    return counting(what, say, begin=False, every_s=every_s) if sys.stderr.isatty() else nullcontext()
