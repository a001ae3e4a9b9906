"""Runs Manta's commands as subprocesses, for the demo and benchmarks.

A server is ready within the `with` block and is stopped at its end by one Ctrl-C. Commands log to a file; if
one fails, the error contains the end of its log. Does not import the engine.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from ...cluster.errors import MantaError
from .http_client import await_ready

START_TIMEOUT_S = 300.0
STOP_TIMEOUT_S = 90.0
LOG_TAIL_LINES = 40


def manta(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "manta.jobs.cli", *arguments]


def without_ray() -> dict[str, str]:
    """Return the environment without RAY_ADDRESS, so that the command starts its own Ray."""
    return {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}


@contextmanager
def server(
    command: Sequence[str], url: str, log: Path, while_waiting: Callable[[], None] | None = None
) -> Iterator[float]:
    """Run a server in its own process group; yield the seconds until it was ready.

    `while_waiting` is called regularly until then.
    """
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, start_new_session=True, env=without_ray(), stdout=output, stderr=output
        )

    def look() -> None:
        if while_waiting is not None:
            while_waiting()
        if process.poll() is not None:
            raise MantaError(f"The server exited with code {process.returncode}:\n{log_tail(log)}")

    try:
        yield await_ready(url, START_TIMEOUT_S, look)
        process.send_signal(signal.SIGINT)
        process.wait(timeout=STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        raise MantaError(f"The server did not exit within {STOP_TIMEOUT_S:.0f} s:\n{log_tail(log)}") from None
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def log_tail(log: Path) -> str:
    return "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-LOG_TAIL_LINES:])
