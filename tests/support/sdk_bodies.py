"""Bodies of requests made from the types of the openai and anthropic SDKs, one for each alternative."""

from __future__ import annotations

import collections.abc
import types
import typing
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import typing_extensions

MAX_DEPTH = 12


class Sample(NamedTuple):
    """A minimal value, and the same with every optional field of its objects null."""

    value: Any  # Any: JSON
    with_nulls: Any


def bodies(params: Any, **seed: Any) -> Iterator[Sample]:
    """Yield bodies of a TypedDict, or a union of them. `seed`: fields with values that belong together."""
    for variant in _members(params):
        given = {name: Sample(value, value) for name, value in seed.items()}
        yield from _objects(variant, given, MAX_DEPTH)


def _objects(kind: Any, given: Mapping[str, Sample], depth: int) -> Iterator[Sample]:
    hints = typing_extensions.get_type_hints(kind, include_extras=True)
    found = {name: list(_samples(hint, depth - 1)) for name, hint in hints.items() if name not in given}
    base = {name: value for name, value in given.items() if name in hints}
    for name in _required(kind, hints) - given.keys():
        if not found[name]:
            return
        base[name] = found[name][0]
    yield _object(base, hints)
    for name, samples in found.items():
        for sample in samples[1:] if name in base else samples:
            yield _object({**base, name: sample}, hints)


def _required(kind: Any, hints: Mapping[str, Any]) -> set[str]:
    """The classes do not know it themselves: their annotations are strings."""
    marked = {name for name, hint in hints.items() if typing.get_origin(hint) is typing_extensions.Required}
    return marked | (set(hints) if kind.__total__ else set())


def _object(fields: Mapping[str, Sample], hints: Mapping[str, Any]) -> Sample:
    value = {name: sample.value for name, sample in fields.items()}
    nulls = {name: sample.with_nulls for name, sample in fields.items()}
    return Sample(value, {**nulls, **dict.fromkeys(name for name in hints if name not in fields)})


def _samples(hint: Any, depth: int) -> Iterator[Sample]:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if depth <= 0:
        return
    if origin in (typing.Annotated, typing_extensions.Required, typing_extensions.NotRequired):
        yield from _samples(arguments[0], depth)
    elif origin in (typing.Union, types.UnionType):
        for member in arguments:
            yield from _samples(member, depth)
    elif origin in (typing.Literal, typing_extensions.Literal):
        yield from (Sample(value, value) for value in arguments[:1])
    elif typing_extensions.is_typeddict(hint):
        yield from _objects(hint, {}, depth)
    elif arguments and isinstance(origin, type) and issubclass(origin, collections.abc.Mapping):
        yield Sample({}, {})
    elif arguments and (origin.__name__ == "SequenceNotStr" or issubclass(origin, collections.abc.Iterable)):
        yield from (Sample([each.value], [each.with_nulls]) for each in _samples(arguments[0], depth))
    elif hint in _PLAIN:
        yield Sample(_PLAIN[hint], _PLAIN[hint])


_PLAIN: dict[Any, Any] = {str: "x", int: 1, float: 0.5, bool: False, object: {}}


def _members(kind: Any) -> tuple[Any, ...]:
    return typing.get_args(kind) if typing.get_origin(kind) is typing.Union else (kind,)
