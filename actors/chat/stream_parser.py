"""Splits a streamed response into reasoning, content and tool calls.

One `Splitter` per completion, driven by a table of formats (`chat_formats.py`). The total output depends only
on the text received, not on how it was split: a stream, a complete response and a stream that another replica
continues give the same result. Text that may begin a mark is held back, and so is a call until it is known to
be one; text that looks like a call but is none is content. Newlines next to a mark belong to it. Called by
`AnswerParser` (`chat_model.py`).
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Generator, Mapping
from typing import Any, Literal

from .chat_formats import CallSyntax, HeadedCalls, JsonCalls, Messages, TaggedCalls, ThinkingFormat
from .text_stream import (
    AnswerDelta,
    CallPiece,
    Marks,
    NotACallError,
    TextPiece,
    TextSource,
    Waiting,
    concatenate,
)
from .tool_parsers import READERS, TOOL_NAME, read_raw_arguments

_NEWLINES = 2  # before a mark
_RECIPIENT = re.compile(r"to=([^\s<]+)")
_CHANNEL = re.compile(r"\s*(\w+)")
_MAX_CALLS = 128


class Splitter:
    """Parser of one completion.

    Args:
        schemas: argument schemas of the callable tools by name (Any: JSON).
        opened: the prompt ends within reasoning.
        id_seed: seed of the call ids.
        parallel: False drops all calls after the first.
    """

    def __init__(
        self,
        thinking: ThinkingFormat | Messages | None = None,
        calls: CallSyntax | Messages | None = None,
        *,
        schemas: Mapping[str, Mapping[str, Any]] | None = None,
        opened: bool = False,
        id_seed: str = "",
        parallel: bool = True,
    ) -> None:
        self.schemas = schemas or {}
        self._id_seed = id_seed
        self._max_calls = _MAX_CALLS if parallel else 1
        self._num_calls = 0
        self._pieces: list[TextPiece | CallPiece] = []
        self._section: tuple[str, int] = ("", -1)  # kind and number of the stretch of text being read
        self._source = TextSource()
        self._reader = self._read(thinking, calls, opened)
        self._done = False

    def feed(self, text: str) -> AnswerDelta:
        """Return what is known now and was not returned before."""
        self._source.add(text)
        return self._take()

    def finish(self) -> AnswerDelta:
        """Return what was held back; no more text follows."""
        self._source.closed = True
        return self._take()

    def _take(self) -> AnswerDelta:
        if not self._done:
            self._done = next(self._reader, self) is self
        found = concatenate([AnswerDelta(tuple(self._pieces))])
        self._pieces.clear()
        return found

    # Output of the readers.

    def open(self, name: str, id: str | None = None) -> None:
        if not TOOL_NAME.fullmatch(name):
            raise NotACallError
        self._source.forget()
        self._end_section()
        index, self._num_calls = self._num_calls, self._num_calls + 1
        if index < self._max_calls:
            digest = hashlib.blake2b(f"{self._id_seed}/{index}".encode(), digest_size=16).hexdigest()
            self._pieces.append(CallPiece(index, id or f"chatcmpl-tool-{digest}", name, ""))

    def add(self, arguments: str) -> None:
        index = self._num_calls - 1
        if index < self._max_calls:
            self._pieces.append(CallPiece(index, None, None, arguments))

    def _emit_reasoning(self, text: str) -> None:
        self._emit("reasoning", text)

    def _emit_content(self, text: str) -> None:
        self._emit("content", text)

    def _emit(self, kind: Literal["reasoning", "content"], text: str) -> None:
        current, number = self._section
        if kind != current:
            self._section = kind, number + 1
        self._pieces.append(TextPiece(kind, text, self._section[1]))

    def _end_section(self) -> None:
        """Begin a stretch of its own with the next text, even if it is of the same kind."""
        self._section = "", self._section[1]

    # Parsing.

    def _read(
        self, thinking: ThinkingFormat | Messages | None, calls: CallSyntax | Messages | None, opened: bool
    ) -> Generator[None, None, None]:
        messages = next((each for each in (thinking, calls) if isinstance(each, Messages)), None)
        if messages is not None:
            yield from self._read_messages(messages, with_calls=calls is not None)
        else:
            assert not isinstance(thinking, Messages) and not isinstance(calls, Messages)
            if opened or (thinking is not None and thinking.always_open):
                assert thinking is not None, "nothing is open where there is no reasoning"
                yield from self._source.skip("\n")
                yield from self._source.starts_with(thinking.begin)  # some models repeat it
                yield from self._read_thoughts(thinking)
            yield from self._read_marked(thinking, calls)
        while not self._source.ended:  # the rest is content
            yield from self._source.through(_NO_MARKS, self._emit_content)

    def _read_marked(self, thinking: ThinkingFormat | None, calls: CallSyntax | None) -> Waiting[None]:
        """Read reasoning at the start and after calls, and content and calls in any order."""
        begins = _begins(calls)
        marks = Marks(*begins, newlines=_NEWLINES) if begins else _NO_MARKS
        bare = calls if isinstance(calls, JsonCalls) and not calls.begin else None
        if bare is not None and not (yield from self._read_bare_calls(bare)):
            return
        while True:
            if thinking is not None:
                yield from self._read_leading_thoughts(thinking)
            mark = yield from self._source.through(marks, self._emit_content)
            if mark is None:
                return
            assert calls is not None, "only calls have marks here"
            yield from self._read_call(calls, mark)

    def _read_leading_thoughts(self, thinking: ThinkingFormat) -> Waiting[None]:
        self._source.mark()
        yield from self._source.skip()
        if (yield from self._source.starts_with(thinking.begin)) is None:
            self._source.go_back()
            return
        self._source.forget()
        if thinking.heading:
            yield from self._source.starts_with(thinking.heading)
        yield from self._read_thoughts(thinking)

    def _read_thoughts(self, thinking: ThinkingFormat) -> Waiting[None]:
        self._end_section()
        yield from self._source.skip("\n")
        yield from self._source.through(Marks(thinking.end, newlines=_NEWLINES), self._emit_reasoning)
        yield from self._source.skip("\n")

    def _read_call(self, calls: CallSyntax, mark: str) -> Waiting[None]:
        self._source.mark()
        before = self._num_calls
        try:
            if isinstance(calls, TaggedCalls | HeadedCalls) and mark.endswith(calls.section):
                yield from self._read_section(calls)
            else:
                yield from READERS[type(calls)](self._source, self, calls)
                yield from self._after_last(calls)
        except NotACallError:
            if self._num_calls == before:
                self._source.go_back()
                self._emit_content(mark)
                return
        self._source.forget()
        yield from self._source.skip("\n")

    def _read_section(self, calls: TaggedCalls | HeadedCalls) -> Waiting[None]:
        begin = calls.name_open if isinstance(calls, TaggedCalls) else calls.begin
        yield from self._source.skip()
        yield from self._source.expect(begin)
        while True:
            yield from READERS[type(calls)](self._source, self, calls)
            yield from self._source.skip()
            if not begin or (yield from self._source.starts_with(begin)) is None:
                break
        yield from self._after_last(calls)

    def _after_last(self, calls: CallSyntax) -> Waiting[None]:
        if isinstance(calls, TaggedCalls | HeadedCalls) and calls.section_end:
            yield from self._source.skip("\n")
            yield from self._source.starts_with(calls.section_end)

    def _read_bare_calls(self, calls: JsonCalls) -> Waiting[bool]:
        """Read calls without marks at the start; False if any was read, so that nothing else follows."""
        while True:
            before = self._num_calls
            self._source.mark()
            yield from self._source.skip()
            if before:
                if (yield from self._source.starts_with(calls.between)) is None:
                    self._source.go_back()
                    return False
                yield from self._source.skip()
            yield from self._source.starts_with(calls.before)
            try:
                yield from READERS[type(calls)](self._source, self, calls)
            except NotACallError:
                if self._num_calls == before:
                    self._source.go_back()
                    return True

    def _read_messages(self, messages: Messages, *, with_calls: bool) -> Waiting[None]:
        """Read messages with headers. Text without a header is content."""
        ends = Marks(*messages.ends, messages.start)
        self._source.mark()
        headed = (yield from self._source.starts_with(*messages.first)) is not None
        self._source.go_back()
        if not headed:
            yield from self._source.through(ends, self._emit_content)
        while (yield from self._source.peek()):
            self._source.mark()
            try:
                header = yield from self._source.short(Marks(messages.body))
                if (tool := _tool(messages, header) if with_calls else None) is not None:
                    self.open(tool)
            except NotACallError:
                was_cut_short = self._source.ended
                self._source.go_back()
                if was_cut_short and (yield from self._source.starts_with(*_header_marks(messages))):
                    yield from self._source.through(_NO_MARKS, lambda text: None)
                return
            self._source.forget()
            self._end_section()
            if tool is not None:
                yield from read_raw_arguments(self._source, self, ends)
            else:
                yield from self._source.through(ends, self._sink(messages, header))

    def _sink(self, messages: Messages, header: str) -> Any:
        to, channel = _RECIPIENT.search(header), None
        if messages.channel:
            channel = _CHANNEL.match(header.rpartition(messages.channel)[2])
        named = {found[1] for found in (to, channel) if found}
        return self._emit_reasoning if named & messages.thoughts else self._emit_content


def _tool(messages: Messages, header: str) -> str | None:
    to = _RECIPIENT.search(header)
    if to is None or to[1] in messages.thoughts | messages.answers or not to[1].startswith(messages.prefix):
        return None
    return to[1].removeprefix(messages.prefix)


def _header_marks(messages: Messages) -> tuple[str, ...]:
    return tuple(filter(None, (messages.start, messages.channel)))


def _begins(calls: CallSyntax | None) -> tuple[str, ...]:
    if calls is None:
        return ()
    if isinstance(calls, JsonCalls):
        return tuple(filter(None, (calls.begin or calls.before,)))
    if isinstance(calls, TaggedCalls):
        return tuple(filter(None, (calls.section, calls.name_open)))
    return (calls.section, calls.begin) if isinstance(calls, HeadedCalls) else (calls.begin,)


_NO_MARKS = Marks()
