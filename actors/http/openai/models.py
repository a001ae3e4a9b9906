"""GET /v1/models and /v1/models/{id}: the served models and their names."""

from __future__ import annotations

from fastapi import APIRouter, Response

from ..generation.generation import check_model
from ..generation.server_context import ServerContext
from ..wire.json_io import JsonObject, json_response


def model_routes(server: ServerContext) -> APIRouter:
    router = APIRouter()

    @router.get("/v1/models")
    async def list_models() -> Response:
        """List the served models."""
        return json_response({"object": "list", "data": [_card(server, name) for name in server.names]})

    @router.get("/v1/models/{name:path}")
    async def get_model(name: str) -> Response:
        """Return one model."""
        return json_response(_card(server, check_model(server, name)))

    return router


def model_card(name: str, *, root: str, created_s: int, max_model_len: int | None) -> JsonObject:
    """Return OpenAI's model with vLLM's `max_model_len`; `root` is the first of its names."""
    return {
        "id": name,
        "object": "model",
        "created": created_s,
        "owned_by": "manta",
        "root": root,
        "parent": None,
        "max_model_len": max_model_len,
    }


def _card(server: ServerContext, name: str) -> JsonObject:
    limit = server.engine.info.max_model_len
    return model_card(name, root=server.name, created_s=server.created_s, max_model_len=limit)
