"""The step channel between an engine and its W workers on one machine, with a latency of a few microseconds.

    engine ── down ring (one writer, W readers) ──▶ workers          plans
    engine ◀── up ring of each worker ───────────── worker           results (rank 0), failures (any rank)

The rings (`ring_buffer.py`) are in an anonymous memory file (memfd) that the engine passes to each worker
over an abstract Unix socket, so no process that is killed leaves anything in /dev/shm or /tmp. Each worker
also gets `NUM_LANES` socket pairs, for work outside of the steps.

Messages are pickled; one that is larger than a slot is sent as several fragments. Linux only, and only
between processes of the same user on the same machine; this, and that both sides know the address's key, is
checked before a pickle is read (`abstract_sockets.py`). Tensors use `actors/workers/comm/process_group.py`
instead. Does not use Ray. An end belongs to one thread.
"""

from __future__ import annotations

import hmac
import json
import os
import socket
import struct
import time
from collections.abc import Callable
from dataclasses import asdict
from multiprocessing.connection import Connection
from typing import Any

from . import abstract_sockets
from .endpoint import PEER_TIMEOUT_S, PeerLostError, ShmEndpoint, SpinWaiter, no_op, spin_budget_s
from .ring_buffer import Layout, SharedMemory, ShmRing

TICK_S = 1e-3  # polling interval for events that wake no sleeper
NUM_LANES = 2  # per worker
_HELLO = struct.Struct("<q")  # rank


class StepChannel(ShmEndpoint):
    """The engine's end. Create it, pass `address` to the workers, `accept` them, then send and receive.

    Ranks 0..W-1 will connect. `layout`: slot sizes; the default suits.
    """

    def __init__(self, num_workers: int, layout: Layout | None = None) -> None:
        self._listener = abstract_sockets.AbstractListener(num_workers)
        self.address = self._listener.address
        self._layout = layout = layout or Layout(num_workers)
        self._file = os.memfd_create("manta-steps")
        os.ftruncate(self._file, layout.size_bytes)
        # The engine waits for a model's step, which uses all the cores it can get.
        waiter = SpinWaiter(spin_budget_s(2 * (num_workers + 1)))
        memory = SharedMemory(self._file, layout.size_bytes)
        super().__init__(memory, 0, waiter)
        self._down = ShmRing.down(memory, layout)
        self._ups = [ShmRing.up(memory, layout, rank) for rank in range(num_workers)]
        self._is_listening = True
        # byte connections to each accepted worker, by rank
        self.lanes: dict[int, tuple[Connection, ...]] = {}

    def accept(self, timeout_s: float = PEER_TIMEOUT_S) -> None:
        deadline_s = time.monotonic() + timeout_s
        hello = json.dumps(asdict(self._layout)).encode()
        while len(self._peers) < self._layout.num_workers:
            self._listener.listener.settimeout(max(0.001, deadline_s - time.monotonic()))
            sock = self._listener.accept()
            if sock is None:
                continue
            sock.settimeout(PEER_TIMEOUT_S)
            (rank,) = _HELLO.unpack(sock.recv(_HELLO.size, socket.MSG_WAITALL))
            pairs = [socket.socketpair() for _ in range(NUM_LANES)]
            socket.send_fds(sock, [hello], [self._file, *(worker_end.fileno() for _, worker_end in pairs)])
            for _, worker_end in pairs:
                worker_end.close()
            self.lanes[rank] = tuple(Connection(engine_end.detach()) for engine_end, _ in pairs)
            self._add_peer(rank, sock, self._layout.line(rank, 0))
        self._close_listener()

    def send(
        self, message: object, timeout_s: float = PEER_TIMEOUT_S, alive: Callable[[], None] = no_op
    ) -> None:
        """Send to every worker. `alive` is called about ten times a second and may raise."""
        self._write(self._down, message, timeout_s, alive)

    def receive(self, timeout_s: float, alive: Callable[[], None] = no_op) -> tuple[int, Any]:
        """Return the next message of any worker and its rank. Raises PeerLostError, TimeoutError."""
        self._wait(self._has_message, timeout_s, alive)
        rank = next(r for r, ring in enumerate(self._ups) if ring.has_next(0))
        return rank, self._read(self._ups[rank], 0, timeout_s, alive)

    def _has_message(self) -> bool:
        return any(ring.has_next(0) for ring in self._ups)

    def _name(self, number: int) -> str:
        return f"the worker of rank {number}"

    def _close_listener(self) -> None:
        if self._is_listening:
            self._is_listening = False
            self._listener.listener.close()
            os.close(self._file)

    def close(self) -> None:
        self._close_listener()
        for lane in (lane for lanes in self.lanes.values() for lane in lanes):
            lane.close()
        super().close()


class WorkerChannel(ShmEndpoint):
    """A worker's end. It gets the shared memory from the engine, which must call `accept` soon.

    `connected`: result of `connect` with the same rank. `waiter`: shared by everything that the worker waits
    for.
    """

    def __init__(
        self,
        connected: tuple[socket.socket, bytes],
        rank: int,
        waiter: SpinWaiter | None = None,
        timeout_s: float = PEER_TIMEOUT_S,
    ) -> None:
        sock, proof = connected
        sock.settimeout(timeout_s)
        try:
            is_proven = hmac.compare_digest(sock.recv(len(proof), socket.MSG_WAITALL), proof)
            hello, files, _, _ = socket.recv_fds(sock, 4096, 1 + NUM_LANES) if is_proven else (b"", [], 0, 0)
        except OSError as error:
            raise PeerLostError(f"the engine ({error})") from None
        if not files:
            raise PeerLostError("the engine")
        layout = Layout(**json.loads(hello))
        memory = SharedMemory(files[0], layout.size_bytes)
        os.close(files[0])
        # byte connections to the engine, in addition to the rings
        self.lanes = tuple(map(Connection, files[1:]))
        # The worker waits for the engine's host work, which is short and runs on one core.
        waiter = waiter or SpinWaiter(spin_budget_s(layout.num_workers + 1))
        super().__init__(memory, layout.line(rank, 0), waiter)
        self._rank = rank
        self._down = ShmRing.down(memory, layout)
        self._up = ShmRing.up(memory, layout, rank)
        self._add_peer(-1, sock, 0)

    def receive(self) -> Any:
        """Wait without limit for the engine's next message. Raises PeerLostError if it dies."""
        self._wait(self._has_message, float("inf"), no_op)
        return self._read(self._down, self._rank, PEER_TIMEOUT_S, no_op)

    def has_message_before(self, event: Callable[[], bool], *, spins: bool) -> bool:
        """Wait for a message (True) or for `event` (False), which must occur soon in any case.

        `spins`: poll continuously, for an event that wakes no sleeper, such as a device's; else sleep.
        """
        while spins and not event():
            if self._has_message():
                return True
            os.sched_yield()
        if not spins:
            is_done = lambda: event() or self._has_message() or bool(self._lost)  # noqa: E731
            self._waiter.wait(is_done, float("inf"), poll_s=TICK_S)
        return not event() and self._has_message()

    def send(self, message: object, timeout_s: float = PEER_TIMEOUT_S) -> None:
        self._write(self._up, message, timeout_s, no_op)

    def _has_message(self) -> bool:
        return self._down.has_next(self._rank)

    def _name(self, number: int) -> str:
        return "the engine"


def connect(address: str, rank: int) -> tuple[socket.socket, bytes]:
    """Connect to the engine's channel. Raises PeerLostError."""
    sock, proof = abstract_sockets.connect(address)
    sock.sendall(_HELLO.pack(rank))
    return sock, proof
