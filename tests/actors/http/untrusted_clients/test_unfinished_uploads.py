"""Uploads that do not end: their bytes are limited by key, and leave nothing behind."""

from __future__ import annotations

import asyncio
import select
import socket
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from manta.actors.http.middleware import request_body
from manta.actors.http.middleware.request_body import BUDGET_UPLOADS, BodyBudget, BodyLimit
from starlette.exceptions import HTTPException
from starlette.types import Message
from support.checkpoints.text_pair import LiveServer
from support.servers.server_probes import Serve
from support.waiting import wait_until

KEYS = ("abuser", "other")
MAXIMUM = 1_000_000
PARTS = (
    b'--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
    b'--b\r\nContent-Disposition: form-data; name="file"; filename="x.jsonl"\r\n\r\n'
)
END = b"\r\n--b--\r\n"
CONTENT = b"{}\n" * (MAXIMUM // 3 - 10)


@pytest.fixture(scope="module")
def storage(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("storage")


@pytest.fixture(scope="module")
def server(serve: Serve, storage: Path) -> Iterator[LiveServer]:
    limits = {"max_batch_file_bytes": MAXIMUM, "max_request_bytes": 20_000}
    with serve(api_key=KEYS, batch_storage=str(storage), **limits) as server:
        yield server


def open_upload(
    server: LiveServer, key: str, content_type: str = "multipart/form-data; boundary=b"
) -> socket.socket:
    """Send the head of an upload; its file is CONTENT."""
    connection = socket.create_connection(server.address)
    size = len(PARTS) + len(CONTENT) + len(END)
    connection.sendall(
        f"POST /v1/files HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {key}\r\nContent-Length: {size}\r\n"
        f"Content-Type: {content_type}\r\n\r\n".encode()
        + PARTS
    )
    return connection


def answered(connections: list[socket.socket]) -> list[socket.socket]:
    return select.select(connections, [], [], 0.0)[0]


def status_of(connection: socket.socket) -> int:
    """Return the status, 0 if the response was lost with the connection."""
    connection.settimeout(600)
    try:
        return int(connection.recv(1 << 16).split(maxsplit=2)[1])
    except (ConnectionError, IndexError):
        return 0


def stored(storage: Path) -> list[Path]:
    return [path for path in storage.rglob("*") if path.is_file()]


def test_unfinished_uploads_of_one_key_make_room_for_those_of_another(
    server: LiveServer, storage: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(request_body, "GRACE_S", 300.0)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with ExitStack() as stack:
        mine = stack.enter_context(open_upload(server, KEYS[1]))
        mine.sendall(CONTENT)
        others = [stack.enter_context(open_upload(server, KEYS[0])) for _ in range(8)]
        for connection in others:
            try:
                connection.sendall(CONTENT)
            except ConnectionError:  # it was dropped while it was sent
                continue
        wait_until(lambda: len(answered(others)) >= 8 + 1 - BUDGET_UPLOADS)
        assert {status_of(each) for each in answered(others)} <= {503, 0}
        assert not answered([mine]) and not list(tmp_path.iterdir()) and not stored(storage)
        mine.sendall(END)
        assert status_of(mine) == 200
    wait_until(lambda: len(stored(storage)) == 2)  # the content, and its object
    with httpx.Client(base_url=server.url, headers={"Authorization": f"Bearer {KEYS[0]}"}) as http:
        form = {"file": ("empty.jsonl", b"")}
        assert http.post("/v1/files", data={"purpose": "batch"}, files=form).json()["bytes"] == 0


def test_a_silent_upload_gets_408_and_another_type_of_body_is_no_upload(
    server: LiveServer, storage: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = stored(storage)
    with open_upload(server, KEYS[0], "application/json") as json_body:
        assert status_of(json_body) == 413, "more than max_request_bytes"
    monkeypatch.setattr(request_body, "GRACE_S", 0.3)
    with open_upload(server, KEYS[0]) as silent:
        assert status_of(silent) == 408
    assert stored(storage) == before


@given(st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 300_000)), max_size=40))
def test_the_key_with_the_most_unfinished_bytes_loses_a_body(pieces: list[tuple[str, int]]) -> None:
    budget = BodyBudget(500_000)
    with ExitStack() as stack:
        bodies = [stack.enter_context(budget.body(key)) for key, _ in pieces]
        for body, (key, num_bytes) in zip(bodies, pieces, strict=True):
            kept = [each for each in bodies if not each.dropped]
            budget.receive(body, num_bytes)
            dropped = [each for each in kept if each.dropped]
            held = {name: sum(each.counted for each in kept if each.key == name) for name in "ab"}
            if len({each.key for each in dropped}) == 1:
                assert dropped[0].key == key or held[dropped[0].key or ""] >= held[key]
            assert budget.num_bytes <= budget.max_bytes


def test_a_body_that_was_dropped_between_its_parts_is_not_waited_for() -> None:
    parts = [{"type": "http.request", "body": bytes(400_000), "more_body": True}]

    async def receive() -> Message:
        return parts.pop()

    async def run() -> None:
        budget = BodyBudget(500_000)
        with (
            BodyLimit(MAXIMUM, "").applied(receive, lambda: None, budget, "a") as limited,
            budget.body("b") as other,
        ):
            await limited()
            budget.receive(other, 300_000)
            with pytest.raises(HTTPException, match="exceed") as refused:
                await limited()
            assert refused.value.status_code == 503

    asyncio.run(run())
