"""Hostile requests to a real `manta serve`, each during another tenant's stream: `HOSTILE`, `attack`.

Each request lists the statuses that are right for it. Beside the status, `attack` checks that an error has
OpenAI's shape and a bounded body, that the stream of another key never pauses longer than BAR_S, that the
replica stays alive, and that memory stops growing. Used by `abuse.py`.
"""

from __future__ import annotations

import gzip
import json
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from support.paths import MODELS
from support.servers.served import Served

from trials.abuse import abuse_grammars
from trials.abuse.abuse_clients import Answer, parallel_stream, request_bytes, send
from trials.abuse.abuse_connections import (
    Held,
    idle_connections,
    slow_heads,
    trickled_bodies,
    unfinished_bodies,
    unfinished_uploads,
)

BAR_S = 0.2  # the longest pause of another tenant's stream
MAX_ERROR_BYTES = 8192
GROWTH_BYTES = 24 << 20
ROUNDS = 3
TIMEOUT_S = 60.0
SILENT_S = 25.0  # a connection may stay open this long after its last byte: 20 s, and time to notice
KEYS = ("abuser-key", "reader-key")

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
REFUSED = range(400, 500)
ANSWERED = (200, *REFUSED)  # any of these is right, if there is an answer
USER = [{"role": "user", "content": "hi"}]
RESUMED = {"prompt": "x", "max_tokens": 4, "stream": True}
ESCAPES = "x\r\n\x1b[31mINJECTED\x00"


@dataclass(frozen=True)
class Hostile:
    """One request as bytes on a socket, and the statuses that are right for it.

    `own_words` marks what HAProxy refuses by itself, in its own words rather than in OpenAI's shape. Status 0
    is a connection that was closed without an answer.
    """

    name: str
    make: Callable[[], bytes]
    expected: Collection[int] = field(default=REFUSED)
    own_words: bool = False


@dataclass(frozen=True)
class Outcome:
    name: str
    status: int
    seconds: float
    pause_ms: float
    wrong: str | None


def post(path: str, body: bytes, headers: Mapping[str, str] | None = None, method: str = "POST") -> bytes:
    return request_bytes(path, body, {"Authorization": f"Bearer {KEYS[0]}", **(headers or {})}, method)


def _json(path: str, body: Any, headers: Mapping[str, str] | None = None) -> Callable[[], bytes]:
    return lambda: post(path, json.dumps(body).encode(), headers)


def _chat(**fields: Any) -> Callable[[], bytes]:
    return _json(CHAT, {"messages": USER, "max_tokens": 4, **fields})


def _text(**fields: Any) -> Callable[[], bytes]:
    return _json(TEXT, {"prompt": "x", "max_tokens": 4, **fields})


def _get(path: str, **headers: str) -> Callable[[], bytes]:
    return lambda: post(path, b"", headers, method="GET")


def _schema(schema: Any) -> Callable[[], bytes]:
    return _chat(response_format={"type": "json_schema", "json_schema": {"name": "s", "schema": schema}})


def _form(parts: bytes, boundary: str = "b") -> Callable[[], bytes]:
    return lambda: post("/v1/files", parts, {"Content-Type": f"multipart/form-data; boundary={boundary}"})


def _file_part(filename: str, content: bytes = b"{}\n", purpose: str = "batch") -> bytes:
    return (
        (
            f'--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\n{purpose}\r\n'
            f'--b\r\nContent-Disposition: form-data; name="file"; filename="{filename}"\r\n\r\n'
        ).encode("utf-8", "surrogateescape")
        + content
        + b"\r\n--b--\r\n"
    )


def _nested(depth: int, opening: str, inner: str, closing: str) -> str:
    return opening * depth + inner + closing * depth


def _with_number(field: str, number: str) -> bytes:
    """Return a body with a number as JSON has it, or as none."""
    return (
        f'{{"prompt": "x", "min_tokens": 1, "temperature": 0, "max_tokens": 4, "{field}": {number}}}'.encode()
    )


