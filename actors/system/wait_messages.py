"""Waits of seconds that are told: what is done meanwhile, and a line with the seconds every now and then."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

Report = Callable[[str], None]

TELL_S = 2.0


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


class Wait:
    """A wait that is under way.

    Attributes:
        what: what is done meanwhile; may change.
    """

    def __init__(self, what: str, report: Report, every_s: float = TELL_S) -> None:
        self.what, self._every_s = what, every_s
        self._report, self._ended, self._begin_s = report, threading.Event(), time.monotonic()

    def turn_to(self, what: str) -> None:
        """Report what is waited for next, and count its seconds from now."""
        self.what, self._begin_s = what, time.monotonic()
        self._report(what)

    def tell_forever(self) -> None:
        while not self._ended.wait(self._every_s):
            self._report(f"{self.what} ({time.monotonic() - self._begin_s:.0f} s)")

    def end(self) -> None:
        self._ended.set()


@contextmanager
def counting(what: str, report: Report, *, begin: bool = True, every_s: float = TELL_S) -> Iterator[Wait]:
    """Report `what` at the beginning of the block and, with the seconds so far, every `every_s` in it.

    Args:
        begin: False leaves out the first line.
    """
    if begin:
        report(what)
    wait = Wait(what, report, every_s)
    threading.Thread(target=wait.tell_forever, name="manta-wait", daemon=True).start()
    try:
        yield wait
    finally:
        wait.end()


def counting_on_terminal(what: str, every_s: float = TELL_S) -> AbstractContextManager[object]:
    """Count on standard error every `every_s` if that is a terminal; else stay silent."""
    return counting(what, say, begin=False, every_s=every_s) if sys.stderr.isatty() else nullcontext()
