"""Answers a `ChatRequest` for APIs other than chat, whole or as the events of their `SectionWriter`."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass

from starlette.requests import Request
from starlette.responses import Response

from ...chat.chat_model import AnswerParserFactory
from ...chat.text_stream import AnswerDelta
from ...engine.outputs import CompletionOutput
from ..wire import sse
from ..wire.json_io import JsonObject, json_response
from .output_items import Events, SectionWriter
from .request_run import GenerationRun
from .server_context import ServerContext


@dataclass(frozen=True, slots=True)
class SupportedOptions:
    """Options of a conversation that the model supports. Agents send them for every model."""

    effort: bool  # the chat template has a reasoning effort
    switch: bool  # thinking can be switched on and off
    thinks: bool  # reasoning can be separated from the answer

    @classmethod
    def of(cls, frontend: ServerContext) -> SupportedOptions:
        uses = frontend.tokenizer.template_uses
        return cls(
            effort=uses("reasoning_effort"),
            switch=uses("enable_thinking"),
            thinks=frontend.chat.thinking is not None,
        )


async def answer(
    run: GenerationRun, parser_factory: AnswerParserFactory, writer: SectionWriter, http: Request
) -> Response:
    headers = run.work.headers
    if run.work.request.stream:
        keep_alive_s = run.frontend.settings.sse_keep_alive_interval
        events = _stream_events(run, parser_factory, writer)
        return await sse.stream(events, http, headers, keep_alive_s, _Ending(writer))
    return json_response(
        await sse.cancel_on_disconnect(http, _full_body(run, parser_factory, writer)), headers=headers
    )


class _Ending:
    """The ending of these APIs' streams: the last event says that it is the last."""

    done = b""

    def __init__(self, writer: SectionWriter) -> None:
        self._writer = writer

    def failed(self, error: BaseException) -> bytes:
        return _joined(self._writer.failed(error))


async def _stream_events(
    run: GenerationRun, parser_factory: AnswerParserFactory, writer: SectionWriter
) -> AsyncGenerator[bytes, None]:
    parts, has_started = parser_factory.make_parser(run.work.id, 0), False
    async with aclosing(run.outputs()) as outputs:
        async for _, output in outputs:
            (completion,) = output.outputs
            events = [] if has_started else writer.begin(run.figures.usage())
            has_started = True
            piece = parts.feed(completion.text, final=completion.finish_reason is not None)
            events += _written(run, writer, piece, completion)
            if events:
                yield _joined(events)


async def _full_body(
    run: GenerationRun, parser_factory: AnswerParserFactory, writer: SectionWriter
) -> JsonObject:
    ((completion,),) = [output.outputs for output in await run.answers()]
    _written(run, writer, parser_factory.parse_complete(run.work.id, 0, completion.text), completion)
    return writer.full_body()


def _written(
    run: GenerationRun, writer: SectionWriter, piece: AnswerDelta, completion: CompletionOutput
) -> Events:
    events = writer.feed(piece)
    if completion.finish_reason is not None:
        events += writer.finish(completion.finish_reason, completion.stop_reason, run.figures.usage())
    return events


def _joined(events: Events) -> bytes:
    return b"".join(map(sse.named_event, events))
