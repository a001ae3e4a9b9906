"""The demo's commands, shown as a user would type them (`commands.py` runs them). Called by `demo.py`."""

from __future__ import annotations

import shlex
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from ..cluster.errors import MantaError
from .commands import log_tail, manta, server, without_ray

TELL_S = 4.0


def run_command(arguments: Sequence[str], *, show: bool = True) -> None:
    """Wait for its end; its output is the demo's, or without `show` only what it says of its progress."""
    _show(arguments)
    output = None if show else subprocess.DEVNULL
    code = subprocess.run(manta(*arguments), env=without_ray(), stdout=output, check=False).returncode
    if code != 0:
        raise MantaError(f"manta {arguments[0]} ended with exit code {code}; see its output above.")


@contextmanager
def serving(arguments: Sequence[str], url: str, log: Path) -> Iterator[None]:
    """`manta serve`, ready in the block; where that fails, the end of its log is shown."""
    _show(arguments)
    begin_s = told_s = time.monotonic()

    def tell() -> None:
        nonlocal told_s
        if time.monotonic() - told_s >= TELL_S:
            told_s = time.monotonic()
            print(f"starting ({told_s - begin_s:.0f} s)", flush=True)

    with server(manta(*arguments), url, log, tell) as ready_s:
        print(f"ready after {ready_s:.0f} s", flush=True)
        try:
            yield
        except BaseException:
            print(f"\nthe server's log ends with:\n{log_tail(log)}", file=sys.stderr, flush=True)
            raise
        print("\nstopping the server", flush=True)


def _show(arguments: Sequence[str]) -> None:
    print(f"$ manta {shlex.join(arguments)}", flush=True)