def _deep(field: str, depth: int = 1000) -> bytes:
    value = _nested(depth, '[{"a": ', "1", "}]")
    return f'{{"messages": {json.dumps(USER)}, "max_tokens": 4, "{field}": {value}}}'.encode()


def _cycle(depth: int) -> dict[str, Any]:
    """A schema whose definitions refer to each other in a circle."""
    names = [f"d{i}" for i in range(depth)]
    following = [*names[1:], names[0]]
    refs = {name: {"$ref": f"#/$defs/{after}"} for name, after in zip(names, following, strict=True)}
    return {"$ref": "#/$defs/d0", "$defs": refs}


def _tool(name: str, parameters: Any = None) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters or {"type": "object"}}}


def _smuggled() -> bytes:
    """Two lengths for one body: a proxy and a server that differ would see two requests."""
    inner = b"0\r\n\r\nGET /metrics HTTP/1.1\r\nHost: x\r\n\r\n"
    head = f"POST {TEXT} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(inner)}\r\n"
    return head.encode() + b"Transfer-Encoding: chunked\r\nConnection: close\r\n\r\n" + inner


HOSTILE: tuple[Hostile, ...] = (
    # HTTP itself
    Hostile("two lengths of one body", _smuggled, (0, *REFUSED), own_words=True),
    Hostile(
        "two Content-Lengths",
        lambda: post(TEXT, b"{}").replace(b"\r\n\r\n", b"\r\nContent-Length: 40\r\n\r\n", 1),
        (0, *REFUSED),
        own_words=True,
    ),
    Hostile(
        "a chunk of 2^64 bytes",
        lambda: (
            f"POST {TEXT} HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\nConnection: close\r\n\r\n"
            "FFFFFFFFFFFFFFFF\r\nx"
        ).encode(),
        (0, *REFUSED),
        own_words=True,
    ),
    Hostile(
        "HTTP/2 without asking", lambda: b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", (0, *REFUSED), own_words=True
    ),
    Hostile(
        "a TLS handshake",
        lambda: b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\0" * 512,
        (0, *REFUSED),
        own_words=True,
    ),
    Hostile("a method nobody knows", lambda: post(TEXT, b"{}", method="BREW"), own_words=True),
    Hostile("TRACE", lambda: post(TEXT, b"", method="TRACE"), own_words=True),
    Hostile("CONNECT", lambda: post("example.com:443", b"", method="CONNECT"), (0, *REFUSED), own_words=True),
    Hostile("a NUL in the path", _get("/v1/models/%00"), (400, 404)),
    Hostile("a path out of the root", _get("/v1/../../etc/passwd"), (400, 404), own_words=True),
    Hostile(
        "an encoded path out of the root", _get("/v1/files/..%2f..%2f..%2fetc%2fpasswd/content"), (400, 404)
    ),
    Hostile("invalid UTF-8 in the path", _get("/v1/models/%ff%fe%80"), (400, 404)),
    Hostile("a query of 30 kB", _get("/v1/models?" + "a" * 30_000), ANSWERED),
    Hostile("a key of 30 kB", _get("/v1/models", Authorization="Bearer " + "k" * 30_000), (401, 431)),
    Hostile(
        "a key of other letters",
        _get("/v1/models", Authorization="Bearer \udcff\udcfe"),
        (400, 401),
        own_words=True,
    ),
    *(
        Hostile(f"the key {key!r}", _get("/v1/models", Authorization=f"Bearer {key}"), (401,))
        for key in ("abuser", "abuser-key,reader-key", "ABUSER-KEY", "abuser-key acme", "*", "None")
    ),
    Hostile("basic credentials", _get("/v1/models", Authorization="Basic YTpi"), (401,)),
    Hostile("two keys", _get("/v1/models", **{"X-Api-Key": "other"}), (200, 401)),
    Hostile("a header in a request id", _text(request_id=ESCAPES), ANSWERED),
    Hostile("a request id of 1 MB", _text(request_id="r" * 1_000_000), ANSWERED),
    Hostile(
        "a gzip bomb",
        lambda: post(TEXT, gzip.compress(b'{"prompt": "' + b"x" * 50_000_000), {"Content-Encoding": "gzip"}),
    ),
    Hostile(
        "another charset", lambda: post(TEXT, b"{}", {"Content-Type": "application/json; charset=utf-7"})
    ),
    Hostile(
        "a tenant with escapes",
        _json(TEXT, {"prompt": "x", "max_tokens": 1}, {"X-Tenant": "a" * 9000}),
        ANSWERED,
    ),
    *(
        Hostile(
            f"the tenant {name!r}", _json(TEXT, {"prompt": "x", "max_tokens": 1}, {"X-Tenant": name}), (200,)
        )
        for name in ("*", "x" * 1000, 'a"b', "\xe9", "globex, acme")
    ),
    Hostile("a tenant that is a list", _text(metadata={"tenant": ["a"], "category": {"b": 1}}), ANSWERED),
    Hostile(
        "a spoofed address",
        _json(TEXT, {"prompt": "x", "max_tokens": 1}, {"X-Forwarded-For": "1.1.1.1"}),
        (200,),
    ),
    # Sampling
    Hostile("biases of other digits", _text(logit_bias={"\u0663": 1, "1e3": 1, " 5": 1})),
    Hostile("a bias of a huge token", _text(logit_bias={"9" * 400: 1})),
    Hostile("a denormal temperature", _text(temperature=1e-320), ANSWERED),
    Hostile("minus zero", _text(temperature=-0.0, top_p=1, min_p=-0.0), ANSWERED),
    Hostile("a seed below all", _text(seed=-(2**63)), ANSWERED),
    Hostile("more least than most tokens", _text(min_tokens=100, max_tokens=1)),
    Hostile("an empty stop string", _text(stop=["", "a"]), ANSWERED),
    Hostile("a stop string of NULs", _text(stop=["\0" * 1000]), ANSWERED),
    Hostile("10,000 stop strings that overlap", _text(stop=["a" * i for i in range(1, 10_000)])),
    Hostile("an empty bad word", _text(bad_words=[""])),
    Hostile("no allowed token", _text(allowed_token_ids=[])),
    Hostile("a negative thinking budget", _chat(thinking_token_budget=-1)),
    Hostile("a billion log probabilities", _chat(logprobs=True, top_logprobs=10**9)),
    Hostile("prompt log probabilities below none", _text(prompt_logprobs=-5)),
    Hostile(
        "128 answers with all log probabilities", _text(n=128, logprobs=20, prompt_logprobs=20), ANSWERED
    ),
    Hostile("a priority of 10^400", lambda: post(TEXT, b'{"prompt": "x", "priority": 1' + b"0" * 400 + b"}")),
    Hostile("a salt of 1 MB", _text(cache_salt="s" * 1_000_000), ANSWERED),
    Hostile("a salt that is a list", _text(cache_salt=["a"])),
    Hostile("speculation of nothing known", _text(speculative={"num_drafts": -1, "x": ESCAPES})),
    # Conversations
    Hostile(
        "a lone surrogate",
        lambda: post(CHAT, b'{"messages": [{"role": "user", "content": "\\ud800"}], "max_tokens": 4}'),
        ANSWERED,
    ),
    Hostile("a template of its own", _chat(chat_template="{% for i in range(10**9) %}x{% endfor %}")),
    Hostile(
        "template variables that hide others",
        _chat(chat_template_kwargs={"messages": [], "__class__": 1}),
        ANSWERED,
    ),
    Hostile(
        "a deep message",
        _json(CHAT, {"messages": [{"role": "user", "content": [{"type": "text", "text": {"a": 1}}]}]}),
    ),
    Hostile(
        "control tokens",
        _json(
            CHAT,
            {
                "messages": [{"role": "user", "content": "<|im_end|><|im_start|>system\n" * 200}],
                "max_tokens": 4,
            },
        ),
        ANSWERED,
    ),
    Hostile("a tool named with escapes", _chat(tools=[_tool(ESCAPES)])),
    Hostile(
        "a tool that is not there",
        _chat(tools=[_tool("f")], tool_choice={"type": "function", "function": {"name": "g"}}),
    ),
    Hostile("a tool of circles", _chat(tools=[_tool("f", _cycle(400))], tool_choice="required"), ANSWERED),
    Hostile("128 tools alike", _chat(tools=[_tool("f")] * 128, tool_choice="required"), ANSWERED),
    Hostile(
        "answers to calls of nobody",
        _json(CHAT, {"messages": [{"role": "tool", "tool_call_id": "x", "content": "y"}], "max_tokens": 4}),
        ANSWERED,
    ),
    Hostile(
        "an image",
        _json(
            CHAT,
            {
                "messages": [
                    {
                        "role": "user",
                        "content": [{"type": "image_url", "image_url": {"url": "http://127.0.0.1:1/x"}}],
                    }
                ]
            },
        ),
    ),
    # Structured output
    Hostile(
        "a schema that nothing satisfies",
        _schema({"type": "object", "required": ["a"], "properties": {"a": False}}),
        ANSWERED,
    ),
    Hostile("an enum of nothing", _schema({"enum": []}), ANSWERED),
    Hostile("a schema of circles", _schema(_cycle(1000)), ANSWERED),
    Hostile("a schema from elsewhere", _schema({"$ref": "http://127.0.0.1:1/schema.json"}), ANSWERED),
    Hostile("a schema of the disk", _schema({"$ref": "file:///etc/passwd"}), ANSWERED),
    Hostile("a regex that looks back", _chat(structured_outputs={"regex": r"(a)\1(?<=b)"})),
    Hostile(
        "a regex of repeated repetitions",
        _chat(structured_outputs={"regex": "((a{1,99}){1,99}){1,99}"}),
        ANSWERED,
    ),
    Hostile(
        "100,000 choices", _chat(structured_outputs={"choice": [f"c{i}" for i in range(100_000)]}), ANSWERED
    ),
    Hostile(
        "a grammar that begins with itself",
        _chat(structured_outputs={"grammar": 'start: start start | "a" | ""'}),
        ANSWERED,
    ),
    Hostile("two structures at once", _chat(structured_outputs={"regex": "a", "choice": ["b"]})),
    # Files and batches
    Hostile(
        "a form without a boundary", lambda: post("/v1/files", b"x", {"Content-Type": "multipart/form-data"})
    ),
    Hostile(
        "a form of 10,000 fields",
        _form(
            b"".join(
                f'--b\r\nContent-Disposition: form-data; name="f{i}"\r\n\r\n1\r\n'.encode()
                for i in range(10_000)
            )
            + b"--b--\r\n"
        ),
    ),
    Hostile(
        "a form that never ends",
        _form(b'--b\r\nContent-Disposition: form-data; name="file"; filename="x"\r\n\r\nx'),
    ),
    Hostile("a file name out of the folder", _form(_file_part("../../../tmp/x")), ANSWERED),
    Hostile("a file name of 10 kB", _form(_file_part("n" * 10_000)), ANSWERED),
    Hostile("a file name with escapes", _form(_file_part("a\x1b[31m\udcff")), ANSWERED),
    Hostile("a purpose of its own", _form(_file_part("x", purpose="p" * 5000))),
    Hostile(
        "a batch of a path",
        _json(
            "/v1/batches", {"input_file_id": "../../etc/passwd", "endpoint": TEXT, "completion_window": "24h"}
        ),
    ),
    Hostile(
        "a batch with 4 MB of metadata",
        _json(
            "/v1/batches",
            {
                "input_file_id": "file-x",
                "endpoint": TEXT,
                "completion_window": "24h",
                "metadata": {"a": "b" * 4_000_000},
            },
        ),
    ),
    Hostile("a batch id of 5,000 letters", _get("/v1/batches/batch_" + "x" * 5000), (404,)),
    *(
        Hostile(f"the file {id[:30]}", _get(f"/v1/files/{id}"), (404,))
        for id in ("%2e%2e", "file-%00", "batch_", "file-" + "0" * 5000, "*")
    ),
    Hostile("a list from a place of nobody", _get("/v1/files?after=../x&limit=-1")),
    # Other dialects
    Hostile(
        "an answer that was never given",
        _json("/v1/responses", {"input": "x", "previous_response_id": "resp_" + "x" * 5000}),
    ),
    Hostile(
        "items of no type",
        _json("/v1/responses", {"input": [{"type": ESCAPES}] * 1000, "max_output_tokens": 4}),
        ANSWERED,
    ),
    Hostile("a message without a limit", _json("/v1/messages", {"model": "m", "messages": USER})),
    Hostile(
        "results in results",
        lambda: post(
            "/v1/messages",
            (
                '{"model": "m", "max_tokens": 4, "messages": [{"role": "user", "content": '
                + _nested(300, '[{"type": "tool_result", "tool_use_id": "x", "content": ', '"y"', "}]")
                + "}]}"
            ).encode(),
        ),
        ANSWERED,
    ),
    Hostile("tokens that are true", _json("/detokenize", {"tokens": [True, False, 1.5]})),
    Hostile("a request that is not there", _get("/explain?id=" + "x" * 5000), (400, 401, 403, 404)),
    # Siblings of found faults
    *(
        Hostile(f"{number} answers", lambda number=number: post(TEXT, _with_number("n", number)), ANSWERED)
        for number in (
            *('"128"', "128.0", '"1_2_8"', '" 128 "', '"0x80"', '"1e2"', "1e2", "true", "[128]", '{"a": 1}'),
            *("-0.0", "1e400", "0.5", '"\u0661\u0662\u0668"', "99999999999999999999"),
        )
    ),
    *(
        Hostile(
            f"{number} tokens", lambda number=number: post(TEXT, _with_number("max_tokens", number)), ANSWERED
        )
        for number in ('"4"', "4.0", '"4_0"', "1e400", "-1e400", '"Infinity"', "true", "[4]", "1e309")
    ),
    *(
        Hostile(f"1,000 levels in {field}", lambda field=field: post(CHAT, _deep(field)), ANSWERED)
        for field in (
            *("metadata", "tools", "tool_choice", "response_format", "structured_outputs", "logit_bias"),
            *("chat_template_kwargs", "documents", "speculative", "stop", "stream_options", "user"),
        )
    ),
    *(
        Hostile(f"the last event {given[:30]}", _json(TEXT, RESUMED, {"Last-Event-ID": given}), ANSWERED)
        for given in (
            *(
                "7",
                "x" * 5000,
                "." * 100,
                f"{'0' * 32}.1.1.1.1.{'0' * 16}",
                f"{'0' * 32}.1.1.1.1.{'0' * 16}.end",
            ),
            *(f"{'0' * 32}.1.{'9' * 19}.1.1.{'0' * 16}", f"{'0' * 32}.1.1.999999999.1.{'0' * 16}"),
            *(
                f"{'f' * 32}.1.1.1.999999999.{'0' * 16}",
                f"{'g' * 32}.1.1.1.1.{'0' * 16}",
                "\u0661",
                "-1.-1.-1",
            ),
        )
    ),
)


