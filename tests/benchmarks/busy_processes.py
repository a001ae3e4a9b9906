"""Processes that do nothing but take CPU time, for as long as a block runs. Used by `busy.py`.

They belong to the session of their parent: Linux may share out time by session first, and then a hundred busy
processes of another session take no more from us than one.
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
# `while True: pass`, but one whose parent was killed ends too.
_PROGRAM = """
import os, sys
print(flush=True)
while os.getppid() == int(sys.argv[1]):
    for _ in range(10**6):
        pass
"""


@contextmanager
def busy_processes(count: int) -> Iterator[tuple[int, ...]]:
    """`count` processes at work, one thread each; their ids. Whatever happens, none is left behind."""
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
            with process:  # waits, and closes its pipe
                pass


def _start() -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-c", _PROGRAM, str(os.getpid())],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,  # Ctrl-C reaches them too, and is no news
    )


def _await_start(process: subprocess.Popen[bytes]) -> None:
    assert process.stdout is not None, "a pipe was asked for"
    ready, _, _ = select.select([process.stdout], [], [], START_TIMEOUT_S)
    if not ready or not process.stdout.read(1):
        raise MantaError(f"A busy process (pid {process.pid}) did not start within {START_TIMEOUT_S:.0f} s.")
