"""Sends requests to a server over HTTP at their arrival times, and records each stream.

Used by `background.py`. The client is small (`output_streams.py`), so that its cost is negligible.
Connections are reused; there are as many as concurrent requests.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

from manta.actors.tokenization.prompts import Chat
from manta.cluster.errors import MantaError
from manta.jobs.bench.common.engine_passes import Figures
from manta.jobs.bench.common.request_source import LoadRequest
from manta.jobs.bench.sweep.load_records import RequestLatencies, describe
from manta.jobs.common.http_client import HEALTH_TIMEOUT_S, ServerClient

from ..arrivals import Arrivals
from .streams import Stream, StreamClient


@dataclass(frozen=True, slots=True)
class Target:
    """A Manta server and the name of its model."""

    url: str
    model: str

    def body(self, request: LoadRequest) -> dict[str, Any]:  # Any: JSON
        chat = isinstance(request.prompt, Chat)
        prompt = {"messages": list(request.prompt.messages)} if chat else {"prompt": request.prompt}
        return {
            "model": self.model,
            **prompt,
            "max_tokens": request.max_tokens,
            "temperature": request.temperature,
            "seed": request.seed & 0x7FFFFFFF,
            "stream_options": {"include_usage": True},
            "ignore_eos": True,
        }


def find_server(url: str) -> Target:
    """Return the server and its first model. Raises MantaError if it cannot be reached."""
    with ServerClient(url, HEALTH_TIMEOUT_S) as client:
        answer = client.request("/v1/models")
    if answer.status != 200:
        raise MantaError(f"{url}/v1/models answered {answer.status}: {answer.error}")
    return Target(url, str(answer.body["data"][0]["id"]))


@dataclass(frozen=True, slots=True)
class Reply:
    request: LoadRequest
    stream: Stream

    @property
    def num_tokens(self) -> int:
        """Return the server's count, or else the number of events with text."""
        reported = self.stream.usage.get("completion_tokens")
        return len(self.stream.token_times_s) if reported is None else int(reported)

    @property
    def whole(self) -> bool:
        """Return whether the stream was complete and not empty."""
        return self.stream.end == "whole" and bool(self.stream.token_times_s)

    @property
    def waits(self) -> RequestLatencies:
        """Return the latencies of a complete stream, from the time it was sent."""
        return RequestLatencies.of(self.stream.requested_s, self.stream.token_times_s, self.num_tokens)

    @property
    def failure(self) -> str | None:
        """Return the kind of failure; None if the stream was complete."""
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
    """All answers of a point, and the seconds from the first request to the end of the last."""

    seconds: float
    replies: Sequence[Reply]


async def send(
    target: Target, requests: Sequence[LoadRequest], arrivals: Arrivals, at_once: int | None, timeout_s: float
) -> ServedPass:
    """Send all requests and wait for all answers.

    Args:
        arrivals: arrival times; an infinite rate with `at_once` is a closed loop.
        at_once: maximum concurrent requests; others wait in the client and are not sent yet (as with vLLM's
            --max-concurrency).
    """
    gate = nullcontext() if at_once is None else asyncio.Semaphore(at_once)
    idle: list[StreamClient] = []
    replies: list[Reply] = []

    async def run(request: LoadRequest) -> None:
        async with gate:
            client = idle.pop() if idle else StreamClient(target.url, timeout_s=timeout_s)
            replies.append(Reply(request, await client.ask(target.body(request))))
            idle.append(client)

    begin_s = time.monotonic()
    async with asyncio.TaskGroup() as group:
        for request, offset_s in zip(
            requests, arrivals.offsets_s(len(requests), seed=len(requests)), strict=True
        ):
            if (wait_s := begin_s + offset_s - time.monotonic()) > 0:
                await asyncio.sleep(wait_s)
            group.create_task(run(request))
    seconds = time.monotonic() - begin_s
    for client in idle:
        client.close()
    return ServedPass(seconds, sorted(replies, key=lambda reply: reply.request.number))


def pass_figures(done: ServedPass) -> Figures:
    """Return the clients' figures; tokens and latencies are those of complete streams."""
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
