"""Wrong, slow and unauthorized requests over real sockets, on a tiny pair."""

from __future__ import annotations

import asyncio
import json
import logging
import select
import shutil
import socket
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, asynccontextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from manta.actors.haproxy.config_rewriter import UNFINISHED_HEADER
from manta.actors.http.middleware import request_body as bodies
from manta.actors.http.middleware import request_gate as gate
from manta.actors.http.middleware.request_body import BodyBudget, BodyLimit
from manta.actors.http.middleware.request_gate import MAX_HEADER_BYTES
from manta.actors.http.wire.errors import MEANINGS
from manta.cluster.errors import DrainingError, RequestError, brief
from manta.cluster.request.request import SamplingParams
from starlette.exceptions import HTTPException
from starlette.types import Message
from support.checkpoints.text_pair import LiveServer
from support.engines.pausable_executor import PausableExecutors
from support.servers.server_probes import Serve, error_of, http_client
from support.waiting import WAIT_S, wait_until

GREEDY: dict[str, Any] = {"model": "tiny", "temperature": 0, "max_tokens": 8}
COMPLETIONS = "/v1/completions"


def lines_of(caplog: pytest.LogCaptureFixture, count: int) -> list[dict[str, Any]]:
    """Return the requests' log lines, once there are enough; a line may come just after its answer."""
    wait_until(lambda: len(caplog.records) >= count)
    found = [json.loads(r.message) for r in caplog.records if r.name == "manta.requests"]
    assert len(found) == count
    return found


def test_a_shown_value_is_shortened() -> None:
    assert brief({"a": [True, None, ("x",)]}) == '{"a": [true, null, ["x"]]}'
    with pytest.raises(RequestError) as caught:
        SamplingParams(bad_words=("", *["word"] * 1000))
    assert len(caught.value.message) < 250 and "(1001 elements)" in caught.value.message


def test_max_tokens_defaults_to_the_remaining_context_and_truncation_leaves_room_for_it(
    http: httpx.Client,
) -> None:
    body: dict[str, Any] = {"prompt": [60] * 505, "temperature": 0, "ignore_eos": True}
    for limit in ({}, {"max_tokens": None}):
        assert http.post(COMPLETIONS, json={**body, **limit}).json()["usage"]["completion_tokens"] == 7
    cut = {**body, "prompt": [60] * 900, "truncate_prompt_tokens": -1, "max_tokens": 30}
    assert http.post(COMPLETIONS, json=cut).json()["usage"]["prompt_tokens"] == 512 - 30


def test_a_request_has_one_id_in_its_header_and_in_its_log_line(
    http: httpx.Client, caplog: pytest.LogCaptureFixture
) -> None:
    body, long = {**GREEDY, "prompt": "a secret"}, "x" * 5000
    cases: list[tuple[dict[str, str], dict[str, Any], str | None]] = [
        ({}, {}, None),
        ({"X-Request-Id": "header"}, {}, "header"),
        ({"X-Request-Id": "header"}, {"request_id": "body"}, "body"),
        ({"X-Request-Id": "header"}, {"request_id": "body", "n": 0}, "body"),
        ({"X-Request-Id": "header"}, {"request_id": "body", "stop": 5}, "body"),
        ({"X-Request-Id": "header"}, {"request_id": "a b"}, "header"),
        ({"X-Request-Id": long}, {}, None),
        ({"X-Request-Id": "a b"}, {"n": 0}, None),
    ]
    for headers, fields, wanted in cases:
        caplog.clear()
        with caplog.at_level(logging.INFO, logger="manta.requests"):
            response = http.post(COMPLETIONS, json={**body, **fields}, headers=headers)
            (line,) = lines_of(caplog, 1)
        (given,) = response.headers.get_list("x-request-id")
        assert given == line["request_id"] and line["status"] == response.status_code
        assert given == wanted or (wanted is None and len(given) == 32)
        assert "secret" not in caplog.text
        if line["status"] == 200:
            assert (line["output_tokens"], line["finish_reason"]) == (8, "length")
            assert line["mean_acceptance_length"] >= 1 and line["ttft_ms"] > 0 and line["tpot_ms"] > 0


