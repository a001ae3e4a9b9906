"""The demo's commands: each a process of its own, shown as a user would type it. Called by `demo.py`.

A command runs to its end, or is a server that ends with the block; a server's log goes to a file, whose end
is shown if it fails.
"""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from ..cluster.errors import MantaError
from .client import await_ready

START_TIMEOUT_S = 300.0
STOP_TIMEOUT_S = 90.0
LOG_TAIL_LINES = 40


def run_command(arguments: Sequence[str]) -> None:
    """Wait for its end; its output is the demo's."""
    _show(arguments)
    code = subprocess.run(_command(arguments), env=_environment(), check=False).returncode
    if code != 0:
        raise MantaError(f"manta {arguments[0]} ended with exit code {code}; see its output above.")


@contextmanager
def serving(arguments: Sequence[str], url: str, log: Path) -> Iterator[None]:
    """`manta serve` in a process group of its own, ready; ended as a user would, by one Ctrl-C."""
    _show(arguments)
    with log.open("wb") as output:
        process = subprocess.Popen(
            _command(arguments), start_new_session=True, env=_environment(), stdout=output, stderr=output
        )
    try:
        _await_ready(process, url)
        yield
        print("\nstopping the server", flush=True)
        process.send_signal(signal.SIGINT)
        process.wait(timeout=STOP_TIMEOUT_S)
    except BaseException:
        print(f"\nthe server's log ends with:\n{_tail(log)}", file=sys.stderr, flush=True)
        raise
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _await_ready(process: subprocess.Popen[bytes], url: str) -> None:
    def look() -> None:
        if process.poll() is not None:
            raise MantaError(f"manta serve ended with exit code {process.returncode}.")

    print(f"ready after {await_ready(url, START_TIMEOUT_S, look):.0f} s", flush=True)


def _tail(log: Path) -> str:
    return "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-LOG_TAIL_LINES:])


def _command(arguments: Sequence[str]) -> list[str]:
    return [sys.executable, "-m", "manta.jobs.cli", *arguments]


def _environment() -> dict[str, str]:
    """A Ray of the demo's own, also where another one is running."""
    return {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}


def _show(arguments: Sequence[str]) -> None:
    print(f"$ manta {shlex.join(arguments)}", flush=True)
