"""POST /v1/completions and /v1/chat/completions, and the preparation of all requests with messages."""

from __future__ import annotations

from collections.abc import Sequence

from fastapi import APIRouter, Request, Response

from ..generation.generation import prepare, respond
from ..generation.generation_task import GenerationTask
from ..generation.server_context import ServerContext
from ..protocol.chat_completion import REASONING_FIELDS, ChatRequest, ChatShape, unused_fields
from ..protocol.completion import OPENAI_MAX_TOKENS, CompletionRequest, CompletionShape
from ..protocol.preparation import prompt_of
from ..wire.json_io import JsonRoute, read_beside


def completion_routes(server: ServerContext) -> APIRouter:
    router = APIRouter(route_class=JsonRoute)
    shape = CompletionShape()

    @router.post("/v1/completions")
    async def create_completion(body: CompletionRequest, http: Request) -> Response:
        """Continue one or several prompts."""
        truncate = body.truncation(server.engine.info.max_model_len)
        prompts = await server.engine.encoder.prompts(body.prompts(), truncate=truncate)
        task = await prepare(server, shape.prefix, body, http, prompts, default_max_tokens=OPENAI_MAX_TOKENS)
        return await respond(server, shape, task, http)

    return router


def chat_routes(server: ServerContext) -> APIRouter:
    router = APIRouter(route_class=JsonRoute)

    @router.post("/v1/chat/completions")
    async def create_chat_completion(body: ChatRequest, http: Request) -> Response:
        """Answer a conversation, with OpenAI's tools, reasoning and schemas."""
        task = await prepare_chat(server, ChatShape.prefix, body, http)
        field = server.settings.reasoning_field_name
        shape = ChatShape(task.parsers, REASONING_FIELDS if field is None else (field,))
        return await respond(server, shape, task, http)

    return router


async def prepare_chat(
    server: ServerContext,
    prefix: str,
    body: ChatRequest,
    http: Request,
    *,
    ignored: Sequence[str] = (),
    unknown: Sequence[str] | None = None,
    ends_with_context: bool = False,
) -> GenerationTask:
    """Return the task of a conversation; see `prepare`."""
    chat = await read_beside(http, prompt_of, server.chat, body, server.engine.tokenizer)
    prompt = await server.engine.encoder.prompt(
        chat, truncate=body.truncation(server.engine.info.max_model_len)
    )
    unused = await read_beside(http, unused_fields, body, body.messages, server.tokenizer)
    return await prepare(
        server,
        prefix,
        body,
        http,
        [prompt],
        default_max_tokens=None,
        ignored=[*ignored, *unused],
        unknown=unknown,
        ends_with_context=ends_with_context,
    )
