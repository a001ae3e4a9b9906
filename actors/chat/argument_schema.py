"""A tool's argument schema, resolved: which values it allows, for grammars and readers of calls.

Formats that write values without JSON's quotes need more of a schema than llguidance does: the types of a
value determine how it is written and how it is read. Both ask `ArgumentSchema`.

A schema is seen as a disjunction of `Branch`es, in each of which several plain schemas hold together:

    $ref ─▶ what it names     allOf ─▶ parts of one branch     anyOf, oneOf ─▶ branches
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import Any

from referencing import Registry, Resource
from referencing.exceptions import Unresolvable
from referencing.jsonschema import DRAFT202012

from ..structured_outputs.json_schema import EnforcedSchema
from ..structured_outputs.schema_keywords import ALIASES, fits_type, type_of
from ..tokenization.client_messages import without_surrogates

Schema = Mapping[str, Any]  # Any, here and below: JSON
MAX_BRANCHES = 64  # of one schema: branches of branches multiply
MAX_PARTS = 1000  # schemas visited for one value
_DEPTH = 16  # longest chain of references
_COMBINED = frozenset({"$ref", "allOf", "anyOf", "oneOf"})
_IMPLIED = {
    **dict.fromkeys(("properties", "required", "additionalProperties"), frozenset({"object"})),
    **dict.fromkeys(("items", "prefixItems"), frozenset({"array"})),
    **dict.fromkeys(("pattern", "minLength", "maxLength", "format"), frozenset({"string"})),
    **dict.fromkeys(("minimum", "maximum", "multipleOf"), frozenset({"integer", "number"})),
}
NUMERIC_BOUNDS = frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"})


class TooManyBranchesError(Exception):
    """A schema's branches exceed the limits."""


@dataclass(frozen=True, slots=True)
class Branch:
    """Plain schemas, without references and combinations, that hold together."""

    parts: tuple[Schema, ...]

    @property
    def types(self) -> frozenset[str] | None:
        """The allowed types; None if the schemas do not say."""
        found = [types for part in self.parts if (types := _types(part)) is not None]
        return frozenset.intersection(*found) if found else None

    @property
    def literals(self) -> list[Any] | None:
        """The values of `enum` and `const` that every part allows; None without such keywords."""
        given = [values for part in self.parts if (values := _literals(part)) is not None]
        if not given:
            return None
        rest = [{_key(value) for value in values} for values in given[1:]]
        return [value for value in given[0] if all(_key(value) in keys for keys in rest)]

    def allows(self, type_name: str) -> bool:
        types = self.types
        return types is None or type_name in types

    def given(self, keyword: str) -> list[Any]:
        return [part[keyword] for part in self.parts if keyword in part]

    @property
    def required(self) -> list[str]:
        names = (name for each in self.given("required") if isinstance(each, list) for name in each)
        return list(dict.fromkeys(name for name in names if isinstance(name, str)))

    @property
    def names(self) -> list[str]:
        """Names of the declared and required properties, in order."""
        declared = (each for each in self.given("properties") if isinstance(each, Mapping))
        return list(dict.fromkeys([name for each in declared for name in each] + self.required))

    def property(self, name: str) -> Schema | bool | None:
        """Return the schema of one property: False if it is not allowed, None if nothing is said of it."""
        found: list[Any] = []
        for part in self.parts:
            properties = part.get("properties")
            if isinstance(properties, Mapping) and name in properties:
                found.append(properties[name])
            else:
                found.append(part.get("additionalProperties", True))
        if any(each is False for each in found):
            return False
        found = [each for each in found if isinstance(each, Mapping)]
        return None if not found else found[0] if len(found) == 1 else {"allOf": found}


class ArgumentSchema:
    """A schema within a document that its references refer to. `schema`: by default the document itself."""

    def __init__(self, document: Schema | bool, schema: Schema | bool | None = None) -> None:
        self.document: Schema = document if isinstance(document, Mapping) else {}
        self.schema: Schema | bool = self.document if schema is None else schema

    @cached_property
    def branches(self) -> tuple[Branch, ...]:
        """The ways to satisfy the schema. Raises TooManyBranchesError."""
        resource = Resource(contents=self.document, specification=DRAFT202012)
        resolver = Registry().with_resource("", resource).resolver()  # type: ignore[var-annotated]
        visits = iter(range(MAX_PARTS))
        return tuple(map(Branch, _branches(self.schema, resolver, visits, _DEPTH)))

    @cached_property
    def types(self) -> frozenset[str]:
        """JSON types that the schema allows; empty if it does not say."""
        try:
            found = [branch.types for branch in self.branches]
        except TooManyBranchesError:
            return frozenset()
        known = [types for types in found if types is not None]
        return frozenset[str]().union(*known) if len(known) == len(found) else frozenset()

    @cached_property
    def names(self) -> frozenset[str]:
        """Names of the declared properties, in any branch."""
        try:
            return frozenset(name for branch in self.branches for name in branch.names)
        except TooManyBranchesError:
            return frozenset()

    def at(self, schema: Schema | bool) -> ArgumentSchema:
        """Return another schema of the same document."""
        return ArgumentSchema(self.document, schema)

    def property(self, name: str) -> ArgumentSchema | None:
        """Return the schema of a property, in any branch; None if nothing is said of it."""
        try:
            found = [each for branch in self.branches if isinstance(each := branch.property(name), Mapping)]
        except TooManyBranchesError:
            return None
        distinct = list({_key(each): each for each in found}.values())
        return None if not distinct else self.at(distinct[0] if len(distinct) == 1 else {"anyOf": distinct})

    def enforced(self, types: frozenset[str] | None = None) -> EnforcedSchema:
        """Return this schema as one that stands alone, restricted to some of its types.

        The document is one that `SchemaReader` has read.
        """
        schema = self.schema if types is None else {"allOf": [self.schema, {"type": sorted(types)}]}
        return EnforcedSchema(self.document).part(schema)


