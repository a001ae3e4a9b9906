"""Client for many concurrent streams of completions and chats, which records how each ended.

A small HTTP/1.1 client over asyncio's sockets: its cost must be negligible, and tests of crashes need to know
how a stream ended (properly, with an error event, cut). Used by `serve_tax.py`, `soak_serve.py`
and the tests that kill servers. For requests without a stream see `jobs/common/http_client.py`.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Self

from manta.jobs.common.http_client import split_url

PATH, CHAT_PATH = "/v1/completions", "/v1/chat/completions"
DONE = b"[DONE]"
RESUME_PAUSE_S = 0.1
SILENCE_S = 20.0  # after which a client that resumes gives a connection up; keep-alives come every 15 s
MAX_HEAD_BYTES = 64 * 1024
Json = Mapping[str, Any]  # Any: JSON

# whole: finish reason and [DONE]. error: an error event, then [DONE]. cut: connection ended before.
# refused: a status other than 200. left: the client closed it. late: it did not end in time.
End = Literal["whole", "error", "cut", "refused", "left", "late"]


@dataclass
class Stream:
    """State of one stream. Times are seconds of `time.monotonic`.

    Attributes:
        requested_s: time at which the request was sent.
        token_times_s: times of events with text or tokens.
        text, token_ids: content of these events; ids only with `return_token_ids`.
        usage: latest usage from the server; {} without one.
        end: None while the stream is open.
        error: the server's error from an event or a rejection.
        status: HTTP status; 0 without a response.
        headers: response headers with lower-case names.
        last_id: of the last event with an id; "" without one.
        resumed: number of connections after the first that continued it.
    """

    requested_s: float
    token_times_s: list[float] = field(default_factory=list)
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    usage: Json = field(default_factory=dict)
    end: End | None = None
    ended_s: float | None = None
    error: Json = field(default_factory=dict)
    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    last_id: str = ""
    resumed: int = 0
    _kept: tuple[int, int] = (0, 0)  # lengths of `text` and `token_ids` at the last id

    def keep(self, event_id: str) -> None:
        """Record the id of an event that has been added."""
        self.last_id, self._kept = event_id, (len(self.text), len(self.token_ids))

    def drop_unkept(self) -> None:
        """Drop events after the last one with an id: they come again."""
        self.text, self.error = self.text[: self._kept[0]], {}
        del self.token_ids[self._kept[1] :]

    @property
    def first_s(self) -> float | None:
        return self.token_times_s[0] - self.requested_s if self.token_times_s else None

    @property
    def seconds(self) -> float:
        assert self.ended_s is not None, "the stream is open"
        return self.ended_s - self.requested_s

    def next_after(self, when_s: float) -> float | None:
        """Return the seconds from `when_s` to the next token or the end."""
        seen = [at for at in (*self.token_times_s, self.ended_s) if at is not None and at > when_s]
        return min(seen) - when_s if seen else None


class StreamClient:
    """A persistent connection for one stream at a time. `async with` closes it.

    Args:
        url: URL of the server, with or without `/v1`.
        api_key: bearer token.
        resumes: ask for ids of events, and continue a stream whose connection broke after one.
    """

    def __init__(
        self, url: str, *, timeout_s: float = 600.0, api_key: str | None = None, resumes: bool = False
    ) -> None:
        parts = split_url(url)
        self._secure = parts.scheme == "https"
        self._host, self._port = parts.hostname or "", parts.port or (443 if self._secure else 80)
        self._prefix = parts.path.rstrip("/").removesuffix("/v1")
        self._key = "" if api_key is None else f"Authorization: Bearer {api_key}\r\n"
        self._timeout_s = timeout_s
        self._resumes = resumes
        self._pipe: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def ask(self, body: Json, *, leave_after: int | None = None, into: Stream | None = None) -> Stream:
        """Run one stream to its end. Failures are in the result; nothing is raised.

        Args:
            body: body of a chat if it has `messages`, else of a completion.
            leave_after: number of events with tokens after which the connection is closed.
            into: stream to fill, for readers that watch it.
        """
        stream = into or Stream(time.monotonic())
        stream.requested_s = time.monotonic()
        try:
            async with asyncio.timeout(self._timeout_s):
                end = await self._attempt(stream, body, leave_after)
                while stream.last_id and (end == "cut" or stream.error.get("code") == 503):
                    self.close()
                    stream.drop_unkept()
                    await asyncio.sleep(RESUME_PAUSE_S)
                    end = await self._attempt(stream, body, leave_after)
                    stream.resumed += end != "cut"
                stream.end = end
        except TimeoutError:
            stream.end = "late"
        stream.ended_s = time.monotonic()
        if stream.end in ("cut", "left", "late"):
            self.close()
        return stream

    async def _attempt(self, stream: Stream, body: Json, leave_after: int | None) -> End:
        try:
            async with asyncio.timeout(SILENCE_S if self._resumes else None) as silence:
                return await self._run(stream, body, leave_after, silence)
        except (OSError, EOFError, ValueError):  # reset, incomplete, or invalid HTTP; silence
            return "cut"

    async def _run(
        self, stream: Stream, body: Json, leave_after: int | None, silence: asyncio.Timeout
    ) -> End:
        path = CHAT_PATH if "messages" in body else PATH
        wanted = "X-Resumable: true\r\n" if self._resumes else ""
        if stream.last_id:
            wanted += f"Last-Event-ID: {stream.last_id}\r\n"
        reader = await self._send(path, wanted, json.dumps({**body, "stream": True}).encode())
        stream.status, stream.headers = await _head(reader)
        keeps = stream.headers.get("connection", "").lower() != "close"
        if stream.status != 200:
            raw = b"".join([piece async for piece in _body(reader, stream.headers)])
            stream.error = _error_of(raw)
            if not keeps:
                self.close()
            return "refused"
        end: End = "cut"
        async for event_id, data in _events(_body(reader, stream.headers)):
            if silence.when() is not None:
                silence.reschedule(asyncio.get_running_loop().time() + SILENCE_S)
            if not data:
                continue
            if data == DONE:
                end = "error" if stream.error else "whole"
                continue
            if _take(stream, json.loads(data)) and len(stream.token_times_s) == leave_after:
                return "left"
            if event_id:
                stream.keep(event_id)
        if not keeps:
            self.close()
        return end

    async def _send(self, path: str, headers: str, content: bytes) -> asyncio.StreamReader:
        if self._pipe is None:
            self._pipe = await asyncio.open_connection(self._host, self._port, ssl=self._secure or None)
        reader, writer = self._pipe
        writer.write(
            f"POST {self._prefix}{path} HTTP/1.1\r\nHost: {self._host}:{self._port}\r\n"
            f"Content-Type: application/json\r\n{self._key}{headers}"
            f"Content-Length: {len(content)}\r\n\r\n".encode()
            + content
        )
        await writer.drain()
        return reader

    def close(self) -> None:
        """Close the connection; the next request opens a new one. Idempotent."""
        if self._pipe is not None:
            self._pipe[1].close()
            self._pipe = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()


def _take(stream: Stream, event: Json | None) -> bool:
    """Add an event to the stream; return whether it has tokens. llama.cpp's server sends null events, too."""
    if event is None:
        return False
    if "error" in event:
        stream.error = event["error"]
        return False
    found = False
    stream.usage = event.get("usage") or stream.usage
    for choice in event.get("choices", ()):
        token_ids = choice.get("token_ids") or ()
        text = _text_of(choice)
        stream.text += text
        stream.token_ids.extend(token_ids)
        found = found or bool(text or token_ids)
    if found:
        stream.token_times_s.append(time.monotonic())
    return found


