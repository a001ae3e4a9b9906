"""What a gateway says of a request beside the client's own words, and what a replica tells it in the stream.

A gateway (`actors/gateway/`) fixes what must not depend on where the answer is made: its id, time and seed.
If the replica dies, another gets these, and what has been generated, and goes on: the client sees one stream.
So a replica *tells* each block's tokens in a comment behind its events:

    data: {...}\\n\\n : tokens 12 5,6,7\\n\\n      12 characters of text are out, with these further tokens
    data: {...}\\n\\n : tokens 14 8 end\\n\\n      ... and nothing follows but [DONE]

Only a replica's own door reads what is here (`actors/gateway/replica_endpoint.py`), and only from who knows
its token: to anybody else these headers mean nothing.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

import orjson

from ...engine.output_processor import NOTHING, Begun

TOKEN_HEADER = "x-manta-token"
CALLER_HEADER = "x-manta-caller"  # `keys.told_caller`: replicas behind a gateway know no keys
ORIGIN_HEADER = "x-manta-origin"
TOLD_HEADER = "x-manta-told"
PRIVATE_PREFIX = "x-manta-"
TOLD = b": tokens "
END = b" end"


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumeOrigin:
    """One attempt at a request.

    Attributes:
        id: of the response, without the endpoint's prefix.
        created_s: Unix time of the request.
        seed: for a request that brings none.
        attempt: how many were made before; so an engine never meets an id again.
        begun: what those generated.
    """

    id: str
    created_s: int
    seed: int
    attempt: int = 0
    begun: Begun = field(default=NOTHING, repr=False)

    def header(self) -> str:
        """All but the tokens, which stand before the body (`prefix`): no header holds a long answer."""
        numbers = [self.created_s, self.seed, self.attempt, self.begun.num_chars, len(self.begun.token_ids)]
        return orjson.dumps([self.id, *numbers]).decode()

    def prefix(self) -> bytes:
        """The tokens, little-endian int32."""
        return array("i", self.begun.token_ids).tobytes()

    @staticmethod
    def prefix_bytes(header: str) -> int:
        """How long the prefix is that comes with a header."""
        return 4 * orjson.loads(header)[-1]

    @classmethod
    def read(cls, header: str, prefix: bytes) -> ResumeOrigin:
        id, created_s, seed, attempt, num_chars, _ = orjson.loads(header)
        begun = Begun(tuple(array("i", prefix)), num_chars)
        return cls(id=id, created_s=created_s, seed=seed, attempt=attempt, begun=begun)


def told(num_chars: int, token_ids: Sequence[int], *, end: bool) -> bytes:
    """The comment behind a block's events."""
    ids = ",".join(map(str, token_ids))
    return TOLD + f"{num_chars} {ids}".encode() + (END if end else b"") + b"\n\n"
