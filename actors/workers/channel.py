"""The step channel: one engine, W workers on the same machine, a few microseconds each way.

    engine ── down ring (one writer, W readers) ──▶ workers          plans
    engine ◀── up ring of each worker ───────────── worker           results (rank 0), failures (any rank)

The rings (`rings.py`) lie in an anonymous memory file (memfd) that the engine hands to each worker over a
Unix socket in the abstract namespace; so nothing is ever left behind in /dev/shm or /tmp, whoever is killed
and when. The same socket rings a sleeper awake (one byte), and tells at once when the process at its other
end has died. Who waits spins for a moment with `sched_yield`, then announces that it sleeps and polls.

Messages are pickled; one larger than a slot goes as several fragments, so there is no size limit. Linux
only, same machine and same user only (both are checked). Not a tensor path: that is `process_group.py`.
Used by `ray_executor.py` (engine's end) and the workers; no Ray in here. An end belongs to one thread.
"""

from __future__ import annotations

import json
import os
import pickle
import secrets
import select
import socket
import struct
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from .rings import Layout, Ring, SharedMemory

PATIENCE_S = 60.0  # for a peer that must answer at once
POLL_S = 0.1  # sleepers look up this often; a lost wake-up costs no more
SHORT_SPIN_S, LONG_SPIN_S = 30e-6, 1e-3
_HELLO = struct.Struct("<q")  # rank
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid


class PeerLostError(Exception):
    """The process at the other end is gone, or never was on this machine."""


class _End:
    """What both ends do: wait, wake the other side, move messages."""

    def __init__(self, memory: SharedMemory, own_line: int, spin_s: float) -> None:
        self._memory = memory
        self._own_line = own_line
        self._peers: dict[int, tuple[socket.socket, int]] = {}  # rank (-1: engine) -> socket, asleep line
        self._poller = select.poll()
        self._spin_s = spin_s
        self._closed = False

    def _write(self, ring: Ring, message: object, timeout_s: float, alive: Callable[[], None]) -> None:
        pieces = ring.fragments(pickle.dumps(message, protocol=5))
        for index, piece in enumerate(pieces):
            self._wait(ring.has_room, timeout_s, alive)
            ring.put(piece, last=index == len(pieces) - 1)
            self._wake_sleepers()

    # Any: a channel carries whatever was put in; both ends are ours.
    def _read(self, ring: Ring, reader: int, timeout_s: float, alive: Callable[[], None]) -> Any:
        """The next message; at least its first fragment is there."""
        fragment, last = ring.peek(reader)
        if last:
            message = pickle.loads(fragment)
            fragment.release()
            self._drop(ring, reader)
            return message
        parts = bytearray()
        while True:
            parts += fragment
            fragment.release()
            self._drop(ring, reader)
            if last:
                return pickle.loads(parts)
            self._wait(lambda: ring.has_next(reader), timeout_s, alive)
            fragment, last = ring.peek(reader)

    def _drop(self, ring: Ring, reader: int) -> None:
        ring.drop(reader)
        self._wake_sleepers()

    def _wake_sleepers(self) -> None:
        self._memory.fence()
        for sock, asleep_line in self._peers.values():
            if self._memory.read(asleep_line):
                try:
                    sock.send(b"w", socket.MSG_NOSIGNAL)
                except BlockingIOError:
                    pass  # its buffer is full of wake-ups
                except OSError:
                    pass  # it died; the next wait says so

    def _wait(self, ready: Callable[[], bool], timeout_s: float, alive: Callable[[], None]) -> None:
        spin_until = time.perf_counter() + self._spin_s
        while not ready():
            if time.perf_counter() > spin_until:
                break
            os.sched_yield()
        else:
            return
        self._memory.write(self._own_line, 1)
        self._memory.fence()
        try:
            self._sleep_until(ready, time.monotonic() + timeout_s, alive)
        finally:
            self._memory.write(self._own_line, 0)

    def _sleep_until(self, ready: Callable[[], bool], deadline_s: float, alive: Callable[[], None]) -> None:
        while not ready():
            alive()
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                raise TimeoutError("the step channel's other end did not answer in time")
            self._poller.poll(min(left_s, POLL_S) * 1e3)
            lost = [rank for rank in self._peers if not self._drain(rank)]
            if lost and not ready():
                raise PeerLostError("the engine" if lost == [-1] else f"the worker of rank {lost[0]}")

    def _drain(self, rank: int) -> bool:
        """Take the wake-ups out of a peer's socket. False if the peer is gone."""
        try:
            return self._peers[rank][0].recv(4096) != b""
        except BlockingIOError:
            return True
        except OSError:
            return False

    def close(self) -> None:
        """Let go of memory and sockets; the other side then sees a lost peer. Idempotent."""
        if not self._closed:
            self._closed = True
            for sock, _ in self._peers.values():
                sock.close()
            self._peers.clear()
            self._memory.close()


