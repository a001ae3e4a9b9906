"""Sides of `benchmarks serve-tax`: the bare engine, and one more layer each.

    engine   in this process
    actor    the same with its worker in a Ray actor
    asgi     the application under uvicorn in its own process, over HTTP
    serve    `manta serve`: Ray Serve behind HAProxy
    engine-plain, serve-plain    the first and the last without speculation
    peers    other programs' servers of the same target

Each runs alone and loads its models for its turn. All answer the same `Question`s.
"""

from __future__ import annotations

import asyncio
import itertools
import shlex
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import ray
from manta.actors.engine.async_engine import AsyncEngine
from manta.actors.engine.uniproc_executor import make_executor
from manta.actors.system.host_resources import free_port
from manta.actors.tokenization.prompts import EncodedPrompt
from manta.cluster.config import EngineConfig
from manta.cluster.errors import MantaError
from manta.cluster.request.request import SamplingParams
from manta.cluster.step.executor import Executor
from manta.jobs.common.http_client import ServerClient
from manta.jobs.common.ray_session import join_or_start_ray
from manta.jobs.common.server_process import server

from ..processes.process_clocks import SERVER_MODULE
from .own_server import manta_serve, write_settings
from .streams import StreamClient


@dataclass(frozen=True, slots=True)
class Question:
    """A request for a stream; every side returns the same tokens."""

    prompt: list[int] = field(repr=False)
    max_tokens: int
    temperature: float
    seed: int


@dataclass(frozen=True, slots=True)
class Reply:
    """Tokens of a stream (None if a server returns no ids), and the time to first token."""

    num_tokens: int
    token_ids: list[int] | None = field(repr=False)
    first_s: float


# A peer's tokens are counted by its usage if it returns no ids; its prefix cache would reuse earlier rounds,
# and its own defaults may truncate the distribution.
PEER_EXTRAS = {
    "stream_options": {"include_usage": True},
    "cache_prompt": False,
    "top_k": 0,
    "top_p": 1.0,
    "min_p": 0.0,
}

Ask = Callable[[Question], Awaitable[Reply]]


class Asker(Protocol):
    def worker(self) -> AbstractAsyncContextManager[Ask]:
        """Return the function with which one of the concurrent workers sends requests."""
        ...


class EngineAsker:
    """Sends requests to an `AsyncEngine` in this process."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine
        self._numbers = itertools.count()

    @asynccontextmanager
    async def worker(self) -> AsyncIterator[Ask]:
        yield self._ask

    async def _ask(self, question: Question) -> Reply:
        params = SamplingParams(
            temperature=question.temperature,
            max_tokens=question.max_tokens,
            seed=question.seed,
            ignore_eos=True,
        )
        prompt, token_ids, first_s = EncodedPrompt(tuple(question.prompt)), list[int](), 0.0
        begin_s = time.monotonic()
        async for output in self._engine.add(f"tax-{next(self._numbers)}", prompt, params):
            first_s = first_s or time.monotonic() - begin_s
            token_ids += output.outputs[0].token_ids
        return Reply(len(token_ids), token_ids, first_s)


class HttpAsker:
    """Sends requests over HTTP, with a persistent connection per worker; to a peer with one per request."""

    def __init__(self, url: str, model: str, *, is_peer: bool = False) -> None:
        self._url, self._model, self._is_peer = url, model, is_peer

    @asynccontextmanager
    async def worker(self) -> AsyncIterator[Ask]:
        async with StreamClient(self._url) as client:

            async def ask(question: Question) -> Reply:
                stream = await client.ask(self._body(question))
                if self._is_peer:  # llama.cpp's server closes the connection, but does not announce it
                    client.close()
                if stream.end != "whole" or stream.first_s is None:
                    raise MantaError(
                        f"A stream from {self._url} ended as {stream.end!r} (status {stream.status}): "
                        f"{dict(stream.error)}."
                    )
                ids = stream.token_ids or None
                return Reply(len(ids) if ids else stream.usage["completion_tokens"], ids, stream.first_s)

            yield ask

    def _body(self, question: Question) -> dict[str, Any]:  # Any: JSON
        return {
            **asdict(question),
            "model": self._model,
            "ignore_eos": True,
            "return_token_ids": True,
            **(PEER_EXTRAS if self._is_peer else {}),
        }


@asynccontextmanager
async def engine_side(config: EngineConfig, scratch: Path) -> AsyncIterator[Asker]:
    async with _engine(config, make_executor) as asker:
        yield asker


@asynccontextmanager
async def actor_side(config: EngineConfig, scratch: Path) -> AsyncIterator[Asker]:
    from manta.actors.workers.ray_executor import RayExecutor

    started_here = join_or_start_ray(log_to_driver=False)
    try:
        async with _engine(config, RayExecutor) as asker:
            yield asker
    finally:
        if started_here:
            ray.shutdown()


@asynccontextmanager
async def asgi_side(config: EngineConfig, scratch: Path) -> AsyncIterator[Asker]:
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    settings = write_settings(config, scratch)
    script = Path(__file__).with_name(f"{SERVER_MODULE}.py")
    command = [sys.executable, "-P", str(script), str(settings), str(port)]
    with server(command, url, scratch / "asgi.log"):
        yield HttpAsker(url, config.model)


@asynccontextmanager
async def serve_side(config: EngineConfig, scratch: Path) -> AsyncIterator[Asker]:
    with manta_serve(config, scratch) as url:
        yield HttpAsker(url, config.model)


@asynccontextmanager
async def peer_side(command: str, config: EngineConfig, scratch: Path) -> AsyncIterator[Asker]:
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    with server(shlex.split(command.replace("{port}", str(port))), url, scratch / "peer.log"):
        with ServerClient(url) as client:
            model = client.request("/v1/models").body["data"][0]["id"]
        yield HttpAsker(url, model, is_peer=True)


def plain(side: Side) -> Side:
    """Return the side without speculation."""
    return lambda config, scratch: side(replace(config, speculative_config=None), scratch)


Side = Callable[[EngineConfig, Path], AbstractAsyncContextManager[Asker]]
SIDES: dict[str, Side] = {
    "engine": engine_side,
    "actor": actor_side,
    "asgi": asgi_side,
    "serve": serve_side,
    "engine-plain": plain(engine_side),
    "serve-plain": plain(serve_side),
}
NAMES = {
    "engine": "engine in process",
    "actor": "worker in an actor",
    "asgi": "bare ASGI",
    "serve": "Serve, HAProxy",
    "engine-plain": "engine, plain",
    "serve-plain": "Serve, plain",
}


@asynccontextmanager
async def _engine(config: EngineConfig, make: Callable[[EngineConfig], Executor]) -> AsyncIterator[Asker]:
    engine = AsyncEngine(config, make)
    try:
        await engine.start()
        yield EngineAsker(engine)
    finally:
        await asyncio.to_thread(engine.close)
