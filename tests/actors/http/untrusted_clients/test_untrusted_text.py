"""Client text reaches no log, metric or error beyond a bounded, escaped name, in any field.

The fields are those of the server's own OpenAPI document, so that a new field or route is tried by itself.
"""

from __future__ import annotations

import io
import json
import logging
import re
import socket
from collections.abc import Iterator
from typing import Any
from urllib.parse import quote, unquote

import httpx
import pytest
from manta.actors.batch.dataset.storage import Storage
from manta.actors.http.config.settings import ServerSettings
from manta.actors.http.openai import tokenization
from manta.actors.system.log_setup import MAX_RECORD, JsonFormatter, TextFormatter
from manta.cluster.config import EngineConfig
from manta.cluster.errors import (
    MAX_MESSAGE,
    MAX_NAME,
    ConfigError,
    RequestError,
    brief,
    brief_name,
    brief_url,
)
from manta.jobs.batch.options import BatchOptions
from support.checkpoints.text_pair import LiveServer
from support.servers.server_probes import Serve
from support.waiting import WAIT_S, wait_until

CORE = "zqMARKqz"
# It would end a line of a log, forge the next one, and color a terminal.
MARK = f"{CORE}\n2026-01-01 INFO manta: forged {CORE}\r\x1b[31m\x9b1m\u202e\u2028\x00" + CORE * 300
MAX_BODY_BYTES = 4 * MAX_MESSAGE
MAX_LINE = 2000
MAX_DEPTH = 5  # of objects in objects
USER = [{"role": "user", "content": "x"}]
# Bodies that are answered; a route that is not here is tried with what its schema needs.
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "x", "max_tokens": 1},
    "/v1/chat/completions": {"messages": USER, "max_tokens": 1},
    "/v1/responses": {"input": "x", "max_output_tokens": 1},
    "/v1/messages": {"messages": USER, "max_tokens": 1},
    "/v1/messages/count_tokens": {"messages": USER},
    "/v1/batches": {"input_file_id": "file-0", "endpoint": "/v1/completions"},
    "/tokenize": {"prompt": "x"},
    "/detokenize": {"tokens": [1]},
}
HEADERS = (
    *("x-request-id", "x-tenant", "x-category", "authorization", "x-api-key", "traceparent", "tracestate"),
    *("x-manta-origin", "x-manta-token", "x-manta-told", "user-agent", "cookie", "accept", "cache-control"),
    *("anthropic-version", "content-encoding", "origin", "host", "x-zqmarkqz"),
)
Json = dict[str, Any]  # Any: JSON


class Log:
    """Everything that this process logs, in both formats."""

    def __init__(self) -> None:
        self.text, self.json = io.StringIO(), io.StringIO()
        self.handlers = [logging.StreamHandler(self.text), logging.StreamHandler(self.json)]
        self.handlers[0].setFormatter(TextFormatter())
        self.handlers[1].setFormatter(JsonFormatter({}))

    def clear(self) -> None:
        for each in (self.text, self.json):
            each.seek(0)
            each.truncate()


@pytest.fixture(scope="module")
def log() -> Iterator[Log]:
    log, loggers = Log(), [logging.getLogger(name) for name in ("", "manta")]
    levels = [each.level for each in loggers]
    ours = loggers[1].handlers, loggers[1].propagate
    loggers[1].handlers, loggers[1].propagate = [], True
    quiet = [logging.getLogger(name) for name in ("httpx", "uvicorn.access")]  # a client's; off under Serve
    for each in quiet:
        each.disabled = True
    for each in loggers:
        each.setLevel(logging.INFO)
    for handler in log.handlers:
        loggers[0].addHandler(handler)
    yield log
    for handler in log.handlers:
        loggers[0].removeHandler(handler)
    for each in quiet:
        each.disabled = False
    for each, level in zip(loggers, levels, strict=True):
        each.setLevel(level)
    loggers[1].handlers, loggers[1].propagate = ours


