"""One HTTP request on the engine: its prompts become whole answers or merged streams, counted and logged.

How the outputs are shown is `generation.py`'s business.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator, Coroutine, Iterator, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass
from typing import Any

from ...cluster.errors import EngineDeadError, MantaError
from ...cluster.request import SamplingParams
from ..chat.reading import PLAIN, Reading
from ..engine import RequestOptions
from ..outputs import NOTHING, Begun, RequestOutput, begun_text
from ..prompts import EncodedPrompt
from .errors import public_error
from .figures import RequestFigures
from .frontend import Frontend
from .origin import TOLD_HEADER, Origin
from .prompt_parts import PromptParts, without_answer
from .protocol import GenerationRequest
from .wire import JsonObject

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
            return await together([self._complete(i) for i in range(len(self.work.prompts))])

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
            "speculate": request.speculative.enabled,
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
        """Acceptance and timings; only where they belong to one completion."""
        request = self.work.request
        if not (self.work.single and request.include_metrics):
            return None
        if self.frontend.settings.per_request_metrics == "none":
            return None
        speculated = request.speculative.enabled and self.frontend.speculates
        return self.figures.metrics(self.frontend.engine.info.num_speculative_tokens, speculated=speculated)


async def together(work: Sequence[Coroutine[Any, Any, RequestOutput]]) -> list[RequestOutput]:
    """What all return, in their order; the first failure ends all."""
    tasks = [asyncio.ensure_future(each) for each in work]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def merge(streams: Sequence[AsyncGenerator[RequestOutput, None]]) -> Outputs:
    """Outputs of several streams as they come, each with its stream's index; the first failure ends all."""
    if len(streams) == 1:
        async with aclosing(streams[0]) as only:
            async for output in only:
                yield 0, output
        return
    queue: asyncio.Queue[tuple[int, RequestOutput | BaseException | None]] = asyncio.Queue(maxsize=64)
    tasks = [asyncio.ensure_future(_pump(i, stream, queue)) for i, stream in enumerate(streams)]
    try:
        running = len(tasks)
        while running:
            index, item = await queue.get()
            if isinstance(item, BaseException):
                raise item
            if item is None:
                running -= 1
            else:
                yield index, item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


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
