"""Turns a parsed request into its response, whole or as a stream of events.

    request ─ prepare ─▶ GenerationTask ─ GenerationRun ─▶ answers: one body; or outputs: one event per block

Completions and chat differ in the format of a choice (`ResponseShape`) and in how the prompt is made.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from typing import Protocol

from starlette.requests import Request
from starlette.responses import Response

from ....cluster.errors import ModelNotFoundError, RequestError, brief
from ....cluster.request.caller import Caller, Tenant, new_id, tenant_of
from ....cluster.step.limits import check_max_tokens
from ...chat.chat_model import AnswerParser, AnswerParserFactory
from ...chat.text_stream import AnswerDelta
from ...engine.outputs import CompletionOutput, RequestOutput
from ...structured_outputs.grammar_frontend import left_out
from ...tokenization.prompts import EncodedPrompt
from ..middleware.api_keys import caller_of
from ..protocol.chat_completion import ChatRequest
from ..protocol.completion import CompletionRequest
from ..protocol.logprobs import token_lengths
from ..protocol.preparation import with_formats
from ..protocol.prompt_echo import PromptParts
from ..protocol.protocol import GenerationRequest, check_extra_fields
from ..wire import sse
from ..wire.errors import logged_elsewhere, trace_headers
from ..wire.json_io import JsonObject, read_beside
from ..wire.request_model import unknown_fields
from .generation_task import GenerationTask
from .large_responses import StreamedChoices
from .request_run import GenerationRun
from .resume_origin import ResumeOrigin, token_comment
from .server_context import ServerContext

MAX_COMPLETIONS = 4096


class ResponseShape(Protocol):
    """Formats the choices of one request for an endpoint; `parsers` parse their text."""

    prefix: str
    full_object: str
    chunk_object: str
    parsers: AnswerParserFactory

    def opening(self, index: int) -> JsonObject | None:
        """Return the chunk before a choice's first text, if there is one."""
        ...

    def chunks(self, index: int, delta: AnswerDelta) -> list[JsonObject]:
        """Return the stream chunks with a choice's new text, at least one."""
        ...

    def end(self, index: int, finish_reason: str) -> JsonObject:
        """Return the stream chunk that ends a choice, without new text."""
        ...

    def full_choice(self, index: int, delta: AnswerDelta, finish_reason: str) -> JsonObject: ...

    def logprobs(self, completion: CompletionOutput, num_top: int, offset: int) -> JsonObject:
        """`num_top`: likeliest tokens to include. `offset`: characters of the preceding tokens."""
        ...


