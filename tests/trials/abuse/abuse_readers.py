"""Clients that request long answers and do not read them, for a while or at all.

Each attack returns when it is over; what it left in the server is for the caller to see. Blocking sockets:
what such a client has is what the system keeps for it. Used by `abuse.py` and `test_slow_readers.py`.
"""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from trials.abuse.abuse_clients import LONG_TOKENS, request_bytes

TIMEOUT_S = 60.0
CHAT = [{"role": "user", "content": "x"}]

Json = Mapping[str, Any]  # Any: JSON
# A stream of each API, and those whose events are large.
STREAMS: Sequence[tuple[str, Json]] = (
    ("/v1/completions", {"prompt": "x", "max_tokens": LONG_TOKENS}),
    ("/v1/completions", {"prompt": "x", "max_tokens": LONG_TOKENS, "logprobs": 20}),
    ("/v1/completions", {"prompt": ["x", "y", "z"], "n": 4, "max_tokens": LONG_TOKENS, "logprobs": 20}),
    ("/v1/completions", {"prompt": "x " * 2000, "echo": True, "logprobs": 20, "max_tokens": LONG_TOKENS}),
    ("/v1/chat/completions", {"messages": CHAT, "max_tokens": LONG_TOKENS, "logprobs": True, "n": 16}),
    ("/v1/responses", {"input": "x", "max_output_tokens": LONG_TOKENS}),
    ("/v1/messages", {"messages": CHAT, "max_tokens": LONG_TOKENS}),
)


class Reader:
    """One request whose answer is read when the test says so.

    Args:
        body: sent with `ignore_eos`, so that it is long.
        headers: in addition to those of every request.
    """

    def __init__(
        self,
        port: int,
        path: str,
        body: Json,
        *,
        stream: bool = True,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        content = json.dumps({**body, "stream": stream, "ignore_eos": True}).encode()
        self._socket = socket.socket()
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        self._socket.settimeout(TIMEOUT_S)
        self._socket.connect(("127.0.0.1", port))
        self._socket.sendall(request_bytes(path, content, headers))

    def read(self, maximum: int = 1 << 30) -> bytes:
        """Read a number of bytes, or until the server closes, at the answer's end or before it."""
        found = bytearray()
        with suppress(ConnectionError):
            while len(found) < maximum and (piece := self._socket.recv(1 << 16)):
                found += piece
        return bytes(found)

    def close(self) -> None:
        self._socket.close()


def never_read(
    port: int, hold_s: float, each: int = 1, streams: Sequence[tuple[str, Json]] = STREAMS
) -> None:
    """A number of each stream, unread for a while, then partly read for every second one."""
    readers = [Reader(port, path, body) for path, body in streams for _ in range(each)]
    time.sleep(hold_s)
    for i, reader in enumerate(readers):
        if i % 2 == 0:
            said = reader.read(1 << 15)
            assert said.startswith(b"HTTP/1.1 200"), said[:200]
        reader.close()


def never_read_complete_answers(port: int, hold_s: float, count: int = 4, tokens: int = 400) -> None:
    """A number of complete answers of 64 completions, unread; the server must have disconnected them.

    Args:
        hold_s: longer than answers take to be made, and `reader_timeout`.
        tokens: of each completion; a kB each, of which the system keeps some MB.
    """
    body = {"prompt": "x", "max_tokens": tokens, "n": 64, "logprobs": 20}
    readers = [Reader(port, "/v1/completions", body, stream=False) for _ in range(count)]
    time.sleep(hold_s)
    for reader in readers:
        said = reader.read()
        assert said.startswith(b"HTTP/1.1 200"), said[:200]
        head, _, content = said.partition(b"\r\n\r\n")
        length = next(
            int(line[16:]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length")
        )
        assert len(content) < int(length), "an answer that nobody read was kept to its end"
        reader.close()


async def stop_reading(port: int, hold_s: float, each: int = 1) -> None:
    """Run `never_read` and `never_read_complete_answers` concurrently, as an attack of `abuse.py`.

    The server's `reader_timeout` must be at most half of `hold_s`.
    """
    await asyncio.gather(
        asyncio.to_thread(never_read, port, hold_s, each),
        asyncio.to_thread(never_read_complete_answers, port, hold_s),
    )
