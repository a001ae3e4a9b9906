"""Waits that a person sees: lines that count seconds, and work in threads beside the main one.

Called by `serve.py` and by benchmarks.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import TypeVar

Report = Callable[[str], None]
Result = TypeVar("Result")

TELL_S = 2.0


class Wait:
    """A wait that is under way.

    Attributes:
        what: what is done meanwhile; may change.
    """

    def __init__(self, what: str, report: Report, every_s: float = TELL_S) -> None:
        self.what, self._every_s = what, every_s
        self._report, self._ended, self._begin_s = report, threading.Event(), time.monotonic()

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


def in_thread(work: Callable[[], Result]) -> Future[Result]:
    """Run `work` in a thread of its own, which the process does not wait for at its end."""
    future = Future[Result]()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:  # the future's reader raises it
            future.set_exception(error)

    threading.Thread(target=run, name="manta-beside", daemon=True).start()
    return future
