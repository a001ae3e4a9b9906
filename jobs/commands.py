"""Manta's own commands in processes of their own: what the demo shows, and sides of benchmarks.

A command is waited for by whoever started it; a server is ready in the block, and ends with it as a user
would end it, by one Ctrl-C. Either logs to a file, whose end is told if it fails. Nothing of the engine is
imported.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from ..cluster.errors import MantaError
from .client import await_ready

START_TIMEOUT_S = 300.0
STOP_TIMEOUT_S = 90.0
LOG_TAIL_LINES = 40


def manta(*arguments: str) -> list[str]:
    """`manta` with these arguments, by this Python."""
    return [sys.executable, "-m", "manta.jobs.cli", *arguments]


def without_ray() -> dict[str, str]:
    """The environment, for a Ray of the command's own also where another one is running."""
    return {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}


@contextmanager
def server(
    command: Sequence[str], url: str, log: Path, while_waiting: Callable[[], None] | None = None
) -> Iterator[float]:
    """A server in a process group of its own, ready; how many seconds that took.

    Args:
        while_waiting: called now and then until it is ready.

    Raises:
        MantaError: it ended, or did not end when it was asked to.
        UnreachableError: it was not ready in time.
    """
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, start_new_session=True, env=without_ray(), stdout=output, stderr=output
        )

    def look() -> None:
        if while_waiting is not None:
            while_waiting()
        if process.poll() is not None:
            raise MantaError(f"The server ended with exit code {process.returncode}:\n{log_tail(log)}")

    try:
        yield await_ready(url, START_TIMEOUT_S, look)
        process.send_signal(signal.SIGINT)
        process.wait(timeout=STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        raise MantaError(f"The server did not end within {STOP_TIMEOUT_S:.0f} s:\n{log_tail(log)}") from None
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def log_tail(log: Path) -> str:
    return "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-LOG_TAIL_LINES:])
