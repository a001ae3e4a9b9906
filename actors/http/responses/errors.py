"""The ending of a /v1/responses stream whose replica has died."""

from __future__ import annotations

from ..wire.errors import public_error
from ..wire.sse import named_event


class LostResponse:
    """Ends the stream with an error event numbered -1: the gateway does not know how many were sent."""

    done = b""

    def failed(self, error: BaseException) -> bytes:
        shown = public_error(error)
        event = {"type": "error", "code": "server_error", "message": shown.message, "param": None}
        return named_event({**event, "sequence_number": -1})
