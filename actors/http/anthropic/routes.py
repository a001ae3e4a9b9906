"""POST /v1/messages and /v1/messages/count_tokens."""

from __future__ import annotations

from dataclasses import replace

from fastapi import APIRouter, Request, Response

from ..generation.chat_adapter import SupportedOptions, answer, rename_error_fields, renamed_paths
from ..generation.generation import check_model
from ..generation.request_run import GenerationRun
from ..generation.server_context import ServerContext
from ..openai.routes import prepare_chat
from ..protocol.preparation import prompt_of
from ..wire.json_io import MAX_VALUES, JsonRoute, json_response
from ..wire.request_model import unknown_fields
from .errors import ROUTES
from .event_writer import PREFIX, MessageWriter
from .request import NAMES, CountRequest, MessagesRequest


def message_routes(server: ServerContext) -> APIRouter:
    router = APIRouter(route_class=JsonRoute)

    @router.post(ROUTES)
    async def create_message(body: MessagesRequest, http: Request) -> Response:
        """Create a message (Anthropic's Messages API)."""
        read = body.conversation()
        supported = SupportedOptions.of(server)
        chat = body.for_chat(read, supported)
        with rename_error_fields({**NAMES, **read.names}):
            task = await prepare_chat(
                server,
                PREFIX,
                chat,
                http,
                ignored=[*body.ignored(supported), *read.skipped],
                unknown=[*unknown_fields(body), *read.unknown],
                ends_with_context=True,
            )
            task = replace(task, ignored=renamed_paths(task.ignored, NAMES))
            run = GenerationRun(server, task)
            writer = MessageWriter(task.id, task.model, body.max_tokens, run.metrics, body.eager_tools)
            return await answer(run, writer, http)

    @router.post(f"{ROUTES}/count_tokens")
    async def count_tokens(body: CountRequest) -> Response:
        """Count the tokens of a message's prompt."""
        read = body.conversation()
        chat = body.for_chat(read, SupportedOptions.of(server))
        with rename_error_fields({**NAMES, **read.names}):
            check_model(server, chat.model)
            prompt = prompt_of(server.chat, chat, server.engine.tokenizer)
            token_ids = await server.engine.encoder.list_tokens(prompt, MAX_VALUES)
        return json_response({"input_tokens": len(token_ids)})

    return router
