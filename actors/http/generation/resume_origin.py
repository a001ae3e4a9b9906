r"""Headers from a gateway and comments from a replica with which another replica can resume a stream.

A gateway (`actors/gateway/`) fixes what must not depend on the replica: the answer's id, time and seed. If
the replica dies, another one gets these and the tokens generated so far, and continues; the client sees one
stream. The replica therefore reports the tokens of each block in a comment after its events:

    data: {...}\n\n : tokens 12 5,6,7\n\n      12 characters sent so far, with these new tokens
    data: {...}\n\n : tokens 14 8 end\n\n      ... and only the API's last line follows, if it has one
    : error {...}\n\n data: {...}\n\n        failed; the client's events of the error follow

These headers are read only at a replica's own endpoint (`actors/gateway/replica_endpoint.py`), for clients
with its token. All other clients' headers are ignored.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

import orjson

from ...engine.outputs import NOT_RESUMED, ResumeState
from ..wire.sse import Ending, public_error_body

TOKEN_HEADER = "x-manta-token"
CALLER_HEADER = "x-manta-caller"  # `api_keys.encode_caller`: replicas of a gateway have no keys
ORIGIN_HEADER = "x-manta-origin"
TOKENS_HEADER = "x-manta-told"
PRIVATE_PREFIX = "x-manta-"
TOKENS_MARK = b": tokens "
END = b" end"
ERROR_MARK = b": error "


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumeOrigin:
    id: str  # of the response, without the endpoint's prefix
    created_s: int  # Unix time of the request
    seed: int  # for a request that has none
    attempt: int = 0  # 0 for the first; differs in all, so that an engine never sees an id twice
    num_events: int = 0  # that the client has from earlier attempts
    resume_state: ResumeState = field(default=NOT_RESUMED, repr=False)  # output of the earlier attempts

    def header(self) -> str:
        """Return all fields but the tokens, which may be many and precede the body (`prefix`)."""
        numbers = [
            self.created_s,
            self.seed,
            self.attempt,
            self.num_events,
            self.resume_state.num_chars,
            len(self.resume_state.token_ids),
        ]
        return orjson.dumps([self.id, *numbers]).decode()

    def prefix(self) -> bytes:
        """Return the tokens as little-endian int32."""
        return array("i", self.resume_state.token_ids).tobytes()

    @staticmethod
    def prefix_bytes(header: str) -> int:
        """Return the length of the prefix that belongs to a header."""
        return 4 * orjson.loads(header)[-1]

    @classmethod
    def read(cls, header: str, prefix: bytes) -> ResumeOrigin:
        id, created_s, seed, attempt, num_events, num_chars, _ = orjson.loads(header)
        return cls(
            id=id,
            created_s=created_s,
            seed=seed,
            attempt=attempt,
            num_events=num_events,
            resume_state=ResumeState(tuple(array("i", prefix)), num_chars),
        )


def token_comment(num_chars: int, token_ids: Sequence[int], *, end: bool) -> bytes:
    ids = ",".join(map(str, token_ids))
    return TOKENS_MARK + f"{num_chars} {ids}".encode() + (END if end else b"") + b"\n\n"


def reporting_errors(ending: Ending) -> Ending:
    """Return an ending that names an error to the gateway before it tells the client in its API's format."""

    def reported(error: BaseException | None) -> bytes:
        comment = b"" if error is None else ERROR_MARK + public_error_body(error) + b"\n\n"
        return comment + ending(error)

    return reported
