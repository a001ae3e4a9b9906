"""Records of requests on one server: spans, JSON logs, timelines, and the audit."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import math
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx
import pytest
from manta.actors.engine.lossless_audit import MAX_WAITING, AuditedAnswer, LosslessAudit
from manta.actors.engine.uniproc_executor import make_executor
from manta.actors.http.config.settings import ServerSettings
from manta.actors.http.generation import tracing
from manta.actors.http.generation.tracing import Tracing
from manta.actors.replica import run_first_request
from manta.actors.system.log_setup import JsonFormatter, current_request_id
from manta.actors.tokenization.prompts import EncodedPrompt
from manta.cluster.config import EngineConfig
from manta.cluster.errors import ConfigError
from manta.cluster.records.acceptance_slices import BlockGroup
from manta.cluster.request.request import SamplingParams
from manta.cluster.step.scheduler_output import SchedulerOutput, StepResult
from manta.jobs.cli import app
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.semconv._incubating.attributes import gen_ai_attributes
from support.checkpoints.text_pair import LiveServer
from support.engines.pausable_executor import PausableExecutor
from support.servers.server_probes import Serve
from support.waiting import wait_until
from typer.testing import CliRunner

NAME = "tiny"
BODY: dict[str, Any] = {"model": NAME, "max_tokens": 24, "temperature": 0.8, "ignore_eos": True}
TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


class Collector:
    """A real receiver of OTLP over HTTP that keeps what it gets."""

    def __init__(self) -> None:
        spans: list[Any] = []
        resources: list[dict[str, Any]] = []

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                reported = ExportTraceServiceRequest.FromString(body)
                for each in reported.resource_spans if self.path == "/v1/traces" else ():
                    resources.append(values(each.resource.attributes))
                    spans.extend(span for scope in each.scope_spans for span in scope.spans)
                self.send_response(200)
                self.send_header("content-type", "application/x-protobuf")
                self.end_headers()

            def log_message(self, *_: object) -> None: ...

        self.spans, self.resources = spans, resources
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()


def values(attributes: Any) -> dict[str, Any]:
    """OTLP's attributes as plain values."""

    def plain(value: Any) -> Any:
        kind = value.WhichOneof("value")
        found = getattr(value, kind)
        return [plain(each) for each in found.values] if kind == "array_value" else found

    return {each.key: plain(each.value) for each in attributes}


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    found = Collector()
    yield found
    found.server.shutdown()
    found.server.server_close()


class WrongExecutor(PausableExecutor):
    """A real executor that can be made to accept a wrong draft; a pause holds back steps without drafts."""

    lies = False

    def submit(self, plan: SchedulerOutput) -> None:
        self._drafts = bool(plan.num_drafts.any())
        if self._drafts:
            self._inner.submit(plan)
        else:
            super().submit(plan)

    def collect(self) -> StepResult:
        result = super().collect()
        if self.lies and self._drafts:
            result.token_ids[result.num_tokens > 0, 0] ^= 1
        return result


@pytest.fixture(scope="module")
def executors() -> list[WrongExecutor]:
    return []


@pytest.fixture
def executor(server: LiveServer, executors: list[WrongExecutor]) -> WrongExecutor:
    return executors[-1]


