"""The hooks around Serve's HTTP: one request id, and OpenAI's form for Serve's own errors. No Ray."""

from __future__ import annotations

import asyncio
import builtins
import json
import logging
import sys
from typing import Any

import pytest
from manta.actors.haproxy.config_rewriter import RETRY_HEADER
from manta.actors.serve import serve_hooks as serve_place
from manta.actors.serve.serve_hooks import CALLBACK, OVERLOADED, ProbeBypass, proxy_listens, restore_print
from manta.jobs.serve.ray_environment import OF_ALL
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send


def pass_through(app: ASGIApp, path: str, header: tuple[bytes, bytes]) -> list[Message]:
    """Return what a client gets of an application behind the hooks, for a request with this header."""
    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    scope: dict[str, Any] = {"type": "http", "method": "POST", "path": path, "headers": [header]}
    asyncio.run(ProbeBypass(app)(scope, None, send))  # type: ignore[arg-type]  # nothing is received
    return sent


def answer(status: int, kind: str, body: bytes, ids: list[str], requested: str) -> tuple[int, Headers, bytes]:
    """Return the ids that a client gets for an answer with a number of ids, to a request with one."""
    seen: list[str | None] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        seen.append(Headers(scope=scope).get("x-request-id"))
        headers = [(b"content-type", kind.encode()), *((b"x-request-id", each.encode()) for each in ids)]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    sent = pass_through(app, "/v1/models", (b"x-request-id", requested.encode()))
    headers = Headers(raw=sent[0]["headers"])
    if requested == "mine":
        assert seen == ["mine"]
    else:
        assert seen[0] is not None and len(seen[0]) == 32
    return sent[0]["status"], headers, sent[1]["body"]


def test_a_full_serve_queue_gives_the_same_error_as_the_engines() -> None:
    plain = b"Request dropped due to backpressure"
    status, headers, body = answer(503, "text/plain; charset=utf-8", plain, [], "mine")
    error = json.loads(body)["error"]
    assert status == error["code"] == 503 and error["message"] == OVERLOADED
    assert headers["retry-after"] and headers["content-type"] == "application/json"
    assert headers["x-request-id"] == "mine"


@pytest.mark.parametrize(
    ("lived", "lives", "draining", "status"),
    [(True, True, True, 425), (False, False, True, 425), (True, False, True, 503), (True, True, False, 503)],
    ids=["it is to go", "it was dead", "it died under the request", "it is full"],
)
def test_a_request_is_resent_only_if_its_engine_did_not_die_during_it(
    monkeypatch: pytest.MonkeyPatch, lived: bool, lives: bool, draining: bool, status: int
) -> None:
    class Replica:
        is_alive = lived
        serves = lived

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        Replica.is_alive, Replica.serves = lives, lives and not draining
        headers = [(b"content-type", b"application/json")]
        await send({"type": "http.response.start", "status": 503, "headers": headers})

    monkeypatch.setattr(serve_place, "_replica", lambda: Replica)
    sent = pass_through(app, "/v1/completions", (RETRY_HEADER.encode(), b"425"))
    assert sent[0]["status"] == status


def test_the_applications_request_id_takes_precedence_and_invalid_ones_are_not_returned() -> None:
    for ids, wanted in ((["body", "mine"], ["body"]), (["mine"], ["mine"]), ([], ["mine"])):
        _, headers, body = answer(200, "application/json", b"{}", ids, "mine")
        assert headers.getlist("x-request-id") == wanted and body == b"{}"
    _, headers, _ = answer(200, "application/json", b"{}", [], "m" * 5000)
    assert len(headers["x-request-id"]) == 32


def test_a_replica_knows_from_its_environment_whether_the_serve_hooks_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv(CALLBACK, raising=False)
    assert not proxy_listens()
    monkeypatch.setenv(CALLBACK, OF_ALL[CALLBACK])
    assert proxy_listens()
    monkeypatch.setenv(CALLBACK, "somebody.elses:middlewares")
    assert not proxy_listens()


def test_tracebacks_of_a_replica_have_pythons_format(monkeypatch: pytest.MonkeyPatch) -> None:
    from ray.serve._private import logging_utils

    monkeypatch.setattr(builtins, "print", logging_utils.redirected_print)  # as Serve does in a replica
    restore_print()
    try:
        raise ValueError("of this test")
    except ValueError:
        text = logging.Formatter().formatException(sys.exc_info())
    assert text.startswith("Traceback (most recent call last):\n") and "('" not in text
