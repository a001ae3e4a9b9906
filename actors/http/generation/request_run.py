"""Runs one HTTP request on the engine: turns its prompts into whole answers or merged streams."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Coroutine, Iterable, Iterator, Sequence
from contextlib import aclosing, contextmanager, nullcontext
from typing import Any, TypeVar

from ....cluster.errors import ENDINGS, EngineDeadError, MantaError, UnprocessableError
from ...capture.collector import CapturedAnswers
from ...engine.output_processor import RequestOptions, resumed_text
from ...engine.output_streams import ReaderLimit, size_of
from ...engine.outputs import RequestMetrics, RequestOutput
from ...tokenization.prompts import EncodedPrompt
from ..protocol.prompt_echo import PromptParts, without_answer
from ..wire.errors import public_error
from ..wire.json_io import JsonObject
from ..wire.sse import cancel
from .generation_task import GenerationTask, RequestStats, acceptance
from .server_context import ServerContext

T = TypeVar("T")

BEGIN_AT_ONCE = 16  # engine requests per iteration of the event loop
MAX_ANSWER_BYTES = 1 << 30  # of a whole answer; a token with 20 log probabilities takes 1,600

Outputs = AsyncGenerator[tuple[int, RequestOutput], None]


class GenerationRun:
    """The engine's outputs for one `GenerationTask`, counted and logged."""

    def __init__(self, server: ServerContext, task: GenerationTask) -> None:
        self.server = server
        self.task = task
        counter = task.parsers.token_counter
        self.figures = RequestStats(len(task.prompts), task.params, task.resume_state.token_ids, counter)
        self._params, self._audited = task.params, None
        self._echoes_only = task.request.echoes_only
        if server.audit is not None and task.single and not self._echoes_only:
            arguments = task.request_id, task.id, task.prompts[0], task.params, task.resume_state
            self._audited = server.audit.choose(*arguments)
        if self._audited is not None:
            self._params = self._audited.params
        self._num_bytes = 0  # of whole answers
        self._captured: CapturedAnswers | None = None
        if server.capture is not None and task.may_be_captured and not self._echoes_only:
            self._captured = server.capture.choose(
                task.prompts, task.resume_state, task.model, task.tenant, task.params.temperature
            )

    async def outputs(self) -> Outputs:
        """Yield (prompt index, new output). Closing early aborts; the end is logged."""
        engine, work = self.server.engine, self.task
        limit = ReaderLimit(work.request_id, self.server.settings.max_unread_bytes)
        streams = [
            engine.add(self._engine_id(i), prompt, self._params, limit=limit, **self._options())
            for i, prompt in enumerate(work.prompts)
        ]
        with self._logged():
            if len(streams) == 1:
                async with aclosing(streams[0]) as only:
                    async for made in only:
                        output = self._visible(made)
                        self._watch(0, output)
                        yield 0, output
                return
            async with aclosing(merge(streams)) as merged:
                async for index, made in merged:
                    output = self._visible(made)
                    self._watch(index, output)
                    yield index, output

    async def answers(self) -> list[RequestOutput]:
        """Return the answers to all prompts; the first failure or a cancellation ends all."""
        with self._logged():
            return await gather_outputs(self._complete(i) for i in range(len(self.task.prompts)))

    async def _complete(self, index: int) -> RequestOutput:
        work = self.task
        answer = await self.server.engine.complete(
            self._engine_id(index),
            work.prompts[index],
            self._params,
            watch=lambda output: self._watch_complete(index, self._visible(output)),
            **self._options(),
        )
        return self._visible(answer)

    def _watch_complete(self, index: int, output: RequestOutput) -> None:
        self._num_bytes += sum(map(size_of, output.outputs))
        if self._num_bytes > MAX_ANSWER_BYTES:
            raise UnprocessableError(
                f"The answer is larger than {MAX_ANSWER_BYTES} bytes in memory. Stream it, or ask for less: "
                "`n`, prompts, tokens, log probabilities.",
                param="stream",
            )
        self._watch(index, output)

    def _visible(self, output: RequestOutput) -> RequestOutput:
        return without_answer(output) if self._echoes_only else output

    def _watch(self, index: int, output: RequestOutput) -> None:
        self.figures.feed(index, output, self.server.telemetry)
        if self._audited is not None:
            self._audited.feed(output)
        if self._captured is not None:
            self._captured.feed(index, output)
        _refuse_aborted(output)

    def _engine_id(self, index: int) -> str:
        work = self.task
        id = work.id if work.origin is None else f"{work.id}.{work.origin.attempt}"
        return id if len(work.prompts) == 1 else f"{id}-{index}"

    def resumed_text(self) -> str:
        """Return the text that the client already has from another replica."""
        work, tokenizer = self.task, self.server.engine.tokenizer
        if tokenizer is None:
            return ""
        return resumed_text(tokenizer, work.prompts[0].token_ids, work.params, work.resume_state)

    async def prompt_parts(self, prompt: EncodedPrompt, answer: RequestOutput) -> PromptParts:
        tokenizer = self.server.engine.tokenizer
        return await PromptParts.of(self.task.request, prompt, answer.prompt_logprobs_state, tokenizer)

    def _options(self) -> RequestOptions:
        request = self.task.request
        return {
            "priority": self.task.priority,
            "cache_salt": self.task.caller.salt(request.cache_salt),
            **request.speculative.options,
            "trace": self._traces or self._detailed,
            "resume_state": self.task.resume_state,
            "client_id": self.task.request_id,
            "owner": self.task.caller.owner,
        }

    @contextmanager
    def _logged(self) -> Iterator[None]:
        """Log the request with its final status. Raises RateLimitError from the key's limit."""
        status = 499
        work, audit = self.task, self.server.audit
        count = len(work.prompts) * work.params.n
        pause = nullcontext() if audit is None else audit.pause_for_online_request()
        try:
            with self.server.key_limits.acquire(work.caller.owner, count), pause:
                yield
            status = 200
        except MantaError as error:
            status = public_error(error).status
            if self.figures.first_token_s is None:
                self.server.telemetry.count_rejection(error)
            raise
        except ENDINGS:
            raise
        except BaseException:
            status = 500
            raise
        finally:
            self._finish(status)

    def _finish(self, status: int) -> None:
        work = self.task
        identity = {"request_id": work.request_id, "id": work.id, "model": work.model}
        self.server.telemetry.log_request({**identity, **self.figures.log_fields(), "status": status})
        self.figures.count_by_tenant(work.tenant, self.server.telemetry)
        if self.server.tracing is not None:
            self.server.tracing.end(work, self.figures, status, self.server.engine.drafter)
        if self._audited is not None and self.server.audit is not None and status == 200:
            self.server.audit.submit(self._audited)
        if self._captured is not None and self.server.capture is not None and status == 200:
            self.server.capture.submit(self._captured)

    def envelope(self, kind: str) -> JsonObject:
        work = self.task
        return {
            "id": work.id,
            "object": kind,
            "created": work.created_s,
            "model": work.model,
            "system_fingerprint": self.server.fingerprint,
        }

    def metrics(self) -> JsonObject | None:
        """Return times and acceptance; None unless there is a single completion."""
        settings, cost = self.server.settings, self.figures.cost
        if cost is None or not (self.task.single and self.task.request.include_metrics):
            return None
        times = self.figures.times() if settings.enable_per_request_metrics else {}
        if settings.per_request_spec_decode_metrics == "none" and not self._traces:
            return times or None
        speculates = self.task.request.speculative.max_draft_tokens != 0 and self.server.speculates
        return {**times, "speculative_decoding": self._acceptance(cost) if speculates else None}

    def _acceptance(self, cost: RequestMetrics) -> JsonObject:
        return acceptance(
            cost,
            self.server.engine.info.num_speculative_tokens,
            detailed=self._traces or self._detailed,
            first_traced=len(self.task.resume_state.token_ids) if self._traces else None,
        )

    @property
    def _traces(self) -> bool:
        return self.task.request.speculative.return_trace

    @property
    def _detailed(self) -> bool:
        return self.server.settings.per_request_spec_decode_metrics == "detailed"


