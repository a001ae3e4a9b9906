"""Waiting for a condition without assuming how fast the machine is."""

from __future__ import annotations

import time
from collections.abc import Callable

WAIT_S = 600.0  # only a test that hangs waits as long


def wait_until(
    condition: Callable[[], object],
    timeout_s: float = WAIT_S,
    what: object = "it did not happen",
    *,
    poll_s: float = 0.01,
    is_running: Callable[[], bool] = lambda: True,
) -> None:
    """Return once the condition holds.

    Raises:
        AssertionError: after the limit, or when what should bring it about has ended; `what` is the message,
            or returns it.
    """
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline_s or not (is_running() or condition()):
            raise AssertionError(what() if callable(what) else what)
        time.sleep(poll_s)