class StepChannel(_End):
    """The engine's end. Make it, give `address` to the workers, `accept` them, then send and receive.

    Args:
        num_workers: ranks 0..W-1, each of which will connect.
        layout: slot sizes; the defaults suit.
    """

    def __init__(self, num_workers: int, layout: Layout | None = None) -> None:
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.address = f"manta-{os.getpid()}-{secrets.token_hex(8)}"
        self._listener.bind("\0" + self.address)
        self._listener.listen(num_workers)
        self._layout = layout = layout or Layout(num_workers)
        self._file = os.memfd_create("manta-steps")
        os.ftruncate(self._file, layout.size_bytes)
        # It awaits a model's step, which uses all the cores it can get.
        spin_s = spin_budget_s(2 * (num_workers + 1))
        memory = SharedMemory(self._file, layout.size_bytes)
        super().__init__(memory, 0, spin_s)
        self._down = Ring.down(memory, layout)
        self._ups = [Ring.up(memory, layout, rank) for rank in range(num_workers)]
        self._door_is_open = True

    def accept(self, timeout_s: float = PATIENCE_S) -> None:
        """Take in all workers; they connected during their set-up."""
        deadline_s = time.monotonic() + timeout_s
        hello = json.dumps(asdict(self._layout)).encode()
        while len(self._peers) < self._layout.num_workers:
            self._listener.settimeout(max(0.001, deadline_s - time.monotonic()))
            sock, _ = self._listener.accept()
            sock.settimeout(PATIENCE_S)
            if _peer_uid(sock) != os.getuid():
                sock.close()
                continue
            (rank,) = _HELLO.unpack(sock.recv(_HELLO.size, socket.MSG_WAITALL))
            socket.send_fds(sock, [hello], [self._file])
            sock.setblocking(False)
            self._peers[rank] = sock, self._layout.line(rank, 0)
            self._poller.register(sock, select.POLLIN)
        self._shut_door()

    def send(
        self, message: object, timeout_s: float = PATIENCE_S, alive: Callable[[], None] = lambda: None
    ) -> None:
        """Give a message to every worker. `alive` is called about ten times a second and may raise."""
        self._write(self._down, message, timeout_s, alive)

    def receive(self, timeout_s: float, alive: Callable[[], None] = lambda: None) -> tuple[int, Any]:
        """The next message of any worker: (rank, message). Raises PeerLostError, TimeoutError."""
        self._wait(self._has_mail, timeout_s, alive)
        rank = next(r for r, ring in enumerate(self._ups) if ring.has_next(0))
        return rank, self._read(self._ups[rank], 0, timeout_s, alive)

    def _has_mail(self) -> bool:
        return any(ring.has_next(0) for ring in self._ups)

    def _shut_door(self) -> None:
        if self._door_is_open:
            self._door_is_open = False
            self._listener.close()
            os.close(self._file)

    def close(self) -> None:
        self._shut_door()
        super().close()


class WorkerChannel(_End):
    """A worker's end. Gets the shared memory from the engine, which must be in, or soon come to, `accept`.

    Args:
        sock: made by `knock` with the same rank.
        rank: of this worker.
    """

    def __init__(self, sock: socket.socket, rank: int, timeout_s: float = PATIENCE_S) -> None:
        sock.settimeout(timeout_s)
        try:
            hello, files, _, _ = socket.recv_fds(sock, 4096, 1)
        except OSError as error:
            raise PeerLostError(f"the engine ({error})") from None
        if not files:
            raise PeerLostError("the engine")
        layout = Layout(**json.loads(hello))
        memory = SharedMemory(files[0], layout.size_bytes)
        os.close(files[0])
        # It awaits the engine's host work, which is short and runs on one core.
        super().__init__(memory, layout.line(rank, 0), spin_budget_s(layout.num_workers + 1))
        self._rank = rank
        self._down = Ring.down(memory, layout)
        self._up = Ring.up(memory, layout, rank)
        sock.setblocking(False)
        self._peers[-1] = sock, 0
        self._poller.register(sock, select.POLLIN)

    def receive(self) -> Any:
        """The engine's next message, however long it takes while the engine lives (PeerLostError)."""
        self._wait(lambda: self._down.has_next(self._rank), float("inf"), lambda: None)
        return self._read(self._down, self._rank, PATIENCE_S, lambda: None)

    def has_mail_before(self, event: Callable[[], bool]) -> bool:
        """Wait for a message (True) or for `event` (False), which must come soon in any case."""
        while not event():
            if self._down.has_next(self._rank):
                return True
            os.sched_yield()
        return False

    def send(self, message: object, timeout_s: float = PATIENCE_S) -> None:
        """Give the engine a message."""
        self._write(self._up, message, timeout_s, lambda: None)


def knock(address: str, rank: int) -> socket.socket:
    """Connect to the engine's channel. Raises PeerLostError if it is not on this machine."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.connect("\0" + address)
    except OSError:
        sock.close()
        raise PeerLostError("the engine is not on this machine") from None
    if _peer_uid(sock) != os.getuid():
        sock.close()
        raise PeerLostError("the engine's address is held by another user")
    sock.sendall(_HELLO.pack(rank))
    return sock


def spin_budget_s(cores_wanted: int) -> float:
    """How long to spin: briefly where spinning would take a core that the awaited process needs."""
    return LONG_SPIN_S if len(os.sched_getaffinity(0)) >= cores_wanted else SHORT_SPIN_S


def _peer_uid(sock: socket.socket) -> int:
    _, uid, _ = _CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return uid
