"""The parts of a response: reasoning, content and tool calls."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CallPiece:
    index: int  # index of the call in its response, from 0
    id: str | None  # set on the call's first part only, as is `name`
    name: str | None
    arguments: str  # a fragment of JSON; the fragments of a call concatenated are its arguments


@dataclass(frozen=True, slots=True)
class AnswerDelta:
    """The parsed content of a stretch of text; `concatenate` makes the complete response."""

    reasoning: str = ""
    content: str = ""
    calls: tuple[CallPiece, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.reasoning or self.content or self.calls)


NO_PIECE = AnswerDelta()


def concatenate(pieces: Iterable[AnswerDelta]) -> AnswerDelta:
    """Concatenate successive parts, with one `CallPiece` for each call."""
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
