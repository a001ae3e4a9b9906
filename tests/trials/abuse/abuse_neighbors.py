"""The load of one key, and a request of another key beside it: `NEIGHBORS`. Used by `abuse.py` and tests.

The other key's request must be answered while the load still lasts, at most BAR_S later than alone.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
from support.servers.probed_server import ProbedServer

Json = Mapping[str, Any]  # Any: JSON
KEYS = ("abuser-key", "reader-key")
BAR_S = 1.0
GROWTH_BYTES = 24 << 20
TIMEOUT_S = 300.0
NUM_SLOW = 60
ENDLESS = {"max_tokens": 100_000, "min_tokens": 100_000}
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


def header(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def any_of(name: str, count: int) -> Json:
    """A schema of distinct objects: 600 are 86 kB, and a large grammar."""
    names = [f"{name}_{i}_{'x' * 30}" for i in range(count)]
    branches = [
        {"type": "object", "properties": {each: {"type": "integer"}}, "required": [each]} for each in names
    ]
    schema = {"name": "a", "schema": {"anyOf": branches}}
    return {"response_format": {"type": "json_schema", "json_schema": schema}}


def slow_grammar(number: int) -> Json:
    """A grammar that takes as much time as a trial may."""
    return {"structured_outputs": {"grammar": "\n" * (120_000 + number)}}


def chat(**fields: Any) -> Json:
    return {"messages": [{"role": "user", "content": "x"}], "max_tokens": 4, **fields}


def text(**fields: Any) -> Json:
    return {"prompt": "x", "max_tokens": 4, **fields}


@dataclass
class Load:
    """Requests of one key that run at the same time, on an event loop in a thread.

    Attributes:
        statuses: of the requests that have an answer; a stream has one with its first event.
    """

    url: str
    requests: Sequence[tuple[str, Json]]
    statuses: list[int] = field(default_factory=list[int])

    @contextmanager
    def running(self) -> Iterator[None]:
        """Send the requests; disconnect those that are left at the end."""
        loop, ends = asyncio.new_event_loop(), asyncio.Event()
        thread = threading.Thread(target=loop.run_until_complete, args=(self._send_all(ends),))
        thread.start()
        try:
            yield
        finally:
            loop.call_soon_threadsafe(ends.set)
            thread.join()
            loop.close()

    async def _send_all(self, ends: asyncio.Event) -> None:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=self.url, timeout=TIMEOUT_S, limits=limits) as http:
            tasks = [asyncio.create_task(self._send(http, *request)) for request in self.requests]
            await ends.wait()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _send(self, http: httpx.AsyncClient, path: str, body: Json) -> None:
        async with http.stream("POST", path, json=body, headers=header(KEYS[0])) as response:
            lines = response.aiter_lines()
            await anext(lines)
            self.statuses.append(response.status_code)
            async for _ in lines:
                pass


@dataclass(frozen=True)
class Neighbor:
    """A load, and another key's request. `num_begun`: answers of the load after which it is sent."""

    name: str
    load: Callable[[], Sequence[tuple[str, Json]]]
    path: str
    body: Json
    num_begun: int


NEIGHBORS = (
    Neighbor(
        "8 streams of 8 answers with large grammars",
        lambda: [(CHAT, {**chat(**any_of(f"load{i}", 600), n=8, stream=True), **ENDLESS}) for i in range(8)],
        CHAT,
        chat(**any_of("other", 610)),
        num_begun=4,
    ),
    Neighbor(
        f"{NUM_SLOW} grammars that take as long as they may",
        lambda: [(TEXT, text(**slow_grammar(i))) for i in range(NUM_SLOW)],
        TEXT,
        text(structured_outputs={"json": {"type": "boolean"}}),
        num_begun=1,
    ),
)


@dataclass(frozen=True)
class Met:
    """What another key's request got: its status, alone and beside the load, and the seconds that it took.

    `left`: requests of the load without an answer then.
    """

    name: str
    status: int
    alone_s: float
    beside_s: float
    left: int


def meet(url: str, neighbor: Neighbor) -> Met:
    """Send another key's request alone, in another form than beside the load, and then beside it."""
    alone_s, _ = _timed(url, neighbor.path, {**neighbor.body, "max_tokens": 5})
    load = Load(url, neighbor.load())
    with load.running():
        _wait_for(lambda: len(load.statuses) >= neighbor.num_begun)
        beside_s, status = _timed(url, neighbor.path, neighbor.body)
        left = len(load.requests) - len(load.statuses)
    return Met(neighbor.name, status, round(alone_s, 2), round(beside_s, 2), left)


def meet_all(server: ProbedServer) -> tuple[list[Met], list[str]]:
    """Try each neighbor twice. Return what the requests got, and the errors: also memory that grew."""
    all_met, wrong, before = list[Met](), list[str](), 0
    for neighbor in NEIGHBORS:
        for is_first in (True, False):
            met = meet(server.url, neighbor)
            all_met.append(met)
            if met.status != 200:
                wrong.append(f"{met.name}: another key's request got {met.status}")
            if met.beside_s > met.alone_s + BAR_S:
                wrong.append(
                    f"{met.name}: another key's request took {met.beside_s} s; {met.alone_s} s alone"
                )
            rss_bytes = server.rest().rss_bytes
            if not is_first and rss_bytes > before + GROWTH_BYTES:
                wrong.append(f"{met.name}: memory grew from {before} to {rss_bytes} bytes")
            before = rss_bytes
    return all_met, wrong


def _timed(url: str, path: str, body: Json) -> tuple[float, int]:
    begin_s = time.monotonic()
    response = httpx.post(url + path, json=body, headers=header(KEYS[1]), timeout=TIMEOUT_S)
    return time.monotonic() - begin_s, response.status_code


def _wait_for(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline_s, "the load does not begin"
        time.sleep(0.01)
