"""POST /v1/responses; and the routes that would need responses to be kept, which say that none are."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from ....cluster.errors import NotFoundError
from ..chat import prepare_chat
from ..conversing import answer
from ..frontend import Frontend
from ..run import Run
from ..translation import said_of
from ..wire import JsonRoute
from .frame import frame
from .request import NAMES, ResponsesRequest
from .writer import PREFIX, ResponseWriter


def response_routes(frontend: Frontend) -> APIRouter:
    router = APIRouter(route_class=JsonRoute)

    @router.post("/v1/responses")
    async def create_response(body: ResponsesRequest, http: Request) -> Response:
        uses = frontend.tokenizer.template_uses
        conversation = body.conversation(knows_developers=uses("developer"))
        ignored = body.ignored()
        effort = body.reasoning.effort if body.reasoning else None
        if effort is not None and not uses("reasoning_effort"):
            # Agents send it with every request, whatever the model.
            effort, ignored = None, [*ignored, "reasoning.effort"]
        chat = body.for_chat(conversation, effort=effort)
        with said_of({**NAMES, **conversation.names}):
            work, reading = await prepare_chat(frontend, PREFIX, chat, http, ignored=ignored, resumable=False)
        run = Run(frontend, work)
        return await answer(run, reading, ResponseWriter(frame(body, chat, run), run.metrics), http)

    @router.get("/v1/responses/{response_id}")
    @router.delete("/v1/responses/{response_id}")
    @router.get("/v1/responses/{response_id}/input_items")
    @router.post("/v1/responses/{response_id}/cancel")
    async def find_response(response_id: str) -> Response:
        raise NotFoundError(
            f"There is no response {response_id[:80]}: this server keeps none. What it answers to POST "
            "/v1/responses is all; a client that closes its connection cancels it.",
            param="response_id",
        )

    return router
