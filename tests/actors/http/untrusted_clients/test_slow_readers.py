"""Slow or absent readers: outputs are merged, bounded and finally ended; shares of keys."""

from __future__ import annotations

import asyncio
import json
import logging
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from manta.actors.engine.output_processor import RequestTracker
from manta.actors.engine.output_streams import MAX_UNMERGED, MERGED_TOKENS, ReaderLimit, UnreadOutputs
from manta.actors.engine.outputs import CompletionOutput, OutputLogprobs
from manta.actors.http.config.settings import ServerSettings
from manta.actors.http.generation import request_run as running
from manta.actors.http.middleware.request_gate import RequestGate, Traffic
from manta.actors.tokenization.prompts import EncodedPrompt
from manta.cluster.config import EngineConfig
from manta.cluster.request.logprobs import TokenLogprobs
from manta.cluster.request.request import SamplingParams
from manta.cluster.step.step_outcome import SequenceUpdate
from starlette.types import Message, Receive, Scope, Send
from support.checkpoints.text_pair import LiveServer
from support.servers import probed_server
from support.servers.gateway_stand import GatewayStand
from support.servers.probed_server import ProbedServer, make_executor, shrink_send_buffer
from support.servers.server_probes import http_client
from support.waiting import WAIT_S, wait_until
from trials.abuse.abuse import MODEL
from trials.abuse.abuse_readers import STREAMS, Reader, never_read

CONFIG = EngineConfig(model=str(MODEL))
UNREAD_BYTES = 1 << 18
GROWTH_BYTES = 48 << 20  # of which the system's buffers of sockets are no part


def update(index: int, token_ids: list[int], *, ends: bool) -> SequenceUpdate:
    return SequenceUpdate(
        request_id=f"r-{index}",
        token_ids=tuple(token_ids),
        finish_reason="length" if ends else None,
        stop_reason=None,
        num_cached_tokens=0,
        num_drafted=0,
        num_accepted=0,
    )


def delta(index: int, token_ids: list[int], *, ends: bool) -> CompletionOutput:
    reported = [TokenLogprobs(-1.0, 1, (t, t + 1), (-1.0, -2.0)) for t in token_ids]
    logprobs = OutputLogprobs(None, reported, token_ids)
    text = "".join(f"<{t}>" for t in token_ids)
    return CompletionOutput(index, text, token_ids, "length" if ends else None, None, logprobs)


@given(
    st.integers(1, 3),
    st.lists(
        st.tuples(st.integers(0, 2), st.lists(st.integers(0, 99), min_size=1, max_size=40), st.booleans())
    ),
)
@settings(max_examples=100, deadline=None)
def test_a_reader_gets_each_token_once_in_order_after_any_merging(
    count: int, steps: list[tuple[int, list[int], bool]]
) -> None:
    tracker = RequestTracker("r", EncodedPrompt((1,)), SamplingParams(n=count, logprobs=2), None)
    limit = ReaderLimit("client", 1 << 30)
    unread, wanted = UnreadOutputs(tracker, limit), dict[int, list[int]]()
    got: dict[int, list[CompletionOutput]] = {}
    finished: list[bool] = []

    def take() -> None:
        output = unread.take()
        (completion,) = output.outputs
        got.setdefault(completion.index, []).append(completion)
        finished.append(output.finished)

    last = [(index, [7], False) for index in range(count)]
    ended = len(steps)
    for number, (index, token_ids, reads) in enumerate([*steps, *last]):
        index %= count
        tracker.feed(index, update(index, token_ids, ends=number >= ended))
        unread.add(delta(index, token_ids, ends=number >= ended))
        wanted.setdefault(index, []).extend(token_ids)
        if reads and len(unread.entries):
            take()
    while len(unread.entries):
        take()
    assert limit.num_bytes == 0
    assert finished[-1] and not any(finished[:-1])
    for index, token_ids in wanted.items():
        outputs = got[index]
        assert [t for output in outputs for t in output.token_ids] == token_ids
        assert "".join(output.text for output in outputs) == "".join(f"<{t}>" for t in token_ids)
        places = [t for output in outputs for (t, *_) in (output.logprobs or OutputLogprobs(None)).numbers]
        assert places == token_ids
        assert [output.finish_reason for output in outputs] == [None] * (len(outputs) - 1) + ["length"]
        assert max(len(output.token_ids) for output in outputs) <= MERGED_TOKENS


