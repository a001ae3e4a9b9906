"""One HTTP request on the engine: its prompts become whole answers or merged streams, counted and logged.

How the outputs are shown is `generation.py`'s business.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator, Coroutine, Iterable, Iterator, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from ...cluster.errors import EngineDeadError, MantaError
from ...cluster.request import SamplingParams
from ..chat.reading import PLAIN, Reading
from ..engine import RequestOptions
from ..outputs import NOTHING, Begun, RequestMetrics, RequestOutput, begun_text
from ..prompts import EncodedPrompt
from .errors import public_error
from .figures import RequestFigures
from .frontend import Frontend
from .origin import TOLD_HEADER, Origin
from .prompt_parts import PromptParts, without_answer
from .protocol import GenerationRequest
from .speculation import acceptance
from .sse import cancel
from .wire import JsonObject

T = TypeVar("T")

BEGIN_AT_ONCE = 16  # engine requests, in a turn of the loop
_UNPRINTABLE = re.compile(r"[^\w.-]", re.ASCII)

Outputs = AsyncGenerator[tuple[int, RequestOutput], None]


@dataclass(frozen=True, slots=True)
class Work:
    """One HTTP request, ready to run. `id` is the response's and the engine's; `request_id` the client's.

    `created_s` is Unix time; `origin` what a gateway fixed of the request; `resumable` says
    whether its stream can go on at another replica, `reading` how its answers are read.
    """

    id: str
    request_id: str
    model: str
    prompts: list[EncodedPrompt]
    params: SamplingParams
    priority: int
    ignored: list[str]
    request: GenerationRequest
    created_s: int
    origin: Origin | None = None
    resumable: bool = True
    reading: Reading = PLAIN

    @property
    def single(self) -> bool:
        return len(self.prompts) == 1 and self.params.n == 1

    @property
    def told(self) -> bool:
        """Whether a gateway is told the stream's tokens.

        Only a single completion can go on elsewhere, and none that begins with its prompt, or whose log
        probabilities were asked for: their offsets count from the beginning of a text that another replica
        has not made.
        """
        alone = self.single and self.params.logprobs is None
        alone = alone and self.resumable and not self.request.echoes
        return self.origin is not None and self.request.stream and alone

    @property
    def begun(self) -> Begun:
        return NOTHING if self.origin is None else self.origin.begun

    @property
    def headers(self) -> dict[str, str]:
        """X-Ignored-Params names what was ignored, as far as names fit a header."""
        names = [_UNPRINTABLE.sub("?", name)[:64] for name in self.ignored[:20]]
        headers = {"X-Ignored-Params": ",".join(names)} if names else {}
        return headers | ({TOLD_HEADER: "1"} if self.told else {})


class Run:
    """The engine's outputs for one `Work`, counted and logged."""

    def __init__(self, frontend: Frontend, work: Work) -> None:
        self.frontend = frontend
        self.work = work
        counter = work.reading.token_counter
        self.figures = RequestFigures(len(work.prompts), work.begun.token_ids, counter)

    async def outputs(self) -> Outputs:
        """(prompt's index, what is new), as it comes. Leaving early aborts; the end is logged."""
        engine, work = self.frontend.engine, self.work
        streams = [
            engine.add(self._engine_id(i), prompt, work.params, **self._options())
            for i, prompt in enumerate(work.prompts)
        ]
        with self._logged():
            async with aclosing(merge(streams)) as merged:
                async for index, made in merged:
                    output = self._shown(made)
                    self._watch(index, output)
                    yield index, output

    async def answers(self) -> list[RequestOutput]:
        """The whole answer to every prompt. The first failure, or leaving, ends all; the end is logged."""
        with self._logged():
            return await together(self._complete(i) for i in range(len(self.work.prompts)))

    async def _complete(self, index: int) -> RequestOutput:
        work = self.work
        answer = await self.frontend.engine.complete(
            self._engine_id(index),
            work.prompts[index],
            work.params,
            watch=lambda output: self._watch(index, self._shown(output)),
            **self._options(),
        )
        return self._shown(answer)

    def _shown(self, output: RequestOutput) -> RequestOutput:
        return without_answer(output) if self.work.request.echoes_only else output

    def _watch(self, index: int, output: RequestOutput) -> None:
        self.figures.feed(index, output, self.frontend.telemetry)
        _refuse_aborted(output)

    def _engine_id(self, index: int) -> str:
        work = self.work
        id = work.id if work.origin is None else f"{work.id}.{work.origin.attempt}"
        return id if len(work.prompts) == 1 else f"{id}-{index}"

    def begun_text(self) -> str:
        """What the client has of the only completion, from another replica."""
        work, tokenizer = self.work, self.frontend.engine.tokenizer
        if tokenizer is None:
            return ""
        return begun_text(tokenizer, work.prompts[0].token_ids, work.params, work.begun)

    async def prompt_parts(self, prompt: EncodedPrompt, answer: RequestOutput) -> PromptParts:
        """What the answer shows of a prompt."""
        tokenizer = self.frontend.engine.tokenizer
        return await PromptParts.of(self.work.request, prompt, answer.prompt_told, tokenizer)

    def _options(self) -> RequestOptions:
        request = self.work.request
        return {
            "priority": self.work.priority,
            "cache_salt": request.cache_salt,
            "max_draft_tokens": request.speculative.max_draft_tokens,
            "trace": self._traces or self._detailed,
            "begun": self.work.begun,
        }

    @contextmanager
    def _logged(self) -> Iterator[None]:
        """Whatever happens inside, the request is logged with the status that it ends in."""
        status = 499
        try:
            yield
            status = 200
        except MantaError as error:
            status = public_error(error).status
            raise
        except Exception:
            status = 500
            raise
        finally:
            self._finish(status)

    def _finish(self, status: int) -> None:
        work = self.work
        request = self.figures.finished(
            request_id=work.request_id, response_id=work.id, model=work.model, status=status
        )
        self.frontend.telemetry.finish_request(request)

    def envelope(self, kind: str) -> JsonObject:
        work = self.work
        return {
            "id": work.id,
            "object": kind,
            "created": work.created_s,
            "model": work.model,
            "system_fingerprint": self.frontend.fingerprint,
        }

    def metrics(self) -> JsonObject | None:
        """Times and acceptance; only where they belong to one completion."""
        settings, cost = self.frontend.settings, self.figures.cost
        if cost is None or not (self.work.single and self.work.request.include_metrics):
            return None
        times = self.figures.times() if settings.enable_per_request_metrics else {}
        if settings.per_request_spec_decode_metrics == "none" and not self._traces:
            return times or None
        speculates = self.work.request.speculative.max_draft_tokens != 0 and self.frontend.speculates
        return {**times, "speculative_decoding": self._acceptance(cost) if speculates else None}

    def _acceptance(self, cost: RequestMetrics) -> JsonObject:
        return acceptance(
            cost,
            self.frontend.engine.info.num_speculative_tokens,
            detailed=self._traces or self._detailed,
            first_traced=len(self.work.begun.token_ids) if self._traces else None,
        )

    @property
    def _traces(self) -> bool:
        return self.work.request.speculative.return_trace

    @property
    def _detailed(self) -> bool:
        return self.frontend.settings.per_request_spec_decode_metrics == "detailed"


