"""Runs the demo's commands (with `jobs/common/subprocess_commands.py`) and prints them as typed. Called by
`demo.py`."""

from __future__ import annotations

import shlex
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from ..cluster.errors import MantaError
from .common.subprocess_commands import log_tail, manta, server, without_ray

TELL_S = 4.0


def run_command(arguments: Sequence[str], *, show: bool = True) -> None:
    """Run a command; without `show` its standard output is hidden, and only its progress is shown."""
    _show(arguments)
    output = None if show else subprocess.DEVNULL
    code = subprocess.run(manta(*arguments), env=without_ray(), stdout=output, check=False).returncode
    if code != 0:
        raise MantaError(f"manta {arguments[0]} exited with code {code}; see its output above.")


@contextmanager
def serving(arguments: Sequence[str], url: str, log: Path) -> Iterator[None]:
    """Run `manta serve`, ready in the `with` block; if that fails, print the end of its log."""
    _show(arguments)
    begin_s = printed_s = time.monotonic()

    def print_progress() -> None:
        nonlocal printed_s
        if time.monotonic() - printed_s >= TELL_S:
            printed_s = time.monotonic()
            print(f"starting ({printed_s - begin_s:.0f} s)", flush=True)

    with server(manta(*arguments), url, log, print_progress) as ready_s:
        print(f"ready after {ready_s:.0f} s", flush=True)
        try:
            yield
        except BaseException:
            print(f"\nthe server's log ends with:\n{log_tail(log)}", file=sys.stderr, flush=True)
            raise
        print("\nstopping the server", flush=True)


def _show(arguments: Sequence[str]) -> None:
    print(f"$ manta {shlex.join(arguments)}", flush=True)
