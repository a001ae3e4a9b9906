"""What both ends of a shared-memory connection do: wait, wake the other side, move messages.

An `End` is one side of rings (`rings.py`) that it shares with its peers; a socket to each peer rings a
sleeper awake (one byte) and tells at once when the process at its other end has died. A `Waiter` waits on
some ends together: first for a moment with `sched_yield`, then asleep on their sockets. The step channel
(`channel.py`) and the way to a drafter (`drafter_link.py`) are made of them. An end belongs to one thread,
and ends that share a waiter to the same one. Messages are pickles, which run what they like when they are
read: nothing is read of a peer before it has proven itself (`doors.py`).
"""

from __future__ import annotations

import hmac
import os
import pickle
import select
import socket
import time
from collections.abc import Callable
from typing import Any

from .rings import Ring, SharedMemory

PATIENCE_S = 60.0  # for a peer that must answer at once
POLL_S = 0.1  # sleepers look up this often; a lost wake-up costs no more
PROOF_BYTES = 32  # with which a socket begins that was knocked at
SHORT_SPIN_S, LONG_SPIN_S = 30e-6, 1e-3


class PeerLostError(Exception):
    """The process at the other end is gone, or never was on this machine."""


def nothing() -> None:
    """For a wait that nobody looks in on."""


class Waiter:
    """Waits until something has happened on any of some ends.

    Args:
        spin_s: how long to spin before it sleeps.
    """

    def __init__(self, spin_s: float) -> None:
        self._spin_s = spin_s
        self._poller = select.poll()
        self._ends: list[End] = []

    def add(self, end: End) -> None:
        self._ends.append(end)

    def remove(self, end: End) -> None:
        if end in self._ends:
            self._ends.remove(end)

    def listen(self, sock: socket.socket) -> None:
        """Wake up for this socket too."""
        self._poller.register(sock, select.POLLIN)

    def forget(self, sock: socket.socket) -> None:
        self._poller.unregister(sock)

    def wait(
        self,
        ready: Callable[[], bool],
        timeout_s: float,
        alive: Callable[[], None] = nothing,
        poll_s: float = POLL_S,
    ) -> None:
        """Until `ready`, which is also asked every `poll_s`; TimeoutError if it is not in time.

        Args:
            alive: called as often; what it raises ends the waiting.
        """
        spin_until = time.perf_counter() + self._spin_s
        while not ready():
            if time.perf_counter() > spin_until:
                break
            os.sched_yield()
        else:
            return
        for end in self._ends:
            end.say_asleep(1)
        try:
            self._sleep_until(ready, time.monotonic() + timeout_s, alive, poll_s)
        finally:
            for end in self._ends:
                end.say_asleep(0)

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


class End:
    """One side; see the module's text.

    Args:
        own_line: of the memory, where it says that it sleeps.
        waiter: waits for it, perhaps among others.
    """

    def __init__(self, memory: SharedMemory, own_line: int, waiter: Waiter) -> None:
        self._memory = memory
        self._own_line = own_line
        self._waiter = waiter
        self._peers: dict[
            int, tuple[socket.socket, int]
        ] = {}  # its number -> socket, where it says it sleeps
        self._lost: set[int] = set()
        self._proofs: dict[int, bytes] = {}  # that peers have still to bring
        self._closed = False
        waiter.add(self)

    def _meet(self, number: int, sock: socket.socket, asleep_line: int, proof: bytes = b"") -> None:
        """A peer is there; the socket is this end's now.

        Args:
            proof: with which the socket must begin before a message is read (`doors.knock`); empty where the
                peer has proven itself.
        """
        sock.setblocking(False)
        self._peers[number] = sock, asleep_line
        if proof:
            self._proofs[number] = proof
        self._waiter.listen(sock)

    def _name(self, number: int) -> str:
        """Of a peer, in errors."""
        return f"peer {number}"

    def _write(self, ring: Ring, message: object, timeout_s: float, alive: Callable[[], None]) -> None:
        pieces = ring.fragments(pickle.dumps(message, protocol=5))
        for index, piece in enumerate(pieces):
            self._wait(ring.has_room, timeout_s, alive)
            ring.put(piece, last=index == len(pieces) - 1)
            self._wake_sleepers()

    # Any: it carries whatever was put in; both ends are ours.
    def _read(self, ring: Ring, reader: int, timeout_s: float, alive: Callable[[], None]) -> Any:
        """The next message; at least its first fragment is there."""
        if self._proofs:  # its proof was sent before the message
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
        """Raises PeerLostError where a peer is gone and nothing is there that it has left."""
        self._waiter.wait(lambda: ready() or bool(self._lost), timeout_s, alive)
        if not ready():
            raise PeerLostError(self._name(min(self._lost)))

    def say_asleep(self, asleep: int) -> None:
        """For peers to see, before it is looked whether they have left something."""
        if not self._closed:
            self._memory.write(self._own_line, asleep)
            self._memory.fence()

    def take_wakeups(self) -> None:
        """Read the sockets empty; note who is gone."""
        for number, (sock, _) in self._peers.items():
            if number in self._lost:
                continue
            if not (self._is_proven(number, sock) if number in self._proofs else _drain(sock)):
                self._lost.add(number)
                self._waiter.forget(sock)

    def _is_proven(self, number: int, sock: socket.socket) -> bool:
        """Take the proof off the socket once it is there. False if it is another, or the peer is gone."""
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
        """Let go of memory and sockets; the other side then sees a lost peer. Idempotent."""
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
    """Take the wake-ups out of a peer's socket. False if the peer is gone."""
    try:
        return sock.recv(4096) != b""
    except BlockingIOError:
        return True
    except OSError:
        return False


def spin_budget_s(cores_wanted: int) -> float:
    """How long to spin: briefly where spinning would take a core that the awaited process needs."""
    return LONG_SPIN_S if len(os.sched_getaffinity(0)) >= cores_wanted else SHORT_SPIN_S
