"""Whole responses of any size: serialized in slices between which the event loop runs, and sent in pieces.

Thousands of completions with log probabilities are tens of MB of JSON. Serialized at once, they would block
every stream for seconds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

import orjson
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ...engine.outputs import CompletionOutput
from ...system.event_loop import LoopYielder
from ..protocol.logprobs import token_lengths
from ..wire.json_io import JsonObject

PLACES_AT_ONCE = 128  # positions of a completion's log probabilities
PIECE_BYTES = 1 << 16  # sent at once; servers buffer at least that for a client that does not read


class FormatsLogprobs(Protocol):
    def logprobs(self, completion: CompletionOutput, num_top: int, offset: int) -> JsonObject: ...


class StreamedChoices:
    def __init__(self) -> None:
        self._choices: list[bytes] = []
        self._yielder = LoopYielder()

    async def add(self, choice: JsonObject) -> None:
        written = {**choice, "logprobs": await self._lists_written(choice.get("logprobs"))}
        self._choices.append(orjson.dumps(written))
        await self._yielder.yield_if_over()

    async def logprobs(
        self, shape: FormatsLogprobs, completion: CompletionOutput, num_top: int
    ) -> JsonObject:
        """Return `shape.logprobs` of the whole completion, computed in slices."""
        places = completion.logprobs
        assert places is not None, "they were not requested"
        found: JsonObject = {}
        offset = 0
        for at in range(0, max(len(places), 1), PLACES_AT_ONCE):
            part = replace(completion, logprobs=places[at : at + PLACES_AT_ONCE])
            for name, value in shape.logprobs(part, num_top, offset).items():
                if isinstance(found.get(name), list):
                    found[name] += value
                else:
                    found[name] = value
            offset += token_lengths(part)
            await self._yielder.yield_if_over()
        return found

    def response(self, head: JsonObject, tail: JsonObject, headers: Mapping[str, str]) -> PiecesResponse:
        """Return the object {**head, "choices": [...], **tail}. Neither may be empty."""
        between = [b","] * len(self._choices)
        choices = [piece for pair in zip(between, self._choices, strict=True) for piece in pair][1:]
        begin, end = orjson.dumps(head)[:-1] + b',"choices":[', b"]," + orjson.dumps(tail)[1:]
        return PiecesResponse([begin, *choices, end], headers)

    async def _lists_written(self, value: JsonObject | None) -> JsonObject | None:
        if value is None:
            return None
        return {name: await self._written(each) for name, each in value.items()}

    async def _written(self, value: Any) -> Any:  # Any: JSON.
        if not isinstance(value, list) or len(value) <= PLACES_AT_ONCE:
            return value
        fragments: list[orjson.Fragment] = []
        for at in range(0, len(value), PLACES_AT_ONCE):
            fragments.append(orjson.Fragment(orjson.dumps(value[at : at + PLACES_AT_ONCE])[1:-1]))
            await self._yielder.yield_if_over()
        return fragments


class PiecesResponse(Response):
    """A JSON body of known length, sent as fast as the client reads."""

    media_type = "application/json"

    def __init__(self, pieces: Sequence[bytes], headers: Mapping[str, str]) -> None:
        length = sum(map(len, pieces))
        super().__init__(headers={**headers, "Content-Length": str(length)}, media_type=self.media_type)
        self._pieces = pieces

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        yielder, waiting = LoopYielder(), bytearray()
        for piece in self._pieces:
            for at in range(0, len(piece), PIECE_BYTES):
                waiting += memoryview(piece)[at : at + PIECE_BYTES]
                if len(waiting) >= PIECE_BYTES:
                    await send({"type": "http.response.body", "body": bytes(waiting), "more_body": True})
                    waiting.clear()
                    await yielder.yield_if_over()
        await send({"type": "http.response.body", "body": bytes(waiting), "more_body": True})
        await send({"type": "http.response.body", "body": b""})  # sent once the client has most of the body
