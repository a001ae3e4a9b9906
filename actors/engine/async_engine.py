"""The asynchronous engine: runs the step loop in its own thread and serves requests as async streams.

    event loop: add() ─ inbox ─▶ step thread: plan, execute, commit ─ updates ─▶ event loop: text, streams

The step thread never touches text: detokenization and stop strings run on the event loop during the next
step. A stop string found there aborts the sequence one step later, and the tokens of that step are dropped.
`LLM` (llm.py) is the synchronous counterpart.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import Counter, deque
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, contextmanager, nullcontext
from typing import TypedDict, Unpack, cast

from ...cluster.config import EngineConfig
from ...cluster.engine.engine_core import EngineCore, EngineStats
from ...cluster.engine.step_watchdog import TICK_S, Stall, StepWatchdog
from ...cluster.errors import EngineDeadError, EngineGoneError, EngineStalledError, MantaError
from ...cluster.fleet.canary import CanaryTrial, Verdict
from ...cluster.metrics.metric import UsageAccount
from ...cluster.records.acceptance_slices import BlockGroup
from ...cluster.records.request_timeline import RequestTimeline
from ...cluster.request.request import FinishReason, Request, SamplingParams
from ...cluster.scheduler.scheduler_stats import Usage
from ...cluster.step.executor import Executor, ExecutorInfo, HasWorkers, SwapsDrafters
from ..structured_outputs.grammar_frontend import GrammarFrontend, HoldsGrammars
from ..tokenization.prompts import AsyncPromptEncoder, EncodedPrompt, SeedSource, load_tokenizer
from ..tokenization.tokenizer import Tokenizer
from .output_processor import OutputProcessor
from .output_streams import OutputStream, OutputStreams, ReaderLimit, processing_failure
from .outputs import RequestOutput, ResumeState
from .speculation_cache import SpeculationCache
from .uniproc_executor import make_executor

logger = logging.getLogger(__name__)

CHECK_INTERVAL_S = 1.0
DELIVERY_TIMEOUT_S = 10.0  # longest time that updates may wait undelivered while the event loop runs


class RequestOptions(TypedDict, total=False):
    """Per-request options, as the fields of `Request` in `cluster/request/request.py`.

    `resume_state`: output that another engine generated before. `trace`: the final metrics list every step.
    """

    priority: int
    cache_salt: str | None
    max_draft_tokens: int | None
    tpot_ms: float | None
    trace: bool
    background: bool
    resume_state: ResumeState
    client_id: str | None
    owner: str | None
    uses_cache: bool
    account: UsageAccount | None
    on_trial: bool


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
        self._stall: Stall | None = None  # set while a step does not end
        self._stopping = threading.Event()  # ends the thread that watches steps
        spec = config.speculative_config
        # the checkpoint that drafts, as it was named; None without speculation
        self.drafter = None if spec is None else spec.drafter
        self.candidate: str | None = None  # the drafter on trial, if any
        # the running trial, which assigns new requests that may be drafted for to an arm at random
        self.trial: CanaryTrial | None = None
        self.verdicts: Counter[Verdict] = Counter()  # number of finished trials by verdict
        self._make = make
        self._executor: Executor | None = None
        self._engine: EngineCore | None = None
        self._speculation_cache: SpeculationCache | None = None
        self._tokenizer: Tokenizer | None = None
        self._encoder: AsyncPromptEncoder | None = None
        self._grammars: GrammarFrontend | None = None
        self._streams = OutputStreams(self._abort_all)
        self._seeds = SeedSource(config.seed)
        self._inbox: deque[Callable[[EngineCore], None]] = deque()
        self._wake = threading.Condition()
        self._closing = False
        self._failure: MantaError | None = None
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    async def start(self) -> None:
        """Load the models and start the loop. Closes the engine and raises MantaError if that fails."""
        self._loop = asyncio.get_running_loop()
        # In parallel: the workers are processes, so this process mostly waits for them.
        loading = asyncio.to_thread(self._load)
        tokenizer = asyncio.to_thread(load_tokenizer, self.config)
        try:
            executor, self._tokenizer = await asyncio.gather(loading, tokenizer)
        except BaseException:
            self.close()
            raise
        self._encoder = AsyncPromptEncoder(self._tokenizer, executor.info.max_model_len)
        holder = executor if isinstance(executor, HoldsGrammars) else None
        self._grammars = await asyncio.to_thread(GrammarFrontend.of, self._tokenizer, executor.info, holder)
        self._streams.processor = OutputProcessor(self._tokenizer)
        self._engine = EngineCore(self.config, executor, watch=self._watch)
        self._speculation_cache = SpeculationCache(self.config, executor.info, self._engine)
        self._thread = threading.Thread(target=self._run, name="manta-engine", daemon=True)
        self._thread.start()
        threading.Thread(target=self._watch_steps, name="manta-step-watch", daemon=True).start()
        self._watch_delivery()

    def _load(self) -> Executor:
        """Build the executor; close it if `close` was called meanwhile."""
        executor = self._make(self.config)
        with self._wake:
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
    def tokenizer(self) -> Tokenizer | None:
        return self._tokenizer

    @property
    def encoder(self) -> AsyncPromptEncoder:
        """Encodes prompts off the event loop, and rejects those that are too long."""
        assert self._encoder is not None, "start() the engine first"
        return self._encoder

    def stats(self) -> EngineStats:
        assert self._engine is not None, "start() the engine first"
        return self._engine.stats()

    def timelines(self, name: str) -> list[RequestTimeline]:
        assert self._engine is not None, "start() the engine first"
        return self._engine.timelines(name)

    def block_groups(self, is_visible: Callable[[str | None], bool]) -> list[BlockGroup]:
        assert self._engine is not None, "start() the engine first"
        return self._engine.block_groups(is_visible)

    def usage_by_account(self) -> dict[UsageAccount, Usage]:
        assert self._engine is not None, "start() the engine first"
        return self._engine.usage_by_account()

    def check_health(self) -> None:
        if self._failure is not None:
            raise self._failure
        if self._executor is None or self._thread is None or not self._thread.is_alive():
            raise EngineDeadError("The engine is not running.")
        self._executor.check_health()
        if self._stall is not None:
            raise _stalled(self._stall)

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
        async with self._hold_grammar(params) as params_with_grammar:
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
        async with self._hold_grammar(params) as params_with_grammar:
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

    async def begin_trial(self, model: str, trial: CanaryTrial) -> None:
        """Load the checkpoint `model` as a candidate, which drafts for requests assigned to it at random.

        Raises CheckpointError or ConfigError if it does not fit, and changes nothing; EngineDeadError.
        """

        def begin(executor: SwapsDrafters, engine: EngineCore) -> None:
            executor.begin_trial(model)
            engine.begin_trial()

        await self._run_between_steps(begin)
        self.candidate, self.trial = model, trial

    async def end_trial(self, verdict: Verdict | None) -> None:
        """Return to one drafter: the candidate if `verdict` is "promoted", else the previous one.

        Running requests keep drafting, except for those older than the trial. `verdict` is None if the trial
        was withdrawn. Raises EngineDeadError.
        """
        promoted = verdict == "promoted"

        def end(executor: SwapsDrafters, engine: EngineCore) -> None:
            executor.end_trial(promoted=promoted)
            engine.end_trial(promoted=promoted)

        self.trial = None
        await self._run_between_steps(end)
        if promoted and self.candidate is not None:
            self.drafter = self.candidate
        self.candidate = None
        if verdict is not None:
            self.verdicts[verdict] += 1

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
        """Run `operation` on the step thread between two steps; raise what it raises."""
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._post_command(lambda engine: self._run_command(engine, operation, done))
        while not done.done():
            self.check_health()  # the thread of a dead engine runs no commands
            await asyncio.wait({done}, timeout=CHECK_INTERVAL_S)
        done.result()

    def end_all(self, failure: MantaError) -> None:
        """End the running requests with `failure`, except background requests."""
        self._streams.fail_online(failure)

    def kill_stalled_workers(self) -> None:
        """Kill the workers if a step does not end, so that none keeps a device."""
        if self._stall is not None and isinstance(self._executor, HasWorkers):
            self._executor.kill_workers(self._stall.reason)

    def close(self) -> None:
        """End loop and workers. Running requests fail with EngineDeadError. Idempotent."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        self._stopping.set()
        self.kill_stalled_workers()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout=60.0)
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

    def _hold_grammar(self, params: SamplingParams) -> AbstractAsyncContextManager[SamplingParams]:
        assert self._grammars is not None, "start() the engine first"
        if params.structured_outputs is None and params.grammar is None:
            return nullcontext(params)
        return self._grammars.hold(params)

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
        try:
            self.check_health()
        except MantaError as error:
            raise EngineGoneError(error.message) from error
        self._streams.check_new(request_id)
        seeded = self._seeds.with_seed(params)
        drafts, trial = options.get("max_draft_tokens") != 0, self.trial
        ticket = trial.begin() if trial is not None and drafts else None
        if ticket is not None:
            options["on_trial"] = ticket.role == "candidate"
        tracker, requests = self._streams.processor.add(request_id, prompt, seeded, **options)
        background, client_id = options.get("background", False), options.get("client_id")
        stream = OutputStream(tracker, background, complete, limit, client_id=client_id)
        self._streams.register(stream)
        try:
            self._post_command(lambda engine: self._admit(engine, requests, stream))
            yield stream
        finally:
            self._streams.remove(stream)
            if trial is not None and ticket is not None:
                trial.end(ticket, tracker.metrics.arm_stats)

    def _watch_delivery(self, num_stuck: int = 0) -> None:
        """Check every CHECK_INTERVAL_S that updates reach readers; declare the engine dead if none does for
        long.

        Counts checks rather than seconds, so a blocked event loop does not count as a failure.
        """
        if self._closing or self._failure is not None:
            return
        num_stuck = num_stuck + 1 if self._streams.is_stuck() else 0
        if num_stuck * CHECK_INTERVAL_S >= DELIVERY_TIMEOUT_S:
            logger.error("no update has reached its reader for %g s: the engine is dead", DELIVERY_TIMEOUT_S)
            self._failure = EngineDeadError("The engine no longer delivers results. Retry.")
            self._streams.fail_all(self._failure)
        assert self._loop is not None
        self._loop.call_later(CHECK_INTERVAL_S, self._watch_delivery, num_stuck)

    def _abort_all(self, child_ids: Sequence[str], reason: FinishReason) -> None:
        def command(engine: EngineCore) -> None:
            for child_id in child_ids:
                engine.abort(child_id, reason)

        self._post_command(command)

    # On the step thread.

    def _post_command(self, command: Callable[[EngineCore], None]) -> None:
        with self._wake:
            self._inbox.append(command)
            self._wake.notify()

    def _admit(self, engine: EngineCore, requests: Sequence[Request], stream: OutputStream) -> None:
        try:
            engine.add_requests(requests)
        except MantaError as error:
            self._post(stream.fail, error)
        except Exception as error:  # contain the failure: only this request fails
            child_ids = [request.request_id for request in requests]
            self._post(stream.fail, processing_failure(child_ids[0], error, client_id=stream.client_id))
            for child_id in child_ids:
                engine.abort(child_id, "error")

    def _run_command(
        self,
        engine: EngineCore,
        operation: Callable[[SwapsDrafters, EngineCore], None],
        done: asyncio.Future[None],
    ) -> None:
        try:
            operation(cast(SwapsDrafters, self._executor), engine)  # those that compute drafts do
        except EngineDeadError:
            raise
        except MantaError as error:
            self._post(done.set_exception, error)
        else:
            self._post(done.set_result, None)

    def _post(self, call: Callable[..., None], *arguments: object) -> None:
        assert self._loop is not None
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(call, *arguments)

    def _run(self) -> None:
        assert self._engine is not None and self._speculation_cache is not None
        try:
            while self._await_work(self._engine):
                updates = self._engine.step()
                if updates:
                    self._post(self._streams.deliver, updates)
                if time.monotonic() >= self._speculation_cache.due_s:
                    self._speculation_cache.write()
            self._speculation_cache.write()
            self._failure = EngineDeadError("The engine is shutting down. Retry.")
        except MantaError as error:
            self._failure = error
        except BaseException as error:  # the thread's outermost level: every request must get an answer
            ids = self._streams.ids
            logger.exception(
                "the engine's loop failed; running requests: %s", ids, extra={"request_ids": ids}
            )
            self._failure = EngineDeadError(f"The engine failed ({type(error).__name__}). Retry.")
        self._stopping.set()
        self._post(self._streams.fail_all, self._failure)

    def _watch_steps(self) -> None:
        executor = self._executor
        stopped = executor.stopped_workers if isinstance(executor, HasWorkers) else tuple[str, ...]
        while not self._stopping.wait(TICK_S):
            stall = self._watch.check(time.monotonic(), stopped)
            if stall is None and self._stall is not None:
                self._stall = None
                logger.warning("the engine's step has ended: it serves again")
            elif stall is not None and self._stall is None:
                self._stall, ids = stall, self._streams.ids
                logger.error(
                    "the engine cannot serve: %s; running requests: %s",
                    *(stall.reason, ids),
                    extra={"request_ids": ids},
                )
                # Streams and the gateway treat it as any engine death; health probes get the reason.
                self._post(self._streams.fail_online, EngineDeadError(_stalled(stall).message))

    def _await_work(self, engine: EngineCore) -> bool:
        """Run commands; sleep while there is nothing to do. False when closing."""
        with self._wake:
            while not self._closing and not self._inbox and not engine.has_unfinished:
                self._wake.wait()
            commands = list(self._inbox)
            self._inbox.clear()
        for command in commands:
            command(engine)
        return not self._closing


def _stalled(stall: Stall) -> EngineStalledError:
    return EngineStalledError(f"The engine cannot serve: {stall.reason}. Retry.")
