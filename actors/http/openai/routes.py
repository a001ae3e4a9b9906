"""POST /v1/completions and /v1/chat/completions, and the preparation of all requests with messages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from fastapi import APIRouter, Request, Response

from ...chat.chat_model import AnswerParserFactory
from ..generation.generation import prepare, respond
from ..generation.generation_task import GenerationTask
from ..generation.server_context import ServerContext
from ..protocol.chat_completion import (
    REASONING_FIELDS,
    ChatRequest,
    ChatShape,
    chat_params,
    check_tools,
    conversation,
    reading_of,
    unused_fields,
)
from ..protocol.completion import OPENAI_MAX_TOKENS, CompletionRequest, CompletionShape
from ..wire.json_io import JsonRoute


def completion_routes(frontend: ServerContext) -> APIRouter:
    router = APIRouter(route_class=JsonRoute)
    shape = CompletionShape()

    @router.post("/v1/completions")
    async def create_completion(body: CompletionRequest, http: Request) -> Response:
        """Continue one or several prompts."""
        truncate = body.truncation(frontend.engine.info.max_model_len)
        prompts = await frontend.engine.encoder.prompts(body.prompts(), truncate=truncate)
        work = prepare(frontend, shape.prefix, body, http, prompts, default_max_tokens=OPENAI_MAX_TOKENS)
        return await respond(frontend, shape, work, http)

    return router


def chat_routes(frontend: ServerContext) -> APIRouter:
    router = APIRouter(route_class=JsonRoute)

    @router.post("/v1/chat/completions")
    async def create_chat_completion(body: ChatRequest, http: Request) -> Response:
        """Answer a conversation, with OpenAI's tools, reasoning and schemas."""
        work, parser_factory = await prepare_chat(frontend, ChatShape.prefix, body, http)
        field = frontend.settings.reasoning_field_name
        shape = ChatShape(parser_factory, REASONING_FIELDS if field is None else (field,))
        return await respond(frontend, shape, work, http)

    return router


async def prepare_chat(
    frontend: ServerContext,
    prefix: str,
    body: ChatRequest,
    http: Request,
    *,
    ignored: Sequence[str] = (),
    unknown: Sequence[str] | None = None,
    resumable: bool = True,
    ends_with_context: bool = False,
) -> tuple[GenerationTask, AnswerParserFactory]:
    """Return the task of a conversation and the parsers of its answers; see `prepare`."""
    check_tools(frontend.chat, body)
    chat = conversation(body, body.messages, frontend.engine.tokenizer)
    prompt = await frontend.engine.encoder.prompt(
        chat, truncate=body.truncation(frontend.engine.info.max_model_len)
    )
    work = prepare(
        frontend,
        prefix,
        body,
        http,
        [prompt],
        default_max_tokens=None,
        ignored=[*ignored, *unused_fields(body, body.messages, frontend.tokenizer)],
        unknown=unknown,
        resumable=resumable,
        ends_with_context=ends_with_context,
    )
    parser_factory = reading_of(frontend.chat, body, prompt.text or "")
    params = chat_params(frontend.chat, body, work.params, prompt.text or "")
    if params.structured_outputs is not None and frontend.settings.unknown_params != "ignore":
        work.ignored.extend(params.structured_outputs.left_out)
    return replace(work, params=params, reading=parser_factory), parser_factory
