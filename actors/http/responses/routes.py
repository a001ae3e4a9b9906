"""POST /v1/responses; the routes for stored responses answer 404, because none are stored."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from ....cluster.errors import NotFoundError, shown
from ..generation.chat_adapter import Heeds, answer
from ..generation.request_run import GenerationRun
from ..generation.request_translation import said_of
from ..generation.server_context import ServerContext
from ..openai.chat import prepare_chat
from ..wire.json_io import JsonRoute
from .event_writer import PREFIX, ResponseWriter
from .request import NAMES, ResponsesRequest
from .response_envelope import frame


def response_routes(frontend: ServerContext) -> APIRouter:
    router = APIRouter(route_class=JsonRoute)

    @router.post("/v1/responses")
    async def create_response(body: ResponsesRequest, http: Request) -> Response:
        """Create a response (OpenAI's Responses API); nothing is stored."""
        with said_of(NAMES):
            heeds = Heeds.of(frontend)
        conversation = body.conversation()
        chat = body.for_chat(conversation, heeds)
        with said_of({**NAMES, **conversation.names}):
            ignored = [*body.ignored(heeds), *conversation.skipped]
            work, reading = await prepare_chat(frontend, PREFIX, chat, http, ignored=ignored, resumable=False)
            run = GenerationRun(frontend, work)
            writer = ResponseWriter(frame(body, chat, run), body.client_tools, run.metrics)
            return await answer(run, reading, writer, http)

    @router.get("/v1/responses/{response_id}")
    @router.delete("/v1/responses/{response_id}")
    @router.get("/v1/responses/{response_id}/input_items")
    @router.post("/v1/responses/{response_id}/cancel")
    async def find_response(response_id: str) -> Response:
        """Answer 404: no responses are stored."""
        raise NotFoundError(
            f"There is no response {shown(response_id)}: this server keeps none. What it answers to POST "
            "/v1/responses is all; a client that closes its connection cancels it.",
            param="response_id",
        )

    return router
