"""Waiting for a condition without assuming how fast the machine is."""

from __future__ import annotations

import time
from collections.abc import Callable

WAIT_S = 120.0  # only a test that hangs waits as long


def wait_until(
    condition: Callable[[], object],
    timeout_s: float = WAIT_S,
    what: object = "it did not happen",
    poll_s: float = 0.01,
) -> None:
    """Return once the condition holds; after the limit raise AssertionError with `what`."""
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, what
        time.sleep(poll_s)