async def gather_outputs(work: Iterable[Coroutine[Any, Any, RequestOutput]]) -> list[RequestOutput]:
    """Return all results in order; the first failure cancels all."""
    tasks: list[asyncio.Task[RequestOutput]] = []
    try:
        await _start_gradually(tasks, work)
        return await asyncio.gather(*tasks)
    finally:
        await cancel(*tasks)


async def merge(streams: Sequence[AsyncGenerator[RequestOutput, None]]) -> Outputs:
    """Yield several streams' outputs with the index of each; the first failure ends all."""
    # A short queue: as many pumps as it has places produce an output each per iteration of the loop.
    queue: asyncio.Queue[tuple[int, RequestOutput | BaseException | None]] = asyncio.Queue(maxsize=8)
    tasks: list[asyncio.Task[None]] = []
    begin = asyncio.create_task(
        _start_gradually(tasks, (_pump(i, stream, queue) for i, stream in enumerate(streams)))
    )
    try:
        running = len(streams)
        while running:
            index, item = await queue.get()
            if isinstance(item, BaseException):
                raise item
            if item is None:
                running -= 1
            else:
                yield index, item
    finally:
        await cancel(begin)
        await cancel(*tasks)


async def _start_gradually(tasks: list[asyncio.Task[T]], work: Iterable[Coroutine[Any, Any, T]]) -> None:
    """Create tasks with pauses: starting thousands at once would block the loop."""
    for count, each in enumerate(work, start=1):
        tasks.append(asyncio.create_task(each))
        if count % BEGIN_AT_ONCE == 0:
            await asyncio.sleep(0)


async def _pump(
    index: int,
    stream: AsyncGenerator[RequestOutput, None],
    queue: asyncio.Queue[tuple[int, RequestOutput | BaseException | None]],
) -> None:
    try:
        async with aclosing(stream):
            async for output in stream:
                await queue.put((index, output))
    except ENDINGS:
        raise
    except BaseException as error:  # passed to the reader, which raises it
        await queue.put((index, error))
    else:
        await queue.put((index, None))


def _refuse_aborted(output: RequestOutput) -> None:
    """Raise EngineDeadError if a completion ended early: OpenAI has no finish reason for that."""
    for completion in output.outputs:
        if completion.finish_reason in ("abort", "error"):
            raise EngineDeadError("The server ended this request early. Retry.")
