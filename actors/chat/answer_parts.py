"""The parts of an answer: what a model thought, what it said, which tools it calls.

Values only. `stream_parser.py` makes them of text, the endpoints (`actors/http/`) and batch rows show them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CallPiece:
    """What came of one call of a tool.

    Attributes:
        index: of the call in its answer, from 0.
        id: with the call's first piece only, as is `name`.
        name: of the tool.
        arguments: JSON, as far as it came; all pieces of a call together are its arguments.
    """

    index: int
    id: str | None
    name: str | None
    arguments: str


@dataclass(frozen=True, slots=True)
class AnswerDelta:
    """What came of a stretch of text. A whole answer is the same, put together (`together`)."""

    reasoning: str = ""
    content: str = ""
    calls: tuple[CallPiece, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.reasoning or self.content or self.calls)


NO_PIECE = AnswerDelta()


def together(pieces: Iterable[AnswerDelta]) -> AnswerDelta:
    """The sum of successive pieces, with one `CallPiece` for each call."""
    found = list(pieces)
    calls: dict[int, CallPiece] = {}
    for call in (call for piece in found for call in piece.calls):
        before = calls.get(call.index)
        calls[call.index] = (
            call
            if before is None
            else CallPiece(call.index, before.id, before.name, before.arguments + call.arguments)
        )
    return AnswerDelta(
        "".join(piece.reasoning for piece in found),
        "".join(piece.content for piece in found),
        tuple(calls.values()),
    )
