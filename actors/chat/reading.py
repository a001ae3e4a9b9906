"""How the answers to one request are read: each completion's text goes through an `Answer`.

Made for a request and its prompt; used by the endpoints and by batch rows.
"""

from __future__ import annotations

from dataclasses import dataclass

from .parts import Piece, together
from .splitter import Splitter


class Answer:
    """One completion, being read.

    Attributes:
        called: whether it has called a tool so far.
    """

    def __init__(self, splitter: Splitter) -> None:
        self._splitter = splitter
        self.called = False

    def feed(self, text: str, *, final: bool = False) -> Piece:
        """Take in what follows, the last of it if `final`; returns what is new."""
        piece = self._splitter.feed(text)
        if final:
            piece = together((piece, self._splitter.finish()))
        self.called = self.called or bool(piece.calls)
        return piece


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """What a request and its prompt say of the texts that follow."""

    def answer(self, response_id: str, index: int) -> Answer:
        """For the `index`th completion of a response; ids of calls are made of both, so they never change."""
        return Answer(Splitter())

    def whole(self, response_id: str, index: int, text: str) -> Piece:
        """A whole answer at once."""
        return self.answer(response_id, index).feed(text, final=True)


PLAIN = Reading()  # of completions: text is text
