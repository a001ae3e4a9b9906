"""The sections of an answer: reasoning, text and tool calls, one after the other.

`/v1/responses` calls them output items and `/v1/messages` content blocks; both send events when a section
opens, grows and closes. This module assigns each `AnswerDelta` to a section; the writers format the events.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Literal

from ....cluster.request.request import FinishReason
from ...chat.text_stream import AnswerDelta, CallPiece, TextPiece
from ..wire.json_io import JsonObject

Kind = Literal["reasoning", "content", "call"]
Events = list[JsonObject]


@dataclass(slots=True)
class Section:
    """`at`: index in the answer. The `text` of a call is its arguments."""

    kind: Kind
    at: int
    key: tuple[str, int] | None = None  # that of its pieces
    call_id: str = ""
    name: str = ""
    text: str = ""


class SectionWriter(ABC):
    def __init__(self) -> None:
        self.sections: list[Section] = []  # so far; the last one is open until `close`
        self._is_open = False

    def feed(self, delta: AnswerDelta) -> Events:
        """Return the events of a piece. A section ends where another begins."""
        events: Events = []
        for each in delta.pieces:
            if not self._is_open or self.sections[-1].key != each.key:
                events += self.close(is_complete=True)
                events += self._open(each)
            if text := each.text if isinstance(each, TextPiece) else each.arguments:
                self.sections[-1].text += text
                events += self.extended(self.sections[-1], text)
        return events

    def resume(self, delta: AnswerDelta, num_events: int) -> None:
        """Continue a stream of which the client has `num_events` events, with the pieces of `delta`."""
        self.feed(delta)

    def close(self, *, is_complete: bool) -> Events:
        """Close the open section. `is_complete`: the answer was not cut off in it."""
        if not self._is_open:
            return []
        self._is_open = False
        return self.closed(self.sections[-1], is_complete=is_complete)

    @property
    def has_calls(self) -> bool:
        return any(section.kind == "call" for section in self.sections)

    def ensure_content(self) -> Events:
        """Open an empty text section if the answer has none: clients expect one."""
        return [] if self.sections else self._open(TextPiece("content", ""))

    @abstractmethod
    def begin(self, usage: JsonObject) -> Events:
        """Return the first events of a stream. `usage` is as in `finish`, after the first tokens."""

    @abstractmethod
    def opened(self, section: Section) -> Events: ...

    @abstractmethod
    def extended(self, section: Section, text: str) -> Events:
        """Return the events for new text, which the section contains already."""

    @abstractmethod
    def closed(self, section: Section, *, is_complete: bool) -> Events: ...

    @abstractmethod
    def finish(self, reason: FinishReason, stop_reason: int | str | None, usage: JsonObject) -> Events:
        """Return the events of the answer's end. `usage` is OpenAI's for chat."""

    @abstractmethod
    def failed(self, error: BaseException) -> Events:
        """Return the events of a stream that failed, possibly before its first event."""

    @abstractmethod
    def full_body(self) -> JsonObject:
        """Return the finished answer as one body."""

    def _open(self, piece: TextPiece | CallPiece) -> Events:
        if isinstance(piece, TextPiece):
            section = Section(piece.kind, len(self.sections), piece.key)
        else:
            section = Section("call", len(self.sections), piece.key, piece.id or "", piece.name or "")
        self.sections.append(section)
        self._is_open = True
        return self.opened(section)
