"""Waiting, waking and messages for both ends of a shared-memory connection.

An `ShmEndpoint` is one side of rings (`ring_buffer.py`) shared with its peers. A socket to each peer wakes a
sleeper (one byte) and reports immediately when the process at its other end has died. A `SpinWaiter` waits on
several ends together: it first spins briefly with `sched_yield`, then sleeps on their sockets. An end belongs
to one thread, as do ends that share a waiter. Messages are pickles, which may execute code, so nothing is
read from a peer before it has proven itself (`abstract_sockets.py`).
"""

from __future__ import annotations

import hmac
import os
import pickle
import select
import socket
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from .ring_buffer import SharedMemory, ShmRing

PEER_TIMEOUT_S = 60.0  # timeout for a peer that must answer at once
POLL_S = 0.1  # polling interval of sleepers, which bounds the cost of a lost wake-up
PROOF_BYTES = 32  # proof at the beginning of a socket that was connected with `abstract_sockets.connect`
SHORT_SPIN_S, LONG_SPIN_S = 30e-6, 1e-3


class PeerLostError(Exception):
    """The process at the other end is gone, or was never on this machine."""


def no_op() -> None:
    """Do nothing, for waits without a callback."""


class SpinWaiter:
    """Waits until something happens on one of several ends. `spin_s`: how long to spin before sleeping."""

    def __init__(self, spin_s: float) -> None:
        self._spin_s = spin_s
        self._poller = select.poll()
        self._ends: list[ShmEndpoint] = []

    def add(self, end: ShmEndpoint) -> None:
        self._ends.append(end)

    def remove(self, end: ShmEndpoint) -> None:
        if end in self._ends:
            self._ends.remove(end)

    def listen(self, sock: socket.socket) -> None:
        self._poller.register(sock, select.POLLIN)

    def forget(self, sock: socket.socket) -> None:
        self._poller.unregister(sock)

    def wait(
        self,
        ready: Callable[[], bool],
        timeout_s: float,
        alive: Callable[[], None] = no_op,
        poll_s: float = POLL_S,
    ) -> None:
        """Wait until `ready`, which is checked at least every `poll_s` seconds. Raises TimeoutError.

        `alive` is called as often; an exception of it ends the wait.
        """
        spin_until = time.perf_counter() + self._spin_s
        while not ready():
            if time.perf_counter() > spin_until:
                break
            os.sched_yield()
        else:
            return
        for end in self._ends:
            end.set_asleep(1)
        try:
            self._sleep_until(ready, time.monotonic() + timeout_s, alive, poll_s)
        finally:
            for end in self._ends:
                end.set_asleep(0)

    def _sleep_until(
        self, ready: Callable[[], bool], deadline_s: float, alive: Callable[[], None], poll_s: float
    ) -> None:
        while not ready():
            alive()
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                raise TimeoutError("the other end did not answer in time")
            self._poller.poll(min(left_s, poll_s) * 1e3)
            for end in self._ends:
                end.take_wakeups()


class _Peer(NamedTuple):
    """A peer's socket, and the line of the memory in which the other end says that it sleeps."""

    sock: socket.socket
    asleep_line: int