@pytest.fixture(scope="module")
def server(serve: Serve, log: Log, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    storage = str(tmp_path_factory.mktemp("batches"))
    with serve(speculative_config=None, trust_request_chat_template=True, batch_storage=storage) as server:
        yield server


@pytest.fixture(scope="module")
def document(http: httpx.Client) -> Json:
    return http.get("/openapi.json").json()


def check_log(log: Log) -> None:
    """Check that both logs contain no part of the marker, except a bounded field's path."""
    text, objects = log.text.getvalue(), log.json.getvalue()
    log.clear()
    for line in text.split("\n"):
        assert line.isprintable() and len(line) <= MAX_LINE and not line.startswith(("2026-01-01", CORE))
    for line in objects.splitlines():
        reported = json.loads(line)
        assert len(reported.pop("param", None) or "") <= MAX_NAME
        assert CORE not in json.dumps(reported), json.dumps(reported)[:800]


def check_answer(response: httpx.Response, what: object) -> None:
    assert response.status_code != 500, what
    if response.status_code >= 400:
        assert len(response.content) <= MAX_BODY_BYTES, what
        assert "\x1b" not in response.text and "\x9b" not in json.dumps(response.json(), ensure_ascii=False)


class Schemas:
    def __init__(self, document: Json) -> None:
        self._named = document["components"]["schemas"]

    def least(self, schema: Json, depth: int = 0) -> Any:
        schema = self._resolved(schema)
        if "const" in schema or "enum" in schema:
            return schema.get("const", next(iter(schema.get("enum", [None]))))
        match schema.get("type"):
            case "object":
                needed = schema.get("required", ())
                return {name: self.least(schema["properties"][name], depth + 1) for name in needed}
            case "array":
                return [self.least(schema.get("items", {}), depth + 1)] if depth < MAX_DEPTH else []
            case "string":
                return "x"
            case "integer" | "number":
                return 1
            case "boolean":
                return True
            case _:
                return None

    def marked(self, schema: Json, depth: int = 0) -> Iterator[Any]:
        """The marker itself and as a name; then the same in each place below."""
        yield from (MARK, {MARK: MARK}) if depth < 1 else (MARK,)
        for each in self._branches(schema):
            if depth == MAX_DEPTH:
                continue
            for name, inner in each.get("properties", {}).items():
                for value in self.marked(inner, depth + 1):
                    yield {**self.least(each), name: value}
            if each.get("type") == "array":
                yield from ([value] for value in self.marked(each.get("items", {}), depth + 1))

    def fields(self, schema: Json) -> Iterator[tuple[str, Any]]:
        for name, inner in self._resolved(schema)["properties"].items():
            yield from ((name, value) for value in self.marked(inner))
        yield MARK, 1

    def _resolved(self, schema: Json) -> Json:
        while "$ref" in schema or "anyOf" in schema or "oneOf" in schema:
            schema = self._branches(schema)[0]
        return schema

    def _branches(self, schema: Json) -> list[Json]:
        if "$ref" in schema:
            return self._branches(self._named[schema["$ref"].rpartition("/")[2]])
        found = [each for kind in ("anyOf", "oneOf", "allOf") for each in schema.get(kind, ())]
        return [branch for each in found for branch in self._branches(each)] or [schema]


def operations(document: Json) -> Iterator[tuple[str, str, Json]]:
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            yield method.upper(), path, operation


def test_no_field_of_a_body_reaches_the_log_the_metrics_or_a_long_error(
    http: httpx.Client, document: Json, log: Log
) -> None:
    schemas, num_fields = Schemas(document), 0
    for method, path, operation in operations(document):
        if "requestBody" not in operation:
            continue
        schema = operation["requestBody"]["content"]["application/json"]["schema"]
        base = BODIES.get(path) or schemas.least(schema)
        for name, value in schemas.fields(schema):
            num_fields += 1
            response = http.request(method, path, json={**base, name: value})
            check_answer(response, (path, name, json.dumps(value)[:300]))
        check_log(log)
    assert num_fields > 250
    assert CORE not in http.get("/metrics").text


# What is looked at only where all around it is right.
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": MARK, MARK: {"$ref": MARK}}}}
TAG = {
    "type": "tag",
    "begin": MARK,
    "content": {"type": "json_schema", "json_schema": {MARK: 1}},
    "end": MARK,
}
DEEP: list[Json] = [
    *({"structured_outputs": {"json": each}} for each in (MARK, {"type": MARK}, {"$ref": MARK}, {MARK: 1})),
    *(
        {"structured_outputs": {"regex": each}}
        for each in (f"({MARK}", f"(?P<{CORE}", f"{CORE}\\p{{{CORE}}}")
    ),
    *({"structured_outputs": {"grammar": each}} for each in (MARK, f"start: {CORE}", f'root ::= "{MARK}')),
    {"structured_outputs": {"structural_tag": {"format": TAG}}},
    {"structured_outputs": {"structural_tag": {"format": {"type": MARK}}}},
    {"response_format": {"type": "structural_tag", "format": {**TAG, MARK: MARK}}},
    {"response_format": {"type": "structural_tag", "structures": [{"begin": MARK}], "triggers": [MARK]}},
    {"response_format": {"type": "json_schema", "json_schema": {"name": MARK, "schema": {"not": {MARK: 1}}}}},
    {"tools": [TOOL], "tool_choice": "required"},
    {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": MARK}}},
    {
        "messages": [
            *USER,
            {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": MARK}}]},
        ]
    },
    {"messages": [{"role": "user", "content": [{"type": MARK, "text": MARK}]}]},
    {
        "continue_final_message": True,
        "add_generation_prompt": False,
        "messages": [{"role": "user", "content": MARK}],
    },
    {"chat_template": f"{{% {CORE} %}}"},
    {"chat_template": f"{{{{ x | {CORE} }}}}"},
    *(
        {"chat_template": f"{{{{ {each} }}}}", "messages": [{"role": "user", "content": MARK}]}
        for each in ("raise_exception(messages[0].content)", "strftime_now(messages[0].content)")
    ),
    {"stop": [MARK], "metadata": {"tenant": MARK, "category": MARK}},
]


@pytest.mark.parametrize("at", range(len(DEEP)))
def test_texts_of_grammars_tools_and_templates_reach_no_log(http: httpx.Client, log: Log, at: int) -> None:
    check_answer(http.post("/v1/chat/completions", json={**BODIES["/v1/chat/completions"], **DEEP[at]}), at)
    check_log(log)


def test_no_header_path_or_query_reaches_the_log_the_metrics_or_a_long_error(
    server: LiveServer, http: httpx.Client, document: Json, log: Log
) -> None:
    path_mark = quote(MARK[:1500], safe="")
    for method, path, operation in operations(document):
        wheres = [each for each in operation.get("parameters", ()) if each["in"] == "query"]
        filled = re.sub(r"{[^}]*}", path_mark, path)
        answers = [http.request(method, filled)] if filled != path else []
        answers += [http.request(method, filled, params={each["name"]: MARK[:1500]}) for each in wheres]
        for answer in answers:
            check_answer(answer, (method, path))
            assert answer.status_code in (400, 404, 405) or filled == path, (method, path, answer.status_code)
    check_answer(http.get(f"/{path_mark}"), "path")
    for name in HEADERS:
        value = (CORE * 20).encode() + b"\x9b31m"
        check_answer(
            http.post("/v1/completions", json=BODIES["/v1/completions"], headers=[(name.encode(), value)]),
            name,
        )
    forms: list[dict[str, str]] = [{"purpose": MARK}, {"purpose": "batch", MARK: MARK}, {}]
    for form in forms:
        content = {"file": (f"{CORE * 100}\x1b.jsonl", b"{}")}
        check_answer(http.post("/v1/files", files=content, data=form), form)
    with socket.create_connection(server.address, timeout=WAIT_S) as connection:
        connection.sendall(f"{CORE} /v1/models HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode())
        assert connection.makefile("rb").readline().split()[1] in (b"400", b"405")
    assert CORE not in http.get("/metrics").text
    check_log(log)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("prefix", ["file-", "batch_", ""])
@pytest.mark.parametrize(
    "rest",
    ["a" * 300, "a" * 60_000, "%00", "a%00", "%ED%A0%80", "..", "%2e%2e%2fx", "a%0a", "%F0%9F%98%80", "²"],
)
def test_an_invalid_id_is_not_found(http: httpx.Client, prefix: str, rest: str) -> None:
    wanted = [("GET", "/v1/files/{}"), ("GET", "/v1/files/{}/content"), ("DELETE", "/v1/files/{}")]
    wanted += [("GET", "/v1/batches/{}"), ("POST", "/v1/batches/{}/cancel"), ("GET", "/v1/responses/{}")]
    for method, path in wanted:
        response = http.request(method, path.format(prefix + rest))
        assert response.status_code in (404, 405), (path, response.text[:200])
        assert len(response.content) <= MAX_BODY_BYTES
    body = {**BODIES["/v1/batches"], "input_file_id": unquote(prefix + rest)}
    assert http.post("/v1/batches", json=body).status_code == 404


def test_no_line_of_a_batch_reaches_the_log_or_a_long_list(http: httpx.Client, log: Log) -> None:
    right = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": BODIES["/v1/completions"]}
    huge = MARK * 100
    wrong = [{**right, name: huge} for name in ("custom_id", "method", "url", "body")]
    wrong += [{**right, "method": {huge: 1}}, {**right, "url": [huge]}, {**right, "body": {"model": huge}}]
    for each in (
        *wrong,
        {**right, "body": {"prompt": MARK, "max_tokens": MARK, MARK: MARK}},
        {**right, MARK: MARK},
    ):
        content = "\n".join(map(json.dumps, (each, {**right, "custom_id": "b"}))).encode()
        file = http.post("/v1/files", data={"purpose": "batch"}, files={"file": ("x.jsonl", content)}).json()
        body = {**BODIES["/v1/batches"], "input_file_id": file["id"]}
        batch = http.post("/v1/batches", json=body).json()
        path = f"/v1/batches/{batch['id']}"
        wait_until(lambda path=path: http.get(path).json()["status"] in ("failed", "completed"))
        status = http.get(path).json()["status"]
        assert status == ("failed" if each in wrong else "completed"), each.keys()
    assert len(http.get("/v1/batches").content) < 20_000
    assert CORE not in http.get("/metrics").text
    check_log(log)


def test_an_internal_failure_is_logged_on_its_own_lines(
    http: httpx.Client, log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise ValueError(MARK * 100)

    log.clear()
    monkeypatch.setattr(tokenization, "json_response", fail)
    response = http.post("/tokenize", json={"prompt": "x"})
    assert response.status_code == 500 and CORE not in response.text
    text = log.text.getvalue()
    assert "ValueError" in text and len(text) < 2 * MAX_RECORD
    assert all(line.isprintable() and not line.startswith("2026-01-01") for line in text.split("\n"))
    log.clear()


def test_foreign_text_is_bounded_and_on_one_line() -> None:
    error = RequestError(f"{MARK * 1000} is wrong", param=MARK)
    assert len(error.message) <= MAX_MESSAGE and len(error.param or "") <= MAX_NAME
    for text in (
        brief(MARK),
        brief([MARK]),
        brief({MARK: MARK}),
        brief_name(MARK),
        str(error),
        error.param or "",
    ):
        assert text.replace("\n", "").isprintable() and "\x1b" not in text
    assert len(brief(MARK)) < 150 and json.loads(brief("\x7f\u202e\n\ud800")) == "\x7f\u202e\n\ud800"


@pytest.mark.parametrize(
    ("url", "wanted"),
    [
        ("s3://key:secret@bucket/x?endpoint_override=http://h:1", "s3://key@bucket/x"),
        ("s3://key:sec/ret@b@bucket/x", "s3://key@bucket/x"),
        ("s3:/key:secret@bucket/x", "s3://key@bucket/x"),
        ("https://user:secret@host:4318/v1?token=secret#secret", "https://user@host:4318/v1"),
        (
            "abfs://container@account.dfs.core.windows.net/x",
            "abfs://container@account.dfs.core.windows.net/x",
        ),
        ("hf://datasets/someone/some@main/data", "hf://datasets/someone/some@main/data"),
        ("/data/a?b@c", "/data/a?b@c"),
    ],
)
def test_a_url_is_shown_without_its_secrets(url: str, wanted: str) -> None:
    assert brief_url(url) == wanted


SECRETS = (
    "s3://k:secret/@b/x?token=secret",
    "s3a://k:secret@b",
    "s3://k:sec%zzret@b",
    "gs://k:secret@b",
    "s3://k:secret@@/",
)


@pytest.mark.parametrize("url", SECRETS)
def test_no_message_or_repr_contains_a_storages_secrets(url: str) -> None:
    for field in ("input", "output", "batch_storage"):
        with pytest.raises(ConfigError) as refused:
            Storage.open(url, field=field)
        assert "secret" not in refused.value.message and "ret@" not in refused.value.message
    settings = ServerSettings(
        batch_storage=url, api_key="secret", otlp_traces_endpoint="http://user:secret@host/x?y=secret"
    )
    options = BatchOptions(input=(url,), output=url)
    config = EngineConfig(model="m")
    assert "secret" not in f"{settings!r} {options!r} {config!r}"
