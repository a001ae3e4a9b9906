"""Translates bodies of other APIs to a `ChatRequest`, and errors back to the fields of those APIs.

Answers it whole or as the events of their `SectionWriter`.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError
from starlette.requests import Request
from starlette.responses import Response

from ....cluster.errors import RequestError
from ...chat.text_stream import AnswerDelta
from ...engine.outputs import CompletionOutput
from ..protocol.chat_completion import ChatRequest
from ..wire import sse
from ..wire.errors import from_validation
from ..wire.json_io import JsonObject, json_response
from .output_items import Events, SectionWriter
from .request_run import GenerationRun
from .resume_origin import token_comment
from .server_context import ServerContext


@dataclass(frozen=True, slots=True)
class SupportedOptions:
    """Options of a conversation that the model supports. Agents send them for every model."""

    effort: bool  # the chat template has a reasoning effort
    switch: bool  # thinking can be switched on and off
    thinks: bool  # reasoning can be separated from the answer

    @classmethod
    def of(cls, server: ServerContext) -> SupportedOptions:
        uses = server.tokenizer.template_uses
        return cls(
            effort=uses("reasoning_effort"),
            switch=uses("enable_thinking"),
            thinks=server.chat.thinking is not None,
        )


async def answer(run: GenerationRun, writer: SectionWriter, http: Request) -> Response:
    headers = run.task.headers
    if run.task.request.stream:
        keep_alive_s = run.server.settings.sse_keep_alive_interval
        events = _stream_events(run, writer)

        def ending(error: BaseException | None) -> bytes:
            """End the stream: unless it failed, its last event says that it is the last."""
            return b"" if error is None else _joined(writer.failed(error))

        return await sse.stream(events, http, headers, keep_alive_s, run.task.ending(ending))
    return json_response(await sse.cancel_on_disconnect(http, _full_body(run, writer)), headers=headers)


async def _stream_events(run: GenerationRun, writer: SectionWriter) -> AsyncGenerator[bytes, None]:
    """Yield the writer's events as bytes.

    A stream that another replica began is continued after the events that the client has. For that, comments
    tell the gateway the tokens so far (`resume_origin.py`).
    """
    task = run.task
    parts, num_chars = task.parsers.make_parser(task.id, 0), task.resume_state.num_chars
    if has_started := task.num_events_sent > 0:
        writer.resume(parts.feed(run.resumed_text()), task.num_events_sent)
    async with aclosing(run.outputs()) as outputs:
        async for _, output in outputs:
            (completion,) = output.outputs
            events = [] if has_started else writer.begin(run.figures.usage())
            has_started = True
            piece = parts.feed(completion.text, final=completion.finish_reason is not None)
            written = _joined(events + _written(run, writer, piece, completion))
            if task.reports_tokens:
                num_chars += len(completion.text)
                written += token_comment(num_chars, completion.token_ids, end=output.finished)
            if written:
                yield written


async def _full_body(run: GenerationRun, writer: SectionWriter) -> JsonObject:
    ((completion,),) = [output.outputs for output in await run.answers()]
    _written(run, writer, run.task.parsers.parse_complete(run.task.id, 0, completion.text), completion)
    return writer.full_body()


def _written(
    run: GenerationRun, writer: SectionWriter, delta: AnswerDelta, completion: CompletionOutput
) -> Events:
    events = writer.feed(delta)
    if completion.finish_reason is not None:
        events += writer.finish(completion.finish_reason, completion.stop_reason, run.figures.usage())
    return events


def _joined(events: Events) -> bytes:
    return b"".join(map(sse.named_event, events))


def chat_request(fields: Mapping[str, Any]) -> ChatRequest:  # Any: JSON.
    """Validate the fields that are not None. Raises RequestError with chat's field names."""
    try:
        return ChatRequest.model_validate(
            {name: value for name, value in fields.items() if value is not None}
        )
    except ValidationError as error:
        raise from_validation(error.errors()) from None


@contextmanager
def rename_error_fields(names: Mapping[str, str]) -> Iterator[None]:
    """Rename fields in errors. `names`: dotted path in the chat -> in the body; also of paths below it."""
    try:
        yield
    except RequestError as error:
        renamed = _renamed(error.param or "", names)
        if renamed is None:
            raise
        param = error.param or ""
        # A name of one word may also occur as an ordinary word later in the message.
        message = error.message.replace(param, renamed, -1 if "_" in param or "." in param else 1)
        raise type(error)(message, param=renamed) from None


def renamed_paths(paths: Sequence[str], names: Mapping[str, str]) -> list[str]:
    """Rename paths as `rename_error_fields` does."""
    return [_renamed(path, names) or path for path in paths]


def _renamed(param: str, names: Mapping[str, str]) -> str | None:
    """Replace a path's longest known prefix; None if no prefix is known."""
    head, tail = param, ""
    while head:
        if head in names:
            return names[head] + tail
        head, dot, last = head.rpartition(".")
        tail = f".{last}{tail}" if dot else ""
    return None
