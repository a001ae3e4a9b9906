"""An exception anywhere between tokens and an answer ends that request and affects no other.

Each stage raises for one request of eight, over real HTTP. What the other seven get is compared with a run
that nothing disturbed.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from manta import LLM, SamplingParams
from manta.actors.batch.dataset.row_reader import Row
from manta.actors.batch.dataset.row_requests import RowSchema
from manta.actors.batch.row_answerer import RowAnswerer
from manta.actors.chat.chat_model import AnswerParser, AnswerParserFactory
from manta.actors.chat.stream_parser import Splitter
from manta.actors.engine import async_engine as engine_module
from manta.actors.engine import output_processor as processing
from manta.actors.engine.async_engine import AsyncEngine
from manta.actors.engine.output_processor import RequestSteps, RequestTracker
from manta.actors.engine.output_streams import OutputStream, OutputStreams
from manta.actors.engine.outputs import OutputLogprobs
from manta.actors.engine.uniproc_executor import make_executor
from manta.actors.http.config.settings import ServerSettings
from manta.actors.http.generation.generation_task import RequestStats
from manta.actors.http.generation.request_run import GenerationRun
from manta.actors.http.protocol.chat_completion import ChatShape
from manta.actors.system import log_setup as process_log
from manta.actors.tokenization.detokenizer import ByteLevelDetokenizer, IncrementalDetokenizer
from manta.actors.tokenization.generation_config import GenerationDefaults
from manta.cluster.config import EngineConfig
from manta.cluster.engine.engine_core import EngineCore
from manta.cluster.errors import OutputProcessingError
from manta.cluster.step.scheduler_output import StepResult
from support.checkpoints.chat_pairs import HERMES, chat_config, tool
from support.checkpoints.text_pair import LiveServer
from support.engines.passing_executor import PassingExecutor
from support.engines.pausable_executor import PausableExecutors
from support.servers.server_probes import events, idle
from support.waiting import wait_until

NUM_REQUESTS = 8
STREAMED = POISONED = 3  # requests with odd numbers are streams
WHOLE = 4
MARK = "#poison#"
TOOLS = [tool("now", zone={"type": "string"})]


class Panic(BaseException):
    """Imitates `pyo3_runtime.PanicException`, which is no Exception."""


# Where things are made of tokens: on the event loop for all requests, and in each reader's own task.
DELIVERY = [
    (IncrementalDetokenizer, "step", KeyError),
    (IncrementalDetokenizer, "step", Panic),
    (ByteLevelDetokenizer, "flush", OverflowError),
    (processing._Text, "_find_stop", RecursionError),
    (processing._Text, "take", IndexError),
    (OutputLogprobs, "extend", TypeError),
    (RequestSteps, "feed", ZeroDivisionError),
    (RequestTracker, "output", MemoryError),
    (OutputStream, "add", ValueError),
]
READERS = [
    (RequestStats, "feed", KeyError),
    (GenerationRun, "_visible", AttributeError),
    (AnswerParser, "feed", RecursionError),
    (Splitter, "feed", Panic),
    (AnswerParserFactory, "parse_complete", ValueError),
    (ChatShape, "chunks", TypeError),
    (ChatShape, "full_choice", TypeError),
    (ChatShape, "logprobs", IndexError),
]
ONLY = {"chunks": {STREAMED}, "parse_complete": {WHOLE}, "full_choice": {WHOLE}}


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> EngineConfig:
    return chat_config(tmp_path_factory.mktemp("pair"), HERMES)


@pytest.fixture(scope="module")
def server(config: EngineConfig) -> Iterator[LiveServer]:
    with LiveServer(config, ServerSettings()) as server:
        yield server


def poison(monkeypatch: pytest.MonkeyPatch, owner: type, name: str, error: type[BaseException]) -> None:
    """Let a stage raise for requests with POISON in their prompt or id."""
    fed: list[bool] = []

    def feed(tracker: RequestTracker, *args: Any) -> Any:
        fed.append(MARK in (tracker.prompt or ""))
        try:
            return original_feed(tracker, *args)
        finally:
            fed.pop()

    def raise_or_go_on(self: Any, *args: Any, **options: Any) -> Any:
        tracker = self if isinstance(self, RequestTracker) else getattr(self, "tracker", None)
        is_marked = tracker is not None and MARK in (tracker.prompt or "")
        if is_marked or any(fed) or (not fed and process_log.current_request_id.get() == "poisoned"):
            raise error("injected")
        return original(self, *args, **options)

    original_feed, original = RequestTracker.feed, getattr(owner, name)
    monkeypatch.setattr(RequestTracker, "feed", feed)
    monkeypatch.setattr(owner, name, raise_or_go_on)


@pytest.fixture(scope="module")
def http(server: LiveServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=600) as http:
        yield http


def ask(http: httpx.Client, index: int, *, poisoned: bool = False) -> tuple[int, Any]:
    """Return the status and the answer, or its error."""
    text = f"Say {index}." + (MARK if poisoned else "")
    body: dict[str, Any] = {
        "messages": [{"role": "user", "content": text}],
        "tools": TOOLS,
        "temperature": 1.0,
        "seed": index,
        "max_tokens": 6,
        "ignore_eos": True,
        "logprobs": True,
        "top_logprobs": 2,
        "stop": ["\u2603\u2603"],
        "stream": index % 2 == 1,
    }
    headers = {"X-Request-Id": "poisoned" if poisoned else f"healthy-{index}"}
    with http.stream("POST", "/v1/chat/completions", json=body, headers=headers) as response:
        if response.status_code != 200 or not body["stream"]:
            found = json.loads(response.read())
            return response.status_code, found.get("error") or found["choices"]
        found = events(response)
    if "error" in found[-1]:
        return 200, found[-1]["error"]
    return 200, [choice for chunk in found for choice in chunk["choices"]]


def round_of(http: httpx.Client, *poisoned: int) -> list[tuple[int, Any]]:
    with ThreadPoolExecutor(NUM_REQUESTS) as pool:
        return list(pool.map(lambda i: ask(http, i, poisoned=i in poisoned), range(NUM_REQUESTS)))


@pytest.fixture(scope="module")
def undisturbed(http: httpx.Client) -> list[tuple[int, Any]]:
    found = round_of(http)
    assert all(status == 200 for status, _ in found)
    return found


@pytest.mark.parametrize(
    ("owner", "name", "error"), [*DELIVERY, *READERS], ids=lambda value: getattr(value, "__name__", value)
)
def test_a_stage_that_raises_ends_only_its_requests(
    server: LiveServer,
    http: httpx.Client,
    undisturbed: list[tuple[int, Any]],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    owner: type,
    name: str,
    error: type[BaseException],
) -> None:
    """A stream and a complete answer fail; either has stages of its own."""
    fail = ONLY.get(name, {STREAMED, WHOLE})
    with monkeypatch.context() as patch, caplog.at_level(logging.ERROR):
        poison(patch, owner, name, error)
        found = round_of(http, *fail)
    for index, (status, answer) in enumerate(found):
        if index not in fail:
            assert (status, answer) == undisturbed[index]
            continue
        assert answer["code"] == 500 and answer["message"] == "Internal server error."
        assert status == 500 or index == STREAMED
    causes = [record for record in caplog.records if record.exc_info and error is record.exc_info[0]]
    assert len(causes) == len(fail) and all("poisoned" in cause.getMessage() for cause in causes)
    wait_until(lambda: idle(server))
    assert http.get("/health").status_code == 200
    assert ask(http, 0) == undisturbed[0]


def test_a_failed_completion_ends_the_others_of_its_request(
    server: LiveServer, http: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = {"prompt": MARK, "n": 3, "max_tokens": 400, "ignore_eos": True, "stop": "\u2603\u2603\u2603"}
    with monkeypatch.context() as patch:
        poison(patch, processing._Text, "_find_stop", KeyError)
        assert http.post("/v1/completions", json=body).status_code == 500
        wait_until(lambda: idle(server))


def test_an_engine_that_delivers_nothing_is_unhealthy(
    config: EngineConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    executors = PausableExecutors()
    server = LiveServer(config, make=executors.make)
    with server, httpx.Client(base_url=server.url, timeout=600) as http:
        body = {"prompt": "x", "max_tokens": 400, "ignore_eos": True}
        assert http.post("/v1/completions", json=body | {"max_tokens": 4}).status_code == 200
        monkeypatch.setattr(engine_module, "CHECK_INTERVAL_S", 0.02)
        monkeypatch.setattr(engine_module, "DELIVERY_TIMEOUT_S", 0.1)
        monkeypatch.setattr(OutputStreams, "_deliver_slice", lambda streams: None)
        with executors[0].paused_after(5):  # the answer is not complete when the engine is found dead
            assert http.post("/v1/completions", json=body).status_code == 503
            assert http.get("/health").status_code == 503


class PanickingExecutor(PassingExecutor):
    def collect(self) -> StepResult:
        super().collect()
        raise Panic("injected")


def test_a_panic_on_the_engines_thread_ends_all_requests_instead_of_none(config: EngineConfig) -> None:
    with (
        LiveServer(config, make=lambda config: PanickingExecutor(make_executor(config))) as server,
        httpx.Client(base_url=server.url, timeout=600) as http,
    ):
        assert http.post("/v1/completions", json={"prompt": "x"}).status_code == 503
        assert http.get("/health").status_code == 503


def test_delivery_continues_after_an_unguarded_error(
    http: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A leftover queue does not count as a delivery in progress."""
    failures: list[BaseException] = []
    hand_out = OutputStreams._deliver_update

    def fail_once(streams: OutputStreams, update: Any) -> None:
        if not failures:
            failures.append(KeyError("injected"))
            streams._updates.appendleft(update)
            raise failures[0]
        hand_out(streams, update)

    with monkeypatch.context() as patch:
        patch.setattr(OutputStreams, "_deliver_update", fail_once)
        response = http.post("/v1/completions", json={"prompt": "x", "max_tokens": 4, "ignore_eos": True})
    assert response.json()["usage"]["completion_tokens"] == 4 and failures


