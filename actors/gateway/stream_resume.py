"""A stream with reported tokens: what the client may have, and what another replica needs to continue.

Handles bytes, not connections. `http/generation/resume_origin.py` defines the format between gateway and
replica. A client that asks for it also gets positions as ids of events, with which it can reconnect to any
gateway (`ResumePoint`). One that sends an Idempotency-Key gets the same answer again (`origin_of_key`).
"""

from __future__ import annotations

import re
import secrets
import time
from array import array
from dataclasses import dataclass
from hashlib import blake2b, sha256
from typing import Any

import orjson

from ...cluster.errors import RequestError, brief
from ...cluster.request.request import MAX_SEED
from ..engine.outputs import ResumeState
from ..http.generation.resume_origin import END, ERROR_MARK, TOKENS_MARK, ResumeOrigin
from ..http.wire.sse import KEEP_ALIVE

RESUMABLE_HEADER = "x-resumable"  # of a client that wants ids: "true"
POINT_HEADER = "last-event-id"
KEY_HEADER = "idempotency-key"
_NUMBERS = r"(\d{1,12})\.(\d{1,19})\.(\d{1,9})\.(\d{1,9})\.(\d{1,9})"
_POINT = re.compile(rf"([0-9a-f]{{32}})\.{_NUMBERS}\.([0-9a-f]{{16}})(\.end)?")


@dataclass(frozen=True, slots=True)
class ResumePoint:
    """A position in a stream, sent as the id of its last event before it.

    It holds what the answer depends on besides the request, so that a process that knows nothing of the
    stream can compute it again up to here, and `digest` of the tokens, so that it notices others.
    """

    id: str
    created_s: int
    seed: int
    num_tokens: int
    num_chars: int
    num_events: int
    digest: str
    ended: bool = False  # the client has all events

    @property
    def origin(self) -> ResumeOrigin:
        return _repeated(self.id, self.created_s, self.seed)

    def __str__(self) -> str:
        numbers = f"{self.created_s}.{self.seed}.{self.num_tokens}.{self.num_chars}.{self.num_events}"
        return f"{self.id}.{numbers}.{self.digest}{'.end' if self.ended else ''}"

    @classmethod
    def parse(cls, text: str) -> ResumePoint:
        """Return the point that an id of `with_id` names. Raises RequestError for any other text."""
        if (found := _POINT.fullmatch(text)) is None or int(found[3]) > MAX_SEED:
            raise RequestError(
                f"Last-Event-ID: {brief(text)} is no id of an event of this server. Send the id of the last "
                "event that had one, or leave the header out.",
                param="Last-Event-ID",
            )
        return cls(found[1], *map(int, found.groups()[1:6]), digest=found[7], ended=found[8] is not None)


def new_origin() -> ResumeOrigin:
    return ResumeOrigin(
        id=secrets.token_hex(16), created_s=int(time.time()), seed=secrets.randbelow(MAX_SEED)
    )


def origin_of_key(*request: bytes) -> ResumeOrigin:
    """Return the origin that all requests with equal bytes have: same id and seed, so the same answer."""
    digest = sha256(b"".join(len(part).to_bytes(8) + part for part in request)).digest()
    return _repeated(digest[:16].hex(), int(time.time()), int.from_bytes(digest[16:24]) % MAX_SEED)


def _repeated(id: str, created_s: int, seed: int) -> ResumeOrigin:
    """Return the origin of an answer that an engine may still run for a client's last connection."""
    return ResumeOrigin(id=id, created_s=created_s, seed=seed, attempt=1 + secrets.randbelow(1 << 48))


class ResumableStream:
    """Removes token comments from the events that a request's successive replicas send.

    An event is released only when its tokens are known, so that after a death the known tokens match what the
    client has.
    """

    def __init__(self) -> None:
        self.num_events = 0  # that the client may have
        self.ended = False  # the completion is whole; only the API's last line follows
        # the error with which a replica ended it, in OpenAI's format (Any: JSON)
        self.error: dict[str, Any] | None = None
        self._token_ids = array("i")
        self._digest = blake2b(digest_size=8)
        self._num_chars = 0
        self._buffered = b""

    @property
    def num_tokens(self) -> int:
        return len(self._token_ids)

    @property
    def resume_state(self) -> ResumeState:
        return ResumeState(tuple(self._token_ids), self._num_chars)

    def point(self, origin: ResumeOrigin) -> ResumePoint:
        """Return the position after all that `feed` has returned."""
        shared = origin.id, origin.created_s, origin.seed, self.num_tokens, self._num_chars, self.num_events
        return ResumePoint(*shared, self._digest.hexdigest(), self.ended)

    def rewind(self, point: ResumePoint) -> None:
        """Go back to a position of the same answer. Raises RequestError if the tokens are others."""
        token_ids = self._token_ids[: point.num_tokens]
        digest = blake2b(token_ids.tobytes(), digest_size=8)
        is_shorter = len(token_ids) < point.num_tokens or self._num_chars < point.num_chars
        if is_shorter or digest.hexdigest() != point.digest:
            raise RequestError(
                "Last-Event-ID: computed again, the answer is another one up to this event. Send the same "
                "body as before, or leave the header out for a new answer.",
                param="Last-Event-ID",
            )
        self._token_ids, self._digest, self._num_chars = token_ids, digest, point.num_chars
        self.num_events = point.num_events
        self.ended = False

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
        if rest.startswith(ERROR_MARK) and (end := rest.find(b"\n\n")) >= 0:
            self.error = orjson.loads(rest[len(ERROR_MARK) : end])["error"]
            rest = rest[end + 2 :]
        self._buffered = rest
        released = b"".join(given)
        self.num_events += released.count(b"\n\n") - released.count(KEEP_ALIVE)
        return released

    def rest(self) -> bytes:
        """Return what has arrived after an error: the client's events of it."""
        return self._buffered

    def _take(self, comment: bytes) -> None:
        """Parse a comment: number of characters, token ids, and whether the completion has ended."""
        self.ended = comment.endswith(END)
        num_chars, _, ids = comment.removesuffix(END).partition(b" ")
        self._num_chars = int(num_chars)
        new = array("i", map(int, filter(None, ids.split(b","))))
        self._token_ids.extend(new)
        self._digest.update(new.tobytes())


def with_id(events: bytes, point: ResumePoint) -> bytes:
    """Give the last event of some an id; none if they end with a comment."""
    begin = events.rfind(b"\n\n", 0, -2)
    begin = 0 if begin < 0 else begin + 2
    if events.startswith(b":", begin):
        return events
    return events[:begin] + f"id: {point}\n".encode() + events[begin:]


def _comment(buffered: bytes, begin: int) -> int:
    """Return the start of the next token comment, or -1. (Events are JSON: none looks like one.)"""
    if buffered.startswith(TOKENS_MARK, begin):
        return begin
    at = buffered.find(b"\n\n" + TOKENS_MARK, begin)
    return at if at < 0 else at + 2
