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
import time
from collections import Counter, deque
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, contextmanager
from typing import Protocol, TypedDict, Unpack, runtime_checkable

from ...cluster.config import EngineConfig
from ...cluster.engine.engine_core import EngineCore, EngineStats
from ...cluster.engine.step_watchdog import TICK_S, Stall, StepWatch
from ...cluster.errors import EngineDeadError, EngineGoneError, EngineStalledError, MantaError
from ...cluster.fleet.canary import CanaryTrial, Verdict
from ...cluster.metrics.bounded_labels import UsageAccount
from ...cluster.records.request_timeline import RequestTimeline
from ...cluster.request.request import FinishReason, Request, SamplingParams
from ...cluster.scheduler.usage_meter import Usage
from ...cluster.step.executor import Executor, ExecutorInfo
from ..structured_outputs.grammar_frontend import GrammarFrontend, HoldsGrammars
from ..tokenization.async_prompt_encoder import AsyncPromptEncoder
from ..tokenization.prompts import EncodedPrompt, SeedSource, load_tokenizer
from ..tokenization.tokenizer import Tokenizer
from .output_processor import Begun, OutputProcessor, RequestOutput
from .output_streams import OutputStream, OutputStreams, processing_failure
from .speculation_cache import SpeculationCache
from .uniproc_executor import make_executor
from .unread_outputs import ReaderLimit

logger = logging.getLogger(__name__)

LOOK_S = 1.0
DELIVERY_TIMEOUT_S = 10.0  # that updates may wait while the event loop runs and hands out none


@runtime_checkable
class SwapsDrafters(Protocol):
    """An executor that can change its drafter between two steps: those of `uniproc_executor.py` and
    `workers/`."""

    def swap_drafter(self, model: str) -> None: ...

    def begin_trial(self, model: str) -> None: ...

    def end_trial(self, *, promoted: bool) -> None: ...


@runtime_checkable
class HasWorkers(Protocol):
    """An executor whose workers are processes of their own (`workers/`). Called from any thread."""

    def stopped_workers(self) -> Sequence[str]:
        """Return the names of those that are stopped."""
        ...

    def give_up(self, reason: str) -> None:
        """End all of them, stopped ones too; the executor is dead from then on."""
        ...


class RequestOptions(TypedDict, total=False):
    """How a request is served, as in `cluster/request/request.py`: `Request`; `begun` by another engine.

    With `trace` the metrics of the whole answer tell each step.
    """

    priority: int
    cache_salt: str | None
    max_draft_tokens: int | None
    tpot_ms: float | None
    trace: bool
    background: bool
    begun: Begun
    client_id: str | None
    owner: str | None
    uses_cache: bool
    account: UsageAccount | None
    on_trial: bool


