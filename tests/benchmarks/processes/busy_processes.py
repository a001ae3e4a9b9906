"""Runs processes that only use CPU time, for the duration of a `with` block. Used by `busy.py`.

They are in the session of their parent: Linux may divide CPU time by session first, and then a hundred busy
processes of another session take no more than one.
"""

from __future__ import annotations

import os
import select
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from manta.cluster.errors import MantaError

START_TIMEOUT_S = 60.0
# `while True: pass` that ends if its parent was killed.
_PROGRAM = """
import os, sys
print(flush=True)
while os.getppid() == int(sys.argv[1]):
    for _ in range(10**6):
        pass
"""


@contextmanager
def busy_processes(count: int) -> Iterator[tuple[int, ...]]:
    """Run `count` processes with one thread each; yield their ids. None is left behind after an error."""
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for _ in range(count):
            processes.append(_start())
        for process in processes:
            _await_start(process)
        yield tuple(process.pid for process in processes)
    finally:
        for process in processes:
            process.kill()
        for process in processes:
            with process:  # waits and closes its pipe
                pass


def _start() -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-c", _PROGRAM, str(os.getpid())],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,  # hides the traceback of Ctrl-C
    )


def _await_start(process: subprocess.Popen[bytes]) -> None:
    assert process.stdout is not None, "stdout is a pipe"
    ready, _, _ = select.select([process.stdout], [], [], START_TIMEOUT_S)
    if not ready or not process.stdout.read(1):
        raise MantaError(f"A busy process (pid {process.pid}) did not start within {START_TIMEOUT_S:.0f} s.")
