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


def completion_routes(server: ServerContext) -> APIRouter:
    router = APIRouter(route_class=JsonRoute)
    shape = CompletionShape()

    @router.post("/v1/completions")
    async def create_completion(body: CompletionRequest, http: Request) -> Response:
        """Continue one or several prompts."""
        truncate = body.truncation(server.engine.info.max_model_len)
        prompts = await server.engine.encoder.prompts(body.prompts(), truncate=truncate)
        work = prepare(server, shape.prefix, body, http, prompts, default_max_tokens=OPENAI_MAX_TOKENS)
        return await respond(server, shape, work, http)

    return router


def chat_routes(server: ServerContext) -> APIRouter:
    router = APIRouter(route_class=JsonRoute)

    @router.post("/v1/chat/completions")
    async def create_chat_completion(body: ChatRequest, http: Request) -> Response:
        """Answer a conversation, with OpenAI's tools, reasoning and schemas."""
        work, parser_factory = await prepare_chat(server, ChatShape.prefix, body, http)
        field = server.settings.reasoning_field_name
        shape = ChatShape(parser_factory, REASONING_FIELDS if field is None else (field,))
        return await respond(server, shape, work, http)

    return router


async def prepare_chat(
    server: ServerContext,
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
    check_tools(server.chat, body)
    chat = conversation(body, body.messages, server.engine.tokenizer)
    prompt = await server.engine.encoder.prompt(
        chat, truncate=body.truncation(server.engine.info.max_model_len)
    )
    work = prepare(
        server,
        prefix,
        body,
        http,
        [prompt],
        default_max_tokens=None,
        ignored=[*ignored, *unused_fields(body, body.messages, server.tokenizer)],
        unknown=unknown,
        resumable=resumable,
        ends_with_context=ends_with_context,
    )
    parser_factory = reading_of(server.chat, body, prompt.text or "")
    params = chat_params(server.chat, body, work.params, prompt.text or "")
    if params.structured_outputs is not None and server.settings.unknown_params != "ignore":
        work.ignored.extend(params.structured_outputs.left_out)
    return replace(work, params=params, parsers=parser_factory), parser_factory
