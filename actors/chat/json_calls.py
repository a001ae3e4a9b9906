"""Calls that are JSON objects with a name and arguments: Hermes, Qwen, Llama 3, and older Mistral models."""

from __future__ import annotations

import re
from dataclasses import dataclass

from ..structured_outputs.lark_text import quoted
from ..tokenization.client_messages import loads
from .argument_schema import ArgumentSchema
from .call_syntax import CallRules, OpenCalls, Schemas
from .lark_writer import LarkWriter
from .text_stream import NotACallError, Sink, TextSource, Waiting, gathering, nowhere

_STRUCTURE = re.compile(r'["{}\[\]<]')  # "<" never occurs in JSON outside of a string, so a mark begins there
_IN_STRING = re.compile(r'["\\]')
_AFTER_SCALAR = re.compile(r"[,}\]\s<]")
_MAX_CHARS = 1024  # of a string that is a key or a name
_NAMES = {"name"}
_ARGUMENTS = {"arguments", "parameters"}
_LABELS = {"type", "id"}


@dataclass(frozen=True, slots=True, kw_only=True)
class JsonCalls:
    """Calls written as `begin {"name": .., "arguments": {..}} end`."""

    # mark before every call; if "", a response that begins with a brace and names a tool is a call
    begin: str = ""
    end: str = ""
    before: str = ""  # optional text before the first call
    between: str = ""  # separator of calls that have no `begin`
    arguments: str = "arguments"
    id_chars: int | None = None  # letters and digits of the ids that the templates accept

    @property
    def begins(self) -> tuple[str, ...]:
        return tuple(filter(None, (self.begin or self.before,)))

    @property
    def _is_bare(self) -> bool:
        """Whether the text alone says that it is a call: it needs arguments, and they begin as JSON."""
        return not self.begin and bool(self.between)

    def read(self, source: TextSource, calls: OpenCalls, mark: str) -> Waiting[None]:
        """Read `{"name": .., "arguments": {..}}`, keys in either order."""
        name: str | None = None
        early: list[str] = []  # arguments that came before the name
        opened = False
        yield from source.skip()
        yield from source.expect("{")
        while True:
            yield from source.skip()
            if (yield from source.starts_with("}")):
                break
            key = yield from json_string(source)
            yield from source.skip()
            yield from source.expect(":")
            yield from source.skip()
            if key in _NAMES and name is None:
                name = yield from json_string(source)
                if not self.begin and name not in calls.schemas:
                    raise NotACallError  # other JSON
                if early:
                    calls.open(name, id_chars=self.id_chars)
                    opened = True
                    calls.add("".join(early))
            elif key in _ARGUMENTS and not opened and not early:
                first = yield from source.peek()
                if first == '"':  # JSON within a string
                    early.append((yield from json_string(source, limit=None)))
                elif first != "{":
                    raise NotACallError
                begun = (yield from _begun_object(source)) if self._is_bare and first == "{" else ""
                if name is not None:
                    calls.open(name, id_chars=self.id_chars)
                    opened = True
                    calls.add("".join(early))
                if first == "{":
                    yield from json_value(source, calls.add if opened else early.append, begun=begun)
            elif key in _LABELS:
                yield from _skip_value(source)
            else:
                raise NotACallError
            yield from source.skip()
            if (yield from source.starts_with(",")) is None:
                if (yield from source.starts_with("}")) is None and not opened:
                    raise NotACallError
                break
        if not opened:
            if name is None or (self._is_bare and not early):
                raise NotACallError
            calls.open(name, id_chars=self.id_chars)
            calls.add("".join(early) or "{}")
        if self.end:
            yield from source.skip()
            yield from source.closing(self.end)

    def rules(self, lark: LarkWriter, schemas: Schemas) -> CallRules:
        return CallRules(
            calls=[self._call(lark, name, schema) for name, schema in schemas.items()],
            between=lark.text("\n" if self.begin else self.between + " "),
        )

    def _call(self, lark: LarkWriter, name: str, schema: ArgumentSchema) -> str:
        if not self.begin:  # other JSON may be an alternative, and lexers do not backtrack
            return json_arguments(lark, _call_schema(name, self.arguments, schema))
        begin = f'{self.begin}\n{{"name": {quoted(name)}, "{self.arguments}": '
        end = lark.text(f"}}\n{self.end}")
        return f"{lark.text(begin)} {json_arguments(lark, schema)} {end}"


def _call_schema(name: str, key: str, schema: ArgumentSchema) -> ArgumentSchema:
    document = {
        "type": "object",
        "properties": {"name": {"const": name}, key: schema.schema or {"type": "object"}},
        "required": ["name", key],
        "additionalProperties": False,
    }
    definitions = schema.document.get("$defs")
    return ArgumentSchema({**document, "$defs": definitions} if definitions else document)


def json_arguments(lark: LarkWriter, schema: ArgumentSchema) -> str:
    """Return the Lark of arguments as a JSON object."""
    whole = schema if schema.schema else ArgumentSchema({"type": "object"})
    return lark.json(whole)


def json_string(source: TextSource, limit: int | None = _MAX_CHARS) -> Waiting[str]:
    """Return a string's value. Raises NotACallError if it is none, or longer than `limit`."""
    parts: list[str] = []
    if (yield from source.peek()) != '"':
        raise NotACallError
    if not (yield from _string(source, gathering(parts, limit))):
        raise NotACallError
    try:
        return loads("".join(parts))
    except ValueError:
        raise NotACallError from None


def _begun_object(source: TextSource) -> Waiting[str]:
    """Return an object's brace and blanks. Raises NotACallError if neither a key nor its end follows."""
    parts = [(yield from source.character())]
    while (found := (yield from source.peek())) and found in " \t\r\n":
        parts.append((yield from source.character()))
    if found and found not in '"}':
        raise NotACallError
    return "".join(parts)


def json_value(source: TextSource, sink: Sink, begun: str = "") -> Waiting[None]:
    """Pass on a value up to the bracket that closes it, or to a mark. Only nesting depth is tracked.

    `begun`: its first bracket, if that was read before.
    """
    depth = 0
    if begun:
        sink(begun)
        depth = 1
    while True:
        found = yield from source.span(_STRUCTURE, sink)
        if found in ("", "<"):
            return
        if found == '"':
            if not (yield from _string(source, sink)):
                return
            continue
        sink((yield from source.character()))
        depth += 1 if found in "{[" else -1
        if depth == 0:
            return


def _skip_value(source: TextSource) -> Waiting[None]:
    first = yield from source.peek()
    if first and first in "{[":
        yield from json_value(source, nowhere)
    elif first == '"':
        yield from _string(source, nowhere)
    else:
        yield from source.span(_AFTER_SCALAR, nowhere)


def _string(source: TextSource, sink: Sink) -> Waiting[bool]:
    """Pass on a string with its quotes. Return False if the text ends within it."""
    sink((yield from source.character()))
    while True:
        found = yield from source.span(_IN_STRING, sink)
        if not found:
            return False
        yield from source.character()
        if found == '"':
            sink(found)
            return True
        sink(found + (yield from source.character()))
