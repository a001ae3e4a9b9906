"""The route and the response format of POST /v1/completions."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from ...chat.chat_model import PLAIN
from ...chat.text_stream import NO_PIECE, AnswerDelta
from ...engine.outputs import CompletionOutput
from ..generation.generation import prepare, respond
from ..generation.server_context import ServerContext
from ..protocol.completion_request import CompletionRequest
from ..protocol.logprobs import completion_logprobs
from ..wire.json_io import JsonObject, JsonRoute

OPENAI_MAX_TOKENS = 16


class CompletionShape:
    prefix = "cmpl-"
    full_object = "text_completion"
    chunk_object = "text_completion"
    reading = PLAIN

    def opening(self, index: int) -> JsonObject | None:
        return None

    def chunks(self, index: int, piece: AnswerDelta) -> list[JsonObject]:
        return [{"index": index, "text": piece.content, "logprobs": None, "finish_reason": None}]

    def end(self, index: int, finish_reason: str) -> JsonObject:
        return self.full_choice(index, NO_PIECE, finish_reason)

    def full_choice(self, index: int, piece: AnswerDelta, finish_reason: str) -> JsonObject:
        return {"index": index, "text": piece.content, "logprobs": None, "finish_reason": finish_reason}

    def logprobs(self, completion: CompletionOutput, num_top: int, offset: int) -> JsonObject:
        return completion_logprobs(completion, num_top, offset)


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
