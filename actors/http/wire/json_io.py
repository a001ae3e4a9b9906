"""Reading and writing JSON bodies, and numbers in them.

orjson parses bodies; unlike Python's parser it refuses NaN and infinities. Lone surrogates, which no
tokenizer accepts, become U+FFFD (`actors/tokenization/client_messages.py`).

Parsing holds the GIL, so every stream waits: about 2 ms per MB of text, but 25 ms per million numbers, and
far more per million strings or objects, which are then validated one by one. So the values of long bodies are
counted first; bodies with too many are refused, others are parsed in slices (`incremental_json.py`) and
validated in a thread.

Numbers are JSON's: text ("128", "1_2_8") and `true`, which pydantic reads as numbers, too, are refused. Only
rows of a dataset have numbers as text (`NUMBERS_IN_TEXT`). A gateway counts a request's completions by the
same validator (`actors/gateway/routing_hints.py`). Valid lists of token ids are neither looped over in Python
nor copied. They are checked in slices, so that a thread lets the event loop run in between.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping
from typing import Annotated, Any, TypeAlias, TypeVar

import orjson
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import (
    BaseModel,
    BeforeValidator,
    Field,
    ValidationError,
    ValidationInfo,
    ValidatorFunctionWrapHandler,
    WrapValidator,
)
from pydantic_core import PydanticCustomError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Scope

from ....cluster.request.caller import acceptable_id
from ...system.log_setup import current_request_id
from ...tokenization.client_messages import loads
from .incremental_json import Bytes, end_of_string, loads_in_slices

JsonObject: TypeAlias = dict[str, Any]  # Any: JSON.


def json_response(body: JsonObject, headers: Mapping[str, str] | None = None) -> Response:
    return Response(orjson.dumps(body), headers=headers, media_type="application/json")


T = TypeVar("T")

# A prompt of token ids has at most this many; longer contexts are sent as text.
MAX_VALUES = 1 << 20
# Includes keys: enough for 10,000 messages, or many times the 1,024 prompts of a request.
MAX_STRINGS_AND_CONTAINERS = 1 << 16
# Shorter bodies cannot exceed either limit.
SHORT_BODY_BYTES = 2 * MAX_STRINGS_AND_CONTAINERS


class JsonRoute(APIRoute):
    """A route with bodies parsed by orjson."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handler, model = super().get_route_handler(), None
        if self.body_field is not None:
            model = self.body_field.field_info.annotation
        if not (isinstance(model, type) and issubclass(model, BaseModel)):
            model = None

        async def handle(request: Request) -> Response:
            json_request = _JsonRequest(request, model)
            try:
                return await handler(json_request)
            except HTTPException:  # of the handler, or of `json_request.json` for an invalid body
                if json_request.invalid is not None:
                    raise json_request.invalid from None
                raise

        return handle


class _JsonRequest(Request):
    """A request with a body that orjson parses; a long one is validated in a thread.

    `invalid`: what is wrong with a long body. FastAPI would replace any error of `json` other than an
    HTTPException, and validate the values a second time, on the event loop.
    """

    _body: bytearray

    def __init__(self, request: Request, model: type[BaseModel] | None) -> None:
        super().__init__(request.scope, request.receive)
        self._model = model
        self.invalid: RequestValidationError | None = None

    async def body(self) -> Bytes:  # type: ignore[override]  # who asks does not change it
        """Collect the body in place: joining 30 MB would block the loop, 100 ms on some machines."""
        if not hasattr(self, "_body"):
            body = bytearray()
            async for piece in self.stream():
                body += piece
            self._body = body
        return self._body

    async def json(self) -> Any:  # Any: JSON.
        """Return the parsed body; a long one as the route's model, since validating takes long, too."""
        body = await self.body()
        found = await parsed(body)
        take_request_id(self.scope, found)
        if self._model is not None and len(body) > SHORT_BODY_BYTES:
            try:
                return await asyncio.to_thread(self._model.model_validate, found)
            except ValidationError as error:
                wrong = [{**each, "loc": ("body", *each["loc"])} for each in error.errors(include_url=False)]
                self.invalid = RequestValidationError(wrong)
                raise HTTPException(400) from None
        return found


async def read_beside(request: Request, call: Callable[..., T], *arguments: object) -> T:
    """Call what reads a request of a `JsonRoute`; in a thread if the body is long."""
    if len(await request.body()) > SHORT_BODY_BYTES:
        return await asyncio.to_thread(call, *arguments)
    return call(*arguments)


async def parsed(body: Bytes) -> Any:  # Any: JSON.
    """Parse, long bodies in a thread. Raises orjson.JSONDecodeError or HTTPException (413)."""
    if len(body) <= SHORT_BODY_BYTES:
        return loads(body)
    await asyncio.to_thread(check_pieces, body)
    return await asyncio.to_thread(loads, body, loads_in_slices)


def check_pieces(body: Bytes) -> None:
    """Raise HTTPException (413) for too many values to parse without blocking other requests."""
    containers = values = strings = at = 0
    while True:
        quote = body.find(b'"', at)
        end = quote if quote >= 0 else len(body)
        values += body.count(b",", at, end)
        containers += body.count(b"[", at, end) + body.count(b"{", at, end)
        if values > MAX_VALUES or strings + containers > MAX_STRINGS_AND_CONTAINERS:
            raise HTTPException(
                413,
                f"The body has more than {MAX_VALUES} values, or more than {MAX_STRINGS_AND_CONTAINERS} "
                "strings, lists and objects. Send it in several requests, or a long prompt as text.",
            )
        if quote < 0:
            return
        strings += 1
        at = end_of_string(body, quote + 1)


def take_request_id(scope: Scope, body: Any) -> None:  # Any: JSON
    """Use the body's id for log and response, unless a gateway or Serve has fixed the header's."""
    state = scope["state"]
    client_id = acceptable_id(body.get("request_id")) if isinstance(body, dict) else None
    if client_id is not None and state["may_rename"] and "origin" not in state:
        state["request_id"] = client_id
        current_request_id.set(client_id)


# Numbers, single ones and long lists of token ids.

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


# Context of a validation in which numbers may be text, as all values of CSV are.
NUMBERS_IN_TEXT = "numbers in text"


def _number(value: Any, info: ValidationInfo) -> Any:
    if isinstance(value, bool):
        raise PydanticCustomError("number_type", "Input should be a number, not true or false")
    if isinstance(value, str) and info.context != NUMBERS_IN_TEXT:
        raise PydanticCustomError("number_type", "Input should be a number, not text")
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