GRAMMARS: tuple[Hostile, ...] = tuple(
    Hostile(f"grammar: {name}", _json(path, body), abuse_grammars.STATUSES)
    for name, path, body in abuse_grammars.HOSTILE
)


def run_hostile(port: int, requests: Collection[Hostile] = HOSTILE) -> Iterator[Outcome]:
    """Send each request during a stream of another key, and yield the result."""
    with parallel_stream(port, KEYS[1]) as gaps:
        for each in requests:
            content = each.make()
            gaps.take()
            begin_s = time.monotonic()
            answer = send(port, content)
            seconds, pause_s = time.monotonic() - begin_s, gaps.take()
            wrong = _wrong(each, answer)
            if wrong is None and pause_s > BAR_S:
                wrong = f"a stream beside paused for {pause_s:.2f} s"
            yield Outcome(each.name, answer.status, round(seconds, 2), round(1e3 * pause_s, 1), wrong)


def _wrong(requested: Hostile, answer: Answer) -> str | None:
    if answer.status not in requested.expected:
        return f"{answer.status} {answer.body[:200]!r}"
    if answer.status < 400 or requested.own_words:
        return None
    if b'"error"' not in answer.body:
        return f"{answer.status}, not in OpenAI's shape: {answer.body[:200]!r}"
    if len(answer.body) > MAX_ERROR_BYTES:
        return f"{answer.status} with an error of {len(answer.body)} bytes"
    return None