def _text_of(choice: Json) -> str:
    """Return the text of a completion's or chat's choice, including reasoning."""
    if "text" in choice:
        return choice["text"] or ""
    delta = choice.get("delta") or {}
    parts = (delta.get(name) for name in ("reasoning_content", "reasoning", "content"))
    return "".join(part for part in parts if part)


async def _head(reader: asyncio.StreamReader) -> tuple[int, dict[str, str]]:
    raw = await reader.readuntil(b"\r\n\r\n")
    if len(raw) > MAX_HEAD_BYTES:
        raise ValueError("the response head is too long")
    first, *lines = raw.decode("latin-1").split("\r\n")
    pairs = (line.partition(":") for line in lines if line)
    return int(first.split()[1]), {name.strip().lower(): value.strip() for name, _, value in pairs}


async def _body(reader: asyncio.StreamReader, headers: Mapping[str, str]) -> AsyncIterator[bytes]:
    """Yield the pieces of a response body as they arrive."""
    if "chunked" in headers.get("transfer-encoding", "").lower():
        while size := int((await reader.readuntil(b"\r\n")).split(b";")[0], 16):
            yield (await reader.readexactly(size + 2))[:-2]
        await reader.readuntil(b"\r\n")
    elif "content-length" in headers:
        yield await reader.readexactly(int(headers["content-length"]))
    else:
        while piece := await reader.read(65536):
            yield piece


async def _events(pieces: AsyncIterator[bytes]) -> AsyncIterator[tuple[str, bytes]]:
    """Yield id ("" without one) and data of server-sent events, b"" for comments."""
    rest = b""
    async for piece in pieces:
        *whole, rest = (rest + piece).replace(b"\r\n", b"\n").split(b"\n\n")
        for event in whole:
            parts = (line.partition(b": ") for line in event.split(b"\n"))
            lines = {name: value for name, _, value in parts}
            yield lines.get(b"id", b"").decode(), lines.get(b"data", b"")


def _error_of(raw: bytes) -> Json:
    """Return OpenAI's error object of a body; {"raw": text} for other formats."""
    try:
        found = json.loads(raw)["error"]
        return found if isinstance(found, dict) else {"raw": raw.decode(errors="replace")}
    except (ValueError, LookupError, TypeError):
        return {"raw": raw.decode(errors="replace")}