REFUSED: list[tuple[str, str, dict[str, Any], int, str | None]] = [
    ("POST", COMPLETIONS, {"json": {"prompt": "secret", "stop": ["secret", ""]}}, 400, "stop"),
    ("POST", COMPLETIONS, {"json": {"prompt": "secret", "model": "secret"}}, 404, "model"),
    ("POST", COMPLETIONS, {"content": b'{"prompt": "secret'}, 400, None),
    ("POST", COMPLETIONS, {"json": {"prompt": ["secret"] * 2000}}, 400, "prompt"),
    ("GET", COMPLETIONS, {}, 405, None),
    ("GET", "/secret", {}, 404, None),
    ("GET", "/v1/files", {}, 501, "batch_storage"),
    ("GET", "/v1/models", {"headers": {"A": "secret" * (MAX_HEADER_BYTES // 6)}}, 431, None),
]


@pytest.mark.parametrize(("method", "path", "what", "status", "param"), REFUSED)
def test_a_refused_request_leaves_one_log_line_without_its_content(
    http: httpx.Client,
    caplog: pytest.LogCaptureFixture,
    method: str,
    path: str,
    what: dict[str, Any],
    status: int,
    param: str | None,
) -> None:
    with caplog.at_level(logging.INFO):
        response = http.request(method, path, **what)
        (line,) = lines_of(caplog, 1)
    assert error_of(response)["code"] == status == line["status"] and line["param"] == param
    assert line["request_id"] == response.headers["x-request-id"] and line["reason"] and line["method"]
    assert "secret" not in "".join(r.message for r in caplog.records if r.name.startswith("manta"))


def test_probes_leave_no_log_line_and_engine_failures_their_own(
    http: httpx.Client, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger="manta.requests"):
        http.get("/health")
        too_many_ends = {**GREEDY, "prompt": "x", "stop_token_ids": [9999]}
        assert http.post(COMPLETIONS, json=too_many_ends).status_code == 400
        (line,) = lines_of(caplog, 1)
    assert line["output_tokens"] == 0 and line["status"] == 400


def sent(server: LiveServer, data: bytes) -> socket.socket:
    connection = socket.create_connection(server.address, timeout=WAIT_S)
    connection.sendall(data)
    return connection


def rest(connection: socket.socket) -> bytes:
    with connection:
        pieces: list[bytes] = []
        while piece := connection.recv(65536):
            pieces.append(piece)
    return b"".join(pieces)


HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"


def test_incomplete_bodies_delay_no_others_and_are_closed(
    server: LiveServer, http: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    half = [sent(server, HEAD + b"Content-Length: 100\r\n\r\n{") for _ in range(75)]
    assert http.get("/health").status_code == 200
    assert http.post(COMPLETIONS, json={**GREEDY, "prompt": "x"}).status_code == 200
    monkeypatch.setattr(bodies, "GRACE_S", 0.5)
    half += [sent(server, HEAD + b"Content-Length: 100\r\n\r\n{") for _ in range(75)]
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(rest, half[75:]))
    for answer in answers:
        head, _, body = answer.partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 408") and json.loads(body)["error"]["code"] == 408
        assert UNFINISHED_HEADER.encode() in head, "HAProxy is to close it"
    for connection in half[:75]:
        connection.close()
    monkeypatch.undo()
    assert http.get("/v1/models").status_code == 200
    for whole in (b"{}", b'{"prompt": 7}'):
        assert UNFINISHED_HEADER not in http.post(COMPLETIONS, content=whole).headers


def test_a_client_that_still_sends_can_read_its_refusal(serve: Serve) -> None:
    """Closing at once would reset the connection, and with it discard what the client has not read yet."""
    chunk = b"800\r\n" + b"x" * 0x800 + b"\r\n"
    with serve(max_request_bytes=2000) as server:
        connection = sent(server, HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + chunk)
        connection.recv(1, socket.MSG_PEEK)  # the refusal has arrived
        for _ in range(100):
            connection.sendall(chunk)
        connection.sendall(b"0\r\n\r\n")
        head, _, body = rest(connection).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 413") and json.loads(body)["error"]["code"] == 413


def test_the_time_for_a_body_grows_with_the_received_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces of a body arrive every 50 ms of a clock that the test sets."""
    now_s, waits = [0.0], list[float]()
    monkeypatch.setattr(bodies, "time", SimpleNamespace(monotonic=lambda: now_s[0]))
    monkeypatch.setattr(bodies, "GRACE_S", 0.1)

    @asynccontextmanager
    async def timeout(delay_s: float) -> AsyncIterator[None]:
        if delay_s < 0.05:
            raise TimeoutError
        waits.append(delay_s)
        yield

    async def read(piece: bytes) -> int:
        """Return how many of ten pieces arrive."""
        count = 0

        async def receive() -> Message:
            now_s[0] += 0.05
            return {"type": "http.request", "body": piece, "more_body": True}

        with BodyLimit(10**6, "").applied(receive, lambda: None) as limited:
            while count < 10:
                try:
                    await limited()
                except HTTPException as late:
                    assert late.status_code == 408
                    break
                count += 1
        return count

    monkeypatch.setattr(bodies, "asyncio", SimpleNamespace(timeout=timeout))
    assert asyncio.run(read(b"x")) < 4
    assert asyncio.run(read(b"x" * 4096)) == 10
    assert max(waits) <= 0.1, "a silent body ends after the grace, whatever has arrived"


def test_long_unfinished_bodies_are_dropped_for_short_ones(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bodies, "GRACE_S", 300.0)
    maximum = 2 << 20
    kept: list[BodyBudget] = []
    monkeypatch.setattr(gate, "BodyBudget", lambda maximum: kept.append(BodyBudget(maximum)) or kept[-1])
    with serve(max_request_bytes=maximum) as server, ExitStack() as stack:
        head = HEAD + f"Content-Length: {maximum}\r\n\r\n".encode()
        long = [stack.enter_context(sent(server, head)) for _ in range(20)]
        for connection in long:
            with suppress(ConnectionError):  # it was dropped while it was sent
                connection.sendall(b'"' * (maximum - 100))
        (budget,) = kept
        http = stack.enter_context(http_client(server.url))
        wait_until(lambda: len(readable(long)) >= 11)  # 20 x 2 MiB do not fit into 16 MiB
        assert 0 < budget.num_bytes <= budget.max_bytes == 8 * maximum
        short = http.post(COMPLETIONS, json={**GREEDY, "prompt": "x"})
        whole = http.post(COMPLETIONS, json={**GREEDY, "prompt": "x" * (maximum - 200)})
        assert short.status_code == 200 and whole.status_code == 400, (
            "its prompt is too long, its body is not"
        )
        answers = [received(connection) for connection in readable(long)]
        reported = [
            answer for answer in answers if answer
        ]  # what was on its way may be lost with the connection
        assert reported and all(answer.startswith(b"HTTP/1.1 503") for answer in reported)
        assert all(b"retry-after" in answer.lower() for answer in reported)
        stack.close()
        wait_until(lambda: budget.num_bytes == 0)


def received(connection: socket.socket) -> bytes:
    try:
        return connection.recv(65536)
    except ConnectionError:
        return b""


def readable(connections: list[socket.socket]) -> list[socket.socket]:
    return select.select(connections, [], [], 0.0)[0]


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 300_000), st.booleans()), max_size=60))
def test_a_body_budget_is_kept_and_released(pieces: list[tuple[int, int, bool]]) -> None:
    budget = BodyBudget(500_000)
    with ExitStack() as stack:
        open_bodies = [stack.enter_context(budget.body()) for _ in range(6)]
        for which, num_bytes, ends in pieces:
            budget.receive(open_bodies[which], num_bytes)
            assert 0 <= budget.num_bytes <= budget.max_bytes
            if ends:
                budget.release(open_bodies[which])
                open_bodies[which] = stack.enter_context(budget.body())
    assert budget.num_bytes == 0


def test_the_server_limits_concurrent_requests_and_refuses_more_in_openais_form(serve: Serve) -> None:
    executors = PausableExecutors()
    with serve(executors.make, max_requests=2) as server, ExitStack() as stack:
        for _ in range(5):  # these take no slot
            stack.enter_context(sent(server, HEAD + b"Content-Length: 100\r\n\r\n{"))
        http = stack.enter_context(http_client(server.url))
        body = {"prompt": "x", "max_tokens": 400, "ignore_eos": True, "stream": True}
        with executors[0].paused_after(4), ThreadPoolExecutor(1) as pool:
            first = stack.enter_context(http.stream("POST", COMPLETIONS, json=body))
            second = pool.submit(lambda: stack.enter_context(http.stream("POST", COMPLETIONS, json=body)))
            wait_until(lambda: http.get("/load").json()["server_load"] == 7)
            executors[0].step_until(second.done)
            assert first.status_code == second.result().status_code == 200
            refused = http.post(COMPLETIONS, json=body)
        assert error_of(refused)["type"] == "ServiceUnavailableError" and refused.headers["retry-after"]
        assert http.get("/health").status_code == http.get("/v1/models").status_code == 200
        (reported,) = [
            line for line in http.get("/metrics").text.splitlines() if 'reason="too_many_requests"' in line
        ]
        assert reported.startswith("vllm:admission_rejections_total{") and reported.endswith(" 1.0")
        stack.close()  # two have left
        with http_client(server.url) as later:
            wait_until(lambda: later.post(COMPLETIONS, json={"prompt": "x"}).status_code == 200)


def test_a_stopping_server_refuses_waiting_requests_and_notifies_streams(serve: Serve) -> None:
    executors = PausableExecutors()
    body = {"prompt": "x", "max_tokens": 400, "ignore_eos": True}
    with (
        serve(executors.make, max_num_seqs=1) as server,
        http_client(server.url) as http,
        ThreadPoolExecutor(1) as pool,
    ):

        def load() -> dict[str, Any]:
            return http.get("/load").json()

        with (
            executors[0].paused_after(4),
            http.stream("POST", COMPLETIONS, json={**body, "stream": True}) as running,
        ):
            events = running.iter_lines()
            assert next(events).startswith("data: ")
            waiting = pool.submit(http.post, COMPLETIONS, json=body)
            wait_until(lambda: load()["server_load"] == 2)
            executors[0].step_until(lambda: load()["waiting"] == 1)
            # As `replica_lifecycle.py` ends requests at the timeout.
            server.loop.call_soon_threadsafe(server.engine.end_all, DrainingError("Its time is up."))
            refused = waiting.result()
            assert error_of(refused)["message"] == "Its time is up." and refused.status_code == 503
            assert '"code":503' in "".join(events), "it had begun"
        counts = {
            line.split('reason="')[1].split('"')[0]: float(line.split()[-1])
            for line in http.get("/metrics").text.splitlines()
            if line.startswith("vllm:admission_rejections_total{")
        }
        assert counts["draining"] == 1 == sum(counts.values())


def test_openapi_documents_every_error_with_its_schema(http: httpx.Client) -> None:
    document = http.get("/openapi.json").json()
    assert "HTTPValidationError" not in document["components"]["schemas"]
    assert {"400", "401", "404", "413", "422", "503"} <= set(map(str, MEANINGS))
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            for status in map(str, MEANINGS):
                schema = operation["responses"][status]["content"]["application/json"]["schema"]
                assert schema == {"$ref": "#/components/schemas/ErrorResponse"}, (path, method, status)


def test_a_storage_failure_is_logged_with_its_request_and_not_shown(
    serve: Serve, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    place = tmp_path / "kept"
    with serve(batch_storage=str(place)) as server:
        with http_client(server.url) as http:
            upload: dict[str, Any] = {"files": {"file": ("a.jsonl", b"{}")}, "data": {"purpose": "batch"}}
            assert http.post("/v1/files", **upload).status_code == 200
            shutil.rmtree(place, ignore_errors=True)
            place.write_text("no folder")
            failed = http.post("/v1/files", headers={"X-Request-Id": "mine"}, **upload)
        assert failed.status_code == 503 and str(tmp_path) not in failed.text
    assert any(r.levelno == logging.ERROR and "request mine: " in r.getMessage() for r in caplog.records)
