"""Requests to a server over HTTP when they are due, the stream of each, and what its clients saw.

Used by `background.py`. The client is a few lines over sockets (`streams.py`), so that it is not what is
measured. Connections are kept and used again, as many as requests are open at once.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

from manta.actors.prompts import Chat
from manta.cluster.errors import MantaError
from manta.jobs.bench.load.arrivals import Arrivals
from manta.jobs.bench.load.asks import Ask
from manta.jobs.bench.load.latencies import Waits, describe
from manta.jobs.bench.passes import Figures
from manta.jobs.client import HEALTH_TIMEOUT_S, ServerClient

from .streams import Stream, StreamClient


@dataclass(frozen=True, slots=True)
class Target:
    """A Manta server, and what it calls its model."""

    url: str
    model: str

    def body(self, ask: Ask) -> dict[str, Any]:  # Any: JSON
        """Return the body of a request."""
        chat = isinstance(ask.prompt, Chat)
        prompt = {"messages": list(ask.prompt.messages)} if chat else {"prompt": ask.prompt}
        return {
            "model": self.model,
            **prompt,
            "max_tokens": ask.max_tokens,
            "temperature": ask.temperature,
            "seed": ask.seed & 0x7FFFFFFF,
            "stream_options": {"include_usage": True},
            "ignore_eos": True,
        }


def find_server(url: str) -> Target:
    """Return the server and its first model. Raises MantaError if it cannot be reached."""
    with ServerClient(url, HEALTH_TIMEOUT_S) as client:
        answer = client.ask("/v1/models")
    if answer.status != 200:
        raise MantaError(f"{url}/v1/models answered {answer.status}: {answer.error}")
    return Target(url, str(answer.body["data"][0]["id"]))


@dataclass(frozen=True, slots=True)
class Reply:
    """What came of a request."""

    ask: Ask
    stream: Stream

    @property
    def num_tokens(self) -> int:
        """As the server says; where it does not, events that brought text."""
        told = self.stream.usage.get("completion_tokens")
        return len(self.stream.token_times_s) if told is None else int(told)

    @property
    def whole(self) -> bool:
        """It ended well, with something in it."""
        return self.stream.end == "whole" and bool(self.stream.token_times_s)

    @property
    def waits(self) -> Waits:
        """Of a whole one; from when it was sent."""
        return Waits.of(self.stream.asked_s, self.stream.token_times_s, self.num_tokens)

    @property
    def failure(self) -> str | None:
        """The kind of it, None if it ended well."""
        if self.whole:
            return None
        if self.stream.end == "whole":
            return "empty"
        if self.stream.end == "refused":
            return f"refused, status {self.stream.status}"
        if self.stream.end == "error":
            return f"error, {self.stream.error.get('type', 'no type')}"
        return str(self.stream.end)


@dataclass(frozen=True, slots=True)
class ServedPass:
    """All requests of a point, and the seconds from the first to the end of the last."""

    seconds: float
    replies: Sequence[Reply]


async def send(
    target: Target, asks: Sequence[Ask], arrivals: Arrivals, at_once: int | None, timeout_s: float
) -> ServedPass:
    """Ask for all of them, and wait for all.

    Args:
        arrivals: when they come; with an infinite rate, and `at_once`, it is a closed loop.
        at_once: most that are open together; others wait at the client, and have not asked yet (as with
            vLLM's --max-concurrency).
    """
    gate = nullcontext() if at_once is None else asyncio.Semaphore(at_once)
    idle: list[StreamClient] = []
    replies: list[Reply] = []

    async def run(ask: Ask) -> None:
        async with gate:
            client = idle.pop() if idle else StreamClient(target.url, timeout_s=timeout_s)
            replies.append(Reply(ask, await client.ask(target.body(ask))))
            idle.append(client)

    begin_s = time.monotonic()
    async with asyncio.TaskGroup() as group:
        for ask, offset_s in zip(asks, arrivals.offsets_s(len(asks), seed=len(asks)), strict=True):
            if (wait_s := begin_s + offset_s - time.monotonic()) > 0:
                await asyncio.sleep(wait_s)
            group.create_task(run(ask))
    seconds = time.monotonic() - begin_s
    for client in idle:
        client.close()
    return ServedPass(seconds, sorted(replies, key=lambda reply: reply.ask.number))


def pass_figures(done: ServedPass) -> Figures:
    """Return what the clients saw. Tokens and times are of requests that ended well."""
    whole = [reply for reply in done.replies if reply.whole]
    waits = [reply.waits for reply in whole]
    tokens = sum(reply.num_tokens for reply in whole)
    request_s = sum(wait.e2el_s for wait in waits)
    return {
        "seconds": round(done.seconds, 3),
        "completed": len(whole),
        "failures": dict(Counter(kind for reply in done.replies if (kind := reply.failure) is not None)),
        "prompt_tokens": sum(int(reply.stream.usage.get("prompt_tokens", 0)) for reply in whole),
        "tokens": tokens,
        "requests_per_s": round(len(whole) / done.seconds, 3),
        "tokens_per_s": round(tokens / done.seconds, 2),
        "user_tokens_per_s": round(tokens / request_s, 2) if request_s else None,
        **describe(waits),
    }
