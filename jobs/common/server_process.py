"""Commands of Manta as processes of their own: a server that is stopped by one Ctrl-C, and others that end.

Does not import the engine. Called by `manta demo` and by benchmarks.
"""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from ...actors.system.wait_messages import counting, say
from ...cluster.errors import MantaError, UnreachableError
from .http_client import await_ready

START_TIMEOUT_S = 300.0
STOP_TIMEOUT_S = 90.0
LOG_TAIL_LINES = 40
OWN_LINE = "manta: "  # how the lines of `manta serve` begin that are for its user


def run_command(arguments: Sequence[str], *, show: bool = True) -> None:
    _show(arguments)
    output = None if show else subprocess.DEVNULL
    code = subprocess.run(manta(*arguments), env=without_ray(), stdout=output, check=False).returncode
    if code != 0:
        raise MantaError(f"manta {arguments[0]} exited with code {code}; see its output above.")


@contextmanager
def serving(arguments: Sequence[str], url: str, log: Path) -> Iterator[None]:
    """Run `manta serve`, ready in the `with` block; if that fails, print the end of its log."""
    _show(arguments)
    with ExitStack() as stack:
        with counting("starting", say, begin=False):
            ready_s = stack.enter_context(server(manta(*arguments), url, log, _shows_new_lines(log)))
        print(f"ready after {ready_s:.0f} s", flush=True)
        try:
            yield
        except BaseException:
            print(f"\nthe server's log ends with:\n{log_tail(log)}", file=sys.stderr, flush=True)
            raise
        print("\nstopping the server", flush=True)


def _shows_new_lines(log: Path) -> Callable[[], None]:
    """Return a function that prints what `manta serve` has reported since its last call."""
    num_shown = 0

    def show() -> None:
        nonlocal num_shown
        lines = log.read_text(encoding="utf-8", errors="replace").split("\n")[:-1]
        for line in lines[num_shown:]:
            if line.startswith(OWN_LINE):
                say(line)
        num_shown = len(lines)

    return show


def _show(arguments: Sequence[str]) -> None:
    print(f"$ manta {shlex.join(arguments)}", flush=True)


def manta(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "manta.jobs.cli", *arguments]


def without_ray() -> dict[str, str]:
    """Return the environment without RAY_ADDRESS, so that the command starts its own Ray."""
    return {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}


@contextmanager
def server(
    command: Sequence[str], url: str, log: Path, while_waiting: Callable[[], None] | None = None
) -> Iterator[float]:
    """Run a server in its own process group; yield the seconds until it was ready."""
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
        try:
            ready_s = await_ready(url, START_TIMEOUT_S, look)
        except UnreachableError as error:
            raise MantaError(f"{error.message} The server's log ends with:\n{log_tail(log)}") from None
        yield ready_s
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
