"""The engine as a living thing: its loop in a thread of its own, requests as async streams.

    event loop: add() ─ inbox ─▶ step thread: plan, execute, commit ─ updates ─▶ event loop: text, streams

The step thread never touches text; detokenization and stop strings run on the event loop while the next
step is under way. A stop string found there aborts the sequence one step later; its tokens never come out.
Used by the Serve replica and by batch actors. `LLM` (llm.py) is the synchronous twin.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol, TypedDict, Unpack, runtime_checkable

from ..cluster.config import EngineConfig
from ..cluster.engine import Engine, EngineStats, SequenceUpdate
from ..cluster.errors import EngineDeadError, MantaError, RequestError
from ..cluster.executor import Executor, ExecutorInfo
from ..cluster.request import FinishReason, Request, SamplingParams
from .encoding import PromptEncoder
from .executor import make_executor
from .grammars import GrammarDoor
from .outputs import Begun, OutputProcessor, RequestOutput, RequestTracker
from .prompts import EncodedPrompt, SeedSource, load_tokenizer
from .tokenizer import Tokenizer

logger = logging.getLogger(__name__)

LOOK_S = 1.0


@runtime_checkable
class SwapsDrafters(Protocol):
    """An executor that can change its drafter between two steps: those of `executor.py` and `workers/`."""

    def swap_drafter(self, model: str) -> None: ...


class RequestOptions(TypedDict, total=False):
    """How a request is served, as in `cluster/request.py`: `Request`; `begun` by another engine."""

    priority: int
    cache_salt: str | None
    speculate: bool
    background: bool
    begun: Begun


@dataclass(slots=True)
class _Stream:
    """Where the outputs of one user request go. `failure` ends it."""

    tracker: RequestTracker
    background: bool = False
    outputs: deque[RequestOutput] = field(default_factory=deque)
    failure: MantaError | None = None
    wake: asyncio.Event = field(default_factory=asyncio.Event)

    async def next(self) -> RequestOutput | None:
        """What is new, None at the end. Raises what ended the request early."""
        while not self.outputs:
            if self.tracker.finished:
                return None
            if self.failure is not None:
                raise self.failure
            await self.wake.wait()
            self.wake.clear()
        return self.outputs.popleft()


class AsyncEngine:
    """One engine for many concurrent users.

    Args:
        config: of the engine.
        make: builds the executor; runs in a thread, since loading takes long.

    Attributes:
        drafter: the checkpoint that drafts, as it was named; None without speculation.
    """

    def __init__(
        self, config: EngineConfig, make: Callable[[EngineConfig], Executor] = make_executor
    ) -> None:
        self.config = config
        spec = config.speculative_config
        self.drafter = None if spec is None else spec.model
        self._make = make
        self._executor: Executor | None = None
        self._engine: Engine | None = None
        self._tokenizer: Tokenizer | None = None
        self._encoder: PromptEncoder | None = None
        self._grammars: GrammarDoor | None = None
        self._processor = OutputProcessor(None)
        self._seeds = SeedSource(config.seed)
        self._streams: dict[str, _Stream] = {}  # by the user's request id
        self._inbox: deque[Callable[[Engine], None]] = deque()
        self._wake = threading.Condition()
        self._closing = False
        self._failure: MantaError | None = None
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    async def start(self) -> None:
        """Load the models and start the loop. Raises ConfigError and its kin."""
        self._loop = asyncio.get_running_loop()
        self._tokenizer = await asyncio.to_thread(load_tokenizer, self.config)
        self._executor = await asyncio.to_thread(self._make, self.config)
        self._encoder = PromptEncoder(self._tokenizer, self._executor.info.max_model_len)
        self._grammars = await asyncio.to_thread(GrammarDoor.of, self._tokenizer, self._executor.info)
        self._processor = OutputProcessor(self._tokenizer)
        self._engine = Engine(self.config, self._executor)
        self._thread = threading.Thread(target=self._run, name="manta-engine", daemon=True)
        self._thread.start()

    @property
    def info(self) -> ExecutorInfo:
        assert self._executor is not None, "start() the engine first"
        return self._executor.info

    @property
    def tokenizer(self) -> Tokenizer | None:
        return self._tokenizer

    @property
    def encoder(self) -> PromptEncoder:
        """The door for text: encodes beside the event loop, and refuses what cannot fit."""
        assert self._encoder is not None, "start() the engine first"
        return self._encoder

    def stats(self) -> EngineStats:
        assert self._engine is not None, "start() the engine first"
        return self._engine.stats()

    def check_health(self) -> None:
        """Raise EngineDeadError if the engine cannot serve."""
        if self._failure is not None:
            raise self._failure
        if self._executor is None or self._thread is None or not self._thread.is_alive():
            raise EngineDeadError("The engine is not running.")
        self._executor.check_health()

    @property
    def is_alive(self) -> bool:
        """Whether `check_health` would be silent."""
        try:
            self.check_health()
        except MantaError:
            return False
        return True

    async def add(
        self,
        request_id: str,
        prompt: EncodedPrompt,
        params: SamplingParams,
        **options: Unpack[RequestOptions],
    ) -> AsyncGenerator[RequestOutput, None]:
        """Serve one request; yields what is new, once per step that brought tokens.

        Leaving the iterator early (break, cancellation, aclose) aborts the request and frees its pages.
        """
        params = await self._let_in(params)
        with self._opened(request_id, prompt, params, options) as stream:
            while (output := await stream.next()) is not None:
                yield output

    async def complete(
        self,
        request_id: str,
        prompt: EncodedPrompt,
        params: SamplingParams,
        *,
        watch: Callable[[RequestOutput], None] | None = None,
        **options: Unpack[RequestOptions],
    ) -> RequestOutput:
        """Serve one request to its end; the whole answer, all n completions. Cancellation aborts it.

        Args:
            watch: called with what `add` would have yielded; what it raises ends the request.
        """
        params = await self._let_in(params)
        with self._opened(request_id, prompt, params, options) as stream:
            while (output := await stream.next()) is not None:
                if watch is not None:
                    watch(output)
            return stream.tracker.whole()

    def abort(self, request_id: str) -> bool:
        """End a request as aborted; its stream ends with finish_reason "abort". False if it is unknown."""
        stream = self._streams.get(request_id)
        if stream is None:
            return False
        child_ids = stream.tracker.child_ids
        self._abort_all(child_ids)
        self._deliver([_aborted(c) for c in child_ids])
        return True

    async def swap_drafter(self, model: str) -> None:
        """Draft with the checkpoint `model` from now on. Requests that run go on, with the same tokens.

        Raises:
            CheckpointError, ConfigError: it does not fit this engine; the old one stays.
            EngineDeadError: the engine cannot serve.
        """
        swapped: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._tell(lambda engine: self._swap(model, swapped))
        while not swapped.done():
            self.check_health()  # a dead engine's thread does nothing any more
            await asyncio.wait({swapped}, timeout=LOOK_S)
        swapped.result()
        self.drafter = model

    def end_all(self, failure: MantaError) -> None:
        """End the requests that run, with `failure`; not those in the background, which nobody waits for."""
        self._fail([stream for stream in self._streams.values() if not stream.background], failure)

    def close(self) -> None:
        """Stop the loop and end the workers. Living requests fail with EngineDeadError. Idempotent."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout=60.0)
        if self._encoder is not None:
            self._encoder.close()
        if self._executor is not None:
            self._executor.close()

    # On the event loop.

    async def _let_in(self, params: SamplingParams) -> SamplingParams:
        """With what the text must be, compiled; beside the event loop."""
        assert self._grammars is not None, "start() the engine first"
        if params.structured_outputs is None and params.grammar is None:
            return params
        return await self.encoder.in_thread(self._grammars.let_in, params)

    @contextmanager
    def _opened(
        self, request_id: str, prompt: EncodedPrompt, params: SamplingParams, options: RequestOptions
    ) -> Iterator[_Stream]:
        """A request that runs while somebody reads."""
        self.check_health()
        if request_id in self._streams:
            raise RequestError(
                f"request_id={request_id!r} is already running; give each request an id of its own.",
                param="request_id",
            )
        seeded = self._seeds.seeded(params)
        tracker, requests = self._processor.add(request_id, prompt, seeded, **options)
        stream = self._streams[request_id] = _Stream(tracker, options.get("background", False))
        try:
            self._tell(lambda engine: self._admit(engine, requests, stream))
            yield stream
        finally:
            self._leave(request_id, stream)

    def _leave(self, request_id: str, stream: _Stream) -> None:
        """The reader is done or gone: forget what is left of the request everywhere."""
        del self._streams[request_id]
        if not stream.tracker.finished:
            self._processor.forget(stream.tracker.child_ids)
            self._abort_all(stream.tracker.child_ids)

    def _abort_all(self, child_ids: Sequence[str], reason: FinishReason = "abort") -> None:
        def command(engine: Engine) -> None:
            for child_id in child_ids:
                engine.abort(child_id, reason)

        self._tell(command)

    def _deliver(self, updates: Sequence[SequenceUpdate]) -> None:
        deltas, stopped = self._processor.process(updates)
        for delta in deltas:
            stream = self._streams[delta.request_id]
            stream.outputs.append(delta)
            stream.wake.set()
        if stopped:
            self._abort_all(stopped, "stop")

    def _fail(self, streams: Sequence[_Stream], failure: MantaError) -> None:
        for stream in streams:
            stream.failure = failure
            stream.wake.set()

    def _fail_all(self, failure: MantaError) -> None:
        self._fail(list(self._streams.values()), failure)

    # On the step thread.

    def _tell(self, command: Callable[[Engine], None]) -> None:
        with self._wake:
            self._inbox.append(command)
            self._wake.notify()

    def _admit(self, engine: Engine, requests: Sequence[Request], stream: _Stream) -> None:
        try:
            engine.add_requests(requests)
        except MantaError as error:
            self._post(self._fail, [stream], error)

    def _swap(self, model: str, swapped: asyncio.Future[None]) -> None:
        try:
            assert isinstance(self._executor, SwapsDrafters), "executors that compute do"
            self._executor.swap_drafter(model)
        except EngineDeadError:
            raise
        except MantaError as error:
            self._post(swapped.set_exception, error)
        else:
            self._post(swapped.set_result, None)

    def _post(self, call: Callable[..., None], *arguments: object) -> None:
        assert self._loop is not None
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(call, *arguments)

    def _run(self) -> None:
        assert self._engine is not None
        try:
            while self._await_work(self._engine):
                updates = self._engine.step()
                if updates:
                    self._post(self._deliver, updates)
            self._failure = EngineDeadError("The engine is shutting down. Retry.")
        except MantaError as error:
            self._failure = error
        except Exception as error:  # a process's edge: whatever broke, the requests must be answered
            logger.exception("the engine's loop failed; running requests: %s", sorted(self._streams))
            self._failure = EngineDeadError(f"The engine failed ({type(error).__name__}). Retry.")
        self._post(self._fail_all, self._failure)

    def _await_work(self, engine: Engine) -> bool:
        """Run commands; sleep while there is nothing to do. False when closing."""
        with self._wake:
            while not self._closing and not self._inbox and not engine.has_unfinished:
                self._wake.wait()
            commands = list(self._inbox)
            self._inbox.clear()
        for command in commands:
            command(engine)
        return not self._closing


def _aborted(child_id: str) -> SequenceUpdate:
    return SequenceUpdate(
        request_id=child_id,
        token_ids=(),
        finish_reason="abort",
        stop_reason=None,
        num_cached_tokens=0,
        num_drafted=0,
        num_accepted=0,
    )
