"""Calls in tags, with values that are written without quotes: Qwen3-Coder, MiniMax, GLM, DeepSeek V3.2 ..."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass

from ...cluster.errors import RequestError, brief
from ..structured_outputs.lark_text import either, quoted, regex
from ..structured_outputs.schema_keywords import TYPES
from ..tokenization.client_messages import without_surrogates
from .argument_schema import ArgumentSchema, Branch, no_constant, read_value
from .call_syntax import CallRules, OpenCalls, Schemas
from .lark_writer import BLANKS, LarkWriter, branches_of, raw_value, strings, without
from .text_stream import Marks, NotACallError, Sink, TextSource, Waiting, gathering

_AFTER_NAME = re.compile(r"[\n<]")
_WRAPPERS = frozenset({"arguments", "input"})  # in which DeepSeek V3.2 writes all arguments at times
_ANY_KEY = "[A-Za-z_][A-Za-z0-9_.-]{0,63}"  # of properties that a schema allows without naming them


@dataclass(frozen=True, slots=True, kw_only=True)
class TaggedCalls:
    """Calls in `section name_open NAME name_close (key_open KEY key_close value value_close)* end
    section_end`.

    The tool's schema determines the types of values, unless their tags do (`text_close`, `json_close`).
    """

    section: str  # may be absent where `name_open` is a mark of its own
    section_end: str
    name_open: str
    name_close: str  # "" if the name ends at the end of its line or at the next mark
    key_open: str
    key_close: str
    text_close: str = ""  # instead of `key_close` where a tag says that the value is text,
    json_close: str = ""  # or that it is JSON
    value_open: str = ""  # mark between key and value
    value_close: str
    end: str  # mark after a call; the section's end mark where a section holds one call
    newlines: bool = True  # one newline directly before and after a value belongs to the marks
    shares_section: bool = False  # parallel calls are written into one section

    @property
    def begins(self) -> tuple[str, ...]:
        return tuple(filter(None, (self.section, self.name_open)))

    def read(self, source: TextSource, calls: OpenCalls, mark: str) -> Waiting[None]:
        if mark.endswith(self.section):
            yield from source.skip()
            yield from source.expect(self.name_open)
        while True:
            yield from self._read_call(source, calls)
            yield from source.skip()
            if not (mark.endswith(self.section) and self.name_open):
                break
            if (yield from source.starts_with(self.name_open)) is None:
                break
        if self.section_end:
            yield from source.closing(self.section_end)

    def _read_call(self, source: TextSource, calls: OpenCalls) -> Waiting[None]:
        """Read `NAME name_close (key_open KEY key_close value_open value value_close)* end`."""
        if self.name_close:
            name = yield from source.short(Marks(self.name_close))
        else:
            yield from source.skip()
            name = yield from name_before(source, _AFTER_NAME)
        name = name.strip()
        calls.open(name)
        schema = calls.schemas.get(name)
        separator = "{"
        wrapped: list[str] = []  # a first argument that may be an object of all arguments
        while True:
            yield from source.skip()
            mark = yield from source.closing(self.key_open, self.end)
            if wrapped:
                inner = _unwrapped(wrapped[-1], schema) if mark == self.end else None
                calls.add("".join(wrapped) if inner is None else inner)
                wrapped.clear()
            if mark != self.key_open:
                break
            source.mark()
            try:
                key, closed = yield from source.short_with_mark(Marks(*self._closes))
            except NotACallError:
                if source.ended:
                    return
                source.go_back()
                mark = None
                break
            source.forget()
            key = key.strip()
            if self.value_open:
                yield from source.skip()
                yield from source.starts_with(self.value_open)
            begin = separator + json.dumps(key, ensure_ascii=False) + ": "
            types = self._types(schema, key, closed)
            if separator == "{" and key in _WRAPPERS and schema is not None and schema.property(key) is None:
                value: list[str] = []
                ended = yield from self._read_value(source, value.append, types)
                wrapped = [begin, "".join(value)]
            else:
                calls.add(begin)
                ended = yield from self._read_value(source, calls.add, types)
            separator = ", "
            if not ended:
                if wrapped:
                    calls.add("".join(wrapped))
                return
        if not source.ended or mark == self.end:
            calls.add("{}" if separator == "{" else "}")

    @property
    def _closes(self) -> Iterable[str]:
        return filter(None, (self.key_close, self.text_close, self.json_close))

    def _types(self, schema: ArgumentSchema | None, key: str, closed: str) -> frozenset[str]:
        """Return the types that the tag allows among those of the schema, or else those of the schema."""
        value = None if schema is None else schema.property(key)
        declared = frozenset[str]() if value is None else value.types
        tagged = {self.text_close: frozenset({"string"}), self.json_close: TYPES - {"string"}}
        if not closed or closed not in tagged:
            return declared
        return declared & tagged[closed] or declared or tagged[closed]

    def _read_value(self, source: TextSource, add: Sink, types: frozenset[str]) -> Waiting[bool]:
        """Read a value, text as it arrives, other types when complete. False if the text ends within."""
        if self.newlines:
            yield from source.starts_with("\n")
        if types <= {"string"}:
            add('"')
            ended = yield from self._through_value(source, lambda text: add(escaped(text)))
            if ended:
                add('"')
            return ended
        parts: list[str] = []
        ended = yield from self._through_value(source, parts.append, parts)
        if ended:
            add(read_value("".join(parts), types))
        return ended

    def _through_value(
        self, source: TextSource, sink: Sink, json_so_far: list[str] | None = None
    ) -> Waiting[bool]:
        """Pass on a value up to its end; False if the text ends before.

        The value ends at its own mark or, if the model omitted that, where the next value begins
        (`_next_key`), or at the call's end mark. The latter is left unread, and counts only if what may
        follow a call comes next, since a value may contain it. So may a string of JSON (`json_so_far`).
        """
        followers = tuple(filter(None, (self.section_end, self.section, self.name_open)))
        ends = Marks(self.value_close, self.end, self._next_key, newlines=int(self.newlines))
        while (mark := (yield from source.through(ends, sink, keep_cut=False))) is not None:
            if mark.endswith(self.key_open):
                source.step_back(len(self.key_open))
                return True
            if mark.endswith(self.value_close):
                if json_so_far is None or not _is_within_string("".join(json_so_far)):
                    return True
                follows = (self.key_open, self.end)
            else:
                source.step_back(len(self.end))
                follows = ()
            source.mark()
            if not follows:
                yield from source.expect(self.end)
            yield from source.skip()
            is_end = (yield from source.starts_with(*(follows or followers))) is not None or source.ended
            source.go_back()
            if is_end:
                return True
            if not follows:
                yield from source.expect(self.end)
            sink(mark)
        return False

    def rules(self, lark: LarkWriter, schemas: Schemas) -> CallRules:
        line = "\n" if self.name_open else ""
        section = self.section + line
        calls = [
            alternative for name, schema in schemas.items() for alternative in self._calls(lark, name, schema)
        ]
        if self.shares_section:
            return CallRules(calls=calls, before=lark.text(section), after=lark.text(self.section_end))
        calls = [f"{lark.text(section)} {call} {lark.text(self.section_end)}" for call in calls]
        return CallRules(calls=calls, between=lark.text("\n"))

    def _calls(self, lark: LarkWriter, name: str, schema: ArgumentSchema) -> Iterable[str]:
        """Yield the Lark of a call's alternatives, one for each of its schema's branches."""
        opening = lark.text(f"{self.name_open}{name}{self.name_close}\n")
        for branch in branches_of(schema, name):
            if not branch.allows("object"):
                continue
            values = [self._value(lark, schema, name, branch, key) for key in branch.names]
            if None in values:
                continue
            if not branch.names and schema.schema and branch.property("") is not False:
                extra = branch.property("")
                value = schema.at({} if extra is None else extra)
                values.append(f"({self._written(lark, name, None, value)})*")
            # Its last newline is a part of the call: lexers cannot tell a newline from one before a mark.
            end = lark.text(self.end + ("\n" if self.section_end else ""))
            yield " ".join([opening, *filter(None, values), end])

    def _value(
        self, lark: LarkWriter, schema: ArgumentSchema, name: str, branch: Branch, key: str
    ) -> str | None:
        """Return the Lark of a property, "" for one that is never written; None if it can and must not be."""
        found = branch.property(key)
        is_required = key in branch.required
        if found is False:
            return None if is_required else ""
        if any(close in key for close in self._closes) or key != key.strip() or not key:
            if not is_required:
                return ""
            raise RequestError(
                f"tools: {name} requires an argument named {brief(key)}, which this model's call format "
                "cannot express. Rename it.",
                param="tools",
            )
        written = self._written(lark, name, key, schema.at({} if found is None else found))
        return written if is_required else f"({written})?"

    def _written(self, lark: LarkWriter, name: str, key: str | None, value: ArgumentSchema) -> str:
        line = "\n" if self.newlines else ""
        end = f"{line}{self.value_close}"
        begin = lark.text(self.key_open + (key or "")) + ("" if key else f" {regex(_ANY_KEY)}")
        between = f"\n{self.value_open}" if self.value_open else line
        if not self.text_close:
            written = raw_value(lark, value, name, end, self._forbidden)
            return f"{begin} {lark.text(self.key_close + between)} {written} {quoted(chr(10))}"
        found: list[str] = []
        text = strings(lark, branches_of(value, name), name)
        if text is not None:
            written = lark.until(without(text, self._forbidden), end)
            found.append(f"{lark.text(self.text_close + between)} {written}")
        if types := (value.types or TYPES) - {"string"}:
            written = f"{lark.json(value, types)} {lark.text(end)}"
            found.append(f"{lark.text(self.json_close + between)} {written}")
        return f"{begin} {either(found)} {quoted(chr(10))}"

    @property
    def _next_key(self) -> str:
        """The text that ends a value without an end mark.

        A text may contain the mark itself, unless a tag of its own says what is text.
        """
        return self.key_open if self.text_close else "\n" + self.key_open

    @property
    def _forbidden(self) -> list[str]:
        """Lark of what would end a text."""
        followers = [quoted(each) for each in (self.section_end, self.section, self.name_open) if each]
        return [
            quoted(self.value_close),
            quoted(self._next_key),
            f"{quoted(self.end)} {regex(BLANKS)} {either(followers)}",
        ]


def _is_within_string(text: str) -> bool:
    """Return whether a JSON object or list so far ends within a string."""
    if not text.lstrip().startswith(("{", "[")):
        return False
    rest = re.sub(r'"(\\.|[^"\\])*"', "", text, flags=re.DOTALL)
    return '"' in rest


def _unwrapped(value: str, schema: ArgumentSchema | None) -> str | None:
    """Return a JSON value's fields without the last brace, if it is an object of declared arguments."""
    assert schema is not None, "an undeclared argument has a schema"
    try:
        found = json.loads(value)
        found = json.loads(found, parse_constant=no_constant) if isinstance(found, str) else found
    except (ValueError, RecursionError):
        return None
    if not isinstance(found, dict) or not found or not found.keys() <= schema.names:
        return None
    return without_surrogates(json.dumps(found, ensure_ascii=False)).removesuffix("}")


def name_before(source: TextSource, pattern: re.Pattern[str]) -> Waiting[str]:
    parts: list[str] = []
    if not (yield from source.span(pattern, gathering(parts))):
        raise NotACallError
    return "".join(parts)


def escaped(text: str) -> str:
    """Return text as between the quotes of a JSON string; pieces of text give pieces of the string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]
