"""POST /v1/chat/completions."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request, Response

from ...cluster.errors import RequestError
from .frontend import Frontend
from .generation import prepare, respond
from .protocol import ChatRequest
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


def chat_routes(frontend: Frontend) -> APIRouter:
    router = APIRouter(route_class=JsonRoute)
    shape = ChatShape()

    @router.post("/v1/chat/completions")
    async def create_chat_completion(body: ChatRequest, http: Request) -> Response:
        variables, ignored = _template_variables(body, frontend)
        text = await frontend.render_chat(
            body.for_template(),
            variables,
            add_generation_prompt=body.add_generation_prompt,
            continue_final_message=body.continue_final_message,
        )
        prompt = await frontend.encode(
            text,
            truncate=body.truncate_prompt_tokens,
            add_special_tokens=False,  # they come from the template
            param="messages",
        )
        work = prepare(frontend, shape, body, http, [prompt], default_max_tokens=None, ignored=ignored)
        return await respond(frontend, shape, work, http)

    return router


def _template_variables(body: ChatRequest, frontend: Frontend) -> tuple[dict[str, Any], list[str]]:
    """What goes to the template, and the names of what it has no use for."""
    variables = dict(body.chat_template_kwargs or {})
    if body.reasoning_effort is not None:
        if not frontend.template_uses("reasoning_effort"):
            raise RequestError(
                "reasoning_effort: this model's chat template knows no reasoning effort. Leave it out.",
                param="reasoning_effort",
            )
        variables["reasoning_effort"] = body.reasoning_effort
    ignored = [f"chat_template_kwargs.{name}" for name in variables if not frontend.template_uses(name)]
    return variables, ignored
