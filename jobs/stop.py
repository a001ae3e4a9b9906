"""Signals that ask a job to end: SIGTERM and Ctrl-C.

At first they raise `Stopped` where the main thread stands. A job that has something to save takes them as
events instead (`told_to`). Either way the second signal ends the process at once. Light: the command line
installs it before torch and Ray are imported.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, Self

STOPPING = (signal.SIGINT, signal.SIGTERM)


class Stopped(BaseException):
    """A signal ended the job. Not an error: nothing that handles errors may take it for one.

    Args:
        number: the signal.

    Attributes:
        told: whether the user was told already, with what is left of the job.
    """

    def __init__(self, number: signal.Signals) -> None:
        super().__init__(f"stopped by {number.name}")
        self.exit_code = 128 + number
        self.told = False


class StopSignals:
    """Takes the signals over while its `with` block lasts. Outside the main thread it does nothing."""

    def __init__(self) -> None:
        self._tell: Callable[[signal.Signals], None] = _raise
        self._before: dict[signal.Signals, Any] = {}  # Any: what `signal.signal` gives back
        self._signalled = False

    @contextmanager
    def told_to(self, tell: Callable[[signal.Signals], None]) -> Iterator[None]:
        """Hand signals to `tell` in place of raising; it must be safe in a signal handler."""
        self._tell = tell
        try:
            yield
        finally:
            self._tell = _raise

    def take_back(self) -> None:
        """Be the handler again, after a library (Ray) has put its own in place."""
        if not self._signalled:  # else the next one ends the process
            for number in self._before:
                signal.signal(number, self._handle)

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._handle) for number in STOPPING}
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}
        # Compiled code that the exception passes through wraps it.
        if isinstance(error, SystemError) and isinstance(error.__cause__, Stopped):
            raise error.__cause__ from None

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self._signalled = True
        for other in STOPPING:
            signal.signal(other, signal.SIG_DFL)
        self._tell(signal.Signals(number))


def _raise(number: signal.Signals) -> None:
    raise Stopped(number)
