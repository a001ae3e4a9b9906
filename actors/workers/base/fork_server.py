"""A process with its imports done that becomes Ray's workers by forking, so that each import is paid once.

    manta serve ── fork ──▶ first server ── fork ──▶ second server ── fork ──▶ third server
                            Serve's libraries        HTTP, PyTorch             Numba
                                 │ fork                   │ fork                    │ fork
    raylet ── fork_client ──▶ worker                   worker                    worker

Serve's controller, proxies and replicas and the engine's workers are Python processes, each of which imports
for one to two seconds. A server listens on a Unix socket that its owner alone may reach. The client
(`fork_client.py`), which Ray starts in place of a worker, passes on what the worker needs. A server that has
imported more replaces the one before it on the socket. All end when the process that started them ends or
calls `close`.

Each worker imports Ray itself: it reads its worker's environment when it is imported, and its random numbers,
of which it makes ids, would be the same in all forks. Linux only. CUDA must not be initialized before a fork,
so PyTorch is imported only where there is no GPU (`jobs/serve/preloaded_imports.py`). Used through
`local_ray.start_ray`.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import runpy
import select
import shutil
import signal
import socket
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from .fork_client import HEADER_BYTES

CLIENT = Path(__file__).with_name("fork_client.py")
RECEIVE_TIMEOUT_S = 10.0
BACKLOG = 128
Order = dict[str, Any]  # Any: JSON of the client
Imports = Callable[[], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stages:
    """Imports of the fork servers: all but Ray.

    `errand` runs in a fork of the second server once that has done `of_errand`, before its other imports; see
    `answer`.
    """

    first: Imports
    errand: Callable[[], bytes]
    of_errand: Imports
    second: Imports
    third: Imports | None


class ForkServer:
    def __init__(self, stages: Stages) -> None:
        assert self.is_possible()
        # Readable by its owner alone. Short, for the path of a socket.
        self._folder = Path(tempfile.mkdtemp(prefix="manta-fork-", dir="/tmp"))
        self._socket = self._folder / "socket"
        listener = _listen(self._socket)
        sys.stdout.flush()
        sys.stderr.flush()
        owner, self._alive = os.pipe()
        self._answer, answer = os.pipe()
        if os.fork() == 0:
            os.close(self._alive)
            os.close(self._answer)
            _in_child(lambda: _serve_first(stages, listener, self._socket, owner, answer))
        listener.close()
        os.close(owner)
        os.close(answer)
        atexit.register(self.close)

    @staticmethod
    def is_possible() -> bool:
        """Whether this process may fork: on Linux, with one thread and without Ray."""
        return sys.platform == "linux" and threading.active_count() == 1 and "ray" not in sys.modules

    def worker_command(self) -> list[str]:
        """Return the command that precedes the path of Ray's `setup_worker.py`."""
        return [sys.executable, "-IS", str(CLIENT), str(self._socket)]

    def answer(self) -> bytes:
        """Wait for what the errand returned; empty if the servers ended before."""
        with os.fdopen(self._answer, "rb") as stream:
            return stream.read()

    def close(self) -> None:
        """End the servers; workers stay. Idempotent."""
        if self._alive >= 0:
            os.close(self._alive)
            self._alive = -1
            shutil.rmtree(self._folder, ignore_errors=True)
            atexit.unregister(self.close)


def _serve_first(stages: Stages, listener: socket.socket, where: Path, owner: int, answer: int) -> None:
    os.setsid()
    stages.first()
    if os.fork() == 0:
        listener.close()
        _in_child(lambda: _serve_second(stages, where, owner, answer))
    os.close(answer)
    _fork_workers(listener, owner)
    shutil.rmtree(where.parent, ignore_errors=True)  # of an owner that was killed


def _serve_second(stages: Stages, where: Path, owner: int, answer: int) -> None:
    stages.of_errand()
    if os.fork() == 0:
        _in_child(lambda: _run_errand(stages, answer))
    os.close(answer)
    stages.second()
    listener = _bind_socket(where)
    if (third := stages.third) is not None and os.fork() == 0:
        listener.close()
        _in_child(lambda: _serve_third(third, where, owner))
    _fork_workers(listener, owner)


def _serve_third(imports: Imports, where: Path, owner: int) -> None:
    imports()
    _fork_workers(_bind_socket(where), owner)


def _bind_socket(where: Path) -> socket.socket:
    """Listen in place of the server before this one."""
    temporary = where.with_name(f"{os.getpid()}")
    try:
        listener = _listen(temporary)
        temporary.replace(where)
    except FileNotFoundError:  # the owner has ended meanwhile
        raise SystemExit(0) from None
    return listener


def _run_errand(stages: Stages, answer: int) -> None:
    found = stages.errand()
    with contextlib.suppress(BrokenPipeError), os.fdopen(answer, "wb") as stream:  # the owner has ended
        stream.write(found)


def _fork_workers(listener: socket.socket, owner: int) -> None:
    """Answer clients until the owner ends."""
    assert "ray" not in sys.modules, "each worker imports it"
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the system reaps workers
    while True:
        ready, _, _ = select.select([listener, owner], [], [])
        if owner in ready:
            return
        connection, _ = listener.accept()
        with connection, contextlib.suppress(OSError, ValueError):  # the client is gone
            order, streams = _receive(connection)
            if os.fork() == 0:
                for each in (listener, connection):
                    each.close()
                os.close(owner)
                _in_child(lambda order=order, streams=streams: _run_worker(order, streams))
            for stream in streams:
                os.close(stream)
            connection.sendall(b"1")


def _receive(connection: socket.socket) -> tuple[Order, list[int]]:
    """Return a client's order and its standard streams. Raises OSError, ValueError."""
    connection.settimeout(RECEIVE_TIMEOUT_S)
    header, streams, _, _ = socket.recv_fds(connection, HEADER_BYTES, 3)
    left = int.from_bytes(header, "big")
    pieces: list[bytes] = []
    while left and (piece := connection.recv(min(left, 1 << 20))):
        pieces.append(piece)
        left -= len(piece)
    return json.loads(b"".join(pieces)), streams


def _run_worker(order: Order, streams: list[int]) -> None:
    os.setsid()  # Ray ends the process group of a worker that has died
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    os.chdir(order["directory"])
    os.environ.clear()
    os.environ.update(order["environment"])
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, order["blocked"])
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed()
    sys.argv = order["arguments"]
    sys.path[0] = str(Path(sys.argv[0]).parent)
    runpy.run_path(sys.argv[0], run_name="__main__")


def _in_child(work: Callable[[], None]) -> NoReturn:
    """Run `work` as the whole life of a forked process."""
    status = 1
    try:
        atexit._clear()
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        work()
        status = 0
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:  # a process's edge
        traceback.print_exc()
    finally:
        try:
            atexit._run_exitfuncs()
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            os._exit(status)


def _listen(where: Path) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(where))
    listener.listen(BACKLOG)
    return listener
