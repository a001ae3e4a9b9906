"""Translates bodies of other APIs to a `ChatRequest`, and errors back to the fields of those APIs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from pydantic import ValidationError

from ....cluster.errors import RequestError
from ..protocol.chat_completion import ChatRequest
from ..wire.errors import from_validation


def chat_request(fields: Mapping[str, Any]) -> ChatRequest:  # Any: JSON.
    """Validate the fields that are not None. Raises RequestError with chat's field names."""
    try:
        return ChatRequest.model_validate(
            {name: value for name, value in fields.items() if value is not None}
        )
    except ValidationError as error:
        raise from_validation(error.errors()) from None


@contextmanager
def rename_error_fields(names: Mapping[str, str]) -> Iterator[None]:
    """Rename fields in errors. `names`: dotted path in the chat -> in the body; also of paths below it."""
    try:
        yield
    except RequestError as error:
        renamed = _renamed(error.param or "", names)
        if renamed is None:
            raise
        param = error.param or ""
        # A name of one word may also occur as an ordinary word later in the message.
        message = error.message.replace(param, renamed, -1 if "_" in param or "." in param else 1)
        raise type(error)(message, param=renamed) from None


def _renamed(param: str, names: Mapping[str, str]) -> str | None:
    """Replace a path's longest known prefix; None if no prefix is known."""
    head, tail = param, ""
    while head:
        if head in names:
            return names[head] + tail
        head, dot, last = head.rpartition(".")
        tail = f".{last}{tail}" if dot else ""
    return None
