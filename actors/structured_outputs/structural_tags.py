"""Structural tags as llguidance's Lark: free text in which triggers begin structures, and formats around
them.

    {"structures": [{"begin": "<fn=f>", "schema": {..}, "end": "</fn>"}], "triggers": ["<fn="]}
    {"format": {"type": "triggered_tags", "triggers": ["<fn="],
                "tags": [{"begin": "<fn=f>", "content": {"type": "json_schema", ..}, "end": "</fn>"}]}}

The older form is that of OpenAI-compatible servers; the newer is XGrammar's, which nests formats (source:
XGrammar's "Structural Tag Usage"). In both, a tag belongs to the shortest trigger that its `begin` starts
with, because the free text before it ends there. Free text ends at the first occurrence of its end mark, so a
tag's end is passed down to the last part inside it. Free text without an end mark cannot be followed by
anything; a format that places something after it is rejected.

Marks that are tokens of the model are written as tokens (`mark_tokens.py`). A trigger that ends within one is
extended to its end. Free text may contain other marks, unless they are special tokens.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from ...cluster.errors import RequestError
from .json_grammar import INDENTED, JsonLayout, json_rule
from .json_schema import MAX_GRAMMAR_CHARS, SchemaReader, check_size
from .lark_text import ANY_TEXT, either, quoted, regex
from .mark_tokens import MarkTokens
from .schema_keywords import ascii_classes

MAX_PARTS = 256  # length of a list
MAX_DEPTH = 16  # nesting of formats
NO_MARKS = MarkTokens({})
_CUT_ESCAPE = re.compile(r"(?<!\\)(?:\\\\)*\\\Z")
_TAG_FIELDS = ("begin", "content", "end")
_FIELDS: Mapping[str, tuple[str, ...]] = {
    "const_string": ("value",),
    "json_schema": ("json_schema",),
    "regex": ("pattern",),
    "any_text": ("excludes",),
    "sequence": ("elements",),
    "or": ("elements",),
    "optional": ("content",),
    "plus": ("content",),
    "star": ("content",),
    "tag": _TAG_FIELDS,
    "triggered_tags": ("triggers", "tags", "at_least_one", "stop_after_first", "excludes"),
    "tags_with_separator": ("tags", "separator", "at_least_one", "stop_after_first"),
}
_COUNTS = {"optional": "?", "plus": "+", "star": "*"}
Json: TypeAlias = Mapping[str, Any]  # Any: JSON.
# Texts of which one ends a part; empty if the part must end by itself; None for the last part.
_Ends: TypeAlias = tuple[str, ...] | None


@dataclass(frozen=True, slots=True)
class _Tag:
    begin: str
    content: Json
    ends: tuple[str, ...]
    field: str


def lark_of_tags(
    tags: Json,
    field: str,
    reader: SchemaReader | None = None,
    layout: JsonLayout = INDENTED,
    marks: MarkTokens = NO_MARKS,
) -> str:
    """Return the Lark of structural tags. Raises RequestError, naming a part of `field`.

    `reader` reads the schemas in them, `layout` is that of their JSON, and `marks` those of the model.
    """
    check_size(tags, field)
    writer = _Writer(reader or SchemaReader(), layout, marks)
    if "format" in tags:
        body = writer.part(_object(tags["format"], f"{field}.format"), f"{field}.format", None)
    else:
        structures = _list(tags, "structures", field, dict)
        found = [_structure(each, f"{field}.structures.{i}") for i, each in enumerate(structures)]
        body = writer.triggered(_list(tags, "triggers", field, str), found, None)
    return "\n".join([f"start: {body}", *writer.rules])


@dataclass(frozen=True, slots=True)
class _FreeText:
    """Text without some texts. `triggers`: what ends it, also where that is a token."""

    excludes: tuple[str, ...] = ()
    triggers: tuple[str, ...] = ()

    @property
    def body(self) -> str:
        """Return the body of a terminal, as Lark."""
        if not self.excludes:
            return ANY_TEXT
        return f"{ANY_TEXT} & ~({ANY_TEXT} {either(map(quoted, self.excludes))} {ANY_TEXT})"


class _Writer:
    def __init__(self, reader: SchemaReader, layout: JsonLayout, marks: MarkTokens) -> None:
        self._reader, self._layout, self._marks = reader, layout, marks
        self.rules: list[str] = []
        self._depth = 0
        self._num_chars = 0

    def part(self, form: Json, field: str, ends: _Ends) -> str:
        """Return the Lark of a format and its ends. Raises RequestError if unknown or incomplete."""
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise RequestError(f"{field}: formats may be nested at most {MAX_DEPTH} deep.", param=field)
        found = self._written(form, field, ends)
        self._depth -= 1
        self._num_chars += len(found)  # the ends of a part are repeated after each alternative
        if self._num_chars > MAX_DEPTH * MAX_GRAMMAR_CHARS:
            raise RequestError(
                f"{field}: as a grammar it is too long; at most {MAX_GRAMMAR_CHARS} characters are taken.",
                param=field,
            )
        return found

    def _written(self, form: Json, field: str, ends: _Ends) -> str:
        kind: Any = form.get("type")
        if not isinstance(kind, str) or kind not in _FIELDS:
            raise RequestError(
                f"{field}.type={json.dumps(kind)} is not supported: {', '.join(_FIELDS)} are.",
                param=f"{field}.type",
            )
        _check_fields(form, field, _FIELDS[kind])
        match kind:
            case "const_string":
                return self._ended(self._marks.lark(_text(form, "value", field)), ends)
            case "json_schema":
                schema = self._reader.read(form.get("json_schema", {}), f"{field}.json_schema")
                return self._ended(self._named(json_rule(schema, self._layout)), ends)
            case "regex":
                return self._ended(lark_regex(_text(form, "pattern", field), f"{field}.pattern"), ends)
            case "any_text":
                return self._until(self._text_without(form, field), self._must_end(ends, field) or ())
            case "sequence":
                elements = list(self._elements(form, field))
                return " ".join(
                    self.part(each, name, ends if i == len(elements) - 1 else ())
                    for i, (each, name) in enumerate(elements)
                )
            case "or":
                return either(self.part(each, name, ends) for each, name in self._elements(form, field))
            case "tag":
                return self._ended(self._tag(_tag(form, field)), ends)
            case "triggered_tags":
                return self.triggered(
                    _list(form, "triggers", field, str),
                    _tags(form, field),
                    self._must_end(ends, field),
                    text=self._text_without(form, field),
                    first=_flag(form, "at_least_one", field),
                    only=_flag(form, "stop_after_first", field),
                )
            case "tags_with_separator":
                return self._ended(self._separated(form, field), ends)
            case _:
                content = self.part(_object(form.get("content"), f"{field}.content"), f"{field}.content", ())
                return self._ended(f"({content}){_COUNTS[kind]}", ends)

    def triggered(
        self,
        triggers: Sequence[str],
        tags: Sequence[_Tag],
        ends: _Ends,
        *,
        text: _FreeText = _FreeText(),
        first: bool = False,
        only: bool = False,
    ) -> str:
        """Return the Lark of free text with tags.

        `text`: allowed text between tags. `first`: it begins with a tag. `only`: it ends with its
        first.
        """
        by_trigger: dict[str, list[str]] = {}
        cut: dict[str, None] = {}  # triggers that end within marks
        for tag in tags:
            trigger = min(
                (each for each in triggers if each and tag.begin.startswith(each)), key=len, default=""
            )
            if not trigger:
                raise RequestError(
                    f"{tag.field}.begin={json.dumps(tag.begin)} starts with none of the triggers.",
                    param=f"{tag.field}.begin",
                )
            length = self._end_of_mark(tag.begin, len(trigger))
            if length > len(trigger):
                cut[trigger] = None
            by_trigger.setdefault(tag.begin[:length], []).append(self._tag(tag, length))
        text = _FreeText((*text.excludes, *cut), (*by_trigger, *(ends or ())))
        opened = [
            f"{self._until(text, (trigger,))} {either(alternatives)}"
            for trigger, alternatives in by_trigger.items()
        ]
        later = self._named(either(opened))
        rest = self._until(text, ends or ())
        triggered_texts = either(
            f"{self._marks.lark(trigger)} {either(alternatives)}"
            for trigger, alternatives in by_trigger.items()
        )
        if only:
            return self._ended(triggered_texts, ends) if first else either([self._ended(later, ends), rest])
        return f"{triggered_texts} {later}* {rest}" if first else f"{later}* {rest}"

    def _tag(self, tag: _Tag, num_matched_chars: int = 0) -> str:
        content = self.part(tag.content, f"{tag.field}.content", tag.ends)
        begin = self._marks.lark(tag.begin[num_matched_chars:])
        return self._named(f"{begin} {content}")

    def _text_without(self, form: Json, field: str) -> _FreeText:
        excludes = _list(form, "excludes", field, str) if form.get("excludes") else ()
        return _FreeText(tuple(excludes))

    def _separated(self, form: Json, field: str) -> str:
        tag = either(self._tag(each) for each in _tags(form, field))
        if not _flag(form, "stop_after_first", field):
            tag = f"{tag} ({self._marks.lark(_text(form, 'separator', field))} {tag})*"
        return tag if _flag(form, "at_least_one", field) else f"({tag})?"

    def _elements(self, form: Json, field: str) -> Iterator[tuple[Json, str]]:
        for i, each in enumerate(_list(form, "elements", field, dict)):
            yield each, f"{field}.elements.{i}"

    def _must_end(self, ends: _Ends, field: str) -> _Ends:
        """Return the ends of free text. Raises RequestError if something follows that cannot."""
        if ends == ():
            raise RequestError(
                f"{field}: free text has no end here, so nothing can follow it. Put it last, or into a tag.",
                param=field,
            )
        return ends

    def _until(self, text: _FreeText, ends: tuple[str, ...]) -> str:
        """Return the Lark of a text up to and including the first of its ends, or of a last text."""
        name = self._named(text.body, terminal=True)
        found = [self._until_mark(name, text, end) for end in ends if self._marks.find(end)]
        if texts := [end for end in ends if not self._marks.find(end)]:
            found.append(self._named(f"{name} {either(map(quoted, texts))}", lazy=True))
        other = self._marks.plain_but((*text.excludes, *text.triggers, *ends))
        return (f"({name} {other})* " if other else "") + (either(found) if found else name)

    def _until_mark(self, name: str, text: _FreeText, end: str) -> str:
        begin, _ = self._marks.find(end) or (0, 0)
        if begin:
            name = self._named(f"({text.body}) {quoted(end[:begin])}", terminal=True)
        return f"{name} {self._marks.lark(end[begin:])}"

    def _end_of_mark(self, text: str, at: int) -> int:
        """Return the end of the mark that a place is within, else the place."""
        begin = 0
        while (found := self._marks.find(text, begin)) is not None and found[0] < at:
            begin = found[1]
        return max(at, begin)

    def _ended(self, body: str, ends: _Ends) -> str:
        return f"{body} {either(map(self._marks.lark, ends))}" if ends else body

    def _named(self, body: str, *, terminal: bool = False, lazy: bool = False) -> str:
        number = len(self.rules)
        name = f"TEXT_{number}" if terminal else f"part_{number}"
        self.rules.append(f"{name}{'[lazy]' if lazy else ''}: {body}")
        return name


def _structure(structure: Json, field: str) -> _Tag:
    begin, end = structure.get("begin"), structure.get("end")
    if not isinstance(begin, str) or not isinstance(end, str):
        raise RequestError(
            f"{field}: a structure holds begin and end (texts) and schema (a JSON schema).", param=field
        )
    content = {"type": "json_schema", "json_schema": structure.get("schema", {})}
    return _Tag(begin, content, (end,), field)


def _tags(form: Json, field: str) -> list[_Tag]:
    return [_tag(each, f"{field}.tags.{i}") for i, each in enumerate(_list(form, "tags", field, dict))]


def _tag(form: Json, field: str) -> _Tag:
    _check_fields(form, field, _TAG_FIELDS)
    end: Any = form.get("end")
    ends: list[Any] = end if isinstance(end, list) and end else [end]
    if not all(isinstance(each, str) for each in ends):
        raise RequestError(
            f"{field}.end is needed: a text, or a list of texts, that ends it.", param=f"{field}.end"
        )
    content = _object(form.get("content"), f"{field}.content")
    return _Tag(_text(form, "begin", field), content, tuple(ends), field)


def _check_fields(form: Json, field: str, known: tuple[str, ...]) -> None:
    for name in form.keys() - {"type", *known}:
        raise RequestError(
            f"{field}.{name} is not supported; {', '.join(known)} are.", param=f"{field}.{name}"
        )


def lark_regex(pattern: str, field: str) -> str:
    """Return a client's pattern as Lark, with ASCII classes. Raises RequestError if an escape is cut off."""
    if _CUT_ESCAPE.search(pattern):
        raise RequestError(f"{field}: it ends in a backslash that escapes nothing.", param=field)
    return regex(ascii_classes(pattern))


def _object(value: object, field: str) -> Json:
    if not isinstance(value, Mapping):
        raise RequestError(f"{field} is needed: a format, an object with a type.", param=field)
    return value


def _text(form: Json, name: str, field: str) -> str:
    value = form.get(name)
    if not isinstance(value, str):
        raise RequestError(f"{field}.{name} is needed: a text.", param=f"{field}.{name}")
    return value


def _flag(form: Json, name: str, field: str) -> bool:
    value = form.get(name, False)
    if not isinstance(value, bool):
        raise RequestError(f"{field}.{name} must be true or false.", param=f"{field}.{name}")
    return value


def _list(tags: Json, name: str, field: str, kind: type) -> list[Any]:
    value = tags.get(name)
    if not isinstance(value, list) or not 1 <= len(value) <= MAX_PARTS:
        raise RequestError(f"{field}.{name} is needed: a list of 1 to {MAX_PARTS}.", param=f"{field}.{name}")
    if not all(isinstance(each, kind) for each in value):
        raise RequestError(
            f"{field}.{name} holds {'objects' if kind is dict else 'texts'} alone.", param=f"{field}.{name}"
        )
    return value