@pytest.fixture(scope="module")
def server(
    serve: Serve,
    collector: Collector,
    executors: list[WrongExecutor],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[LiveServer]:
    def make(config: EngineConfig) -> WrongExecutor:
        executors.append(WrongExecutor(make_executor(config)))
        return executors[-1]

    settings = {
        "otlp_traces_endpoint": collector.url,
        "lossless_audit": 1.0,
        "admin_api_key": "root",
        "batch_storage": str(tmp_path_factory.mktemp("batches")),
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")  # milliseconds
        with serve(make, **settings) as server:
            yield server


@pytest.fixture
def log() -> Iterator[io.StringIO]:
    """The lines that a replica would write with --log-format json."""
    ours, reported = logging.getLogger("manta"), io.StringIO()
    handler = logging.StreamHandler(reported)
    handler.setFormatter(JsonFormatter({"process": "replica", "replica": "r1", "engine": NAME}))
    level = ours.level
    ours.addHandler(handler)
    ours.setLevel(logging.INFO)
    yield reported
    ours.removeHandler(handler)
    ours.setLevel(level)


def audits(http: httpx.Client) -> dict[str, float]:
    lines = http.get("/metrics", headers={"Authorization": "Bearer root"}).text.splitlines()
    found = [line for line in lines if line.startswith("dflash:lossless_audit_total")]
    return {line.split('result="')[1].split('"')[0]: float(line.split()[-1]) for line in found}


def flushed(server: LiveServer, collector: Collector, request_id: str) -> dict[str, Any]:
    """Return the spans of a request by name, as they arrive at the collector."""

    def mine() -> list[Any]:
        return [s for s in collector.spans if values(s.attributes).get("manta.request_id") == request_id]

    wait_until(lambda: bool(mine()))
    (root,) = mine()
    children = {s.name: s for s in collector.spans if s.parent_span_id == root.span_id}
    return {"root": root, **children}


def test_a_request_is_a_span_with_queue_prefill_and_decode(
    server: LiveServer, http: httpx.Client, collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    headers = {"traceparent": f"00-{TRACE}-{PARENT}-01", "X-Request-Id": "traced-1"}
    body = {**BODY, "messages": [{"role": "user", "content": "a secret"}], "seed": 3, "top_k": 5}
    answer = http.post("/v1/chat/completions", json=body, headers=headers).json()
    spans = flushed(server, collector, "traced-1")
    root = spans["root"]
    reported, spec = values(root.attributes), answer["metrics"]["speculative_decoding"]
    assert root.name == f"chat {NAME}" and root.kind == root.SPAN_KIND_SERVER
    assert (root.trace_id.hex(), root.parent_span_id.hex()) == (TRACE, PARENT)
    assert reported["gen_ai.usage.output_tokens"] == 24 == answer["usage"]["completion_tokens"]
    assert reported["gen_ai.usage.input_tokens"] == answer["usage"]["prompt_tokens"]
    assert reported["gen_ai.response.id"] == answer["id"] and reported["gen_ai.response.finish_reasons"] == [
        "length"
    ]
    assert (reported["gen_ai.request.seed"], reported["gen_ai.request.top_k"]) == (3, 5)
    assert reported["speculation.verify_steps"] == spec["num_spec_steps"] > 0
    assert reported["speculation.accepted_tokens"] == spec["num_accepted_draft_tokens"]
    assert reported["speculation.drafted_tokens"] == spec["num_draft_tokens"]
    assert abs(reported["speculation.mean_acceptance_length"] - spec["mean_acceptance_length"]) < 1e-3
    assert reported["speculation.drafter"] == server.engine.drafter and "secret" not in str(root)
    queue, prefill, decode = (spans[name] for name in ("queue", "prefill", "decode"))
    ends = [root.start_time_unix_nano, queue.end_time_unix_nano, prefill.end_time_unix_nano]
    assert ends == sorted(ends)
    assert [s.start_time_unix_nano for s in (queue, prefill, decode)] == ends
    assert decode.end_time_unix_nano == root.end_time_unix_nano
    assert collector.resources[0]["service.name"] == "manta"


def test_span_names_follow_the_conventions(
    server: LiveServer, http: httpx.Client, collector: Collector
) -> None:
    body = {**BODY, "prompt": "x", "presence_penalty": 0.1, "frequency_penalty": 0.1, "n": 2}
    http.post("/v1/completions", json=body, headers={"X-Request-Id": "traced-2"})
    reported = values(flushed(server, collector, "traced-2")["root"].attributes)
    known = {value for name, value in vars(gen_ai_attributes).items() if name.startswith("GEN_AI_")}
    newer = {"gen_ai.response.time_to_first_chunk", "gen_ai.usage.cache_read.input_tokens"}
    assert (
        reported["gen_ai.operation.name"] == "text_completion"
        and reported["gen_ai.request.choice.count"] == 2
    )
    assert {name for name in reported if name.startswith("gen_ai.")} <= known | newer


def test_a_refused_request_is_a_span_with_its_status_and_reason(
    server: LiveServer, http: httpx.Client, collector: Collector
) -> None:
    headers = {"traceparent": f"00-{TRACE}-{PARENT}-01", "X-Request-Id": "traced-3"}
    refused = http.post("/v1/completions", json={**BODY, "prompt": "x", "top_k": "secret"}, headers=headers)
    spans = flushed(server, collector, "traced-3")
    root = spans.pop("root")
    reported = values(root.attributes)
    assert refused.status_code == 400 and not spans, "no engine had it"
    assert root.name == "POST /v1/completions" and root.kind == root.SPAN_KIND_SERVER
    assert (root.trace_id.hex(), root.parent_span_id.hex()) == (TRACE, PARENT)
    assert reported["http.response.status_code"] == 400 and reported["error.type"] == "400"
    assert reported["manta.refusal.param"] == "top_k" and "secret" not in str(root)
    assert root.end_time_unix_nano > root.start_time_unix_nano


def test_an_invalid_collector_is_refused_and_a_missing_extra_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(ConfigError, match="otlp_traces_endpoint") as caught:
        ServerSettings(otlp_traces_endpoint="collector:4317")
    assert "http://" in caught.value.message
    for name in ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"):
        monkeypatch.delenv(name, raising=False)
    assert tracing.open_tracing(ServerSettings(), "r") is None
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
    found = tracing.open_tracing(ServerSettings(), "r")
    assert isinstance(found, Tracing)
    found.close()
    monkeypatch.setattr(tracing, "_EXPORTER", "opentelemetry.not_there.exporter")
    with pytest.raises(ConfigError, match=r"pip install opentelemetry-sdk"):
        tracing.check_tracing(ServerSettings(otlp_traces_endpoint="http://127.0.0.1:9"))
    assert tracing.open_tracing(ServerSettings(), "r") is None, "the environment may mean others"


def test_json_log_lines_name_the_request_and_the_process(http: httpx.Client, log: io.StringIO) -> None:
    answer = http.post(
        "/v1/completions", json={**BODY, "prompt": "a secret", "request_id": "logged-1"}
    ).json()
    http.post(
        "/v1/completions", json={**BODY, "prompt": "", "stream": True}, headers={"X-Request-Id": "bad-1"}
    )
    wait_until(lambda: "bad-1" in log.getvalue() and '"id":' in log.getvalue())
    lines = [json.loads(line) for line in log.getvalue().splitlines()]
    (served,) = [line for line in lines if line.get("id") == answer["id"]]
    (refused,) = [line for line in lines if line.get("request_id") == "bad-1"]
    for line, event in ((served, "request"), (refused, "refusal")):
        assert (line["event"], line["level"], line["process"], line["engine"]) == (
            event,
            "INFO",
            "replica",
            NAME,
        )
        assert line["time"].endswith("+00:00")
    assert served["request_id"] == "logged-1" and served["output_tokens"] == 24
    assert refused["status"] == 400 and refused["param"] == "prompt" and "secret" not in log.getvalue()


def test_later_log_lines_do_not_name_the_first_request(log: io.StringIO) -> None:
    async def answer(scope: Any, receive: Any, send: Any) -> None:
        current_request_id.set("ready-check")
        logging.getLogger("manta.test").info("within")
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"data: [DONE]"})

    async def replica() -> None:
        await run_first_request(answer, 1)
        logging.getLogger("manta.test").info("after")

    asyncio.run(replica())
    within, after = [json.loads(line) for line in log.getvalue().splitlines()]
    assert within["request_id"] == "ready-check" and "request_id" not in after


def explained(*arguments: str, url: str | None = None) -> Any:
    where = ["--url", url, "--api-key", "root"] if url is not None else []
    return CliRunner().invoke(app, ["logs", "explain", *arguments, *where])


def test_a_request_is_explained_by_either_of_its_ids(server: LiveServer, http: httpx.Client) -> None:
    body = {**BODY, "prompt": list(range(60, 160)), "temperature": 0}
    http.post("/v1/completions", json=body)
    answer = http.post("/v1/completions", json=body, headers={"X-Request-Id": "lived-1"}).json()
    wait_until(lambda: server.engine.stats().running == 0)  # the audit of it
    result = explained(answer["id"], url=server.url)
    assert result.exit_code == 0, result.output
    spec = answer["metrics"]["speculative_decoding"]
    assert "100 prompt tokens, at most 24 output tokens" in result.output
    assert (
        "96 tokens were in the prefix cache" in result.output and "ended (length): 24 tokens" in result.output
    )
    accepted = f"{spec['num_accepted_draft_tokens']} of {spec['num_draft_tokens']} verified drafts accepted"
    assert accepted in result.output
    assert result.output.count("\n") == 4 + len([s for s in result.output.splitlines() if "alone" in s])
    lives = [json.loads(line) for line in explained("lived-1", "--json", url=server.url).output.splitlines()]
    life = next(each for each in lives if each["id"] == answer["id"])
    steps = [step for stay in life["stays"] for step in stay["steps"]]
    assert [s["accepted"] for s in steps if s["kind"] == "verify"] and sum(s["tokens"] for s in steps) == 24
    stranger = explained("nobody", url=server.url)
    assert stranger.exit_code != 0
    assert (
        http.get("/explain", params={"id": "nobody"}, headers={"Authorization": "Bearer root"}).status_code
        == 404
    )
    assert http.get("/explain", params={"id": "lived-1"}).status_code == 401


def test_a_server_reports_acceptance_by_slice_of_its_requests(
    server: LiveServer, http: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    headers = {"Authorization": "Bearer root"}
    for temperature in (0, 0.5):
        for prompt in ("a", "b", "c"):
            body = {**BODY, "prompt": prompt * 40, "temperature": temperature}
            http.post("/v1/completions", json=body)
    (report,) = http.get("/explain", headers=headers).json()["data"]
    slices = {(each["dimension"], each["value"]): each for each in report["slices"]}
    assert {
        ("temperature", "0"),
        ("temperature", "0.5"),
        ("grammar", "no"),
        ("context", "256"),
    } <= slices.keys()
    assert report["object"] == "acceptance" and slices["temperature", "0.5"]["requests"] >= 3
    drafted = [each for each in slices.values() if each["dimension"] == "context"]
    assert sum(each["blocks"] for each in drafted) == report["blocks"]
    said = explained(url=server.url)
    assert said.exit_code == 0 and "tokens per block over" in said.output and "temperature" in said.output
    assert json.loads(explained("--json", url=server.url).output)["slices"]
    assert http.get("/explain").status_code == 401
    groups = [
        BlockGroup(f"{value}-{i}", {"temperature": value}, {(7, accepted + i % 2): 25})
        for value, accepted in (("0", 5), ("1", 1))
        for i in range(4)
    ]
    monkeypatch.setattr(server.engine, "block_groups", lambda is_visible: groups)
    (report,) = http.get("/explain", headers=headers).json()["data"]
    (cause,) = report["causes"]
    assert cause["cause"] == "temperature" and cause["evidence"].startswith("temperature 1: ")
    assert "\n1. temperature: 100% of the lost tokens\n" in explained(url=server.url).output


def test_finished_answers_are_audited_and_equal(server: LiveServer, http: httpx.Client) -> None:
    before = audits(http)
    drafted = server.engine.stats().num_draft_tokens
    stop = http.post("/v1/completions", json={**BODY, "prompt": "q", "seed": 5}).json()["choices"][0]["text"][
        5:7
    ]
    for extra in ({"stop": [stop], "seed": 5, "prompt": "q"}, {"prompt": "y", "logprobs": 2, "stream": True}):
        assert http.post("/v1/completions", json={**BODY, **extra}).status_code == 200
    drafted_by_us = server.engine.stats().num_draft_tokens
    wait_until(lambda: audits(http)["match"] >= before["match"] + 3)  # and those of earlier tests
    assert audits(http)["mismatch"] == before["mismatch"] and drafted_by_us > drafted
    assert server.engine.stats().num_draft_tokens == drafted_by_us, "nothing is drafted for an audit"


def test_a_differing_answer_is_named_with_its_token(
    http: httpx.Client, server: LiveServer, executor: WrongExecutor, log: io.StringIO
) -> None:
    wait_until(lambda: server.engine.stats().running == 0)
    before = audits(http)
    executor.lies = True
    try:
        http.post("/v1/completions", json={**BODY, "prompt": "z"}, headers={"X-Request-Id": "wrong-1"})
    finally:
        executor.lies = False
    wait_until(lambda: audits(http)["mismatch"] == before["mismatch"] + 1)
    lines = [json.loads(line) for line in log.getvalue().splitlines()]
    (warning,) = [line for line in lines if line["level"] == "WARNING"]
    assert warning["request_id"] == "wrong-1" and "from token 1 of 24 on" in warning["message"]


def test_an_online_request_interrupts_an_audit_which_resumes(
    server: LiveServer, http: httpx.Client, executor: WrongExecutor
) -> None:
    wait_until(lambda: server.engine.stats().running == 0)
    before, headers = audits(http), {"Authorization": "Bearer root"}
    executor.allow_steps(16)
    http.post(
        "/v1/completions",
        json={**BODY, "prompt": "long", "max_tokens": 250},
        headers={"X-Request-Id": "long-1"},
    )

    def audited() -> list[dict[str, Any]]:
        lives = http.get("/explain", params={"id": "long-1"}, headers=headers).json()["data"]
        return [life for life in lives if life["background"]]

    def has_begun() -> bool:
        executor.allow_steps(4)  # of more than 200
        return any(len(stay["steps"]) > 3 for life in audited() for stay in life["stays"])

    with ThreadPoolExecutor(1) as pool:
        wait_until(has_begun)
        online = pool.submit(http.post, "/v1/completions", json={**BODY, "prompt": "now", "max_tokens": 4})
        wait_until(lambda: http.get("/load", headers=headers).json()["server_load"] > 0)
        executor.step_until(online.done)
        executor.allow_steps(math.inf)
        assert online.result().status_code == 200
    wait_until(lambda: audits(http)["match"] >= before["match"] + 2)
    *broken_off, last = audited()
    assert broken_off and {life["finish_reason"] for life in broken_off} == {"abort"}
    assert last["finish_reason"] == "length" and last["begun_tokens"] > 0


def test_answers_beyond_the_audit_queue_are_skipped() -> None:
    counted: list[str] = []
    audit = LosslessAudit(None, 1.0, counted.append)  # type: ignore[arg-type]  # nothing is computed
    for i in range(MAX_WAITING + 2):
        audit.submit(AuditedAnswer(str(i), str(i), EncodedPrompt((1,)), SamplingParams(seed=1), [1]))
    assert counted == ["skipped"] * 2
    assert ServerSettings().lossless_audit == 0.0
    with pytest.raises(ConfigError, match="lossless_audit"):
        ServerSettings(lossless_audit=1.5)