async def prepare(
    server: ServerContext,
    prefix: str,
    request: ChatRequest | CompletionRequest,
    http: Request,
    prompts: Sequence[EncodedPrompt],
    *,
    default_max_tokens: int | None,
    ignored: Sequence[str] = (),
    unknown: Sequence[str] | None = None,
    ends_with_context: bool = False,
) -> GenerationTask:
    """Make a task of a request, with all checks that need no engine.

    Schemas and tools, which may be large, are read in a thread.

    Args:
        prefix: of the response's id.
        default_max_tokens: None means as many as fit.
        ignored: further names for X-Ignored-Params.
        unknown: unknown fields in objects of the body that was translated to `request`; None: it was not.
        ends_with_context: a limit beyond the context's length means its end, not an error.
    """
    model = check_model(server, request.model)
    all_ignored = [*await read_beside(http, _ignored_fields, server, request, unknown), *ignored]
    params = request.sampling_params(server.defaults, default_max_tokens)
    if params.structured_outputs is not None:
        all_ignored += await asyncio.to_thread(left_out, params.structured_outputs)
    if len(prompts) * params.n > MAX_COMPLETIONS:
        raise RequestError(
            f"n={params.n} for {len(prompts)} prompts: at most {MAX_COMPLETIONS} completions in one request.",
            param="n",
        )
    if request.speculative.return_trace and not _includes_trace(server, request, len(prompts) * params.n):
        all_ignored.append("speculative.return_trace")
    if ends_with_context and _exceeds_context(server, request, prompts):
        params = replace(params, max_tokens=None)
    else:
        _check_context(server, request, prompts)
    caller = caller_of(http.scope)
    tenant, ignored_fields = _tenant(server, request, http, caller)
    all_ignored += ignored_fields
    origin: ResumeOrigin | None = http.scope["state"].get("origin")
    if origin is not None and params.seed is None:
        params = replace(params, seed=origin.seed)
    write = partial(with_formats, server.chat, request, params, prompts[0].text or "")
    has_tools = isinstance(request, ChatRequest) and bool(request.tools)
    params, parsers = await asyncio.to_thread(write) if has_tools else write()
    if params.structured_outputs is not None:
        all_ignored += params.structured_outputs.left_out
    return GenerationTask(
        id=new_id(prefix) if origin is None else prefix + origin.id,
        request_id=http.scope["state"]["request_id"],
        model=model,
        prompts=list(prompts),
        params=params,
        priority=_priority(server, request, http),
        ignored=all_ignored if server.settings.unknown_params != "ignore" else [],
        request=request,
        created_s=int(time.time()) if origin is None else origin.created_s,
        caller=caller,
        tenant=tenant,
        may_be_captured=request.store is not False
        and "no-store" not in http.headers.get("cache-control", ""),
        origin=origin,
        parsers=parsers,
        trace_headers=trace_headers(http.headers),
    )


def check_model(server: ServerContext, name: str | None) -> str:
    if name is None or name in server.names:
        return name or server.name
    raise ModelNotFoundError(
        f"The model {brief(name)} is not served here. Served: {', '.join(server.names)}.", param="model"
    )


def _ignored_fields(
    server: ServerContext, request: GenerationRequest, unknown: Sequence[str] | None
) -> list[str]:
    """Return dotted names of ignored fields. Raises RequestError for those that must not be."""
    extra, known = request.model_extra or {}, type(request).model_fields
    nested = unknown_fields(request) if unknown is None else unknown
    ignored = check_extra_fields(extra, known, server.settings.unknown_params, nested)
    if "speculative" in request.model_fields_set and request.speculative.enabled and not server.speculates:
        ignored.append("speculative")
    return ignored


def _priority(server: ServerContext, request: GenerationRequest, http: Request) -> int:
    """Return the body's priority, else the header's. Raises RequestError if the policy has none."""
    if server.engine.config.scheduling_policy == "priority":
        if "priority" in request.model_fields_set:
            return request.priority
        return _header_priority(http)
    if request.priority != 0:
        raise RequestError(
            f"priority={request.priority} needs a server started with scheduling_policy=priority.",
            param="priority",
        )
    return 0


def _tenant(
    server: ServerContext, request: GenerationRequest, http: Request, caller: Caller
) -> tuple[Tenant, list[str]]:
    """Return the request's tenant and category, and ignored fields."""
    metadata = (request.model_extra or {}).get("metadata")
    tenant, ignored_fields = tenant_of(http.headers, metadata, caller, server.settings.tenants)
    if ignored_fields is not None and server.settings.unknown_params == "reject":
        raise RequestError(
            f"{ignored_fields} names no tenant of this key. Leave it out, or have the operator add it to "
            "`tenants` or to the key's line.",
            param=ignored_fields,
        )
    return tenant, [ignored_fields] if ignored_fields is not None else []


def _header_priority(http: Request) -> int:
    value = http.headers.get("x-vllm-priority") or http.headers.get("x-priority") or "0"
    try:
        return int(value)
    except ValueError:
        raise RequestError("The header X-Priority must be an integer.", param="priority") from None


def _includes_trace(server: ServerContext, request: GenerationRequest, num_completions: int) -> bool:
    """Return whether the response can contain a trace (`GenerationRun.metrics`), and one will exist."""
    if num_completions > 1 or not (server.speculates and request.speculative.max_draft_tokens != 0):
        return False
    options = request.stream_options
    has_usage = not request.stream or (options is not None and options.include_usage)
    return has_usage and request.include_metrics


