"""Reads what routing needs from a request: model, session, the prompt's beginning. Rejects nothing."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import orjson
from pydantic import TypeAdapter, ValidationError
from starlette.datastructures import Headers
from starlette.requests import Request

from ...cluster.fleet.router import hash_chain
from ...cluster.request.caller import Caller
from ..http.middleware.api_keys import caller_of
from ..http.wire.json_io import Integer, parsed, take_request_id

SESSION_HEADER = "x-session-id"
SESSION_FIELDS = ("session_id", "prompt_cache_key", "user")
# Fields with the beginning of a conversation outside its messages: /v1/messages, /v1/responses.
BEFORE = ("system", "instructions")

_COUNT = TypeAdapter[int](Integer)


@dataclass(frozen=True, slots=True)
class RoutingHints:
    """`chain`: hash chain of the prompt's prefixes. `num_completions`: 1 if the fields are not valid."""

    model: str | None = None
    session: str | None = None
    chain: list[int] = field(default_factory=list[int], repr=False)
    num_completions: int = 1


async def read_hints(http: Request, body: bytes) -> RoutingHints:
    """Parse a JSON body, off the event loop if it is long; too many values get 413."""
    try:
        found = await parsed(body)
    except orjson.JSONDecodeError:
        return RoutingHints()
    take_request_id(http.scope, found)
    return _make_hints(http.headers, found, caller_of(http.scope))


def _make_hints(headers: Headers, fields: Any, caller: Caller) -> RoutingHints:  # Any: JSON.
    if not isinstance(fields, dict):
        return RoutingHints()
    named = (headers.get(SESSION_HEADER), *(fields.get(name) for name in SESSION_FIELDS))
    session = next((name for name in named if isinstance(name, str) and name), None)
    model, salt = fields.get("model"), fields.get("cache_salt")
    return RoutingHints(
        model=model if isinstance(model, str) else None,
        session=session,
        chain=hash_chain(_prompt_bytes(fields), caller.salt(salt if isinstance(salt, str) else None)),
        num_completions=_num_completions(fields),
    )


def _num_completions(fields: dict[str, Any]) -> int:
    """Return the number that a replica will compute; 1 if it will refuse the request."""
    prompt = fields.get("prompt")
    try:
        each = max(1, _COUNT.validate_python(fields.get("n") or 1))
    except ValidationError:
        return 1
    if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
        return each * len(prompt)
    return each


def _prompt_bytes(fields: dict[str, Any]) -> bytes:
    """Return bytes with the prompts' common prefixes; empty beyond 254 levels, which orjson cannot write."""
    try:
        return _written_prompt(fields)
    except orjson.JSONEncodeError:
        return b""


def _written_prompt(fields: dict[str, Any]) -> bytes:
    if spoken := [fields[name] for name in (*BEFORE, "input") if name in fields]:
        return orjson.dumps([*spoken, fields.get("messages")])
    prompt = fields.get("messages", fields.get("prompt"))
    if isinstance(prompt, list) and prompt and not isinstance(prompt[0], (int, dict)):
        prompt = prompt[0]  # several prompts: route by the first
    return prompt.encode() if isinstance(prompt, str) else orjson.dumps(prompt)
