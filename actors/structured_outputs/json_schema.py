"""Reads JSON Schemas for llguidance: what it enforces, and the names of what it cannot enforce.

    schema ─▶ EnforcedSchema(schema with `$ref`s to `#/$defs/..`, names of the keywords left out)

Annotations are dropped. A keyword that cannot be enforced is left out and named; with `strict` it refuses the
schema, as with OpenAI, unless it is a format or unknown: JSON Schema treats these as annotations
(`docs/decisions/grammars.md`). `schema_keywords.py` reads single keywords. Used for response formats,
structured outputs, structural tags and parameters of tools.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from referencing import Registry
from referencing.exceptions import Unresolvable
from referencing.jsonschema import DRAFT202012, specification_with

from ...cluster.errors import RequestError, brief
from . import schema_keywords as keywords
from .disjoint_schemas import are_disjoint

MAX_GRAMMAR_CHARS = 131_072
MAX_JSON_DEPTH = 120  # JSON schema readers accept up to 128
MAX_REFERENCES = 64  # to references, that are followed
_WITHOUT_SIBLINGS = ("draft-03", "draft-04", "draft-06", "draft-07")  # drafts that ignore those of $ref

Schema = Mapping[str, Any] | bool  # Any, here and below: JSON


@dataclass(frozen=True, slots=True)
class EnforcedSchema:
    """A schema that llguidance enforces.

    Attributes:
        schema: it stands alone: every `$ref` is `#/$defs/..`, and has no siblings without effect.
        left_out: paths of keywords that were sent and are not enforced, such as
            "response_format.json_schema.schema.properties.tags.uniqueItems".
        guidance: options of llguidance that came with the schema (`x-guidance`).
    """

    schema: Schema
    left_out: tuple[str, ...] = ()
    guidance: Mapping[str, Any] | None = None

    @property
    def defs(self) -> Mapping[str, Schema]:
        return self.schema.get("$defs", {}) if isinstance(self.schema, Mapping) else {}

    def part(self, schema: Schema) -> EnforcedSchema:
        """Return a part of this schema as one that stands alone."""
        parts = {} if schema is True else {"enum": []} if schema is False else schema
        return EnforcedSchema({**parts, "$defs": self.defs} if self.defs else schema, (), self.guidance)

    def lark(self, guidance: Mapping[str, Any]) -> str:
        """Return the right-hand side of a Lark rule. `guidance`: its layout, as in `x-guidance`."""
        return f"%json {self.text(guidance)}"

    def text(self, guidance: Mapping[str, Any]) -> str:
        """Return the schema as llguidance takes it."""
        keywords = self.schema if isinstance(self.schema, Mapping) else {}
        return json.dumps({**keywords, "x-guidance": guidance}, ensure_ascii=False)


class SchemaReader:
    """Reads the schemas of a request.

    Args:
        strict: refuse a schema with a keyword that restricts answers and cannot be enforced.
        closes_objects: an object has the named properties alone if its schema does not mention others.

    Attributes:
        left_out: paths of keywords, of all schemas read, that are not enforced.
    """

    def __init__(self, *, strict: bool = False, closes_objects: bool = False) -> None:
        self._strict, self._closes_objects = strict, closes_objects
        self.left_out: list[str] = []

    def read(self, schema: Any, field: str) -> EnforcedSchema:
        """Read a schema. `field` names it in errors and in `left_out`.

        Raises RequestError if it is none, is too large or refers to nothing; with `strict` also if a keyword
        that restricts answers cannot be enforced.
        """
        check_size(schema, field)
        if not isinstance(schema, Mapping) and schema is not True:
            raise _refusal(field, "a JSON schema is an object, or true; false allows no answer")
        try:
            json.dumps(schema, ensure_ascii=False, allow_nan=False).encode()
        except (TypeError, ValueError, RecursionError) as error:
            raise _refusal(field, f"it cannot be written as JSON: {error}") from None
        document = _Document({} if schema is True else schema, field, self._closes_objects)
        found = document.read()
        if self._strict and document.unenforced:
            names = ", ".join(map(brief, document.unenforced))
            raise RequestError(
                f"{field}: strict=true, and these keywords cannot be enforced: {names}. Leave them out of "
                "the schema, or leave out strict.",
                param=document.unenforced[0],
            )
        self.left_out += found.left_out
        return found


def check_size(value: Any, field: str) -> None:
    """Raise RequestError for too deep or large JSON, without recursion or serialization."""
    num_chars, depth, layer = 0, 0, [value]
    while layer:
        following: list[Any] = []
        for part in layer:
            if isinstance(part, Mapping):
                num_chars += sum(map(len, map(str, part.keys()))) + 4 * len(part)
                parts = part.values()
            else:
                num_chars += len(part) if isinstance(part, str | list | tuple) else 1
                parts = part if isinstance(part, list | tuple) else ()
            if num_chars > MAX_GRAMMAR_CHARS:
                raise _refusal(field, f"it is too long; at most {MAX_GRAMMAR_CHARS} characters are taken")
            following += parts
        layer, depth = following, depth + 1
        if depth > MAX_JSON_DEPTH:
            raise _refusal(field, f"it is nested too deep; at most {MAX_JSON_DEPTH} levels are taken")


class _Document:
    """A schema and what it refers to. Every definition is read once."""

    def __init__(self, root: Mapping[str, Any], field: str, closes_objects: bool) -> None:
        self._root, self._field, self._closes_objects = root, field, closes_objects
        uri = root.get("$schema")
        self._draft = uri if isinstance(uri, str) else ""
        self._specification = specification_with(self._draft, default=DRAFT202012)
        self._names: dict[int, str] = {}  # of definitions, by the id of what they hold
        self._defs: dict[str, Schema] = {}
        self._pending: list[tuple[str, Any, str, Any]] = []  # name, schema, path, resolver (untyped library)
        self._one_of: list[tuple[str, list[Schema]]] = []
        self._left_out: dict[str, None] = {}
        self.unenforced: list[str] = []  # those that restrict answers

    def read(self) -> EnforcedSchema:
        resolver = Registry().resolver_with_root(self._specification.create_resource(self._root))
        schema = self._node(self._root, self._field, resolver)
        while self._pending:
            name, contents, at, resolver = self._pending.pop()
            self._defs[name] = self._node(contents, at, resolver)
        for at, options in self._one_of:
            if not are_disjoint(options, self._defs):
                self._leave_out(at)
        if self._defs:
            schema = {**(schema if isinstance(schema, Mapping) else {}), "$defs": self._defs}
        return EnforcedSchema(schema, tuple(self._left_out), self._guidance())

    def _guidance(self) -> Mapping[str, Any] | None:
        guidance = self._root.get("x-guidance")
        if not isinstance(guidance, Mapping):
            return None
        # With these llguidance would leave out keywords by itself.
        return {name: value for name, value in guidance.items() if name not in ("lenient", "coerce_one_of")}

    def _leave_out(self, at: str, *, restricts: bool = True) -> None:
        if restricts and at not in self._left_out:
            self.unenforced.append(at)
        self._left_out[at] = None

    def _node(self, schema: Any, at: str, resolver: Any, *, is_merged: bool = False) -> Schema:
        """Read a schema. `is_merged`: llguidance intersects it with others."""
        if isinstance(schema, bool):
            return schema
        if not isinstance(schema, Mapping):
            raise _refusal(at, "a schema is an object, true or false")
        if "$ref" in schema and any(draft in self._draft for draft in _WITHOUT_SIBLINGS):
            schema = {"$ref": schema["$ref"]}
        elif schema is not self._root and isinstance(schema.get("$id"), str):
            resolver = resolver.in_subresource(self._specification.create_resource(schema))
        merges = is_merged or any(name in schema for name in keywords.APPLICATORS)
        out: dict[str, Any] = {}
        for name, value in schema.items():
            if name not in keywords.ANNOTATIONS and not name.startswith("x-"):
                self._keyword(name, value, schema, out, at, resolver, is_merged)
        found, unread = keywords.bounds(schema)
        out |= found
        for name in unread:
            self._leave_out(f"{at}.{name}")
        self._rest_of_object(schema, out, at, resolver, merges)
        self._rest_of_array(schema, out, at, resolver, merges)
        return out

    def _keyword(
        self,
        name: str,
        value: Any,
        schema: Mapping[str, Any],
        out: dict[str, Any],
        at: str,
        resolver: Any,
        is_merged: bool,
    ) -> None:
        """Write to `out` what llguidance enforces of a keyword, and name the rest as left out.

        Args:
            schema: the schema that has the keyword; the meaning of some depends on the others.
            out: the enforced schema, as far as it is written.
            at: path of the schema, for names.
            resolver: finds what `$ref`s name.
            is_merged: llguidance merges this schema with others that hold at the same place.
        """
        here = f"{at}.{name}"
        match name:
            case "$ref" if isinstance(value, str):
                if (reference := self._reference(value, here, resolver)) is not None:
                    out[name] = reference
            case "type":
                types, has_others = keywords.types(value)
                if types:
                    out[name] = types[0] if len(types) == 1 else types
                if has_others:
                    self._leave_out(here)
            case "const" | "enum" if name == "const" or (isinstance(value, list) and value):
                out[name] = value
                values = [value] if name == "const" else value
                is_copied = not is_merged and not schema.keys() - keywords.ANNOTATIONS - {name, "type"}
                if any(keywords.is_rounded(each, is_copied) for each in values):
                    self._leave_out(here)  # llguidance writes the nearest float
            case "allOf" | "anyOf" | "oneOf" if isinstance(value, list) and value:
                merges = is_merged or name == "allOf" or bool(schema.keys() - keywords.ANNOTATIONS - {name})
                options = [
                    self._node(each, f"{here}.{i}", resolver, is_merged=merges)
                    for i, each in enumerate(value)
                ]
                if name == "oneOf":
                    self._one_of.append((here, options))
                _conjoin(out, name, options)
            case "properties" if isinstance(value, Mapping):
                out[name] = self._nodes(value, here, resolver)
            case "patternProperties" if isinstance(value, Mapping):
                if patterns := self._patterns(value, here, resolver):
                    out[name] = patterns
            case "items" | "prefixItems" if isinstance(value, list):
                if value:
                    out["prefixItems"] = [
                        self._node(each, f"{here}.{i}", resolver) for i, each in enumerate(value)
                    ]
            case "items" | "additionalProperties":
                out[name] = self._node(value, here, resolver)
            case "additionalItems":
                if isinstance(schema.get("items"), list):
                    out["items"] = self._node(value, here, resolver)
            case "required" if isinstance(value, list) and all(isinstance(each, str) for each in value):
                out[name] = value
            case "required" if isinstance(value, bool):  # of draft 3: in a property
                if value:
                    self._leave_out(here)
            case "pattern" if (found := keywords.pattern(value)) is not None:
                out[name] = found
            case "format":
                if value in keywords.FORMATS:
                    out[name] = value
                    if value in keywords.FORMAT_PATTERNS:
                        out.setdefault("pattern", keywords.FORMAT_PATTERNS[value])
                elif keywords.may_be(schema, "string"):
                    self._leave_out(here, restricts=False)
            case "multipleOf" if (number := keywords.multiple(value)) is not None:
                out[name] = number
            case _ if name in keywords.COUNTS and (number := keywords.count(value)) is not None:
                out[name] = number
            case _ if name in keywords.BOUNDS or name in keywords.LATER:
                pass
            case _:
                if not keywords.is_harmless(name, value, schema):
                    self._leave_out(here, restricts=name in keywords.RESTRICTING)

    def _nodes(self, schemas: Mapping[str, Any], at: str, resolver: Any) -> dict[str, Schema]:
        return {name: self._node(each, f"{at}.{name}", resolver) for name, each in schemas.items()}

    def _patterns(self, schemas: Mapping[str, Any], at: str, resolver: Any) -> dict[str, Schema]:
        """Read patternProperties: llguidance takes patterns of which a name matches one at most."""
        found: dict[str, Schema] = {}
        for written, schema in self._nodes(schemas, at, resolver).items():
            pattern = keywords.pattern(written)
            if pattern is None:
                self._leave_out(f"{at}.{written}")
            else:
                found[pattern] = schema
        if keywords.exclude_each_other(list(found)):
            return found
        options = list(found.values())
        any_pattern = "|".join(f"(?:{pattern})" for pattern in found)
        if all(option == options[0] for option in options):
            return {any_pattern: options[0]}
        self._leave_out(at)
        return {any_pattern: {"anyOf": options}}

    def _reference(self, reference: str, at: str, resolver: Any) -> str | None:
        """Return the definition that is referred to; None, and leave it out, if another document holds it."""
        try:
            resolved = resolver.lookup(reference)
        except Unresolvable:
            if not reference.startswith("#"):
                self._leave_out(at)
                return None
            raise _refusal(at, f"{json.dumps(reference)} refers to nothing in the schema") from None
        except Exception as error:  # the library walks what a client sent, and expects a proper schema
            raise _refusal(at, f"{json.dumps(reference)} cannot be resolved: {error!r:.200}") from None
        contents = resolved.contents
        name = self._names.get(id(contents)) if isinstance(contents, Mapping) else None
        if name is None:
            pointer = reference.partition("#")[2] if reference.startswith("#/") else ""
            short = re.sub(r"[^\w.-]", "_", reference.rpartition("/")[2].strip("#")) or "root"
            taken = self._names.values()
            name = short if short not in taken else f"{short}.{len(self._names)}"
            where = self._field + (pointer.replace("/", ".") if pointer else f".{reference}")
            self._names[id(contents) if isinstance(contents, Mapping) else -len(self._names) - 1] = name
            self._pending.append((name, contents, where.rstrip(".#"), resolved.resolver))
        return f"#/$defs/{name}"

    def _rest_of_object(
        self, schema: Mapping[str, Any], out: dict[str, Any], at: str, resolver: Any, merges: bool
    ) -> None:
        """Read the keywords that depend on `properties` and their siblings."""
        if "unevaluatedProperties" in schema and "additionalProperties" not in schema:
            value = schema["unevaluatedProperties"]
            if not merges and not schema.keys() & keywords.UNREAD_APPLICATORS:
                out["additionalProperties"] = self._node(value, f"{at}.unevaluatedProperties", resolver)
            elif value is not True:
                self._leave_out(f"{at}.unevaluatedProperties")
        if "propertyNames" in schema and not keywords.is_harmless(
            "propertyNames", schema["propertyNames"], schema
        ):
            self._property_names(schema["propertyNames"], out, f"{at}.propertyNames", resolver)
        if self._closes_objects and "properties" in out and not merges:
            out.setdefault("additionalProperties", False)
        for name in keywords.uncounted_properties(out, merges):
            self._leave_out(f"{at}.{name}")

    def _rest_of_array(
        self, schema: Mapping[str, Any], out: dict[str, Any], at: str, resolver: Any, merges: bool
    ) -> None:
        if "unevaluatedItems" in schema and "items" not in out:
            value = schema["unevaluatedItems"]
            if not merges and not schema.keys() & keywords.UNREAD_APPLICATORS:
                out["items"] = self._node(value, f"{at}.unevaluatedItems", resolver)
            elif value is not True:
                self._leave_out(f"{at}.unevaluatedItems")

    def _property_names(self, names: Any, out: dict[str, Any], at: str, resolver: Any) -> None:
        """Write propertyNames as properties or patternProperties; leave it out beside those."""
        for _ in range(MAX_REFERENCES):
            if not isinstance(names, Mapping) or not isinstance(names.get("$ref"), str):
                break
            if self._reference(names["$ref"], at, resolver) is None:
                return
            resolved = resolver.lookup(names["$ref"])
            names, resolver = resolved.contents, resolved.resolver
        others = out.keys() & {"properties", "patternProperties", *keywords.APPLICATORS}
        additional = out.get("additionalProperties", True)
        read = None if others else keywords.property_names(names, additional)
        if read is None:
            self._leave_out(at)
        else:
            out |= {**read, "additionalProperties": False}


def _conjoin(out: dict[str, Any], name: str, options: list[Schema]) -> None:
    """Add allOf, anyOf or oneOf; the last as another anyOf."""
    if name == "allOf":
        out["allOf"] = [*out.get("allOf", ()), *options]
    elif "anyOf" in out:
        out["allOf"] = [*out.get("allOf", ()), {"anyOf": options}]
    else:
        out["anyOf"] = options


def _refusal(field: str, reason: str) -> RequestError:
    return RequestError(f"{field}: {reason}.", param=field)
