"""A text source for incremental parsers that read as if the whole text were available.

A reader is a generator that yields when it needs more text (`Waiting`), that is, only while the received text
is ambiguous. So how the text was split does not matter. What it finds are the parts of a response: reasoning,
content and tool calls (`AnswerDelta`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass, replace
from itertools import chain, groupby
from typing import Literal, TypeVar

T = TypeVar("T")
Waiting = Generator[None, None, T]  # yields while it waits for text, then returns a T
Sink = Callable[[str], None]
MAX_NAME_CHARS = 256  # of a tool's or argument's name, or a header


class NotACallError(Exception):
    """Text that looked like a tool call is content. Never leaves this package."""


class Marks:
    """Strings that end a stretch of text; without any, nothing ends it. No mark may begin within another.

    `newlines`: up to this many newlines before a mark belong to it, not to the text.
    """

    def __init__(self, *marks: str, newlines: int = 0) -> None:
        self._marks = sorted(marks, key=len, reverse=True)
        self._newlines = newlines
        spelled = "|".join(map(re.escape, self._marks)) or "(?!)"
        self._pattern = re.compile(f"\n{{0,{newlines}}}(?:{spelled})")
        self._max_chars = newlines + max(map(len, marks), default=1) - 1
        self._first_chars = {mark[0] for mark in marks} | ({"\n"} if newlines else set())

    def search(self, text: str, at: int) -> re.Match[str] | None:
        return self._pattern.search(text, at)

    def partial_mark_at(self, text: str, at: int) -> int:
        """Return the position from which the end of `text` may be the beginning of a mark."""
        for begin in range(max(at, len(text) - self._max_chars), len(text)):
            if text[begin] in self._first_chars and self._may_begin(text[begin:]):
                return begin
        return len(text)

    def _may_begin(self, rest: str) -> bool:
        num_newlines = min(self._newlines, len(rest) - len(rest.lstrip("\n")))
        return any(mark.startswith(rest[i:]) for i in range(num_newlines + 1) for mark in self._marks)


def gathering(parts: list[str], limit: int | None = MAX_NAME_CHARS) -> Sink:
    """Return a sink that adds to `parts`. It raises NotACallError beyond `limit` characters, if any."""
    num_chars = 0

    def take(text: str) -> None:
        nonlocal num_chars
        parts.append(text)
        num_chars += len(text)
        if limit is not None and num_chars > limit:
            raise NotACallError

    return take


def nowhere(text: str) -> None:
    """Drop a text: the sink of what is no part of the answer."""


class TextSource:
    def __init__(self) -> None:
        self._text = ""
        self._at = 0
        self._marked_from: int | None = None
        self.closed = False  # no more text will arrive

    def add(self, text: str) -> None:
        begin = self._at if self._marked_from is None else self._marked_from
        self._text = self._text[begin:] + text
        self._at -= begin
        if self._marked_from is not None:
            self._marked_from = 0

    def mark(self, num_chars: int = 0) -> None:
        """Keep everything from here on for `go_back`, and the last `num_chars` characters read."""
        self._marked_from = self._at - num_chars

    def forget(self) -> None:
        self._marked_from = None

    def go_back(self) -> None:
        assert self._marked_from is not None, "nothing was marked"
        self._at, self._marked_from = self._marked_from, None

    def step_back(self, num_chars: int) -> None:
        """Unread characters that were just read, without waiting since."""
        self._at -= num_chars

    @property
    def ended(self) -> bool:
        return self.closed and self._at >= len(self._text)

    def peek(self) -> Waiting[str]:
        """Return the next character without reading it; "" at the end."""
        while self._at >= len(self._text):
            if self.closed:
                return ""
            yield
        return self._text[self._at]

    def character(self) -> Waiting[str]:
        found = yield from self.peek()
        self._at += len(found)
        return found

    def skip(self, characters: str = " \t\r\n") -> Waiting[None]:
        while (found := (yield from self.peek())) and found in characters:
            self._at += 1

    def starts_with(self, *marks: str) -> Waiting[str | None]:
        """Read the longest of these marks that comes next; return it, or None."""
        for mark in sorted(marks, key=len, reverse=True):
            while not self._text.startswith(mark, self._at):
                rest = self._text[self._at : self._at + len(mark)]
                if self.closed or not mark.startswith(rest):
                    break
                yield
            else:
                self._at += len(mark)
                return mark
        return None

    def closing(self, *marks: str) -> Waiting[str | None]:
        """Read one of these marks like `starts_with`, or what the end of the text has cut off of one."""
        found = yield from self.starts_with(*marks)
        rest = self._text[self._at :]
        if found is None and self.closed and rest and any(mark.startswith(rest) for mark in marks):
            self._at = len(self._text)
            return rest
        return found

    def expect(self, mark: str) -> Waiting[None]:
        if (yield from self.starts_with(mark)) is None:
            raise NotACallError

    def through(self, marks: Marks, sink: Sink, *, keep_cut: bool = True) -> Waiting[str | None]:
        """Pass text to `sink` up to a mark. Read and return the mark with its newlines; None at the end.

        `keep_cut`: the beginning of a mark with which the text ends is text; otherwise it is dropped.
        """
        while True:
            if found := marks.search(self._text, self._at):
                self._emit(found.start(), sink)
                self._at = found.end()
                return found[0]
            partial = marks.partial_mark_at(self._text, self._at)
            self._emit(len(self._text) if self.closed and keep_cut else partial, sink)
            if self.closed:
                self._at = len(self._text)
                return None
            yield

    def span(self, pattern: re.Pattern[str], sink: Sink) -> Waiting[str]:
        """Pass text to `sink` up to a character that matches. Return it unread, or "" at the end."""
        while True:
            found = pattern.search(self._text, self._at)
            self._emit(found.start() if found else len(self._text), sink)
            if found:
                return found[0]
            if self.closed:
                return ""
            yield

    def short(self, marks: Marks, limit: int = MAX_NAME_CHARS) -> Waiting[str]:
        """Return the text before a mark and read the mark. Raises NotACallError beyond `limit` characters."""
        return (yield from self.short_with_mark(marks, limit))[0]

    def short_with_mark(self, marks: Marks, limit: int = MAX_NAME_CHARS) -> Waiting[tuple[str, str]]:
        parts: list[str] = []
        mark = yield from self.through(marks, gathering(parts, limit))
        if mark is None:
            raise NotACallError
        return "".join(parts), mark

    def _emit(self, end: int, sink: Sink) -> None:
        if end > self._at:
            text, self._at = self._text[self._at : end], end
            sink(text)


@dataclass(frozen=True, slots=True)
class TextPiece:
    kind: Literal["reasoning", "content"]
    text: str
    section: int = 0  # pieces of one stretch of the answer have the same number; numbers increase
    # What separates a stretch from the one of its kind before, for APIs that join them; on its first piece.
    gap: str = ""

    @property
    def joined(self) -> str:
        return self.gap + self.text

    @property
    def key(self) -> tuple[str, int]:
        return self.kind, self.section


@dataclass(frozen=True, slots=True)
class CallPiece:
    index: int  # index of the call in its response, from 0
    id: str | None  # set on the call's first part only, as is `name`
    name: str | None
    arguments: str  # a fragment of JSON; the fragments of a call concatenated are its arguments

    @property
    def key(self) -> tuple[str, int]:
        return "call", self.index


@dataclass(frozen=True, slots=True)
class AnswerDelta:
    """The parsed content of a stretch of text, in its order; `concatenate` makes the complete response."""

    pieces: tuple[TextPiece | CallPiece, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.pieces)

    @property
    def reasoning(self) -> str:
        return self._text("reasoning")

    @property
    def content(self) -> str:
        return self._text("content")

    @property
    def calls(self) -> tuple[CallPiece, ...]:
        return tuple(piece for piece in self.pieces if isinstance(piece, CallPiece))

    def without_reasoning(self) -> AnswerDelta:
        return AnswerDelta(
            tuple(piece for piece in self.pieces if isinstance(piece, CallPiece) or piece.kind == "content")
        )

    def _text(self, kind: str) -> str:
        return "".join(
            piece.joined for piece in self.pieces if isinstance(piece, TextPiece) and piece.kind == kind
        )


def content_only(text: str) -> AnswerDelta:
    return AnswerDelta((TextPiece("content", text),) if text else ())


NO_PIECE = AnswerDelta()


def concatenate(deltas: Iterable[AnswerDelta]) -> AnswerDelta:
    """Concatenate successive parts, with one piece for each stretch of text and each call."""
    pieces = chain.from_iterable(delta.pieces for delta in deltas)
    return AnswerDelta(tuple(_joined(list(group)) for _, group in groupby(pieces, lambda piece: piece.key)))


def _joined(pieces: list[TextPiece | CallPiece]) -> TextPiece | CallPiece:
    first = pieces[0]
    if isinstance(first, TextPiece):
        return replace(first, text="".join(piece.text for piece in pieces if isinstance(piece, TextPiece)))
    fragments = (piece.arguments for piece in pieces if isinstance(piece, CallPiece))
    return replace(first, arguments="".join(fragments))
