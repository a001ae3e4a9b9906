"""Clients that hold connections: idle ones, and unfinished headers and bodies.

Each trial opens connections to a port on loopback, sends a probe and a small request meanwhile, closes the
connections and returns its results as a `Held`. None takes much longer than a minute. Called by
`abuse_hostile.py`:

    idle_connections(port, 4150)            a server behind HAProxy: probes 200, the small request answered
    slow_heads(port, 500)                   likewise; all of them are closed within 15 s
    unfinished_bodies(port, 30, 31)         of 31 MB each: likewise; closed 20 s after their last byte
    unfinished_uploads(port, 8, 120)        of 120 MB each: likewise; a budget drops some before
    trickled_bodies(port, 50, seconds=30)   a byte a second: 408 after 20 s and 1 s more for each 32 KiB
"""

from __future__ import annotations

import asyncio
import resource
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field

SOURCES = [f"127.0.0.{i}" for i in range(2, 12)]  # a limit for each address
ANSWER_S = 20.0
CLOSED_S = 90.0  # sending included; see `Held.silent_s`
SMALL = b'{"prompt": "x", "max_tokens": 1}'
ROUTE = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"

Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@dataclass
class Held:
    """The server's behavior while connections were held.

    Attributes:
        opened: connections that were accepted.
        probe: status of `GET /health` meanwhile, 0 without an answer, and `probe_s` how long it took.
        small: status of a small request from another address meanwhile, and `small_s`.
        answers: statuses that the held connections got in the end; 0: closed without one.
        open_s: how long the last of them stayed open; None: some still were after CLOSED_S.
        silent_s: the longest time that one stayed open after its last byte.
    """

    opened: int = 0
    probe: int = 0
    probe_s: float = 0.0
    small: int = 0
    small_s: float = 0.0
    answers: dict[int, int] = field(default_factory=dict[int, int])
    open_s: float | None = None
    silent_s: float = 0.0


def idle_connections(port: int, count: int) -> Held:
    """Connections that sent HAProxy one request and are then silent, as long as they are kept alive."""
    return _hold(port, count, b"GET /-/healthz HTTP/1.1\r\nHost: x\r\n\r\n")


def slow_heads(port: int, count: int) -> Held:
    """Unfinished headers."""
    return _hold(port, count, ROUTE + b"X-Never: ends")


def unfinished_bodies(port: int, count: int, megabytes: int) -> Held:
    """Bodies of a number of megabytes whose last byte does not come."""
    size = megabytes * 1_000_000
    head = ROUTE + f"Content-Length: {size}\r\n\r\n".encode()
    body = b'{"prompt": "' + b"x" * (size - 13)
    return _hold(port, count, head + body)


def unfinished_uploads(port: int, count: int, megabytes: int, kind: str = "multipart/form-data") -> Held:
    """Uploads of a number of megabytes, sent as a content type, that stop after these."""
    part = b'--b\r\nContent-Disposition: form-data; name="file"; filename="x"\r\n\r\n'
    size = megabytes * 1_000_000
    head = f"POST /v1/files HTTP/1.1\r\nHost: x\r\nContent-Type: {kind}; boundary=b\r\n"
    return _hold(port, count, f"{head}Content-Length: {size + 1000}\r\n\r\n".encode() + part + b"x" * size)


def trickled_bodies(port: int, count: int, seconds: float = 30.0) -> Held:
    """Bodies of which a byte comes each second."""

    head = ROUTE + b"Content-Length: 1000000\r\n\r\n" + b" " * 70_000
    return _hold(port, count, head, num_trickled=round(seconds))


def _hold(port: int, count: int, sent: bytes, *, num_trickled: int = 0) -> Held:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return asyncio.run(_trial(port, count, sent, num_trickled))


async def _trial(port: int, count: int, sent: bytes, num_trickled: int) -> Held:
    held = Held()
    async with _opened(port, count) as connections:
        held.opened = len(connections)
        began_s = time.monotonic()
        clients = [_Client(*each) for each in connections]
        ends = [asyncio.create_task(each.until_closed(sent, num_trickled)) for each in clients]
        await asyncio.sleep(2.0)
        held.probe, held.probe_s = await _ask(port, b"GET /health HTTP/1.1\r\nHost: x\r\n")
        head = ROUTE + f"Content-Length: {len(SMALL)}\r\n".encode()
        held.small, held.small_s = await _ask(port, head, SMALL)
        done, left = await asyncio.wait(ends, timeout=CLOSED_S)
        held.answers = dict(Counter(task.result() for task in done))
        ended_s = time.monotonic()
        held.open_s = None if left else round(ended_s - began_s, 1)
        held.silent_s = round(max((each.closed_s or ended_s) - each.sent_s for each in clients), 1)
        for task in left:
            task.cancel()
    return held


@asynccontextmanager
async def _opened(port: int, count: int) -> AsyncIterator[list[Connection]]:
    found: list[Connection] = []
    try:
        for i in range(count):
            with suppress(OSError, TimeoutError):
                source = (SOURCES[i % len(SOURCES)], 0)
                opening = asyncio.open_connection("127.0.0.1", port, local_addr=source)
                found.append(await asyncio.wait_for(opening, 5.0))
        yield found
    finally:
        for _, writer in found:
            writer.transport.abort()


class _Client:
    """One connection: sends, and reads at the same time what the server says.

    Attributes:
        sent_s: when its last byte was taken.
        closed_s: when the server closed it; None while it is open.
    """

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self.sent_s = time.monotonic()
        self.closed_s: float | None = None

    async def until_closed(self, sent: bytes, num_trickled: int) -> int:
        """Send, then a byte each second; return the server's last status, or 0."""
        sending = asyncio.create_task(self._send(sent, num_trickled))
        said = b""
        with suppress(OSError):
            while piece := await self._reader.read(1 << 16):
                said = (said + piece)[-(1 << 16) :]
        self.closed_s = time.monotonic()
        sending.cancel()
        at = said.rfind(b"HTTP/1.1 ")
        return int(said[at + 9 : at + 12]) if at >= 0 else 0

    async def _send(self, sent: bytes, num_trickled: int) -> None:
        with suppress(OSError):
            for at in range(0, len(sent), 1 << 16):
                await self._write(sent[at : at + (1 << 16)])
            for _ in range(num_trickled):
                await self._write(b" ")
                await asyncio.sleep(1.0)

    async def _write(self, piece: bytes) -> None:
        self._writer.write(piece)
        await self._writer.drain()
        self.sent_s = time.monotonic()


async def _ask(port: int, head: bytes, body: bytes = b"") -> tuple[int, float]:
    """Status of one request on its own connection, and its seconds."""
    began_s, line = time.monotonic(), b""
    with suppress(OSError, TimeoutError):
        async with asyncio.timeout(ANSWER_S):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(head + b"Connection: close\r\n\r\n" + body)
            line = await reader.readline()
            writer.close()
    status = int(line.split()[1]) if line.startswith(b"HTTP/1.1 ") else 0
    return status, round(time.monotonic() - began_s, 2)
