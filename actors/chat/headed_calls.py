"""Calls with a header that names the tool, and JSON arguments: Kimi, DeepSeek and Mistral."""

from __future__ import annotations

import re
from dataclasses import dataclass

from .argument_schema import ArgumentSchema
from .call_syntax import CallRules, OpenCalls, Schemas
from .json_calls import JsonCalls, json_arguments, json_value
from .lark_writer import LarkWriter
from .text_stream import Marks, NotACallError, TextSource, Waiting, nowhere

_INDEX = re.compile(r"(.+):\d+")


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadedCalls:
    """Calls written as `section (begin prefix NAME heading {..} end)* section_end`."""

    section: str = ""
    section_end: str = ""
    begin: str
    prefix: str = ""
    heading: str
    end: str = ""  # "" if arguments end at their closing brace
    between: str = ""
    numbered: bool = False  # a name is followed by `:0`, and the header is the call's id
    id_mark: str = ""  # may follow a name, with the call's id
    id_chars: int | None = None  # letters and digits of the ids that the templates accept
    # A list of JSON objects may follow `begin` instead; it must where the model lacks the heading's token.
    listed: JsonCalls | None = None

    @property
    def begins(self) -> tuple[str, ...]:
        return tuple(filter(None, (self.section, self.begin)))

    def read(self, source: TextSource, calls: OpenCalls, mark: str) -> Waiting[None]:
        if not self.section or not mark.endswith(self.section):
            yield from self._read_call(source, calls)
            yield from source.skip("\n")
            yield from source.closing(*filter(None, (self.section_end,)))
            return
        around, num_read = Marks(self.begin, self.section_end), 0
        while (yield from source.through(around, nowhere)) == self.begin:  # drop text between calls
            try:
                yield from self._read_call(source, calls)
                num_read += 1
            except NotACallError:
                pass  # text between calls, too
        if not num_read:
            raise NotACallError

    def _read_call(self, source: TextSource, calls: OpenCalls) -> Waiting[None]:
        if self.listed is not None:
            yield from source.skip()
            while (yield from source.starts_with(self.begin)):  # some models repeat it
                yield from source.skip()
            if (yield from source.peek()) in ("[", "{"):
                yield from self._read_list(source, calls, self.listed)
                return
        # Some models omit the heading before a brace, or the arguments.
        end = self.end[self.end.find("<") :]
        header, mark = yield from source.short_with_mark(Marks(self.heading, end or "{"))
        if mark == "{":
            source.step_back(len(mark))
        header = header.strip()
        name, _, given_id = header.partition(self.id_mark) if self.id_mark else (header, "", "")
        name = name.removeprefix(self.prefix)
        if self.numbered and (found := _INDEX.fullmatch(name)) is not None:
            name, given_id = found[1], header
        elif self.numbered and name.strip() not in calls.schemas:
            raise NotACallError
        calls.open(name.strip(), given_id or None, id_chars=self.id_chars, closed=mark == end)
        if mark == end:
            calls.add("{}")
        else:
            yield from self._read_arguments(source, calls)

    def _read_arguments(self, source: TextSource, calls: OpenCalls) -> Waiting[None]:
        if not self.end:
            yield from source.skip()
            if (yield from source.peek()) == "{":
                yield from json_value(source, calls.add)
            else:
                calls.add("{}")
            return
        others = tuple(filter(None, (self.begin, self.section_end)))
        ends = Marks(self.end.lstrip("\n"), *others, newlines=1)
        mark = yield from read_raw_arguments(source, calls, ends)
        if mark is not None and mark.endswith(others):  # the call's own end is missing
            source.step_back(len(mark))

    def _read_list(self, source: TextSource, calls: OpenCalls, listed: JsonCalls) -> Waiting[None]:
        is_list = (yield from source.starts_with("[")) is not None
        while True:
            yield from source.skip()
            yield from listed.read(source, calls, "")
            yield from source.skip()
            if not is_list or (yield from source.starts_with(",")) is None:
                break
        yield from source.starts_with("]")

    def rules(self, lark: LarkWriter, schemas: Schemas) -> CallRules:
        if self.listed is not None and not lark.has(self.heading):
            inner = self.listed.rules(lark, schemas)
            return CallRules(
                calls=inner.calls, before=lark.text(self.begin + "["), between=lark.text(", "), after='"]"'
            )
        return CallRules(
            calls=[self._call(lark, name, schema) for name, schema in schemas.items()],
            before=lark.text(self.section),
            between=lark.text(self.between),
            after=lark.text(self.section_end),
        )

    def _call(self, lark: LarkWriter, name: str, schema: ArgumentSchema) -> str:
        header = lark.text(self.begin + self.prefix + name + (":" if self.numbered else ""))
        number = "/[0-9]{1,4}/" if self.numbered else ""
        arguments = f"{lark.text(self.heading)} {json_arguments(lark, schema)}"
        return f"{header} {number} {arguments} {lark.text(self.end)}"


def read_raw_arguments(source: TextSource, calls: OpenCalls, end: Marks) -> Waiting[str | None]:
    """Read JSON up to a mark and return the mark. If there is no JSON, the arguments are `{}`."""
    yield from source.skip()
    some = False

    def add(text: str) -> None:
        nonlocal some
        some = True
        calls.add(text)

    mark = yield from source.through(end, add, keep_cut=False)
    if not some and not source.ended:
        calls.add("{}")
    return mark
