"""Bodies of other APIs become a `ChatRequest`; what is wrong with it is said in their own words.

`/v1/responses` and `/v1/messages` are two ways to write a conversation. Their modules translate the fields;
from there on a request takes chat's way, and an error that names a field of chat is renamed on its way back.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from pydantic import ValidationError

from ....cluster.errors import RequestError
from ..protocol.chat_request import ChatRequest
from ..wire.errors import from_validation


def chat_request(fields: Mapping[str, Any]) -> ChatRequest:  # Any: JSON.
    """Of fields that are set; None stands for absence. Raises RequestError in chat's words."""
    try:
        return ChatRequest.model_validate(
            {name: value for name, value in fields.items() if value is not None}
        )
    except ValidationError as error:
        raise from_validation(error.errors()) from None


@contextmanager
def said_of(names: Mapping[str, str]) -> Iterator[None]:
    """Errors that name a field of chat name what it was made of.

    Args:
        names: dotted path in the chat -> in the body; what lies below a path goes with it.
    """
    try:
        yield
    except RequestError as error:
        renamed = _renamed(error.param or "", names)
        if renamed is None:
            raise
        param = error.param or ""
        # A name of one word may be an ordinary word as well, behind the first place.
        message = error.message.replace(param, renamed, -1 if "_" in param or "." in param else 1)
        raise type(error)(message, param=renamed) from None


def _renamed(param: str, names: Mapping[str, str]) -> str | None:
    """The longest known beginning of a path, replaced; None if there is none."""
    head, tail = param, ""
    while head:
        if head in names:
            return names[head] + tail
        head, dot, last = head.rpartition(".")
        tail = f".{last}{tail}" if dot else ""
    return None
