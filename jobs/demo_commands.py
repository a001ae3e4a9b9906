"""The demo's commands: each a process of its own, shown as a user would type it. Called by `demo.py`.

A command runs to its end, or is a server that ends with the block; a server's log goes to a file, whose end
is shown if it fails.
"""

from __future__ import annotations

import http.client
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from ..cluster.errors import MantaError

START_TIMEOUT_S = 300.0
STOP_TIMEOUT_S = 90.0
HEALTH_INTERVAL_S = 0.5
LOG_TAIL_LINES = 40


def run_command(arguments: Sequence[str]) -> None:
    """Wait for its end; its output is the demo's."""
    _show(arguments)
    code = subprocess.run(_command(arguments), env=_environment(), check=False).returncode
    if code != 0:
        raise MantaError(f"manta {arguments[0]} ended with exit code {code}; see its output above.")


@contextmanager
def serving(arguments: Sequence[str], port: int, log: Path) -> Iterator[None]:
    """`manta serve` in a process group of its own, ready; ended as a user would, by one Ctrl-C."""
    _show(arguments)
    with log.open("wb") as output:
        process = subprocess.Popen(
            _command(arguments), start_new_session=True, env=_environment(), stdout=output, stderr=output
        )
    try:
        _await_health(process, port)
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


def _await_health(process: subprocess.Popen[bytes], port: int) -> None:
    started_s = time.monotonic()
    while (waited_s := time.monotonic() - started_s) < START_TIMEOUT_S:
        if process.poll() is not None:
            raise MantaError(f"manta serve ended with exit code {process.returncode}.")
        if _is_healthy(port):
            print(f"ready after {waited_s:.0f} s", flush=True)
            return
        time.sleep(HEALTH_INTERVAL_S)
    raise MantaError(f"manta serve was not ready within {START_TIMEOUT_S:.0f} s.")


def _is_healthy(port: int) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    except OSError:  # not listening yet
        return False
    finally:
        connection.close()


def _tail(log: Path) -> str:
    return "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-LOG_TAIL_LINES:])


def _command(arguments: Sequence[str]) -> list[str]:
    return [sys.executable, "-m", "manta.jobs.cli", *arguments]


def _environment() -> dict[str, str]:
    """A Ray of the demo's own, also where another one is running."""
    return {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}


def _show(arguments: Sequence[str]) -> None:
    print(f"$ manta {shlex.join(arguments)}", flush=True)
