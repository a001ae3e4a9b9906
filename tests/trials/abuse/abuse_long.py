"""The longest possible requests, each during a stream: `LONG`, `measure`.

Each is refused, or served without delaying others. Results are the longest pause of the server's loop, and
the stream's longest wait for its next token. Used by `abuse.py`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import orjson
from support.servers.probed_server import ProbedServer

from trials.abuse.abuse_clients import parallel_stream

Body = Mapping[str, Any]  # Any: JSON
TEXT, CHAT = "/v1/completions", "/v1/chat/completions"
CODE = Path(__file__).read_text(encoding="utf-8")
USER = [{"role": "user", "content": "hi"}]


def text(num_chars: int) -> str:
    return (CODE * (num_chars // len(CODE) + 1))[:num_chars]


def _messages(count: int, content: Any) -> Body:
    return {"messages": [{"role": "user", "content": content}] * count, "max_tokens": 1}


def _one(**fields: Any) -> Body:
    return {"prompt": "x", "max_tokens": 1, **fields}


def _chat(**fields: Any) -> Body:
    return {"messages": USER, "max_tokens": 1, **fields}


_MANY = {"prompt": ["x"] * 1024, "n": 4, "max_tokens": 16}

# Made when they are sent: together they are half a GB.
LONG: Mapping[str, tuple[str, Callable[[], Body]]] = {
    "1,024 prompts of 20 kB": (TEXT, lambda: {"prompt": [text(20_000)] * 1024, "max_tokens": 1}),
    "1,024 prompts of 7 kB": (TEXT, lambda: {"prompt": [text(7000)] * 1024, "max_tokens": 1}),
    "1,024 prompts of 1,000 ids": (TEXT, lambda: {"prompt": [[7] * 1000] * 1024, "max_tokens": 1}),
    "the same, n=4": (TEXT, lambda: {"prompt": [[7] * 1000] * 1024, "max_tokens": 1, "n": 4}),
    "4 million ids": (TEXT, lambda: {"prompt": [7] * 4_000_000}),
    "1 million ids": (TEXT, lambda: {"prompt": [7] * 1_040_000}),
    "1 million ids to read": ("/detokenize", lambda: {"tokens": [7] * 1_040_000}),
    "1 million wrong ids": ("/detokenize", lambda: {"tokens": [-7] * 1_040_000}),
    "60,000 words as ids": ("/detokenize", lambda: {"tokens": ["a"] * 60_000}),
    "30 MB in 1,000 messages": (CHAT, lambda: _messages(1000, text(30_000))),
    "30 MB in a message": (CHAT, lambda: _messages(1, text(30_000_000))),
    "4 MB in a message": (CHAT, lambda: _messages(1, text(4_000_000))),
    "100,000 messages": (CHAT, lambda: _messages(100_000, "hi")),
    "10,000 messages": (CHAT, lambda: _messages(10_000, "hi")),
    "10,000 wrong messages": (CHAT, lambda: _messages(10_000, 7)),
    "12,000 parts": (CHAT, lambda: _messages(1, [{"type": "text", "text": "a"}] * 12_000)),
    "12,000 wrong parts": (CHAT, lambda: _messages(1, [7] * 12_000)),
    "60,000 template arguments": (CHAT, lambda: _chat(chat_template_kwargs=_numbers(60_000))),
    "30,000 tools": (CHAT, lambda: _chat(tools=[{"type": "function"}] * 30_000)),
    "60,000 biases": (TEXT, lambda: _one(logit_bias=_numbers(60_000))),
    "1 million allowed tokens": (TEXT, lambda: _one(allowed_token_ids=list(range(1_000_000)))),
    "4,000 allowed, 4,096 answers": (TEXT, lambda: {**_MANY, "allowed_token_ids": list(range(4000))}),
    "1 million stop tokens": (TEXT, lambda: _one(stop_token_ids=[5.5] * 1_000_000)),
    "60,000 stop strings": (TEXT, lambda: _one(stop=["ab"] * 60_000)),
    "64 stop strings of 100 kB": (TEXT, lambda: _one(stop=[f"{i}{text(100_000)}" for i in range(64)])),
    "1,024 bad words of 256": (TEXT, lambda: _one(bad_words=[f"{i}{text(250)}" for i in range(1024)])),
    "60,000 bad words": (TEXT, lambda: _one(bad_words=["abc"] * 60_000)),
    "60,000 unknown fields": (TEXT, lambda: _one(**_numbers(60_000))),
    "1.5 MB as tokens and words": (
        "/tokenize",
        lambda: {"prompt": text(1_500_000), "return_token_strs": True},
    ),
    "25 MB as tokens": ("/tokenize", lambda: {"prompt": text(25_000_000)}),
    "4,096 answers": (TEXT, lambda: _MANY),
    "4,096 answers, logprobs": (TEXT, lambda: {**_MANY, "logprobs": 20}),
    "the same, streamed": (TEXT, lambda: {**_MANY, "logprobs": 20, "stream": True}),
    "128 long answers, logprobs": (
        CHAT,
        lambda: {"messages": USER, "n": 128, "max_tokens": 256, "logprobs": True, "top_logprobs": 20},
    ),
}


def _numbers(count: int) -> Body:
    return {f"{i}": i for i in range(count)}


@dataclass(frozen=True)
class Measured:
    """One request: `pause_ms` of the loop, `wait_ms` of the parallel stream; `held_by` names the cause."""

    name: str
    megabytes: float
    status: int
    seconds: float
    pause_ms: float
    wait_ms: float
    held_by: list[str]


def measure(server: ProbedServer) -> Iterator[Measured]:
    """Send each of LONG during a stream."""
    with (
        parallel_stream(server.port, "any key") as gaps,
        httpx.Client(base_url=server.url, timeout=300) as http,
    ):
        for name, (path, make) in LONG.items():
            content = orjson.dumps(make())
            server.look()
            gaps.take()
            begin_s = time.monotonic()
            status = _post(http, path, content)
            spent_s, wait_ms = round(time.monotonic() - begin_s, 2), round(1e3 * gaps.take())
            found, megabytes = server.look(), round(len(content) / 1e6, 1)
            yield Measured(name, megabytes, status, spent_s, found.pause_ms, wait_ms, found.held_by)


def _post(http: httpx.Client, path: str, content: bytes) -> int:
    with http.stream("POST", path, content=content, headers={"content-type": "application/json"}) as answer:
        for _ in answer.iter_bytes():
            pass
        return answer.status_code
