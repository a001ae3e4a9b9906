"""Hostile clients: nonsense, silence, slow reading, disconnects.

Each attack returns when it is over; what it left in the server is for the caller to see. Blocking sockets for
one request, asyncio's for many. Used by `abuse.py` and `test_abuse.py`.
"""

from __future__ import annotations

import asyncio
import socket
import struct
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import cycle, islice
from typing import Any

import httpx
import orjson

LONG_TOKENS = 100_000  # more than any test waits for
TIMEOUT_S = 120.0
PHASES = ("head", "body", "asked", "first event", "middle", "whole answer", "reset")

Json = Mapping[str, Any]  # Any: JSON


@dataclass(frozen=True)
class Answer:
    status: int
    body: bytes

    @property
    def is_openai_error(self) -> bool:
        try:
            error = orjson.loads(self.body)["error"]
        except (orjson.JSONDecodeError, TypeError, KeyError):
            return False
        return {"message", "type", "param", "code"} <= error.keys() and error["code"] == self.status


def nonsense() -> Iterator[tuple[str, str, bytes, dict[str, str]]]:
    """Nonsense requests: a name, the path, the body and further headers."""
    chat, text = "/v1/chat/completions", "/v1/completions"
    deep = 10_000
    bodies = {
        "nothing": b"",
        "null": b"null",
        "a list": b"[]",
        "half an object": b'{"prompt": "x", ',
        "bad UTF-8": b'{"prompt": "\xff\xfe"}',
        "UTF-16": '{"prompt": "x"}'.encode("utf-16"),
        "a byte order mark": b'\xef\xbb\xbf{"prompt": "x"}',
        "deep lists": b'{"prompt": ' + b"[" * deep + b"]" * deep + b"}",
        "deep objects": b'{"prompt": "x", "metadata": ' + b'{"a":' * deep + b"1" + b"}" * deep + b"}",
        "open brackets": b"[" * 20_000_000,
        "NaN": b'{"prompt": "x", "temperature": NaN}',
        "an infinite number": b'{"prompt": "x", "temperature": 1e999}',
        "minus infinity": b'{"prompt": "x", "presence_penalty": -Infinity}',
        "a huge integer": b'{"prompt": "x", "max_tokens": ' + b"9" * 5000 + b"}",
        "a huge seed": b'{"prompt": "x", "seed": 99999999999999999999}',
        "a huge token": b'{"prompt": [99999999999999999999]}',
        "a negative token": b'{"prompt": [-1]}',
        "a negative limit": b'{"prompt": "x", "max_tokens": -5}',
        "a small number": b'{"prompt": "x", "temperature": 1e-400, "max_tokens": 0}',
        "a double key, the last one wrong": b'{"prompt": "x", "n": 1, "n": "no"}',
        "an empty prompt list": b'{"prompt": []}',
        "a null character": b'{"prompt": "x", "model": "\\u0000"}',
        "a long name": orjson.dumps({"prompt": "x", "model": "m" * 1_000_000}),
        "20 MB of nothing": b'{"prompt": "x", "stop": ' + b" " * 20_000_000 + b"7}",
        "20 MB of text": orjson.dumps({"prompt": "x " * 10_000_000}),
        "too large": b'{"prompt": "' + b"x" * (33 << 20) + b'"}',
    }
    for name, body in bodies.items():
        yield name, text, body, {}
    for role in ("nobody", None, 7):
        yield f"role {role}", chat, orjson.dumps({"messages": [{"role": role, "content": "x"}]}), {}
    yield "no messages", chat, b'{"messages": []}', {}
    yield "a form", text, b"prompt=x", {"content-type": "application/x-www-form-urlencoded"}
    yield "a negative token", "/detokenize", b'{"tokens": [-1]}', {}
    yield "huge tokens", "/detokenize", b'{"tokens": [9223372036854775808]}', {}
    yield "no prompt", "/tokenize", b"{}", {}


def request_bytes(
    path: str, body: bytes, headers: Mapping[str, str] | None = None, method: str = "POST"
) -> bytes:
    """Return a whole request on a connection of its own."""
    lines = {"Host": "x", "Content-Type": "application/json", "Content-Length": str(len(body))}
    lines |= {"Connection": "close", **(headers or {})}
    head = f"{method} {path} HTTP/1.1\r\n" + "".join(f"{name}: {value}\r\n" for name, value in lines.items())
    return head.encode("utf-8", "surrogateescape") + b"\r\n" + body


def send(port: int, content: bytes) -> Answer:
    """Send bytes and read to the end, although the server may close before it has read all.

    Returns status 0 if the server closes without an answer, or does not answer in time.
    """
    raw = bytearray()
    with socket.create_connection(("127.0.0.1", port), timeout=TIMEOUT_S) as connection:
        with suppress(ConnectionError):
            connection.sendall(content)
        with suppress(ConnectionError):
            try:
                while piece := connection.recv(1 << 16):
                    raw += piece
            except TimeoutError:
                return Answer(0, b"nothing for %d s after %r" % (TIMEOUT_S, bytes(raw[:100])))
    head, _, body = bytes(raw).partition(b"\r\n\r\n")
    words = head.split(b" ", 2)
    return Answer(int(words[1]) if len(words) > 1 and words[1][:3].isdigit() else 0, body)


