"""An answer's text, taken apart as it comes: reasoning, content, calls of tools.

One `Splitter` per completion. What it has given out after some text depends on that text alone, not on how
the text was cut: a stream and a whole answer have equal sums, and so has a stream that another replica
continues. Used by the endpoints and by batch rows through `reading.py`.
"""

from __future__ import annotations

from .parts import NO_PIECE, Piece


class Splitter:
    """Of an answer that is all content. `reading.py` knows when there is more to find."""

    def feed(self, text: str) -> Piece:
        """Take in what follows; returns what can be told of the text so far and was not told before."""
        return Piece(content=text) if text else NO_PIECE

    def finish(self) -> Piece:
        """The text has ended: what was held back."""
        return NO_PIECE