def test_a_fast_reader_gets_an_output_per_step_and_a_slow_one_few() -> None:
    tracker = RequestTracker("r", EncodedPrompt((1,)), SamplingParams(), None)
    unread = UnreadOutputs(tracker)
    for step in range(1000):
        unread.add(delta(0, [step], ends=False))
        assert unread.take().outputs[0].token_ids == [step]
    for step in range(10_000):
        unread.add(delta(0, [step], ends=False))
    assert len(unread.entries) <= MAX_UNMERGED + 10_000 / MERGED_TOKENS + 1


@pytest.fixture(scope="module")
def probed() -> Iterator[ProbedServer]:
    front = {"max_unread_bytes": UNREAD_BYTES, "reader_timeout": 2.0}
    with ProbedServer(MODEL, front, keeps_little=True) as server:
        yield server


@pytest.fixture(scope="module")
def live() -> Iterator[LiveServer]:
    server = LiveServer(CONFIG, ServerSettings(max_unread_bytes=UNREAD_BYTES // 8), make_executor)
    shrink_send_buffer(server._socket)
    with server:
        yield server


def test_memory_is_bounded_and_clients_that_never_read_leave_nothing(probed: ProbedServer) -> None:
    never_read(probed.port, 1.0, streams=STREAMS[:3])  # what the first ones make is there to stay
    before = probed.rest()
    readers = [Reader(probed.port, *STREAMS[2]) for _ in range(2)]
    wait_until(lambda: probed.look().running == 0)  # ended by the server, without a read or a disconnect
    rested = probed.rest(before.tasks)
    assert not rested.busy(before.tasks), "a place is held"
    assert rested.rss_bytes < before.rss_bytes + GROWTH_BYTES
    for reader in readers:
        reader.close()


@pytest.mark.parametrize("place", [2, 4])
def test_an_unread_stream_ends_with_an_error_event_and_a_log_line(
    live: LiveServer, place: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "manta")
    path, body = STREAMS[place]
    reader = Reader(live.address[1], path, body, headers={"X-Request-Id": f"lazy-{place}"})
    wait_until(lambda: any(f"lazy-{place} is ended" in record.getMessage() for record in caplog.records))
    wait_until(lambda: live.engine.stats().running == 0)
    assert live.engine.stats().kv_usage == 0.0
    said = reader.read()
    if said.startswith(b"HTTP/1.1 408"):  # on a busy machine, where the limit came before the first event
        error = json.loads(said.partition(b"\r\n\r\n")[2])
    else:
        assert b"data: [DONE]\n\n" in said[-40:]
        (error,) = [json.loads(line[6:]) for line in said.split(b"\n") if line.startswith(b'data: {"error"')]
    assert error["error"]["code"] == 408 and error["error"]["param"] == "max_unread_bytes"
    reader.close()


def test_an_answer_too_large_to_complete_is_refused_and_can_be_streamed(
    live: LiveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(running, "MAX_ANSWER_BYTES", 10_000)
    body = {"prompt": ["x", "y"], "n": 2, "max_tokens": 50, "logprobs": 5}
    with http_client(live.url) as http:
        refused = http.post("/v1/completions", json=body)
        streamed = http.post("/v1/completions", json={**body, "stream": True})
    assert refused.status_code == 422 and "10000 bytes" in refused.text
    assert streamed.text.endswith("data: [DONE]\n\n")
    wait_until(lambda: live.engine.stats().running == 0)


def test_a_gateway_reports_a_slow_client_and_does_not_try_another_replica(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(probed_server, "STEP_S", 0.0005)
    settings = ServerSettings(served_model_name="tiny", max_unread_bytes=4096)
    with GatewayStand([(CONFIG, settings)] * 2, makers=[make_executor] * 2) as stand:
        port = int(stand.url.rpartition(":")[2])
        for listener in (stand._socket, *(replica.door._socket for replica in stand.replicas)):
            shrink_send_buffer(listener)
        reader = Reader(port, *STREAMS[0])
        engines = [replica.engine for replica in stand.replicas]
        wait_until(lambda: sum(engine.stats().running for engine in engines) == 1)
        wait_until(lambda: sum(engine.stats().running for engine in engines) == 0)
        said = reader.read()
        assert b'"code":408' in said and b"[DONE]" in said
        lines = stand.http.get("/metrics").text.splitlines()
        assert not [line for line in lines if "resumed_streams_total{" in line and not line.endswith(" 0.0")]
        reader.close()


def test_a_client_that_reads_nothing_for_too_long_is_disconnected(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "manta")

    def is_cut(name: str) -> bool:
        return any(f"{name} is disconnected" in record.getMessage() for record in caplog.records)

    server = LiveServer(CONFIG, ServerSettings(reader_timeout=1.0), make_executor)
    shrink_send_buffer(server._socket)
    with server:
        path, whole = "/v1/completions", {"prompt": "x", "max_tokens": 60, "n": 64, "logprobs": 20}
        stream = Reader(server.address[1], *STREAMS[2], headers={"X-Request-Id": "stream"})
        answer = Reader(server.address[1], path, whole, stream=False, headers={"X-Request-Id": "whole"})
        wait_until(lambda: is_cut("stream") and is_cut("whole"))
        wait_until(lambda: server.engine.stats().running == 0)
        assert b"[DONE]" not in stream.read()
        head, _, content = answer.read().partition(b"\r\n\r\n")
        (length,) = re.findall(rb"content-length: (\d+)", head)
        assert b" 200 " in head and len(content) < int(length) / 2
        stream.close()
        answer.close()


class SimulatedTimeLoop(asyncio.SelectorEventLoop):
    """An event loop whose time passes while it would wait, and only then."""

    now_s = 0.0

    def time(self) -> float:
        return self.now_s

    def _run_once(self) -> None:
        if not self._ready and self._scheduled:
            self.now_s = max(self.now_s, self._scheduled[0].when())
        super()._run_once()


@pytest.mark.parametrize(("read_s", "num_sent"), [(0.7, 12), (1.3, 0)])
def test_a_client_that_reads_slowly_is_not_disconnected(read_s: float, num_sent: int) -> None:
    sent: list[Message] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for i in range(11):
            await send({"type": "http.response.body", "body": b"x", "more_body": i < 10})

    async def receive() -> Message:
        return {"type": "http.request"}

    async def send(message: Message) -> None:
        await asyncio.sleep(read_s)
        sent.append(message)

    gate = RequestGate(app, ServerSettings(reader_timeout=1.0), Mock(), Traffic(), "replica")
    with asyncio.Runner(loop_factory=SimulatedTimeLoop) as runner:
        runner.run(gate({"type": "http", "method": "GET", "path": "/ping", "headers": []}, receive, send))
    assert len(sent) == num_sent


def test_a_key_is_limited_to_its_share_and_others_have_theirs() -> None:
    settings = ServerSettings(served_model_name="tiny", api_key=("a", "b"), max_requests_per_key=4)
    config = replace(CONFIG, max_num_seqs=8)
    body = {"prompt": "x", "max_tokens": 50, "n": 2}

    def ask(url: str, key: str, **more: Any) -> httpx.Response:
        headers = {"Authorization": f"Bearer {key}"}
        return httpx.post(f"{url}/v1/completions", json={**body, **more}, headers=headers, timeout=WAIT_S)

    with (
        LiveServer(config, settings, make_executor) as server,
        GatewayStand([(config, settings)], makers=[make_executor]) as stand,
    ):
        engines = {server.url: server.engine, stand.url: stand.replicas[0].engine}
        for url, engine in engines.items():
            port, key = int(url.rpartition(":")[2]), {"Authorization": "Bearer a"}
            long = {"prompt": ["x", "y"], "max_tokens": 100_000}
            held = Reader(port, "/v1/completions", {**long, "n": 1}, headers=key)
            wait_until(lambda engine=engine: engine.stats().running == 2)
            assert ask(url, "a").status_code == 200
            refused = ask(url, "a", n=3)
            assert refused.status_code == 429 and refused.headers["retry-after"]
            error = refused.json()["error"]
            assert error["type"] == "RateLimitError" and error["param"] == "max_requests_per_key"
            assert "max_requests_per_key" in error["message"]
            assert ask(url, "a", n=3, stream=True).status_code == ask(url, "a", n=3.0).status_code == 429
            assert ask(url, "b", n=3).status_code == 200
            for n in (5, 5.0, "5", "1_0", True):
                alone = ask(url, "b", n=n)
                assert alone.status_code == 400 and alone.json()["error"]["param"] == "n"
            said = httpx.post(
                f"{url}/v1/messages",
                json={"model": "tiny", "max_tokens": 9, "messages": [{"role": "user", "content": "x"}]},
                headers={"X-Api-Key": "b"},
                timeout=WAIT_S,
            )
            assert said.status_code == 200
            held.close()
            wait_until(lambda engine=engine: engine.stats().running == 0)
            assert ask(url, "a", n=4).status_code == 200