def _check_context(
    server: ServerContext, request: GenerationRequest, prompts: Sequence[EncodedPrompt]
) -> None:
    name, limit = request.token_limit
    check_max_tokens(_longest(prompts), limit, server.engine.info.max_model_len, name)


def _exceeds_context(
    server: ServerContext, request: GenerationRequest, prompts: Sequence[EncodedPrompt]
) -> bool:
    _, limit = request.token_limit
    return limit is not None and _longest(prompts) + limit > server.engine.info.max_model_len


def _longest(prompts: Sequence[EncodedPrompt]) -> int:
    return max(len(prompt.token_ids) for prompt in prompts)


async def respond(
    server: ServerContext, shape: ResponseShape, task: GenerationTask, http: Request
) -> Response:
    """Return the response, once its first token is there. Earlier failures raise MantaError."""
    task = replace(task, params=await server.engine.encoder.bad_words(task.params))
    run = GenerationRun(server, task)
    logged_elsewhere(http.scope)
    if task.request.stream:
        keep_alive_s = server.settings.sse_keep_alive_interval
        ending = task.ending(sse.done_ending)
        return await sse.stream(stream_events(run, shape), http, task.headers, keep_alive_s, ending)
    return await sse.cancel_on_disconnect(http, full_response(run, shape))


async def full_response(run: GenerationRun, shape: ResponseShape) -> Response:
    work, body, at = run.task, StreamedChoices(), 0
    root_fields: JsonObject = {}
    answers = (await run.answers())[::-1]
    for prompt in work.prompts:
        answer = answers.pop()  # freed one at a time: freeing thousands with log probabilities takes long
        parts = await run.prompt_parts(prompt, answer)
        root_fields |= parts.root_fields()
        for completion in answer.outputs:
            choice = full_choice(shape, work.id, at, completion, None)
            if work.params.logprobs is not None:
                choice["logprobs"] = await body.logprobs(shape, completion, work.params.logprobs)
            choice = parts.begin(choice)
            if work.request.return_token_ids:
                choice["token_ids"] = completion.token_ids
                choice["prompt_token_ids"] = prompt.token_ids
            await body.add(choice)
            at += 1
    tail = _with_metrics({"usage": run.figures.usage()} | root_fields, run)
    return body.response(run.envelope(shape.full_object), tail, work.headers)


def full_choice(
    shape: ResponseShape, response_id: str, at: int, completion: CompletionOutput, num_logprobs: int | None
) -> JsonObject:
    assert completion.finish_reason is not None, "an answer ends only when all its completions have"
    piece = shape.parsers.parse_complete(response_id, at, completion.text)
    choice = shape.full_choice(
        at, piece, openai_finish_reason(completion.finish_reason, called=bool(piece.calls))
    )
    if num_logprobs is not None:
        choice["logprobs"] = shape.logprobs(completion, num_logprobs, 0)
    return {**choice, "stop_reason": completion.stop_reason}


def openai_finish_reason(finish_reason: str, *, called: bool) -> str:
    """Return "tool_calls" for a choice with calls that was not cut off."""
    return "tool_calls" if called and finish_reason == "stop" else finish_reason


async def stream_events(run: GenerationRun, shape: ResponseShape) -> AsyncGenerator[bytes, None]:
    """Yield the bytes of each verified block, with opening, finish and usage chunks."""
    work = run.task
    options = work.request.stream_options
    envelope = run.envelope(shape.chunk_object)
    continuous = options is not None and options.continuous_usage_stats
    with_usage = options is not None and options.include_usage
    if with_usage and not continuous:
        envelope["usage"] = None
    single, reports_tokens, echoes = work.single, work.reports_tokens, work.request.echoes
    writer, num_chars = _ChunkWriter(run, shape), work.resume_state.num_chars
    async with aclosing(run.outputs()) as outputs:
        async for prompt_index, output in outputs:
            if continuous:
                envelope["usage"] = run.figures.usage()
            if echoes:
                await writer.prepare_prompt(prompt_index, output)
            piece = b""
            for choice in writer.choices(prompt_index, output):
                piece += sse.event({**envelope, "choices": [choice]})
            if single and output.finished and with_usage:
                piece += _usage_event(run, envelope)
            if reports_tokens:
                (completion,) = output.outputs
                num_chars += len(completion.text)
                piece += token_comment(num_chars, completion.token_ids, end=output.finished)
            if piece:
                yield piece
    if with_usage and not single:
        yield _usage_event(run, envelope)


