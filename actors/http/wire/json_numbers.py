"""Numbers in bodies, single ones and long lists of token ids.

pydantic reads numbers from text, as rows of CSV need it; it would also read `true` as 1, which is refused
here. Valid lists of token ids are neither looped over in Python nor copied. They are checked in slices, so
that a thread lets the event loop run in between.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, ValidatorFunctionWrapHandler, WrapValidator
from pydantic_core import PydanticCustomError

MAX_TOKEN_IDS = 1 << 18  # in a field that lists token ids; vocabularies are smaller
SLICE_VALUES = 1 << 15  # values per call that holds the GIL: about a millisecond


# Any: validators see raw JSON.
def are_ids(values: list[Any]) -> bool:
    return types_of(values) <= {int}


def types_of(values: Iterable[Any]) -> set[type]:
    if not isinstance(values, list):
        return set(map(type, values))
    types: set[type] = set()
    for each in _slices(values):
        types.update(map(type, each))
    return types


def lowest(values: list[int]) -> int:
    return min((min(each) for each in _slices(values)), default=0)


def highest(values: list[int]) -> int:
    return max((max(each) for each in _slices(values)), default=0)


def _slices(values: list[Any]) -> Iterator[list[Any]]:
    if len(values) <= SLICE_VALUES:
        yield from [values] if values else ()
        return
    for begin in range(0, len(values), SLICE_VALUES):
        yield values[begin : begin + SLICE_VALUES]


def no_booleans(types: set[type]) -> None:
    if bool in types:
        raise PydanticCustomError("number_type", "Input should be numbers, not true or false")


def _number(value: Any) -> Any:
    if isinstance(value, bool):
        raise PydanticCustomError("number_type", "Input should be a number, not true or false")
    return value


def ids_as_they_are(values: Any, validate: ValidatorFunctionWrapHandler) -> Any:
    """Return a valid list unchanged; pydantic reports the error of an invalid one."""
    if isinstance(values, list):
        types = types_of(values)
        if types <= {int} and lowest(values) >= 0:
            return values
        no_booleans(types)
    return validate(values)


def _not_many_ids(values: Any, validate: ValidatorFunctionWrapHandler) -> Any:
    if isinstance(values, list) and len(values) > MAX_TOKEN_IDS:
        raise PydanticCustomError(
            "too_long",
            "List should have at most {most} items, not {count}",
            {"most": MAX_TOKEN_IDS, "count": len(values)},
        )
    return ids_as_they_are(values, validate)


Integer = Annotated[int, BeforeValidator(_number)]
Number = Annotated[float, BeforeValidator(_number)]
# fail_fast: pydantic would otherwise describe each of a million wrong elements, which blocks all streams.
TokenIds = Annotated[list[int], Field(max_length=MAX_TOKEN_IDS, fail_fast=True), WrapValidator(_not_many_ids)]
