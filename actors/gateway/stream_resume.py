"""A told stream: what the client may have of it, and what another replica needs to go on with it.

Knows bytes, not connections. The words are `http/generation/resume_origin.py`'s.
"""

from __future__ import annotations

from array import array
from typing import Any

import orjson

from ..engine.output_processor import Begun
from ..http.generation.resume_origin import END, TOLD
from ..http.wire.sse import KEEP_ALIVE

_ERROR = b'data: {"error":'


class ToldStream:
    """Takes the comments out of what one request's replicas send, one after the other.

    An event is given out only when its tokens are known: whatever a replica dies of, what the client has and
    what is known of it agree.

    Attributes:
        ended: the completion is whole; nothing follows but [DONE].
        error: what a replica ended it with, in OpenAI's shape (Any: JSON).
    """

    def __init__(self) -> None:
        self.ended = False
        self.error: dict[str, Any] | None = None
        self._token_ids = array("i")
        self._num_chars = 0
        self._held = b""

    @property
    def num_tokens(self) -> int:
        return len(self._token_ids)

    @property
    def begun(self) -> Begun:
        """What the next replica begins with."""
        return Begun(tuple(self._token_ids), self._num_chars)

    def next_replica(self) -> None:
        """What the last one left half said, and why it stopped, is forgotten."""
        self._held, self.error = b"", None

    def feed(self, data: bytes) -> bytes:
        """Take in what came; returns what the client may have now."""
        held = self._held + data if self._held else data
        given: list[bytes] = []
        begin = 0
        while (at := _comment(held, begin)) >= 0 and (end := held.find(b"\n\n", at)) >= 0:
            given.append(held[begin:at])
            self._take(held[at + len(TOLD) : end])
            begin = end + 2
        rest = held[begin:]
        while rest.startswith(KEEP_ALIVE):
            given.append(KEEP_ALIVE)
            rest = rest[len(KEEP_ALIVE) :]
        if rest.startswith(_ERROR) and (end := rest.find(b"\n\n")) >= 0:
            self.error = orjson.loads(rest[len(b"data: ") : end])["error"]
        self._held = rest
        return b"".join(given)

    def _take(self, said: bytes) -> None:
        """The words of a comment: characters, tokens, and whether that was all."""
        self.ended = said.endswith(END)
        num_chars, _, ids = said.removesuffix(END).partition(b" ")
        self._num_chars = int(num_chars)
        self._token_ids.extend(map(int, filter(None, ids.split(b","))))


def _comment(held: bytes, begin: int) -> int:
    """Where the next comment with tokens begins, or -1. No line of an event begins so: events are JSON."""
    if held.startswith(TOLD, begin):
        return begin
    at = held.find(b"\n\n" + TOLD, begin)
    return at if at < 0 else at + 2
