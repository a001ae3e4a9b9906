"""The gateway's application: routes that it answers itself, and those that it forwards to a replica.

Health and models are answered from the gateway's state. Scrapes and /explain query all replicas, briefly.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from urllib.parse import urlencode

import orjson
from fastapi import FastAPI, Request, Response

from ...version import __version__
from ..haproxy.metrics_aggregator import joined
from ..http.admin.explain import PATH, timelines_response
from ..http.admin.operations import operation_routes
from ..http.anthropic.errors import lost_message
from ..http.config.settings import ServerSettings
from ..http.middleware.api_keys import KeyLimits
from ..http.middleware.request_gate import METHODS, RequestGate, Traffic
from ..http.middleware_stack import add_middleware
from ..http.openai.models import model_card
from ..http.responses.event_writer import lost_response
from ..http.wire.json_io import JsonObject, json_response
from ..http.wire.sse import Ending, done_ending
from .forward_proxy import ForwardedResponse
from .gateway_metrics import GatewayMetrics
from .generation_proxy import BROKEN, GatewayState, GenerationResponse
from .isolation import Isolation
from .replica_set import Fleet, Member, ServedModel
from .routing_hints import read_hints
from .upstream_client import Upstream, caller_header

SCRAPE_TIMEOUT_S = 2.0
# Endings of streams of the routes that generate.
ENDINGS: dict[str, Ending] = {
    "/v1/completions": done_ending,
    "/v1/chat/completions": done_ending,
    "/v1/responses": lost_response,
    "/v1/messages": lost_message,
}


def create_gateway(
    fleet: Fleet,
    settings: ServerSettings,
    *,
    gateway: str = "0",
    traffic: Traffic | None = None,
    echo_request_id: bool = True,
) -> FastAPI:
    """Create the gateway's application.

    `traffic` counts the requests in flight and holds whether the gateway is draining. `echo_request_id`: see
    `RequestGate`.
    """
    traffic = traffic or Traffic()
    own_metrics = GatewayMetrics(fleet, gateway)
    started_s = int(time.time())
    parts: GatewayState

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        nonlocal parts
        isolation = Isolation(fleet, own_metrics, by_key=settings.has_several_keys)
        parts = GatewayState(fleet, Upstream(), own_metrics, traffic, isolation, KeyLimits(settings))
        watching = asyncio.create_task(fleet.watch_forever())
        yield
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
        await parts.upstream.close()

    app = FastAPI(title="Manta", version=__version__, lifespan=lifespan, openapi_url=None)

    def check_health() -> None:
        for model in fleet.models:
            if not model.sleeps:
                fleet.check(model)

    async def metrics_text() -> str:
        members = [member for model in fleet.models for member in fleet.ready(model)]
        texts = await asyncio.gather(*(_text(parts.upstream, member, "/metrics") for member in members))
        return joined([*texts, own_metrics.render()])

    def load_now() -> JsonObject:
        records = [member.record for model in fleet.models for member in fleet.ready(model)]
        running, waiting = sum(r.running for r in records), sum(r.waiting for r in records)
        return {"running": running, "waiting": waiting}

    app.include_router(operation_routes(traffic, check_health, metrics_text, load_now))

    @app.get(PATH)
    async def explain(http: Request, id: str | None = None) -> Response:
        members = [member for model in fleet.models for member in fleet.ready(model)]
        path = PATH if id is None else f"{PATH}?{urlencode({'id': id})}"
        headers = [caller_header(http.scope)]
        texts = await asyncio.gather(*(_text(parts.upstream, member, path, headers) for member in members))
        found = [each for text in texts if text for each in orjson.loads(text)["data"]]
        if id is None:
            return json_response({"object": "list", "data": found})
        return timelines_response(id, found)

    @app.get("/v1/models")
    async def list_models() -> Response:
        cards = [_card(fleet, model, name, started_s) for model in fleet.models for name in model.names]
        return json_response({"object": "list", "data": cards})

    @app.get("/v1/models/{name:path}")
    async def get_model(name: str) -> Response:
        return json_response(_card(fleet, fleet.find(name), name, started_s))

    async def generate(http: Request) -> Response:
        body = await http.body()
        ending = ENDINGS[http.url.path]
        return GenerationResponse(parts, http, body, await read_hints(http, body), ending)

    for path in ENDINGS:
        app.post(path)(generate)

    @app.api_route("/{path:path}", methods=sorted(METHODS))
    async def forward(http: Request) -> Response:
        return ForwardedResponse(parts, http)

    gate = partial(
        RequestGate,
        settings=settings,
        telemetry=own_metrics,
        traffic=traffic,
        replica=gateway,
        echo_request_id=echo_request_id,
    )
    add_middleware(app, settings, gate)
    return app


def _card(fleet: Fleet, model: ServedModel, name: str, started_s: int) -> JsonObject:
    records = [m.record for m in fleet.members if m.record.names[0] == model.names[0]]
    return model_card(
        name,
        root=model.names[0],
        created_s=min((record.created_s for record in records), default=started_s),
        max_model_len=records[0].max_model_len if records else None,
    )


async def _text(
    upstream: Upstream, member: Member, path: str, headers: Sequence[tuple[str, str]] = ()
) -> str:
    """Return the body of a replica's 200 response; "" after another status, an error or a time-out."""
    try:
        async with (
            asyncio.timeout(SCRAPE_TIMEOUT_S),
            upstream.request(member, "GET", path, headers, None) as response,
        ):
            return await response.text() if response.status == 200 else ""
    except BROKEN:
        return ""