def read_value(raw: str, types: frozenset[str]) -> str:
    """Return a value written without quotes as JSON: of a type that is allowed, else a JSON string."""
    word = raw.strip(_BLANKS)
    known = _WORDS.get(word.lower())
    if known is not None and ("null" if known == "null" else "boolean") in types:
        return known
    if types - {"null", "string"}:
        try:
            value = json.loads(word, parse_constant=no_constant)
        except (ValueError, RecursionError):
            pass
        else:
            if fits_type(value, types):
                return _one_line(word, value)
    return json.dumps(raw, ensure_ascii=False)


_BLANKS = " \t\r\n"
_WORDS = {"true": "true", "false": "false", "null": "null", "none": "null"}
NULL_WORDS, BOOLEAN_WORDS = "(?i:null|none)", "(?i:true|false)"  # regular expressions of what `_WORDS` reads


def without_zero_fraction(number: str) -> str:
    """Return `5` for `5.0`: the same JSON number, which every client reads, also as an integer."""
    found = _WHOLE.fullmatch(number)
    return found[1] if found else number


_WHOLE = re.compile(r"(-?[1-9][0-9]*|0)\.0+")


def _one_line(word: str, value: Any) -> str:
    """Return a number as it was written, and other values in the usual form."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return without_zero_fraction(word)
    return without_surrogates(json.dumps(value, ensure_ascii=False))


def no_constant(word: str) -> None:
    raise ValueError(word)  # NaN and infinities are not valid JSON


def _branches(schema: Any, resolver: Any, visits: Iterator[int], depth: int) -> list[tuple[Schema, ...]]:
    """Return the branches of a schema, each the plain schemas that hold together in it.

    A schema is a product of factors (its own keywords, `$ref`, each of `allOf`) of which `anyOf` and `oneOf`
    have several branches. Raises TooManyBranchesError after `visits` schemas or at a chain of `depth`
    references.
    """
    if next(visits, None) is None or depth <= 0:
        raise TooManyBranchesError
    if not isinstance(schema, Mapping):
        return [] if schema is False else [()]
    plain = {name: value for name, value in schema.items() if name not in _COMBINED}
    factors: list[list[tuple[Schema, ...]]] = [[(plain,) if plain else ()]]
    if isinstance(reference := schema.get("$ref"), str):
        try:
            resolved = resolver.lookup(reference)
        except Unresolvable:
            pass  # llguidance refuses it, where the schema is enforced
        else:
            factors.append(_branches(resolved.contents, resolved.resolver, visits, depth - 1))
    if isinstance(schemas := schema.get("allOf"), list):
        factors += [_branches(each, resolver, visits, depth - 1) for each in schemas]
    for name in ("anyOf", "oneOf"):
        if isinstance(schemas := schema.get(name), list):
            found = [_branches(each, resolver, visits, depth - 1) for each in schemas]
            factors.append([branch for branches in found for branch in branches])
    count = 1
    for factor in factors:
        count *= len(factor)
        if count > MAX_BRANCHES:
            raise TooManyBranchesError
    return [tuple(part for parts in chosen for part in parts) for chosen in product(*factors)]


def _types(schema: Schema) -> frozenset[str] | None:
    given = schema.get("type")
    names = [given] if isinstance(given, str) else given if isinstance(given, list) else []
    standard = {_standard(name) for name in names if isinstance(name, str)}
    if standard:
        return frozenset(standard | {"integer"} if "number" in standard else standard)
    if (literals := _literals(schema)) is not None:
        return frozenset(map(type_of, literals))
    return next((types for keyword, types in _IMPLIED.items() if keyword in schema), None)


def _standard(name: str) -> str:
    return ALIASES.get(name, name)


def _literals(schema: Schema) -> list[Any] | None:
    if "const" in schema:
        return [schema["const"]]
    values = schema.get("enum")
    return list(values) if isinstance(values, list) else None


def _key(value: Any) -> str:
    return json.dumps(value, sort_keys=True)