def test_a_row_whose_answer_fails_is_an_error_row(
    config: EngineConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout = RowSchema(defaults={"max_tokens": 6, "temperature": 0.0, "ignore_eos": True})
    rows = [Row(i, {"prompt": f"row {i}" + MARK * (i == POISONED)}) for i in range(NUM_REQUESTS)]

    async def answered() -> list[dict[str, Any]]:
        engine = AsyncEngine(config)
        await engine.start()
        try:
            answerer = RowAnswerer(engine, layout, GenerationDefaults(), "m")
            first = await asyncio.gather(*map(answerer.answer, rows))
            poison(monkeypatch, IncrementalDetokenizer, "step", Panic)
            again = await asyncio.gather(*map(answerer.answer, rows))
            engine.check_health()
            while engine.stats().running:
                await asyncio.sleep(0.01)
            return [*first, *again]
        finally:
            engine.close()

    found = asyncio.run(answered())
    texts = [row.get("text") for row in found]
    assert texts[NUM_REQUESTS:] == [None if i == POISONED else text for i, text in enumerate(texts[:8])]
    bad = found[NUM_REQUESTS + POISONED]
    assert bad["error"]["type"] == "InternalServerError" and "Panic" in bad["error"]["message"]
    assert MARK in bad["input"]


def test_offline_generation_reports_the_failed_request(
    config: EngineConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    with LLM(config.model, dtype="float32", num_pages=256, num_threads=1) as llm:
        prompts = [f"prompt {i}" + MARK * (i == POISONED) for i in range(NUM_REQUESTS)]
        params = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
        before = [output.outputs[0].text for output in llm.generate(prompts, params)]
        with monkeypatch.context() as patch:
            poison(patch, IncrementalDetokenizer, "step", KeyError)
            after = llm.generate(prompts, params)
            with pytest.raises(OutputProcessingError, match="KeyError"):
                list(llm.stream(prompts[POISONED], params))
        assert [o.outputs[0].finish_reason for o in after].count("error") == 1
        assert after[POISONED].outputs[0].finish_reason == "error"
        others = [i for i in range(NUM_REQUESTS) if i != POISONED]
        assert [after[i].outputs[0].text for i in others] == [before[i] for i in others]
        assert [output.outputs[0].text for output in llm.generate(prompts, params)] == before
        assert llm.stats().running == 0


def test_a_request_that_fails_the_engines_checks_ends_alone(
    http: httpx.Client, undisturbed: list[tuple[int, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    add_requests: Callable[..., None] = EngineCore.add_requests

    def checked(engine: EngineCore, requests: Any) -> None:
        if requests[0].params.max_tokens == 11:
            raise KeyError("injected")
        add_requests(engine, requests)

    with monkeypatch.context() as patch:
        patch.setattr(EngineCore, "add_requests", checked)
        assert http.post("/v1/completions", json={"prompt": "x", "max_tokens": 11}).status_code == 500
        assert ask(http, 0) == undisturbed[0]
        assert http.get("/health").status_code == 200
