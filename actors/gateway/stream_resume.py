"""A stream with reported tokens: what the client may have, and what another replica needs to continue.

Handles bytes, not connections. `http/generation/resume_origin.py` defines the format.
"""

from __future__ import annotations

from array import array
from typing import Any

import orjson

from ..engine.outputs import ResumeState
from ..http.generation.resume_origin import END, TOKENS_MARK
from ..http.wire.sse import KEEP_ALIVE

_ERROR = b'data: {"error":'


class ResumableStream:
    """Removes token comments from the events that a request's successive replicas send.

    An event is released only when its tokens are known, so that after a death the known tokens match what the
    client has.
    """

    def __init__(self) -> None:
        self.ended = False  # the completion is whole; only [DONE] follows
        # the error with which a replica ended it, in OpenAI's format (Any: JSON)
        self.error: dict[str, Any] | None = None
        self._token_ids = array("i")
        self._num_chars = 0
        self._buffered = b""

    @property
    def num_tokens(self) -> int:
        return len(self._token_ids)

    @property
    def resume_state(self) -> ResumeState:
        return ResumeState(tuple(self._token_ids), self._num_chars)

    def next_replica(self) -> None:
        """Discard incomplete events and the last replica's error."""
        self._buffered, self.error = b"", None

    def feed(self, data: bytes) -> bytes:
        """Return the bytes that the client may have now."""
        buffered = self._buffered + data if self._buffered else data
        given: list[bytes] = []
        begin = 0
        while (at := _comment(buffered, begin)) >= 0 and (end := buffered.find(b"\n\n", at)) >= 0:
            given.append(buffered[begin:at])
            self._take(buffered[at + len(TOKENS_MARK) : end])
            begin = end + 2
        rest = buffered[begin:]
        while rest.startswith(KEEP_ALIVE):
            given.append(KEEP_ALIVE)
            rest = rest[len(KEEP_ALIVE) :]
        if rest.startswith(_ERROR) and (end := rest.find(b"\n\n")) >= 0:
            self.error = orjson.loads(rest[len(b"data: ") : end])["error"]
        self._buffered = rest
        return b"".join(given)

    def _take(self, comment: bytes) -> None:
        """Parse a comment: number of characters, token ids, and whether the completion has ended."""
        self.ended = comment.endswith(END)
        num_chars, _, ids = comment.removesuffix(END).partition(b" ")
        self._num_chars = int(num_chars)
        self._token_ids.extend(map(int, filter(None, ids.split(b","))))


def _comment(buffered: bytes, begin: int) -> int:
    """Return the start of the next token comment, or -1. (Events are JSON: none looks like one.)"""
    if buffered.startswith(TOKENS_MARK, begin):
        return begin
    at = buffered.find(b"\n\n" + TOKENS_MARK, begin)
    return at if at < 0 else at + 2
