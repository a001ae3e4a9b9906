"""POST /v1/chat/completions."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from ..outputs import CompletionOutput
from .chat_request import ChatRequest, conversation
from .frontend import Frontend
from .generation import prepare, respond
from .logprobs import chat_logprobs
from .wire import JsonObject, JsonRoute


class ChatShape:
    prefix = "chatcmpl-"
    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def opening(self, index: int) -> JsonObject | None:
        delta = {"role": "assistant", "content": ""}
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}

    def chunk(self, index: int, text: str | None, finish_reason: str | None) -> JsonObject:
        delta = {} if text is None else {"content": text}
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": finish_reason}

    def whole(self, index: int, text: str, finish_reason: str) -> JsonObject:
        message = {"role": "assistant", "content": text, "refusal": None}
        return {"index": index, "message": message, "logprobs": None, "finish_reason": finish_reason}

    def logprobs(self, completion: CompletionOutput, num_top: int, offset: int) -> JsonObject:
        return chat_logprobs(completion, num_top)


def chat_routes(frontend: Frontend) -> APIRouter:
    router = APIRouter(route_class=JsonRoute)
    shape = ChatShape()

    @router.post("/v1/chat/completions")
    async def create_chat_completion(body: ChatRequest, http: Request) -> Response:
        chat = conversation(body, body.messages, frontend.engine.tokenizer)
        prompt = await frontend.engine.encoder.prompt(
            chat, truncate=body.truncation(frontend.engine.info.max_model_len)
        )
        ignored = [
            f"chat_template_kwargs.{name}"
            for name in chat.variables or ()
            if not frontend.tokenizer.template_uses(name)
        ]
        work = prepare(frontend, shape, body, http, [prompt], default_max_tokens=None, ignored=ignored)
        return await respond(frontend, shape, work, http)

    return router
