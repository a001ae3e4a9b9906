"""The route of POST /v1/completions."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from ..generation.generation import prepare, respond
from ..generation.server_context import ServerContext
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
