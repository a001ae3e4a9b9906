"""Reference page of the HTTP API: routes, fields of bodies and statuses, from the OpenAPI document.

The application is the real one; its engine's executor is simulated, so no model is loaded.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from typing import Any

from manta.actors.engine.async_engine import AsyncEngine
from manta.actors.http.app import create_app
from manta.actors.http.batch_api.routes import BatchRequest
from manta.actors.http.config.settings import ServerSettings
from manta.actors.http.openai.tokenization import DetokenizeRequest, TokenizeRequest
from manta.actors.http.protocol.chat_completion import ChatRequest
from manta.actors.http.protocol.completion import CompletionRequest
from manta.actors.http.protocol.protocol import GenerationRequest, Speculative
from manta.actors.http.wire.errors import MEANINGS
from manta.cluster.config import EngineConfig
from manta.cluster.request.request import SamplingParams
from manta.cluster.simulation.simulated_executor import SimulatedExecutor
from manta.cluster.step.executor import ExecutorInfo
from manta.jobs.common.engine_flags import described

from .markdown import cell, code, table

# Any in this module: JSON of the OpenAPI document.
_INTRODUCTION = """# HTTP API

OpenAI's routes and fields with vLLM's extensions, and Anthropic's `/v1/messages`. A running server has the
same at `/openapi.json`. A field that is not supported is rejected by name; the setting
[`unknown_params`](settings.md#the-server) determines how unknown fields are handled.
"""
_BODIES = {
    body.__name__: body
    for body in (
        *(CompletionRequest, ChatRequest, Speculative),
        *(BatchRequest, TokenizeRequest, DetokenizeRequest),
    )
}
_FIELDS = ("field", "type", "default", "meaning")
_SHARED = """## Fields of bodies

`CompletionRequest` and `ChatRequest` have these fields, and their own ones below:
"""
_STATUSES = """## Statuses

Errors have OpenAI's shape: `{"error": {message, type, param, code}}`.
"""


def routes_page() -> str:
    document = openapi()
    schemas = document["components"]["schemas"]
    rows = {name: list(_fields(name, schemas[name])) for name in _BODIES}
    shared = [row for row in rows["ChatRequest"] if row in rows["CompletionRequest"]]
    own = {name: [row for row in found if row not in shared] for name, found in rows.items()}
    bodies = (f"### `{name}`\n\n{table(_FIELDS, found)}" for name, found in own.items())
    statuses = table(("status", "meaning"), [(str(status), cell(text)) for status, text in MEANINGS.items()])
    routes = table(("route", "body", "what it does"), list(_routes(document)))
    parts = (
        _INTRODUCTION,
        "## Routes\n",
        routes,
        f"{_SHARED}\n{table(_FIELDS, shared)}",
        *bodies,
        _STATUSES,
        statuses,
    )
    return "\n".join(parts)


def openapi() -> Mapping[str, Any]:
    """Return the OpenAPI document of a server."""
    return asyncio.run(_document())


async def _document() -> Mapping[str, Any]:
    info = ExecutorInfo((64,), 16, 512, 256, (), 0, "float32", "cpu")
    engine = AsyncEngine(
        EngineConfig(model="any", skip_tokenizer_init=True), lambda config: SimulatedExecutor(info)
    )
    await engine.start()
    try:
        return create_app(engine, ServerSettings(generation_config="openai")).openapi()
    finally:
        engine.close()


def _routes(document: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            content = operation.get("requestBody", {}).get("content", {}).values()
            body = next((each["schema"].get("$ref", "") for each in content), "").rpartition("/")[2]
            link = f"[`{body}`](#{body.lower()})" if body in _BODIES else code(body)
            yield code(f"{method.upper()} {path}"), link, cell(operation.get("description", ""))


def _fields(name: str, schema: Mapping[str, Any]) -> Iterator[tuple[str, str, str, str]]:
    """Yield rows in the schema's order; sampling parameters have their class's descriptions."""
    said = _meanings(name)
    required = schema.get("required", ())
    for field, facts in schema["properties"].items():
        default = "required" if field in required else _default(facts)
        yield code(field), cell(_kind(facts)), default, cell(facts.get("description") or said.get(field, ""))


def _meanings(name: str) -> dict[str, str]:
    body = _BODIES[name]
    kinds = [*([SamplingParams] if issubclass(body, GenerationRequest) else []), *reversed(body.__mro__)]
    said = (described(kind.__doc__, "Attributes:") for kind in kinds)
    return {field: text for each in said for field, text in each.items()}


def _default(facts: Mapping[str, Any]) -> str:
    return code(str(facts["default"]).lower()) if facts.get("default") not in (None, {}) else ""


def _kind(facts: Mapping[str, Any]) -> str:
    """Return a JSON schema's type as text, without null."""
    if "anyOf" in facts:
        kinds = dict.fromkeys(_kind(each) for each in facts["anyOf"] if each.get("type") != "null")
        return " or ".join(kinds)
    if "$ref" in facts:
        return code(facts["$ref"].rpartition("/")[2].rpartition("__")[2])  # without its module
    if "enum" in facts or "const" in facts:
        return ", ".join(code(str(value)) for value in facts.get("enum", [facts.get("const")]))
    if facts.get("type") == "array":
        return f"list of {_kind(facts.get('items', {}))}"
    kind = str(facts.get("type", "any"))
    return {"string": "text", "boolean": "true or false"}.get(kind, kind)
