"""The base of all objects in a request's body.

JSON null means that a field is absent, in every object: clients send all of their optional fields. Fields
that an object does not have are kept, so that they can be named to the client (`unknown_fields`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import cache
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, model_validator

# Fields of messages, items and parts that describe them, or that only their own server reads.
DESCRIPTIONS = frozenset(
    {
        *("type", "id", "status", "phase", "tool_call_id", "cache_control", "prompt_cache_breakpoint"),
        *("annotations", "citations", "logprobs", "signature", "encrypted_content", "caller", "created_by"),
        *("audio", "refusal", "index"),
    }
)


class RequestModel(BaseModel):
    """`unread`: fields that are no mistake although nothing reads them."""

    model_config = ConfigDict(extra="allow")

    unread: ClassVar[Collection[str]] = ()

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, value: Any) -> Any:  # Any: a validator sees raw JSON
        if not isinstance(value, dict):
            return value
        known, required = _names(cls)
        if None not in value.values() and value.keys() <= known:
            return value
        return {
            name: each if name in known else without_nulls(each)
            for name, each in value.items()
            if each is not None or name in required
        }

    def own_unknown_fields(self) -> Iterable[str]:
        return [name for name in self.model_extra or () if name not in self.unread]


@cache
def _names(model: type[BaseModel]) -> tuple[frozenset[str], frozenset[str]]:
    """Return the names of the known fields, and of the required ones."""
    fields = {field.alias or name: field for name, field in model.model_fields.items()}
    return frozenset(fields), frozenset(name for name, field in fields.items() if field.is_required())


def without_nulls(value: Any) -> Any:  # Any: JSON
    """Return an object without the keys that are null; other values unchanged."""
    return (
        {name: each for name, each in value.items() if each is not None} if isinstance(value, dict) else value
    )


def unknown_fields(body: BaseModel) -> list[str]:
    """Return the dotted names of unknown fields in a body's objects, without places in lists."""
    return list(dict.fromkeys(_walk(body, "")))


def _walk(model: BaseModel, at: str) -> Iterator[str]:
    for name, field in type(model).model_fields.items():
        value, place = getattr(model, name), f"{at}{field.alias or name}."
        for each in value if isinstance(value, list) else (value,):
            if not isinstance(each, BaseModel):
                break  # lists are of one type, and may be of a million token ids
            if isinstance(each, RequestModel):
                yield from (f"{place}{unknown}" for unknown in each.own_unknown_fields())
            yield from _walk(each, place)


def unread_keys(part: Mapping[str, Any], *read: str) -> Iterator[str]:  # Any: JSON
    """Yield the keys of a message, item or part that are neither read nor descriptions."""
    return (
        name
        for name, value in part.items()
        if value is not None and not (name in read or name in DESCRIPTIONS)
    )