async def together(work: Iterable[Coroutine[Any, Any, RequestOutput]]) -> list[RequestOutput]:
    """What all return, in their order; the first failure ends all."""
    tasks: list[asyncio.Task[RequestOutput]] = []
    try:
        await _begin_in_turns(tasks, work)
        return await asyncio.gather(*tasks)
    finally:
        await cancel(*tasks)


async def merge(streams: Sequence[AsyncGenerator[RequestOutput, None]]) -> Outputs:
    """Outputs of several streams as they come, each with its stream's index; the first failure ends all."""
    if len(streams) == 1:
        async with aclosing(streams[0]) as only:
            async for output in only:
                yield 0, output
        return
    # Short: as many pumps as it holds make an output each in one turn of the loop.
    queue: asyncio.Queue[tuple[int, RequestOutput | BaseException | None]] = asyncio.Queue(maxsize=8)
    tasks: list[asyncio.Task[None]] = []
    begin = asyncio.create_task(
        _begin_in_turns(tasks, (_pump(i, stream, queue) for i, stream in enumerate(streams)))
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


async def _begin_in_turns(tasks: list[asyncio.Task[T]], work: Iterable[Coroutine[Any, Any, T]]) -> None:
    """Make tasks of the work. What one does as it begins is short, but is felt a thousand times over."""
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
    except Exception as error:  # carried to the reader, who raises it
        await queue.put((index, error))
    else:
        await queue.put((index, None))


def _refuse_aborted(output: RequestOutput) -> None:
    """A completion that the server ended early has no OpenAI finish reason: it is a failure."""
    if any(completion.finish_reason in ("abort", "error") for completion in output.outputs):
        raise EngineDeadError("The server ended this request early. Retry.")
