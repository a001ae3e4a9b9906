"""Handles the signals that stop a job: SIGTERM and Ctrl-C.

By default the first signal raises `Stopped` in the main thread. A job that has state to save can handle it as
an event instead (`notifying`). The second signal always ends the process at once. Imports little: the command
line installs the handlers before torch and Ray are imported.
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
    """A signal stops the job. A BaseException, so that error handlers do not catch it."""

    def __init__(self, number: signal.Signals) -> None:
        super().__init__(f"stopped by {number.name}")
        self.exit_code = 128 + number
        self.is_reported = False


class StopSignals:
    """Handles the signals within a `with` block. Does nothing outside the main thread."""

    def __init__(self) -> None:
        self._notify: Callable[[signal.Signals], None] = _raise
        self._before: dict[signal.Signals, Any] = {}  # Any: return value of `signal.signal`
        self._signalled = False

    @contextmanager
    def notifying(self, notify: Callable[[signal.Signals], None]) -> Iterator[None]:
        """Pass signals to `notify` instead of raising; it must be safe in a signal handler."""
        self._notify = notify
        try:
            yield
        finally:
            self._notify = _raise

    def reinstall(self) -> None:
        """Reinstall the handlers after a library (Ray) has replaced them."""
        if not self._signalled:  # else the next signal must end the process
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
        # Compiled code wraps an exception that passes through it in a SystemError.
        if isinstance(error, SystemError) and isinstance(error.__cause__, Stopped):
            raise error.__cause__ from None

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self._signalled = True
        for other in STOPPING:
            signal.signal(other, signal.SIG_DFL)
        self._notify(signal.Signals(number))


def _raise(number: signal.Signals) -> None:
    raise Stopped(number)
