"""Answers that are messages with headers: gpt-oss (Harmony) and Muse."""

from __future__ import annotations

import re
from dataclasses import dataclass

from ..structured_outputs.lark_text import ANY_TEXT, either
from .argument_schema import ArgumentSchema
from .call_syntax import CallRules, OpenCalls, Schemas
from .headed_calls import read_raw_arguments
from .json_calls import json_arguments
from .lark_writer import LarkWriter
from .tagged_calls import TaggedCalls
from .text_stream import Marks, NotACallError, Sink, TextSource, Waiting, nowhere

_RECIPIENT = re.compile(r"to=([^\s<]+)")
_MAX_THOUGHTS = 4  # messages of reasoning before a constrained answer or a required call
_CHANNEL = re.compile(r"\s*(\w+)")
_MARK = r"(?:\s*<(?:\|(?:\w+(?:\|>?)?)?)?)"  # or its beginning
_CUT_HEADER = re.compile(rf"{_MARK}?\w*(?:\s*to=[^\s<]*|{_MARK}\s*\w*)*\s*")  # without the message


@dataclass(frozen=True, slots=True, kw_only=True)
class Messages:
    """Messages with headers that name recipients: `start ROLE to=X channel Y kind json body text end`."""

    start: str
    # possible beginnings of a response; the prompt has ended with `start` and the role
    first: tuple[str, ...]
    body: str
    ends: tuple[str, ...]
    channel: str = ""
    kind: str = ""
    thoughts: frozenset[str]  # channels or recipients of reasoning
    # recipients of content; a message without a recipient is also content
    answers: frozenset[str] = frozenset()
    final: str  # header of the message that answers
    prefix: str = ""  # prefix of tool names as recipients
    calls: TaggedCalls | None = None  # the syntax of a message that calls; None: its text is JSON arguments

    @property
    def begins(self) -> tuple[str, ...]:
        return ()

    def read(self, source: TextSource, calls: OpenCalls, mark: str) -> Waiting[None]:
        raise AssertionError("messages are read by `read_answer`")

    def read_answer(
        self, source: TextSource, calls: OpenCalls, content: Sink, reasoning: Sink, *, with_calls: bool
    ) -> Waiting[None]:
        """Read all messages of a response. Text without a header is content."""
        ends = Marks(*self.ends, self.start)
        source.mark()
        headed = (yield from source.starts_with(*self.first)) is not None
        source.go_back()
        if not headed:
            yield from source.through(ends, content)
        while (yield from source.peek()):
            source.mark()
            try:
                header = yield from source.short(Marks(self.body))
                tool = self._tool(header, calls.schemas) if with_calls else None
                calls.end_section()
                if tool is not None:
                    yield from self._read_call(source, calls, tool, ends)
            except NotACallError:
                was_cut_short = source.ended
                source.go_back()
                calls.end_section()
                if was_cut_short:
                    rest: list[str] = []
                    yield from source.through(Marks(), rest.append)
                    if not _CUT_HEADER.fullmatch("".join(rest)):
                        content("".join(rest))
                return
            source.forget()
            if tool is None:
                yield from source.through(ends, reasoning if self._is_reasoning(header) else content)

    def _read_call(self, source: TextSource, calls: OpenCalls, tool: str, ends: Marks) -> Waiting[None]:
        if self.calls is not None:
            yield from source.skip()
            mark = yield from source.starts_with(*self.calls.begins)
            if mark is not None:
                yield from self.calls.read(source, calls, mark)
                yield from source.through(ends, nowhere)
                return
        calls.open(tool)
        yield from read_raw_arguments(source, calls, ends)

    def _tool(self, header: str, schemas: Schemas) -> str | None:
        found = _RECIPIENT.search(header)
        if found is None or found[1] in self.thoughts | self.answers:
            return None
        if found[1].startswith(self.prefix):
            return found[1].removeprefix(self.prefix)
        return found[1] if found[1] in schemas else None

    def _is_reasoning(self, header: str) -> bool:
        """Return whether a message that is no call is not meant for the user."""
        if self.final in header:
            return False
        if (to := _RECIPIENT.search(header)) is not None:
            return to[1] not in self.answers  # a tool that the model was not given is not, either
        channel = _CHANNEL.match(header.rpartition(self.channel)[2]) if self.channel else None
        return channel is not None and channel[1] in self.thoughts

    def rules(self, lark: LarkWriter, schemas: Schemas) -> CallRules:
        """Return calls without their `start` and role, which the prompt or `thoughts_rule` has written."""
        another = None if self.calls is None else lark.text(f"{self.ends[0]}{self.start}assistant")
        calls = [self._call(lark, name, schema) for name, schema in schemas.items()]
        return CallRules(calls=calls, between=another)

    def _call(self, lark: LarkWriter, name: str, schema: ArgumentSchema) -> str:
        if self.channel:
            header = f"{self.channel}commentary to={self.prefix}{name} {self.kind}json"
        else:
            header = f" to={name}"
        if self.calls is None:
            return f"{lark.text(header + self.body)} {json_arguments(lark, schema)}"
        inner = self.calls.rules(lark, {name: schema})
        call = f"{inner.before} {either(inner.calls)} {inner.after}"
        return f"{lark.text(header + self.body)} {call}"

    def thoughts_rule(self, lark: LarkWriter) -> str:
        """Return the Lark of optional reasoning, which ends with the start of the next message."""
        header = lark.text(self.reasoning_header)
        text = lark.until(ANY_TEXT, self.ends[0])
        return f"({header} {text} {lark.text(self.start + 'assistant')}){{0,{_MAX_THOUGHTS}}}"

    @property
    def reasoning_header(self) -> str:
        (thoughts,) = self.thoughts
        return (self.channel + thoughts if self.channel else f" to={thoughts}") + self.body
