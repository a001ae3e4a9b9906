"""The ready check of a replica: streams one completion through an application that no metric counts."""

from __future__ import annotations

import asyncio

import orjson
from starlette.types import ASGIApp, Message, Scope

from ...cluster.errors import EngineDeadError

PATH = "/v1/completions"
NAME = "ready-check"


async def run_first_request(app: ASGIApp, max_tokens: int) -> None:
    """Stream one completion. Raises EngineDeadError if it does not complete."""
    body = {"prompt": [1], "max_tokens": max_tokens, "ignore_eos": True, "temperature": 0, "stream": True}
    body["store"] = False
    exchange = _Exchange(orjson.dumps(body))
    run = app(_scope(), exchange.receive, exchange.send)
    await asyncio.gather(run)  # in a task of its own: the caller's log lines do not get its request id
    if exchange.status != 200 or b'"error"' in exchange.answer or b"[DONE]" not in exchange.answer:
        start = exchange.answer[:500].decode(errors="replace")
        raise EngineDeadError(f"The first request failed with status {exchange.status}: {start}")


class _Exchange:
    def __init__(self, body: bytes) -> None:
        self._request: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]
        self.status = 0
        self.answer = b""

    async def receive(self) -> Message:
        if self._request:
            return self._request.pop()
        await asyncio.Event().wait()  # this client never disconnects
        raise AssertionError("it is never set")

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
        else:
            self.answer += message.get("body", b"")


def _scope() -> Scope:
    headers = [(b"content-type", b"application/json"), (b"x-request-id", NAME.encode())]
    return {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": PATH,
        "raw_path": PATH.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": headers,
        "client": None,
        "server": None,
    }