class Gaps:
    """The longest time between two events of a stream since `take` was last called."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._last_s: float | None = None
        self._longest_s = 0.0
        self._begun = threading.Event()

    def wait_for_an_event(self) -> None:
        assert self._begun.wait(TIMEOUT_S), "the stream has not begun"

    def event(self) -> None:
        with self._lock:
            now_s = time.monotonic()
            if self._last_s is not None:
                self._longest_s = max(self._longest_s, now_s - self._last_s)
            self._last_s = now_s
        self._begun.set()

    def end(self) -> None:
        """The stream has ended; the time before the next one's first event is no pause."""
        with self._lock:
            self._last_s = None

    def take(self) -> float:
        with self._lock:
            now_s, last_s = time.monotonic(), self._last_s
            longest_s = max(self._longest_s, now_s - last_s if last_s is not None else 0.0)
            self._longest_s, self._last_s = 0.0, now_s if last_s is not None else None
            return longest_s


@contextmanager
def parallel_stream(port: int, key: str) -> Iterator[Gaps]:
    """Stream one answer after another with `key`; yield their gaps. A broken stream fails at the end."""
    gaps, left, failures = Gaps(), threading.Event(), list[str]()
    body = {"prompt": "def f(", "max_tokens": 1000, "stream": True, "ignore_eos": True}
    body |= {"speculative": False}  # an event for each token
    headers = {"Authorization": f"Bearer {key}"}

    def read() -> None:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60, headers=headers) as http:
            while not left.is_set():
                with http.stream("POST", "/v1/completions", json=body) as answer:
                    if answer.status_code != 200:
                        failures.append(f"{answer.status_code}: {answer.read()[:200]!r}")
                        gaps.event()
                        return
                    for line in answer.iter_lines():
                        if line.startswith('data: {"error"'):
                            failures.append(line)
                        if line.startswith("data: {"):
                            gaps.event()
                        if left.is_set():
                            return
                gaps.end()

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    gaps.wait_for_an_event()
    try:
        yield gaps
    finally:
        left.set()
        thread.join(timeout=TIMEOUT_S)
    assert not failures, failures


async def leave(port: int, count: int, at_once: int = 50) -> None:
    """A number of requests whose clients disconnect, in each phase of a request."""
    phases = list(islice(cycle(PHASES), count))
    for at in range(0, count, at_once):
        await asyncio.gather(*(_leave(port, phase) for phase in phases[at : at + at_once]))


async def read_slowly(port: int, slow: int, others: int, tokens: int) -> None:
    """Clients that read nothing of long answers, while others read theirs to the end."""
    body = {"prompt": "x", "max_tokens": LONG_TOKENS, "logprobs": 20, "ignore_eos": True}
    sleepers = [await _connect(port, small=True) for _ in range(slow)]
    for _, writer in sleepers:
        await _send(writer, {**body, "stream": True})
    whole = await _connect(port, small=True)
    await _send(whole[1], {**body, "max_tokens": 256, "n": 64})
    streams = await asyncio.gather(*(_read_to_the_end(port, tokens) for _ in range(others)))
    assert all(stream.endswith(b"data: [DONE]\n\n") for stream in streams), "a stream beside was cut"
    for _, writer in [*sleepers, whole]:
        writer.transport.abort()


async def be_silent(port: int, count: int) -> None:
    """Streams that are opened and not read; the server answers others meanwhile."""
    body = {"prompt": "x", "max_tokens": LONG_TOKENS, "stream": True, "ignore_eos": True}
    silent = [await _connect(port) for _ in range(count)]
    for _, writer in silent:
        await _send(writer, body)
    await asyncio.sleep(1.0)
    for path in ("/health", "/metrics", "/v1/models"):
        status = await asyncio.wait_for(_get(port, path), TIMEOUT_S)
        assert status == 200, f"{path} answered {status} beside {count} silent streams"
    for _, writer in silent:
        writer.close()
    await asyncio.gather(*(writer.wait_closed() for _, writer in silent), return_exceptions=True)


async def _leave(port: int, phase: str) -> None:
    reader, writer = await _connect(port)
    body = orjson.dumps(
        {
            "prompt": "x" * 200,
            "max_tokens": LONG_TOKENS,
            "ignore_eos": True,
            "stream": phase != "whole answer",
        }
    )
    whole = request_bytes("/v1/completions", body)
    sent = {"head": whole[:30], "body": whole[: 50 - len(body)]}.get(phase, whole)
    writer.write(sent)
    with suppress(ConnectionError):
        await writer.drain()
        if phase in ("first event", "middle", "reset"):
            for _ in range(1 if phase == "first event" else 5):
                await asyncio.wait_for(reader.readuntil(b"data: {"), TIMEOUT_S)
        elif phase != "asked":
            await asyncio.sleep(0.05)
    if phase == "reset":
        linger = struct.pack("ii", 1, 0)
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
    writer.close()
    with suppress(ConnectionError):
        await writer.wait_closed()


async def _read_to_the_end(port: int, tokens: int) -> bytes:
    reader, writer = await _connect(port)
    await _send(writer, {"prompt": "x", "max_tokens": tokens, "stream": True, "ignore_eos": True})
    try:
        found = await asyncio.wait_for(reader.readuntil(b"data: [DONE]\n\n"), TIMEOUT_S)
    finally:
        writer.close()
    return found


async def _get(port: int, path: str) -> int:
    reader, writer = await _connect(port)
    writer.write(f"GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode())
    line = await reader.readline()
    writer.close()
    return int(line.split()[1])


async def _connect(port: int, *, small: bool = False) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Args: small: a small receive buffer for a client that does not read."""
    connection = socket.socket()
    if small:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.setblocking(False)
    await asyncio.get_running_loop().sock_connect(connection, ("127.0.0.1", port))
    return await asyncio.open_connection(sock=connection, limit=(1 << 24) if not small else 4096)


async def _send(writer: asyncio.StreamWriter, body: Json) -> None:
    writer.write(request_bytes("/v1/completions", orjson.dumps(body)))
    await writer.drain()