def _usage_event(run: GenerationRun, envelope: JsonObject) -> bytes:
    return sse.event(_with_metrics({**envelope, "choices": [], "usage": run.figures.usage()}, run))


class _ChunkWriter:
    def __init__(self, run: GenerationRun, shape: ResponseShape) -> None:
        self._work = run.task
        self._shape = shape
        self._answers: dict[int, AnswerParser] = {}
        if run.task.resume_state.token_ids:
            self._answers[0] = self._answer(0)
            self._answers[0].feed(run.resumed_text())
        self._lengths: dict[int, int] = {}  # characters of the tokens whose log probabilities were sent
        self._run = run
        self._echoes: dict[int, PromptParts] = {}  # by prompt

    async def prepare_prompt(self, prompt_index: int, output: RequestOutput) -> None:
        if prompt_index not in self._echoes:
            prompt = self._work.prompts[prompt_index]
            self._echoes[prompt_index] = await self._run.prompt_parts(prompt, output)

    def choices(self, prompt_index: int, output: RequestOutput) -> list[JsonObject]:
        found: list[JsonObject] = []
        for completion in output.outputs:
            at = prompt_index * self._work.params.n + completion.index
            if at not in self._answers:
                self._answers[at] = self._answer(at)
                found.extend(self._opening(at, prompt_index))
            found.extend(self._body(at, completion))
        return found

    def _answer(self, at: int) -> AnswerParser:
        return self._shape.parsers.make_parser(self._work.id, at)

    def _opening(self, at: int, prompt_index: int) -> list[JsonObject]:
        choice, echo = self._shape.opening(at), self._echoes.get(prompt_index)
        if echo is not None:
            choice, self._lengths[at] = echo.opening(at), echo.num_chars
        if choice is None:
            return []
        if self._work.request.return_token_ids:
            choice["prompt_token_ids"] = self._work.prompts[prompt_index].token_ids
        return [choice]

    def _body(self, at: int, completion: CompletionOutput) -> list[JsonObject]:
        """Return the chunks of new output; log probabilities and token ids are in the first."""
        found: list[JsonObject] = []
        with_ids = self._work.request.return_token_ids
        answer = self._answers[at]
        piece = answer.feed(completion.text, final=completion.finish_reason is not None)
        has_more = completion.logprobs or (with_ids and completion.token_ids)
        if piece.content or piece.reasoning or piece.calls or has_more:
            found = self._shape.chunks(at, piece)
            if with_ids:
                found[0]["token_ids"] = completion.token_ids
            if completion.logprobs:
                found[0]["logprobs"] = self._logprobs(at, completion)
        if completion.finish_reason is not None:
            choice = self._shape.end(at, openai_finish_reason(completion.finish_reason, called=answer.called))
            choice["stop_reason"] = completion.stop_reason
            found.append(choice)
        return found

    def _logprobs(self, at: int, completion: CompletionOutput) -> JsonObject:
        num_top, offset = self._work.params.logprobs, self._lengths.get(at, 0)
        assert num_top is not None, "they were not requested"
        self._lengths[at] = offset + token_lengths(completion)
        return self._shape.logprobs(completion, num_top, offset)


def _with_metrics(body: JsonObject, run: GenerationRun) -> JsonObject:
    metrics = run.metrics()
    return body if metrics is None else {**body, "metrics": metrics}
