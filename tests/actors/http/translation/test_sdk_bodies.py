"""Bodies of the openai and anthropic SDKs' own types: null means absent, and what is not read is named."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Collection, Iterator
from typing import Any

import pydantic
import pytest
from anthropic.types import message_create_params
from anthropic.types.beta import message_create_params as beta_message_create_params
from manta.actors.http.anthropic.request import SILENT as ANTHROPIC_SILENT
from manta.actors.http.anthropic.request import MessagesRequest
from manta.actors.http.batch_api.routes import BatchRequest
from manta.actors.http.generation.chat_adapter import SupportedOptions
from manta.actors.http.protocol.chat_completion import ChatRequest, unused_fields
from manta.actors.http.protocol.completion import CompletionRequest
from manta.actors.http.protocol.protocol import SILENT, GenerationRequest, check_extra_fields
from manta.actors.http.responses.request import SILENT as RESPONSES_SILENT
from manta.actors.http.responses.request import ResponsesRequest
from manta.actors.http.wire.errors import from_validation
from manta.actors.http.wire.request_model import DESCRIPTIONS, unknown_fields
from manta.cluster.errors import RequestError
from openai.types import batch_create_params, completion_create_params
from openai.types.chat import completion_create_params as chat_create_params
from openai.types.responses import response_create_params
from support.sdk_bodies import Sample, bodies

ALL = SupportedOptions(effort=True, switch=True, thinks=True)
USER = {"role": "user", "content": "x"}
SCHEMA = {"type": "object", "properties": {}}


class Mute:
    """Stands in for a tokenizer with a template that mentions no field."""

    def template_uses(self, variable: str) -> bool:
        return False


def _named(request: GenerationRequest, unknown: list[str]) -> list[str]:
    return check_extra_fields(request.model_extra or {}, type(request).model_fields, "warn", unknown)


def _known(request: GenerationRequest, *others: str) -> Any:
    fields = type(request).model_fields.keys() - set(others)
    return {name: getattr(request, name) for name in sorted(fields)}


def chat(body: Any) -> tuple[Any, list[str]]:
    request = ChatRequest.model_validate(body)
    unused = unused_fields(request, request.messages, Mute())  # type: ignore[arg-type]
    said = [message.for_template("messages") for message in request.messages]
    return (_known(request, "messages"), said), [
        *_named(request, unknown_fields(request)),
        *unused,
    ]


def completions(body: Any) -> tuple[Any, list[str]]:
    request = CompletionRequest.model_validate(body)
    return _known(request), _named(request, unknown_fields(request))


def responses(body: Any) -> tuple[Any, list[str]]:
    request = ResponsesRequest.model_validate(body)
    read = request.conversation()
    asked = request.for_chat(read, ALL)
    ignored = [*request.ignored(ALL), *read.skipped]
    return _known(asked), [*_named(asked, [*unknown_fields(request), *read.unknown]), *ignored]


def messages(body: Any) -> tuple[Any, list[str]]:
    request = MessagesRequest.model_validate(body)
    read = request.conversation()
    asked = request.for_chat(read, ALL)
    ignored = [*request.ignored(ALL), *read.skipped]
    return _known(asked), [*_named(asked, [*unknown_fields(request), *read.unknown]), *ignored]


def batches(body: Any) -> tuple[Any, list[str]]:
    request = BatchRequest.model_validate(body)
    request.check()
    return request, []


Outcome = tuple[Any, list[str]] | str


def outcome(read: Callable[[Any], tuple[Any, list[str]]], body: Any) -> Outcome:
    try:
        return read(body)
    except RequestError as error:
        return str(error.param)
    except pydantic.ValidationError as error:
        return str(from_validation(error.errors()).param)


FUNCTION = {"name": "x", "parameters": SCHEMA}
TYPES: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "chat": (
        chat,
        chat_create_params.CompletionCreateParamsNonStreaming,
        {"stream": True, "tools": [{"type": "function", "function": FUNCTION}]},
    ),
    "completions": (
        completions,
        completion_create_params.CompletionCreateParamsNonStreaming,
        {"stream": True},
    ),
    "responses": (
        responses,
        response_create_params.ResponseCreateParamsNonStreaming,
        {"input": [USER], "tools": [{"type": "function", **FUNCTION}]},
    ),
    "messages": (
        messages,
        message_create_params.MessageCreateParamsNonStreaming,
        {"tools": [{"name": "x", "input_schema": SCHEMA}]},
    ),
    "beta messages": (
        messages,
        beta_message_create_params.MessageCreateParamsNonStreaming,
        {"tools": [{"name": "x", "input_schema": SCHEMA}]},
    ),
    "batches": (
        batches,
        batch_create_params.BatchCreateParams,
        {"endpoint": "/v1/chat/completions"},
    ),
}


def samples(api: str) -> Iterator[Sample]:
    """Yield bodies with tools that match the choices, then those with tools and histories of every type."""
    _, params, seed = TYPES[api]
    yield from bodies(params, **seed)
    others = {name: seed[name] for name in seed if name != "tools"}
    yield from bodies(params, **others)
    history = "input" if api == "responses" else "messages"
    others.pop(history, None)
    for sample in bodies(params, **others):
        if isinstance(sample.value.get(history), list):  # an item alone may be no conversation
            yield Sample(*({**body, history: [USER, *body[history]]} for body in sample))


@pytest.mark.parametrize("api", TYPES)
def test_null_is_absent_in_every_optional_field_of_every_object(api: str) -> None:
    read, num_accepted = TYPES[api][0], 0
    for sample in samples(api):
        found = outcome(read, sample.value)
        assert outcome(read, sample.with_nulls) == found, sample
        num_accepted += not isinstance(found, str)
    assert num_accepted


UNKNOWN = "of_next_year"
# Fields that are not read as a whole.
SILENT_FIELDS = {
    "chat": SILENT,
    "completions": SILENT,
    "responses": RESPONSES_SILENT,
    "messages": ANTHROPIC_SILENT,
    "beta messages": ANTHROPIC_SILENT,
}
# What is written into the prompt: a function's other fields, the arguments of calls, and what tools returned,
# where parts other than texts become a placeholder.
ANTHROPIC_WRITTEN = ("messages.content.content", "messages.content.source")
WRITTEN: dict[str, tuple[str, ...]] = {
    "chat": ("tools.function",),
    "completions": (),
    "responses": ("tools", "input.action", "input.operation", "input.output", "input.environment"),
    "messages": ANTHROPIC_WRITTEN,
    "beta messages": ANTHROPIC_WRITTEN,
}


def objects(
    value: Any, unread: Collection[str], place: tuple[str | int, ...] = ()
) -> Iterator[tuple[str | int, ...]]:
    """Yield the places of the objects within a body that are read."""
    if isinstance(value, dict):
        if value and place:
            yield place
        for name, each in value.items():
            if name not in unread:
                yield from objects(each, unread, (*place, name))
    elif isinstance(value, list):
        for i, each in enumerate(value):
            yield from objects(each, unread, (*place, i))


def kinds_of(body: Any, place: tuple[str | int, ...]) -> list[str]:
    """Return the types of the objects on the way to a place."""
    found: list[str] = []
    for key in place:
        body = body[key]
        if isinstance(body, dict):
            found.append(str(body.get("type")))
    return found


def is_accounted(body: Any, place: tuple[str | int, ...], names: list[str]) -> bool:
    """Return whether a name says that the key, its object or one around it was left out."""
    keys = [key for key in place if isinstance(key, str)]
    around = {".".join(keys[: i + 1]) for i in range(len(keys))}
    around |= {f"{keys[0]}.{kind}" for kind in kinds_of(body, place)}
    return any(name in around or name.endswith(f".{UNKNOWN}") for name in names)


@pytest.mark.parametrize("api", SILENT_FIELDS)
def test_an_unknown_key_of_every_object_is_named(api: str) -> None:
    read, unread = TYPES[api][0], {*DESCRIPTIONS, *SILENT_FIELDS[api], "parameters", "input_schema"}
    tried, silent = set[tuple[str, ...]](), {}
    for sample in samples(api):
        if isinstance(outcome(read, sample.value), str):
            continue
        for place in objects(sample.value, unread):
            path = ".".join(key for key in place if isinstance(key, str))
            kinds = (path, *kinds_of(sample.value, place))
            if kinds in tried:
                continue
            tried.add(kinds)
            body = copy.deepcopy(sample.value)
            functools.reduce(lambda within, key: within[key], place, body)[UNKNOWN] = 1
            found = outcome(read, body)
            is_written = path.startswith(WRITTEN[api])
            if not (isinstance(found, str) or is_written or is_accounted(body, place, found[1])):
                silent[path] = body
    assert tried and not silent