class AsyncEngine:
    """One engine for many concurrent users.

    Args:
        config: of the engine.
        make: builds the executor; runs in a thread, since loading takes long.
        watch: judges steps that do not end.

    Attributes:
        drafter: the checkpoint that drafts, as it was named; None without speculation.
        candidate: the one beside it that is on trial, if there is one.
        trial: of which requests that come, and may be drafted for, draw lots.
        verdicts: how many trials have ended so.
    """

    def __init__(
        self,
        config: EngineConfig,
        make: Callable[[EngineConfig], Executor] = make_executor,
        watch: StepWatch | None = None,
    ) -> None:
        self.config = config
        self._watch = watch or StepWatch()
        self._stall: Stall | None = None  # while a step does not end
        self._stopping = threading.Event()  # of the thread that watches steps
        spec = config.speculative_config
        self.drafter = None if spec is None else spec.drafter
        self.candidate: str | None = None
        self.trial: CanaryTrial | None = None
        self.verdicts: Counter[Verdict] = Counter()
        self._make = make
        self._executor: Executor | None = None
        self._engine: EngineCore | None = None
        self._kept: SpeculationCache | None = None
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
        """Load the models and start the loop. Raises ConfigError and its kin; then it is closed."""
        self._loop = asyncio.get_running_loop()
        # Side by side: workers are processes, and mostly waited for.
        loading = asyncio.to_thread(self._load)
        reading = asyncio.to_thread(load_tokenizer, self.config)
        try:
            executor, self._tokenizer = await asyncio.gather(loading, reading)
        except BaseException:
            self.close()
            raise
        self._encoder = AsyncPromptEncoder(self._tokenizer, executor.info.max_model_len)
        holder = executor if isinstance(executor, HoldsGrammars) else None
        self._grammars = await asyncio.to_thread(GrammarFrontend.of, self._tokenizer, executor.info, holder)
        self._streams.processor = OutputProcessor(self._tokenizer)
        self._engine = EngineCore(self.config, executor, watch=self._watch)
        self._kept = SpeculationCache(self.config, executor.info, self._engine)
        self._thread = threading.Thread(target=self._run, name="manta-engine", daemon=True)
        self._thread.start()
        threading.Thread(target=self._watch_steps, name="manta-step-watch", daemon=True).start()
        self._watch_delivery()

    def _load(self) -> Executor:
        """In a thread; whom `close` did not find here, because it still loaded, ends itself."""
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
        """The door for text: encodes beside the event loop, and refuses what cannot fit."""
        assert self._encoder is not None, "start() the engine first"
        return self._encoder

    def stats(self) -> EngineStats:
        assert self._engine is not None, "start() the engine first"
        return self._engine.stats()

    def lives(self, name: str) -> list[RequestTimeline]:
        """What became of the requests of this name; see `EngineCore.lives`."""
        assert self._engine is not None, "start() the engine first"
        return self._engine.lives(name)

    def spent(self) -> dict[UsageAccount, Usage]:
        """What steps were for whom; see `EngineCore.spent`."""
        assert self._engine is not None, "start() the engine first"
        return self._engine.spent()

    def check_health(self) -> None:
        """Raise EngineDeadError if the engine cannot serve."""
        if self._failure is not None:
            raise self._failure
        if self._executor is None or self._thread is None or not self._thread.is_alive():
            raise EngineDeadError("The engine is not running.")
        self._executor.check_health()
        if self._stall is not None:
            raise _stalled(self._stall)

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
        *,
        limit: ReaderLimit | None = None,
        **options: Unpack[RequestOptions],
    ) -> AsyncGenerator[RequestOutput, None]:
        """Serve one request; yields what is new, once per step that brought tokens; less often where the
        reader is behind.

        Leaving the iterator early (break, cancellation, aclose) aborts the request and frees its pages.

        Args:
            limit: of what may be unread; beyond it the request ends with SlowReaderError.
        """
        async with self._held(params) as held:
            with self._opened(request_id, prompt, held, options, limit=limit) as stream:
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
        async with self._held(params) as held:
            with self._opened(request_id, prompt, held, options, whole=watch is None) as stream:
                while (output := await stream.next()) is not None:
                    if watch is not None:
                        watch(output)
                return stream.tracker.whole()

    def abort(self, request_id: str) -> bool:
        """End a request as aborted; its stream ends with finish_reason "abort". False if it is unknown."""
        return self._streams.abort(request_id)

    async def swap_drafter(self, model: str) -> None:
        """Draft with the checkpoint `model` from now on. Requests that run go on, with the same tokens.

        Raises:
            CheckpointError, ConfigError: it does not fit this engine; the old one stays.
            EngineDeadError: the engine cannot serve.
        """
        await self._ordered(lambda executor, engine: executor.swap_drafter(model))
        self.drafter = model

    async def begin_trial(self, model: str, trial: CanaryTrial) -> None:
        """Have the checkpoint `model` beside the drafter: it drafts for requests that are `on_trial`, by lot.

        Raises:
            CheckpointError, ConfigError: it does not fit this engine; nothing has changed.
            EngineDeadError: the engine cannot serve.
        """

        def begin(executor: SwapsDrafters, engine: EngineCore) -> None:
            executor.begin_trial(model)
            engine.begin_trial()

        await self._ordered(begin)
        self.candidate, self.trial = model, trial

    async def end_trial(self, verdict: Verdict | None) -> None:
        """Have one drafter again: the candidate if it is "promoted". Requests that run go on, and keep their
        drafts but for those older than the trial.

        Args:
            verdict: None: it was taken back.

        Raises:
            EngineDeadError: the engine cannot serve.
        """
        promoted = verdict == "promoted"

        def end(executor: SwapsDrafters, engine: EngineCore) -> None:
            executor.end_trial(promoted=promoted)
            engine.end_trial(promoted=promoted)

        self.trial = None
        await self._ordered(end)
        if promoted and self.candidate is not None:
            self.drafter = self.candidate
        self.candidate = None
        if verdict is not None:
            self.verdicts[verdict] += 1

    async def end_warm_up(self) -> None:
        """Leave the requests so far out of all figures; only what their steps took stays known.

        Raises:
            EngineDeadError: the engine cannot serve.
        """
        kept = self._kept
        assert kept is not None, "start() the engine first"
        await self._ordered(lambda executor, engine: kept.end_warm_up())

    async def _ordered(self, order: Callable[[SwapsDrafters, EngineCore], None]) -> None:
        """Done by the step thread between two steps; raises what that raises."""
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._tell(lambda engine: self._obey(engine, order, done))
        while not done.done():
            self.check_health()  # a dead engine's thread does nothing any more
            await asyncio.wait({done}, timeout=LOOK_S)
        done.result()

    def end_all(self, failure: MantaError) -> None:
        """End the requests that run, with `failure`; not those in the background, which nobody waits for."""
        self._streams.fail_online(failure)

    def give_up_stalled(self) -> None:
        """End the workers if a step does not end: nothing is left that could go on, or hold a device."""
        if self._stall is not None and isinstance(self._executor, HasWorkers):
            self._executor.give_up(self._stall.reason)

    def close(self) -> None:
        """Stop the loop and end the workers. Living requests fail with EngineDeadError. Idempotent."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        self._stopping.set()
        self.give_up_stalled()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout=60.0)
        if self._encoder is not None:
            self._encoder.close()
        if self._grammars is not None:
            self._grammars.close()
        if self._executor is not None:
            self._executor.close()

    def seeded(self, params: SamplingParams) -> SamplingParams:
        """The parameters with the seed that a request without one gets, for who must know it."""
        return self._seeds.seeded(params)

    # On the event loop.

    def _held(self, params: SamplingParams) -> AbstractAsyncContextManager[SamplingParams]:
        """The parameters with their grammar, which is compiled beside the event loop and the steps."""
        assert self._grammars is not None, "start() the engine first"
        return self._grammars.held(params)

    @contextmanager
    def _opened(
        self,
        request_id: str,
        prompt: EncodedPrompt,
        params: SamplingParams,
        options: RequestOptions,
        *,
        whole: bool = False,
        limit: ReaderLimit | None = None,
    ) -> Iterator[OutputStream]:
        """A request that runs while somebody reads."""
        try:
            self.check_health()
        except MantaError as error:
            raise EngineGoneError(error.message) from error
        self._streams.check_new(request_id)
        seeded = self._seeds.seeded(params)
        drafts, trial = options.get("max_draft_tokens") != 0, self.trial
        ticket = trial.begin() if trial is not None and drafts else None
        if ticket is not None:
            options["on_trial"] = ticket.role == "candidate"
        tracker, requests = self._streams.processor.add(request_id, prompt, seeded, **options)
        background, client_id = options.get("background", False), options.get("client_id")
        stream = OutputStream(tracker, background, whole, limit, client_id=client_id)
        self._streams.enter(stream)
        try:
            self._tell(lambda engine: self._admit(engine, requests, stream))
            yield stream
        finally:
            self._streams.leave(stream)
            if trial is not None and ticket is not None:
                trial.end(ticket, tracker.metrics.brought)

    def _watch_delivery(self, num_stuck: int = 0) -> None:
        """Check every second that updates reach their readers. If none does for long, the engine is dead.

        Checks are counted, not seconds, so a loop that was blocked itself is no reason.
        """
        if self._closing or self._failure is not None:
            return
        num_stuck = num_stuck + 1 if self._streams.is_stuck() else 0
        if num_stuck * LOOK_S >= DELIVERY_TIMEOUT_S:
            logger.error("no update has reached its reader for %g s: the engine is dead", DELIVERY_TIMEOUT_S)
            self._failure = EngineDeadError("The engine delivers nothing any more. Retry.")
            self._streams.fail_all(self._failure)
        assert self._loop is not None
        self._loop.call_later(LOOK_S, self._watch_delivery, num_stuck)

    def _abort_all(self, child_ids: Sequence[str], reason: FinishReason) -> None:
        def command(engine: EngineCore) -> None:
            for child_id in child_ids:
                engine.abort(child_id, reason)

        self._tell(command)

    # On the step thread.

    def _tell(self, command: Callable[[EngineCore], None]) -> None:
        with self._wake:
            self._inbox.append(command)
            self._wake.notify()

    def _admit(self, engine: EngineCore, requests: Sequence[Request], stream: OutputStream) -> None:
        try:
            engine.add_requests(requests)
        except MantaError as error:
            self._post(stream.fail, error)
        except Exception as error:  # a request's edge: it alone fails
            child_ids = [request.request_id for request in requests]
            self._post(stream.fail, processing_failure(child_ids[0], error, client_id=stream.client_id))
            for child_id in child_ids:
                engine.abort(child_id, "error")

    def _obey(
        self,
        engine: EngineCore,
        order: Callable[[SwapsDrafters, EngineCore], None],
        done: asyncio.Future[None],
    ) -> None:
        try:
            assert isinstance(self._executor, SwapsDrafters), "executors that compute do"
            order(self._executor, engine)
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
        assert self._engine is not None and self._kept is not None
        try:
            while self._await_work(self._engine):
                updates = self._engine.step()
                if updates:
                    self._post(self._streams.deliver, updates)
                self._kept.keep_if_due()
            self._kept.keep()
            self._failure = EngineDeadError("The engine is shutting down. Retry.")
        except MantaError as error:
            self._failure = error
        except BaseException as error:  # a thread's edge: whatever broke, the requests must be answered
            ids = self._streams.ids
            logger.exception(
                "the engine's loop failed; running requests: %s", ids, extra={"request_ids": ids}
            )
            self._failure = EngineDeadError(f"The engine failed ({type(error).__name__}). Retry.")
        self._stopping.set()
        self._post(self._streams.fail_all, self._failure)

    def _watch_steps(self) -> None:
        """In a thread of its own: see that steps end."""
        executor = self._executor
        stopped = executor.stopped_workers if isinstance(executor, HasWorkers) else tuple[str, ...]
        while not self._stopping.wait(TICK_S):
            stall = self._watch.tick(time.monotonic(), stopped)
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
                # To them, and to a gateway, it is a death like others; the reason is for whoever probes.
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
