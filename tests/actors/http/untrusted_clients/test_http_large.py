"""Large bodies over real HTTP during a stream: it continues, and what cannot fit is refused unread."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any, ClassVar

import httpx
import orjson
import pytest
from fastapi import APIRouter, FastAPI
from fastapi.testclient import TestClient
from manta.actors.http.wire.errors import install_handlers
from manta.actors.http.wire.json_io import (
    MAX_STRINGS_AND_CONTAINERS,
    MAX_VALUES,
    SHORT_BODY_BYTES,
    JsonRoute,
    check_pieces,
)
from manta.actors.tokenization.tokenizer import Tokenizer
from pydantic import BaseModel, field_validator
from starlette.exceptions import HTTPException
from support.checkpoints.text_pair import LiveServer
from support.servers.server_probes import http_client
from support.waiting import WAIT_S, wait_until

CODE = Path(__file__).read_text(encoding="utf-8")
LARGE = (CODE * (20_000_000 // len(CODE) + 1))[:20_000_000]
LONG = (CODE * (1_500_000 // len(CODE) + 1))[:1_500_000]

STREAM = {"prompt": "x", "max_tokens": 400, "ignore_eos": True, "stream": True}


class Encodings:
    """Records every encoded text: its length, and the events that a listener got meanwhile."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.listener: Listener | None = None
        self.found: list[tuple[int, int]] = []
        for name in ("encoding", "encode_unlocked"):
            monkeypatch.setattr(Tokenizer, name, self._recording(getattr(Tokenizer, name)))

    @property
    def longest(self) -> tuple[int, int]:
        return max(self.found)

    def _recording(self, encode: Any) -> Any:
        def recording(tokenizer: Tokenizer, text: str, **named: Any) -> Any:
            before = self.listener.num_events if self.listener else 0
            encoding = encode(tokenizer, text, **named)
            after = self.listener.num_events if self.listener else 0
            self.found.append((len(text), after - before))
            return encoding

        return recording


@pytest.fixture
def encodings(monkeypatch: pytest.MonkeyPatch) -> Encodings:
    return Encodings(monkeypatch)


class Listener:
    """Reads streams one after the other and counts their events."""

    def __init__(self, url: str) -> None:
        self.num_events = 0
        self._url = url
        self._leaves = threading.Event()
        self._thread = threading.Thread(target=self._listen, daemon=True)

    def __enter__(self) -> Listener:
        self._thread.start()
        self.wait_for_more()
        return self

    def __exit__(self, *_: object) -> None:
        self._leaves.set()
        self._thread.join(timeout=WAIT_S)
        assert not self._thread.is_alive()

    def wait_for_more(self) -> None:
        before = self.num_events
        wait_until(lambda: self.num_events > before, what="the stream brings nothing")

    def _listen(self) -> None:
        with http_client(self._url) as http:
            while not self._leaves.is_set():
                with http.stream("POST", "/v1/completions", json=STREAM) as response:
                    for line in response.iter_lines():
                        self.num_events += line.startswith("data: {")
                        if self._leaves.is_set():
                            break


def post(server: LiveServer, path: str, body: Any, encodings: Encodings | None = None) -> httpx.Response:
    """Return the answer to a large body sent during a stream, which must continue."""
    content = body if isinstance(body, bytes) else orjson.dumps(body)
    with Listener(server.url) as listener, http_client(server.url) as http:
        if encodings is not None:
            encodings.listener = listener
        answer = http.post(path, content=content, headers={"content-type": "application/json"})
        listener.wait_for_more()
        return answer


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/completions", {"prompt": LARGE}, "prompt"),
        ("/v1/completions", {"prompt": ["short", LARGE], "stream": True}, "prompt"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": LARGE[: 1 << 22]}]}, "messages"),
        ("/v1/completions", {"prompt": [7] * 900_000}, "prompt"),
    ],
)
def test_texts_that_cannot_fit_are_refused_unread_while_a_stream_continues(
    server: LiveServer, encodings: Encodings, path: str, body: Any, param: str
) -> None:
    answer = post(server, path, body)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["param"] == param and "must fit max_model_len=512" in error["message"]
    assert encodings.longest[0] < 1000  # the listener's own prompts


def test_a_long_text_is_encoded_while_a_stream_continues(server: LiveServer, encodings: Encodings) -> None:
    found = post(server, "/tokenize", {"prompt": LONG}, encodings).json()
    assert found["count"] > 400_000
    length, num_events = encodings.longest
    assert length == len(LONG) and num_events > 1  # at most one where encoding holds Python's lock
    assert post(server, "/detokenize", {"tokens": found["tokens"]}).json() == {"prompt": LONG}


def test_a_large_text_is_served_when_it_is_truncated(server: LiveServer, encodings: Encodings) -> None:
    body = {"prompt": LARGE, "truncate_prompt_tokens": 16, "max_tokens": 2, "return_token_ids": True}
    answer = post(server, "/v1/completions", body)
    assert encodings.longest[0] < 50_000
    end = server.engine.tokenizer.encode(LARGE[-5000:])[-16:]  # type: ignore[union-attr]
    assert answer.json()["choices"][0]["prompt_token_ids"] == end


@pytest.mark.parametrize(
    "body",
    [
        b'{"prompt": [' + b"7," * (MAX_VALUES + 1) + b"7]}",
        b'{"prompt": [' + b'"",' * MAX_STRINGS_AND_CONTAINERS + b'""]}',
        b"[" * 20_000_000,
    ],
)
def test_a_body_of_too_many_values_is_refused_unparsed(
    server: LiveServer, body: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    parse = orjson.loads
    parsed: list[int] = []
    monkeypatch.setattr(orjson, "loads", lambda b: parsed.append(len(b)) or parse(b))
    answer = post(server, "/v1/completions", body)
    assert answer.status_code == 413 and answer.json()["error"]["type"] == "RequestTooLargeError"
    assert max(parsed) < SHORT_BODY_BYTES


@pytest.mark.parametrize(
    "text", ["," * 2_000_000, '"' * 300_000, '\\",[{' * 300_000, "\\" * 200_000, '\\\\"[']
)
def test_characters_inside_strings_are_not_counted(text: str) -> None:
    check_pieces(orjson.dumps({"prompt": text, "stop": [text, ""]}))
    with pytest.raises(HTTPException):
        check_pieces(orjson.dumps({"prompt": text, "stop": [[]] * MAX_STRINGS_AND_CONTAINERS}))


class Checked(BaseModel):
    """A body without negative values; records the threads that validate it."""

    validated_on: ClassVar[list[int]] = []

    values: list[int]

    @field_validator("values")
    @classmethod
    def check(cls, values: list[int]) -> list[int]:
        cls.validated_on.append(threading.get_ident())
        if min(values) < 0:
            raise ValueError("no negative values")
        return values


def test_a_long_body_is_validated_once_and_not_on_the_event_loop() -> None:
    router, app = APIRouter(route_class=JsonRoute), FastAPI()
    loops: list[int] = []

    @router.post("/")
    async def post(body: Checked) -> int:
        loops.append(threading.get_ident())
        return len(body.values)

    app.include_router(router)
    install_handlers(app)
    with TestClient(app) as client:
        assert client.post("/", json={"values": [7] * SHORT_BODY_BYTES}).json() == SHORT_BODY_BYTES
        answer = client.post("/", json={"values": [-7] * SHORT_BODY_BYTES})
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "values"
    assert len(Checked.validated_on) == 2 and not {*Checked.validated_on} & {*loops}
