"""Text that comes in pieces, read as if it were all there.

A reader is a generator that yields when it must know more than has come (`Waiting`); `Splitter` wakes it
when there is more. Each step here decides by the text alone: it waits only while what has come could still go
either way, so that how the text was cut changes nothing. Behind a `mark` what was read can be read again.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator
from typing import TypeVar

T = TypeVar("T")
Waiting = Generator[None, None, T]  # yields while it waits for text, then returns a T
Sink = Callable[[str], None]


class NotACallError(Exception):
    """What looked like a call of a tool is none: it is content. Never leaves this package."""


class Marks:
    """Strings that end a stretch of text; without any, nothing ends it. No mark may begin within another.

    Args:
        newlines: as many newlines before a mark belong to it: they are neither shown nor part of a value.
    """

    def __init__(self, *marks: str, newlines: int = 0) -> None:
        self._marks = sorted(marks, key=len, reverse=True)
        self._newlines = newlines
        spelled = "|".join(map(re.escape, self._marks)) or "(?!)"
        self._pattern = re.compile(f"\n{{0,{newlines}}}(?:{spelled})")
        self._most_chars = newlines + max(map(len, marks), default=1) - 1
        self._first_chars = {mark[0] for mark in marks} | ({"\n"} if newlines else set())

    def search(self, text: str, at: int) -> re.Match[str] | None:
        return self._pattern.search(text, at)

    def held_from(self, text: str, at: int) -> int:
        """Where the end of `text` begins that may be a mark's beginning."""
        for begin in range(max(at, len(text) - self._most_chars), len(text)):
            if text[begin] in self._first_chars and self._may_begin(text[begin:]):
                return begin
        return len(text)

    def _may_begin(self, rest: str) -> bool:
        after = rest.removeprefix("\n" * min(self._newlines, len(rest) - len(rest.lstrip("\n"))))
        return any(mark.startswith(after) for mark in self._marks)


class TextSource:
    """What has come of a text and was not read."""

    def __init__(self) -> None:
        self._text = ""
        self._at = 0
        self._kept_from: int | None = None
        self.closed = False  # nothing more comes

    def add(self, text: str) -> None:
        begin = self._at if self._kept_from is None else self._kept_from
        self._text = self._text[begin:] + text
        self._at -= begin
        if self._kept_from is not None:
            self._kept_from = 0

    def mark(self, num_chars: int = 0) -> None:
        """From here on everything is kept, for `go_back`; and `num_chars` that were read just now."""
        self._kept_from = self._at - num_chars

    def forget(self) -> None:
        self._kept_from = None

    def go_back(self) -> None:
        assert self._kept_from is not None, "nothing was marked"
        self._at, self._kept_from = self._kept_from, None

    @property
    def ended(self) -> bool:
        return self.closed and self._at >= len(self._text)

    def peek(self) -> Waiting[str]:
        """The next character, not read; "" at the end."""
        while self._at >= len(self._text):
            if self.closed:
                return ""
            yield
        return self._text[self._at]

    def character(self) -> Waiting[str]:
        """The next character; "" at the end."""
        found = yield from self.peek()
        self._at += len(found)
        return found

    def skip(self, characters: str = " \t\r\n") -> Waiting[None]:
        """Read on as long as there is one of these."""
        while (found := (yield from self.peek())) and found in characters:
            self._at += 1

    def starts_with(self, *marks: str) -> Waiting[str | None]:
        """Read the longest of these marks that comes next, if one does."""
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

    def expect(self, mark: str) -> Waiting[None]:
        """Raises NotACallError where something else comes."""
        if (yield from self.starts_with(mark)) is None:
            raise NotACallError

    def through(self, marks: Marks, sink: Sink) -> Waiting[str | None]:
        """Hand text to `sink` until a mark comes; returns it, read, with its newlines, or None at the end."""
        while True:
            if found := marks.search(self._text, self._at):
                self._hand(found.start(), sink)
                self._at = found.end()
                return found[0]
            self._hand(len(self._text) if self.closed else marks.held_from(self._text, self._at), sink)
            if self.closed:
                return None
            yield

    def span(self, pattern: re.Pattern[str], sink: Sink) -> Waiting[str]:
        """Hand text to `sink` until a character comes that matches; returns it, unread, or "" at the end."""
        while True:
            found = pattern.search(self._text, self._at)
            self._hand(found.start() if found else len(self._text), sink)
            if found:
                return found[0]
            if self.closed:
                return ""
            yield

    def short(self, marks: Marks, limit: int = 256) -> Waiting[str]:
        """The text before a mark, which is read. Raises NotACallError where none comes in time."""
        parts: list[str] = []

        def take(text: str) -> None:
            parts.append(text)
            if sum(map(len, parts)) > limit:
                raise NotACallError

        if (yield from self.through(marks, take)) is None:
            raise NotACallError
        return "".join(parts)

    def _hand(self, end: int, sink: Sink) -> None:
        if end > self._at:
            text, self._at = self._text[self._at : end], end
            sink(text)