@contextmanager
def hostile_server(*, has_keys: bool = True, **settings: Any) -> Iterator[Served]:
    """`manta serve` of the shipped pair with stored batches, and two keys."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        given: dict[str, Any] = {
            "model": str(MODELS / "target"),
            "speculative_config": {"method": "dflash", "model": str(MODELS / "drafter")},
            "batch_storage": str(folder / "batches"),
        }
        if has_keys:
            keys = folder / "keys"
            keys.write_text("\n".join(KEYS) + "\n")
            keys.chmod(0o600)
            given["api_key_file"] = str(keys)
        with Served({**given, **settings}, folder / "log", key=KEYS[0] if has_keys else None) as served:
            yield served


def memory_bytes(served: Served) -> int:
    """Resident memory of the replicas and gateways."""
    pids = [*served.pids("replica"), *served.pids("gateway")]
    return sum(int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096 for pid in pids)


def attack(served: Served, requests: Collection[Hostile] = HOSTILE) -> tuple[list[Outcome], list[str]]:
    """Send all requests ROUNDS times. Return the outcomes with the longest pauses, and the errors."""
    before = served.pids("replica")
    worst, memories, wrong = dict[str, Outcome](), list[int](), list[str]()
    for _ in range(ROUNDS):
        for each in run_hostile(served.port, requests):
            if each.wrong:
                wrong.append(f"{each.name}: {each.wrong}")
            if each.name not in worst or each.pause_ms > worst[each.name].pause_ms:
                worst[each.name] = each
        memories.append(memory_bytes(served))
    if served.pids("replica") != before:
        wrong.append("a replica died")
    if memories[-1] > memories[-2] + GROWTH_BYTES:
        wrong.append(f"memory grew from {memories[-2]} to {memories[-1]} bytes in the last round")
    return list(worst.values()), list(dict.fromkeys(wrong))


def hold_connections(port: int) -> Iterator[tuple[str, Held, str | None]]:
    """Hold idle and unfinished connections of a server without keys; yield the results and errors."""
    trials: Mapping[str, Callable[[], Held]] = {
        "4,150 idle connections": lambda: idle_connections(port, 4150),
        "500 slow heads": lambda: slow_heads(port, 500),
        "30 unfinished bodies of 31 MB": lambda: unfinished_bodies(port, 30, 31),
        "8 unfinished uploads of 120 MB": lambda: unfinished_uploads(port, 8, 120),
        "5 uploads of 180 MB as JSON": lambda: unfinished_uploads(port, 5, 180, "application/json"),
        "50 bodies by the byte": lambda: trickled_bodies(port, 50),
    }
    for name, trial in trials.items():
        held = trial()
        answers = {"/health": held.probe, "a small request": held.small}
        refused = [f"{what} got {status}" for what, status in answers.items() if status != 200]
        left = [] if held.open_s is not None else ["some stayed open"]
        if held.silent_s > SILENT_S:
            left.append(f"one stayed open for {held.silent_s} s behind its last byte")
        yield name, held, ", ".join([*refused, *left]) or None


def run() -> tuple[dict[str, Any], list[str]]:
    """Run all trials on real servers. Return figures for JSON (Any), and the errors."""
    figures: dict[str, Any] = {}
    wrong: list[str] = []
    for place, settings in {"a replica": {}, "a gateway": {"replicas": "1:1"}}.items():
        with hostile_server(**settings) as served:
            outcomes, said = attack(served, (*HOSTILE, *GRAMMARS))
        figures[place] = [asdict(each) for each in outcomes]
        wrong += [f"{place}: {each}" for each in said]
        with hostile_server(has_keys=False, **settings) as served:
            before = memory_bytes(served)
            for name, held, said in hold_connections(served.port):
                figures[f"{place}, {name}"] = {**asdict(held), "memory_bytes": memory_bytes(served) - before}
                wrong += [f"{place}, {name}: {said}"] if said else []
    return figures, wrong