class ShmEndpoint:
    """One side of a shared-memory connection.

    `own_line`: line of the memory in which this end says that it sleeps.
    """

    def __init__(self, memory: SharedMemory, own_line: int, waiter: SpinWaiter) -> None:
        self._memory = memory
        self._own_line = own_line
        self._waiter = waiter
        self._peers: dict[int, _Peer] = {}  # by number
        self._lost: set[int] = set()
        self._proofs: dict[int, bytes] = {}  # that peers have yet to send
        self._closed = False
        waiter.add(self)

    def _add_peer(self, number: int, sock: socket.socket, asleep_line: int, proof: bytes = b"") -> None:
        """Add a peer with its socket, which this end now owns.

        `proof`: what the socket must begin with before a message is read (`abstract_sockets.connect`); empty
        if the peer has already proven itself.
        """
        sock.setblocking(False)
        self._peers[number] = _Peer(sock, asleep_line)
        if proof:
            self._proofs[number] = proof
        self._waiter.listen(sock)

    def _name(self, number: int) -> str:
        return f"peer {number}"

    def _write(self, ring: ShmRing, message: object, timeout_s: float, alive: Callable[[], None]) -> None:
        pieces = ring.fragments(pickle.dumps(message, protocol=5))
        for index, piece in enumerate(pieces):
            self._wait(ring.has_room, timeout_s, alive)
            ring.put(piece, last=index == len(pieces) - 1)
            self._wake_sleepers()

    # Any: the messages; both ends are our own code.
    def _read(self, ring: ShmRing, reader: int, timeout_s: float, alive: Callable[[], None]) -> Any:
        """Return the next message after its first fragment has arrived."""
        if self._proofs:  # the peer sends its proof before the message
            self.take_wakeups()
            if self._proofs:
                raise PeerLostError(f"{self._name(min(self._proofs))}: it has not proven itself")
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

    def _drop(self, ring: ShmRing, reader: int) -> None:
        ring.drop(reader)
        self._wake_sleepers()

    def _wake_sleepers(self) -> None:
        self._memory.fence()
        for sock, asleep_line in self._peers.values():
            if self._memory.read(asleep_line):
                try:
                    sock.send(b"w", socket.MSG_NOSIGNAL)
                except BlockingIOError:
                    pass  # the socket's buffer is full of wake-ups
                except OSError:
                    pass  # the peer died; the next wait reports it

    def _wait(self, ready: Callable[[], bool], timeout_s: float, alive: Callable[[], None]) -> None:
        """Wait; raise PeerLostError if a peer is gone and left nothing to read."""
        self._waiter.wait(lambda: ready() or bool(self._lost), timeout_s, alive)
        if not ready():
            raise PeerLostError(self._name(min(self._lost)))

    def set_asleep(self, is_asleep: int) -> None:
        """Tell peers whether this end sleeps, before checking for their messages."""
        if not self._closed:
            self._memory.write(self._own_line, is_asleep)
            self._memory.fence()

    def take_wakeups(self) -> None:
        """Empty the sockets, and record lost peers."""
        for number, (sock, _) in self._peers.items():
            if number in self._lost:
                continue
            if not (self._is_proven(number, sock) if number in self._proofs else _drain(sock)):
                self._lost.add(number)
                self._waiter.forget(sock)

    def _is_proven(self, number: int, sock: socket.socket) -> bool:
        """Remove the proof once it has arrived. False if it is wrong or the peer is gone."""
        proof = self._proofs[number]
        try:
            begin = sock.recv(len(proof), socket.MSG_PEEK)
            if len(begin) == len(proof):
                sock.recv(len(proof))
                if hmac.compare_digest(begin, proof):
                    del self._proofs[number]
                    return True
        except BlockingIOError:
            return True
        except OSError:
            return False
        return len(begin) not in (0, len(proof))

    def close(self) -> None:
        """Release memory and sockets, so that the other side sees a lost peer. Idempotent."""
        if not self._closed:
            self._closed = True
            self._waiter.remove(self)
            for number, (sock, _) in self._peers.items():
                if number not in self._lost:
                    self._waiter.forget(sock)
                sock.close()
            self._peers.clear()
            self._memory.close()


def _drain(sock: socket.socket) -> bool:
    """Remove wake-ups from a peer's socket. False if the peer is gone."""
    try:
        return sock.recv(4096) != b""
    except BlockingIOError:
        return True
    except OSError:
        return False


def spin_budget_s(cores_wanted: int) -> float:
    """Spin briefly if spinning would take a core that the awaited process needs."""
    return LONG_SPIN_S if len(os.sched_getaffinity(0)) >= cores_wanted else SHORT_SPIN_S
