"""Splits a streamed response into reasoning, content and tool calls.

One `Splitter` per completion, driven by a table of formats (`chat_formats.py`). The total output depends only
on the text received, not on how it was split: a stream, a complete response and a stream that another replica
continues give the same result. Text that may begin a mark is held back, and so is a call until it is known to
be one; text that looks like a call but is none is content. Newlines next to a mark belong to it; where an API
joins the content before and after, they separate it (`TextPiece.gap`). Called by `AnswerParser`
(`chat_model.py`).
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Generator, Mapping
from typing import Any, Literal

from .argument_schema import ArgumentSchema
from .call_syntax import CallSyntax, ThinkingFormat
from .json_calls import JsonCalls
from .messages import Messages
from .text_stream import (
    AnswerDelta,
    CallPiece,
    Marks,
    NotACallError,
    Sink,
    TextPiece,
    TextSource,
    Waiting,
    concatenate,
)

_NEWLINES = 2  # before a mark
_TOOL_NAME = re.compile(r"[\w.:/-]{1,256}")
_CLOSED_NAME = re.compile(r".{1,256}")
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
        calls: CallSyntax | None = None,
        *,
        schemas: Mapping[str, Mapping[str, Any]] | None = None,
        opened: bool = False,
        id_seed: str = "",
        parallel: bool = True,
    ) -> None:
        self.schemas = {name: ArgumentSchema(schema) for name, schema in (schemas or {}).items()}
        self._id_seed = id_seed
        self._max_calls = _MAX_CALLS if parallel else 1
        self._num_calls = 0
        self._has_thought = False
        self._blank = ""  # at the start of a stretch of content, shown unless a call follows
        self._newlines = ""  # at the marks since the last content, up to `_NEWLINES`
        self._has_messages = isinstance(thinking, Messages) or isinstance(calls, Messages)
        self._shown: set[str] = set()  # kinds of text that the answer has so far
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

    def open(
        self, name: str, id: str | None = None, *, id_chars: int | None = None, closed: bool = False
    ) -> None:
        if not (_CLOSED_NAME if closed else _TOOL_NAME).fullmatch(name):
            raise NotACallError
        self._source.forget()
        self._blank = ""
        self.end_section()
        index, self._num_calls = self._num_calls, self._num_calls + 1
        if index < self._max_calls:
            digest = hashlib.blake2b(f"{self._id_seed}/{index}".encode(), digest_size=16).hexdigest()
            own_id = digest[:id_chars] if id_chars else f"chatcmpl-tool-{digest}"
            self._pieces.append(CallPiece(index, id or own_id, name, ""))

    def add(self, arguments: str) -> None:
        index = self._num_calls - 1
        if index < self._max_calls:
            self._pieces.append(CallPiece(index, None, None, arguments))

    def _emit_reasoning(self, text: str) -> None:
        self._emit("reasoning", text)

    def _emit_content(self, text: str) -> None:
        text, self._blank = self._blank + text, ""
        if text.isspace() and self._section[0] != "content":
            self._blank = text
        else:
            self._emit("content", text)

    def _emit(self, kind: Literal["reasoning", "content"], text: str) -> None:
        current, number = self._section
        gap = ""
        if kind != current:
            self._section = kind, number + 1
            if kind in self._shown:
                gap = "\n" if kind == "reasoning" or self._has_messages else self._newlines
            self._shown.add(kind)
        if kind == "content":
            self._newlines = ""
        self._pieces.append(TextPiece(kind, text, self._section[1], gap))

    def end_section(self) -> None:
        """Begin a stretch of its own with the next text, even if it is of the same kind."""
        self._section = "", self._section[1]

    # Parsing.

    def _read(
        self, thinking: ThinkingFormat | Messages | None, calls: CallSyntax | None, opened: bool
    ) -> Generator[None, None, None]:
        messages = next((each for each in (thinking, calls) if isinstance(each, Messages)), None)
        if messages is not None:
            yield from messages.read_answer(
                self._source, self, self._emit_content, self._emit_reasoning, with_calls=calls is not None
            )
        else:
            assert not isinstance(thinking, Messages)
            if opened or (thinking is not None and thinking.always_open):
                assert thinking is not None, "nothing is open where there is no reasoning"
                yield from self._source.skip("\n")
                yield from self._read_thoughts(thinking, calls)
            yield from self._read_marked(thinking, calls)
        while not self._source.ended:  # the rest is content
            yield from self._source.through(_NO_MARKS, self._emit_content)
        if self._blank and not self._num_calls:
            self._emit("content", self._blank)

    def _read_marked(self, thinking: ThinkingFormat | None, calls: CallSyntax | None) -> Waiting[None]:
        """Read reasoning at the start and after calls, and content and calls in any order."""
        if isinstance(calls, JsonCalls) and not calls.begin and not (yield from self._read_bare_calls(calls)):
            return
        while True:
            if thinking is not None:
                yield from self._read_leading_thoughts(thinking, calls)
            marks = self._content_marks(thinking, calls)
            mark = yield from self._source.through(marks, self._emit_content)
            if mark is None:
                return
            self._add_newlines(len(mark) - len(mark.lstrip("\n")))
            if thinking is not None and mark.endswith(thinking.begin):
                yield from self._read_thoughts(thinking, calls)
            elif thinking is None or not mark.endswith(thinking.end):
                assert calls is not None, "only calls have other marks"
                yield from self._read_call(calls, mark, self._emit_content)

    def _content_marks(self, thinking: ThinkingFormat | None, calls: CallSyntax | None) -> Marks:
        """Return the marks that end content. An end of reasoning that was read before is dropped."""
        marks = () if calls is None else calls.begins
        if thinking is not None and thinking.anywhere:
            marks += (thinking.begin, thinking.end)
        elif thinking is not None and self._has_thought:
            marks += (thinking.end,)
        return Marks(*marks, newlines=_NEWLINES) if marks else _NO_MARKS

    def _read_leading_thoughts(self, thinking: ThinkingFormat, calls: CallSyntax | None) -> Waiting[None]:
        self._source.mark()
        yield from self._source.skip()
        mark = yield from self._source.starts_with(*thinking.begins, thinking.end)
        if mark is None:
            self._source.go_back()
            return
        self._source.forget()
        if mark != thinking.end:
            yield from self._read_thoughts(thinking, calls)

    def _read_thoughts(self, thinking: ThinkingFormat, calls: CallSyntax | None) -> Waiting[None]:
        """Read reasoning up to its end, or through a call, which ends it as well."""
        self.end_section()
        yield from self._source.starts_with(thinking.begin)  # some models repeat it
        if thinking.heading:
            yield from self._source.starts_with(thinking.heading)
        yield from self._source.skip("\n")
        begins = () if calls is None else calls.begins
        marks = Marks(thinking.end, *begins, newlines=_NEWLINES)
        self._has_thought = True
        while (
            mark := (yield from self._source.through(marks, self._emit_reasoning, keep_cut=False))
        ) is not None:
            if mark.endswith(thinking.end):
                break
            assert calls is not None, "only calls have other marks"
            begin = mark.lstrip("\n")
            if newlines := mark.removesuffix(begin):  # they are before no mark of the reasoning's
                self._emit_reasoning(newlines)
            if (yield from self._read_call(calls, begin, self._emit_reasoning)):
                return
        yield from self._skip_newlines()

    def _read_call(self, calls: CallSyntax, mark: str, otherwise: Sink) -> Waiting[bool]:
        """Read a call after its mark; False if it is none, and the mark goes to `otherwise`."""
        self._source.mark()
        before = self._num_calls
        try:
            yield from calls.read(self._source, self, mark)
        except NotACallError:
            if self._num_calls == before:
                self._source.go_back()
                otherwise(mark)
                return False
        self._source.forget()
        yield from self._skip_newlines()
        return True

    def _skip_newlines(self) -> Waiting[None]:
        while (yield from self._source.starts_with("\n")):
            self._add_newlines(1)

    def _add_newlines(self, count: int) -> None:
        self._newlines = (self._newlines + "\n" * count)[:_NEWLINES]

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
                yield from calls.read(self._source, self, "")
            except NotACallError:
                if self._num_calls == before:
                    self._source.go_back()
                    return True


_NO_MARKS = Marks()
