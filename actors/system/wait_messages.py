"""Reports long waits: on a terminal in one line with the elapsed time, in a log by a line for each phase."""

from __future__ import annotations

import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Report = Callable[[str], None]

INTERVAL_S = 1.0
_ERASE = "\r\x1b[K"


class StderrReport:
    """Writes lines to standard error. On a terminal, a line of progress gives way to the next line."""

    def __init__(self, prefix: str = "") -> None:
        self._prefix = prefix

    def __call__(self, line: str) -> None:
        erase = _ERASE if self.is_terminal else ""
        print(f"{erase}{self._prefix}{line}", file=sys.stderr, flush=True)

    @property
    def is_terminal(self) -> bool:
        return sys.stderr.isatty()

    def rewrite(self, line: str) -> None:
        """Show progress on a terminal. The cursor is left at the line's beginning, for lines of others."""
        width = shutil.get_terminal_size().columns - 1
        print(f"{_ERASE}{f'{self._prefix}{line}'[:width]}\r", end="", file=sys.stderr, flush=True)

    def erase(self) -> None:
        print(_ERASE, end="", file=sys.stderr, flush=True)


say = StderrReport()


class Wait:
    """`what`: the work in progress; may change."""

    def __init__(self, what: str, report: Report, every_s: float = INTERVAL_S) -> None:
        self.what, self._report, self._every_s = what, report, every_s
        self._terminal = report if isinstance(report, StderrReport) and report.is_terminal else None
        self._ended, self._begin_s = threading.Event(), time.monotonic()
        self._thread: threading.Thread | None = None

    def begin(self) -> None:
        if self._terminal is not None:
            self._thread = threading.Thread(target=self._rewrite_forever, name="manta-wait", daemon=True)
            self._thread.start()

    def set_stage(self, what: str) -> None:
        """Report the next work, and count its seconds from now."""
        self.what, self._begin_s = what, time.monotonic()
        self.report_stage()

    def report_stage(self) -> None:
        (self._report if self._terminal is None else self._terminal.rewrite)(self.what)

    def end(self) -> None:
        self._ended.set()
        if self._thread is not None and self._terminal is not None:
            self._thread.join()
            self._terminal.erase()

    def _rewrite_forever(self) -> None:
        assert self._terminal is not None, "only a terminal is rewritten"
        while not self._ended.wait(self._every_s):
            self._terminal.rewrite(f"{self.what} ({time.monotonic() - self._begin_s:.0f} s)")


@contextmanager
def counting(what: str, report: Report, *, begin: bool = True, every_s: float = INTERVAL_S) -> Iterator[Wait]:
    """Report `what`, on a terminal with the elapsed seconds; in a log once, without `begin` never."""
    wait = Wait(what, report, every_s)
    if begin:
        wait.report_stage()
    wait.begin()
    try:
        yield wait
    finally:
        wait.end()
