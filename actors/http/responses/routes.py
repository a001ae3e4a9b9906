"""POST /v1/responses; the routes for stored responses answer 404, because none are stored."""

from __future__ import annotations

from dataclasses import replace

from fastapi import APIRouter, Request, Response

from ....cluster.errors import NotFoundError, brief
from ..generation.chat_adapter import SupportedOptions, answer, rename_error_fields, renamed_paths
from ..generation.request_run import GenerationRun
from ..generation.server_context import ServerContext
from ..openai.routes import prepare_chat
from ..protocol.chat_completion import ChatRequest
from ..wire.json_io import JsonObject, JsonRoute
from ..wire.request_model import unknown_fields
from .event_writer import PREFIX, ResponseWriter
from .request import NAMES, ResponsesRequest


def response_routes(server: ServerContext) -> APIRouter:
    router = APIRouter(route_class=JsonRoute)

    @router.post("/v1/responses")
    async def create_response(body: ResponsesRequest, http: Request) -> Response:
        """Create a response (OpenAI's Responses API); nothing is stored."""
        with rename_error_fields(NAMES):
            supported = SupportedOptions.of(server)
        conversation = body.conversation()
        chat = body.for_chat(conversation, supported)
        with rename_error_fields({**NAMES, **conversation.names}):
            ignored = [*body.ignored(supported), *conversation.skipped]
            unknown = [*unknown_fields(body), *conversation.unknown]
            task = await prepare_chat(server, PREFIX, chat, http, ignored=ignored, unknown=unknown)
            task = replace(task, ignored=renamed_paths(task.ignored, NAMES))
            run = GenerationRun(server, task)
            writer = ResponseWriter(response_fields(body, chat, run), body.client_tools, run.metrics)
            return await answer(run, writer, http)

    @router.get("/v1/responses/{response_id}")
    @router.delete("/v1/responses/{response_id}")
    @router.get("/v1/responses/{response_id}/input_items")
    @router.post("/v1/responses/{response_id}/cancel")
    async def find_response(response_id: str) -> Response:
        """Answer 404: no responses are stored."""
        raise NotFoundError(
            f"There is no response {brief(response_id)}: this server stores none. A response is only in the "
            "answer to POST /v1/responses; a client that closes its connection cancels it.",
            param="response_id",
        )

    return router


def response_fields(body: ResponsesRequest, chat: ChatRequest, run: GenerationRun) -> JsonObject:
    """Return all fields of the SDKs' response model except those that grow (`event_writer.py`)."""
    params = run.task.params
    text = (
        body.text.model_dump(by_alias=True, exclude_none=True) if body.text else {"format": {"type": "text"}}
    )
    return {
        "id": run.task.id,
        "object": "response",
        "created_at": run.task.created_s,
        "completed_at": None,
        "model": run.task.model,
        "system_fingerprint": run.server.fingerprint,
        "error": None,
        "incomplete_details": None,
        "instructions": body.instructions,
        "metadata": body.metadata or {},
        "tools": body.tools or [],
        "tool_choice": body.tool_choice or "auto",
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "text": text,
        "reasoning": {"effort": chat.reasoning_effort, "summary": None},
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_logprobs": 0,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": None,
        "truncation": "disabled",
        "background": False,
        "store": False,
        "previous_response_id": None,
        "service_tier": "default",
        "user": None,
    }
