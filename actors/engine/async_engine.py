"""The asynchronous engine: serves requests as async streams, with steps in a thread (`step_thread.py`).

    event loop: add() ─ inbox ─▶ step thread: plan, execute, commit ─ updates ─▶ event loop: text, streams

The step thread never touches text: detokenization and stop strings run on the event loop during the next
step. A stop string found there aborts the sequence one step later, and the tokens of that step are dropped.
`LLM` (llm.py) is the synchronous counterpart.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, contextmanager, nullcontext
from typing import Unpack

from ...cluster.config import EngineConfig
from ...cluster.engine.engine_core import EngineCore
from ...cluster.engine.engine_stats import EngineStats
from ...cluster.engine.step_watchdog import StepWatchdog
from ...cluster.errors import EngineDeadError, EngineGoneError, MantaError
from ...cluster.pages.page_files import PageFolder
from ...cluster.records.acceptance_slices import BlockGroup
from ...cluster.records.request_timeline import RequestTimeline
from ...cluster.request.request import FinishReason, Request, SamplingParams
from ...cluster.step.executor import Executor, ExecutorInfo, SwapsDrafters
from ..structured_outputs.grammar_frontend import GrammarFrontend
from ..structured_outputs.rank_grammars import HoldsGrammars
from ..tokenization.prompts import AsyncPromptEncoder, EncodedPrompt, SeedSource, load_tokenizer
from ..tokenization.tokenizer import Tokenizer
from .output_processor import OutputProcessor, RequestOptions
from .output_streams import OutputStream, OutputStreams, ReaderLimit, processing_failure
from .outputs import RequestOutput
from .speculation_cache import SpeculationCache
from .step_thread import StepThread
from .uniproc_executor import make_executor

logger = logging.getLogger(__name__)

CHECK_INTERVAL_S = 1.0
DELIVERY_TIMEOUT_S = 10.0  # longest time that updates may wait undelivered while the event loop runs


class AsyncEngine:
    """One engine that serves many concurrent requests. `make` builds the executor, in a thread."""

    def __init__(
        self,
        config: EngineConfig,
        make: Callable[[EngineConfig], Executor] = make_executor,
        watch: StepWatchdog | None = None,
    ) -> None:
        self.config = config
        self._watch = watch or StepWatchdog()
        spec = config.speculative_config
        # the checkpoint that drafts, as it was named; None without speculation
        self.drafter = None if spec is None else spec.drafter
        self._make = make
        self._executor: Executor | None = None
        self._engine: EngineCore | None = None
        self._speculation_cache: SpeculationCache | None = None
        self.tokenizer: Tokenizer | None = None
        self._encoder: AsyncPromptEncoder | None = None
        self._grammars: GrammarFrontend | None = None
        self._streams = OutputStreams(self._abort_all)
        self._seeds = SeedSource(config.seed)
        self._steps: StepThread | None = None
        self._closing, self._close_lock = False, threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None

    async def start(self) -> None:
        """Load the models and start the loop. Closes the engine and raises MantaError if that fails."""
        self._loop = asyncio.get_running_loop()
        # In parallel: the workers are processes, so this process mostly waits for them.
        loading = asyncio.to_thread(self._load)
        tokenizer = asyncio.to_thread(load_tokenizer, self.config)
        try:
            executor, self.tokenizer = await asyncio.gather(loading, tokenizer)
        except BaseException:
            self.close()
            raise
        self._encoder = AsyncPromptEncoder(self.tokenizer, executor.info.max_model_len)
        holder = executor if isinstance(executor, HoldsGrammars) else None
        self._grammars = await asyncio.to_thread(
            GrammarFrontend.of, self.tokenizer, executor.info, self.config, holder
        )
        self._streams.processor = OutputProcessor(self.tokenizer, executor.clock)
        self._engine = EngineCore(self.config, executor, watch=self._watch)
        self._speculation_cache = SpeculationCache(self.config, executor.info, self._engine)
        self._steps = StepThread(
            *(self._engine, executor, self._speculation_cache, self._watch, self._streams, self._loop)
        )
        self._steps.start()
        self._watch_delivery()

    def _load(self) -> Executor:
        """Build the executor; close it if `close` was called meanwhile."""
        executor = self._make(self.config)
        with self._close_lock:
            self._executor = executor
            closing = self._closing
        if closing:
            executor.close()
        return executor

    @property
    def info(self) -> ExecutorInfo:
        assert self._executor is not None, "start() the engine first"
        return self._executor.info

    @property
    def encoder(self) -> AsyncPromptEncoder:
        """Encodes prompts off the event loop, and rejects those that are too long."""
        assert self._encoder is not None, "start() the engine first"
        return self._encoder

    @property
    def _core(self) -> EngineCore:
        assert self._engine is not None, "start() the engine first"
        return self._engine

    @property
    def page_folder(self) -> PageFolder | None:
        """The files of the tier below the pages, while they are used."""
        return self._core.page_folder

    def stats(self) -> EngineStats:
        return self._core.stats()

    def timelines(self, name: str) -> list[RequestTimeline]:
        return self._core.timelines(name)

    def block_groups(self, is_visible: Callable[[str | None], bool]) -> list[BlockGroup]:
        return self._core.block_groups(is_visible)

    def check_health(self) -> None:
        if self._steps is None:
            raise EngineDeadError("The engine is not running.")
        self._steps.check_health()

    @property
    def is_alive(self) -> bool:
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
        *,
        limit: ReaderLimit | None = None,
        **options: Unpack[RequestOptions],
    ) -> AsyncGenerator[RequestOutput, None]:
        """Serve one request. Yield new output once per step that produced tokens; less often to a slow
        reader.

        Leaving the iterator early (break, cancellation, aclose) aborts the request and frees its pages.
        Beyond `limit`, which bounds unread output, it ends with SlowReaderError.
        """
        async with self._hold_grammar(params, options) as params_with_grammar:
            with self._open_stream(request_id, prompt, params_with_grammar, options, limit=limit) as stream:
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
        """Serve one request and return its complete output with all n completions. Cancellation aborts it.

        `watch` is called with every output that `add` would have yielded; an exception from it ends the
        request.
        """
        async with self._hold_grammar(params, options) as params_with_grammar:
            with self._open_stream(
                request_id, prompt, params_with_grammar, options, complete=watch is None
            ) as stream:
                while (output := await stream.next()) is not None:
                    if watch is not None:
                        watch(output)
                return stream.tracker.complete_output()

    def abort(self, request_id: str) -> bool:
        """End a request as aborted (finish_reason "abort"). Return False if it is unknown."""
        return self._streams.abort(request_id)

    async def swap_drafter(self, model: str) -> None:
        """Draft with the checkpoint `model` from now on. Running requests continue with unchanged tokens.

        Raises CheckpointError or ConfigError if it does not fit, and keeps the old drafter; EngineDeadError.
        """
        await self._run_between_steps(lambda executor, engine: executor.swap_drafter(model))
        self.drafter = model

    async def measure_steps(self) -> None:
        """Measure steps of every draft length before the first request."""
        speculation_cache = self._speculation_cache
        assert speculation_cache is not None, "start() the engine first"
        await self._run_between_steps(lambda executor, engine: speculation_cache.measure_steps())

    async def end_warm_up(self) -> None:
        """Exclude the requests so far from all statistics; only measured step times are kept."""
        speculation_cache = self._speculation_cache
        assert speculation_cache is not None, "start() the engine first"
        await self._run_between_steps(lambda executor, engine: speculation_cache.end_warm_up())

    async def _run_between_steps(self, operation: Callable[[SwapsDrafters, EngineCore], None]) -> None:
        assert self._steps is not None, "start() the engine first"
        await self._steps.run_between_steps(operation)

    def end_all(self, failure: MantaError) -> None:
        """End the running requests with `failure`, except background requests."""
        self._streams.fail_online(failure)

    def kill_stalled_workers(self) -> None:
        """Kill the workers if a step does not end, so that none keeps a device."""
        if self._steps is not None:
            self._steps.kill_stalled_workers()

    def close(self) -> None:
        """End loop and workers. Running requests fail with EngineDeadError. Idempotent."""
        with self._close_lock:
            self._closing = True
        if self._steps is not None:
            self._steps.stop()
        if self._encoder is not None:
            self._encoder.close()
        if self._grammars is not None:
            self._grammars.close()
        if self._executor is not None:
            self._executor.close()

    def with_seed(self, params: SamplingParams) -> SamplingParams:
        """Add the seed that the engine would choose for a request without one."""
        return self._seeds.with_seed(params)

    # On the event loop.

    def _hold_grammar(
        self, params: SamplingParams, options: RequestOptions
    ) -> AbstractAsyncContextManager[SamplingParams]:
        assert self._grammars is not None, "start() the engine first"
        if params.structured_outputs is None and params.grammar is None:
            return nullcontext(params)
        background = options.get("background", False)
        return self._grammars.hold(params, options.get("owner"), background=background)

    @contextmanager
    def _open_stream(
        self,
        request_id: str,
        prompt: EncodedPrompt,
        params: SamplingParams,
        options: RequestOptions,
        *,
        complete: bool = False,
        limit: ReaderLimit | None = None,
    ) -> Iterator[OutputStream]:
        steps = self._healthy_steps()
        self._streams.check_new(request_id)
        seeded = self._seeds.with_seed(params)
        tracker, requests = self._streams.processor.add(request_id, prompt, seeded, **options)
        background, client_id = options.get("background", False), options.get("client_id")
        stream = OutputStream(tracker, background, complete, limit, client_id=client_id)
        self._streams.register(stream)
        try:
            steps.post_command(lambda core: _admit(core, requests, stream, steps))
            yield stream
        finally:
            self._streams.remove(stream)

    def _healthy_steps(self) -> StepThread:
        """Return the thread that runs steps. Raises EngineGoneError if it does not."""
        try:
            self.check_health()
        except MantaError as error:
            raise EngineGoneError(error.message) from error
        assert self._steps is not None, "it is healthy"
        return self._steps

    def _watch_delivery(self, num_stuck: int = 0) -> None:
        """Check every CHECK_INTERVAL_S that updates reach readers; declare the engine dead if none does for
        long.

        Counts checks rather than seconds, so a blocked event loop does not count as a failure.
        """
        steps = self._steps
        if self._closing or steps is None or steps.failure is not None:
            return
        num_stuck = num_stuck + 1 if self._streams.is_stuck() else 0
        if num_stuck * CHECK_INTERVAL_S >= DELIVERY_TIMEOUT_S:
            logger.error("no update has reached its reader for %g s: the engine is dead", DELIVERY_TIMEOUT_S)
            steps.failure = EngineDeadError("The engine no longer delivers results. Retry.")
            self._streams.fail_all(steps.failure)
        assert self._loop is not None
        self._loop.call_later(CHECK_INTERVAL_S, self._watch_delivery, num_stuck)

    def _abort_all(self, child_ids: Sequence[str], reason: FinishReason) -> None:
        def command(core: EngineCore) -> None:
            for child_id in child_ids:
                core.abort(child_id, reason)

        assert self._steps is not None, "streams are opened once it has started"
        self._steps.post_command(command)


def _admit(core: EngineCore, requests: Sequence[Request], stream: OutputStream, steps: StepThread) -> None:
    """Queue the requests of a stream; on the step thread."""
    try:
        core.add_requests(requests)
    except MantaError as error:
        steps.post(stream.fail, error)
    except Exception as error:  # contain the failure: only this request fails
        child_ids = [request.request_id for request in requests]
        steps.post(stream.fail, processing_failure(child_ids[0], error, client_id=stream.client_id))
        for child_id in child_ids:
            core.abort(child_id, "error")
