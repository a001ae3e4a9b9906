"""The engine, the settings and the model's names, for all routes. Created once per application."""

from __future__ import annotations

import hashlib
import json
import time
from dataclasses import asdict

from starlette.requests import Request

from ....cluster.errors import ModelNotFoundError, RequestError, brief
from ....cluster.request.caller import Caller, Tenant, tenant_of
from ...capture.collector import TrafficCapture
from ...chat.chat_model import ChatModel
from ...engine.async_engine import AsyncEngine
from ...engine.lossless_audit import LosslessAudit
from ...observability.telemetry import RequestTelemetry
from ...observability.usage_store import ReceiptWriter
from ...tokenization.generation_config import GenerationDefaults
from ...tokenization.prompts import require_tokenizer
from ...tokenization.tokenizer import Tokenizer
from ..config.settings import ServerSettings
from ..middleware.api_keys import KeyLimits
from ..protocol.protocol import GenerationRequest, check_extra_fields
from .tracing import Tracing


class ServerContext:
    def __init__(
        self,
        engine: AsyncEngine,
        settings: ServerSettings,
        defaults: GenerationDefaults,
        telemetry: RequestTelemetry,
        audit: LosslessAudit,
        tracing: Tracing | None = None,
        receipts: ReceiptWriter | None = None,
        capture: TrafficCapture | None = None,
    ) -> None:
        self.engine = engine
        self.settings = settings
        self.key_limits = KeyLimits(settings)
        self.defaults = defaults
        self.telemetry = telemetry
        self.audit = audit
        self.tracing = tracing
        self.receipts = receipts
        self.capture = capture
        # the model's formats of tool calls and reasoning
        self.chat = ChatModel.of(
            engine.tokenizer,
            tool_call_parser=settings.tool_call_parser,
            reasoning_parser=settings.reasoning_parser,
            auto_calls=settings.enable_auto_tool_choice,
        )
        # under which the model is served, the reported one first
        self.names = settings.model_names(engine.config.model)
        self.created_s = int(time.time())  # Unix time of the start
        facts = json.dumps({**asdict(engine.config), "dtype": engine.info.dtype}, sort_keys=True, default=str)
        # equal for equal models and engine settings
        self.fingerprint = "fp_" + hashlib.blake2b(facts.encode(), digest_size=6).hexdigest()

    @property
    def name(self) -> str:
        return self.names[0]

    @property
    def speculates(self) -> bool:
        return self.engine.info.num_speculative_tokens > 0

    def check_model(self, name: str | None) -> str:
        if name is None or name in self.names:
            return name or self.name
        raise ModelNotFoundError(
            f"The model {brief(name)} is not served here. Served: {', '.join(self.names)}.", param="model"
        )

    def ignored_fields(self, request: GenerationRequest) -> list[str]:
        """Return dotted names of ignored fields. Raises RequestError for those that must not be."""
        extra, known = request.model_extra or {}, type(request).model_fields
        ignored = check_extra_fields(extra, known, self.settings.unknown_params)
        if "speculative" in request.model_fields_set and request.speculative.enabled and not self.speculates:
            ignored.append("speculative")
        return ignored

    def priority(self, request: GenerationRequest, http: Request) -> int:
        """Return the body's priority, else the header's. Raises RequestError if the policy has none."""
        if self.engine.config.scheduling_policy == "priority":
            if "priority" in request.model_fields_set:
                return request.priority
            return _header_priority(http)
        if request.priority != 0:
            raise RequestError(
                f"priority={request.priority} needs a server started with scheduling_policy=priority.",
                param="priority",
            )
        return 0

    def requester(
        self, request: GenerationRequest, http: Request, caller: Caller
    ) -> tuple[Tenant, list[str]]:
        """Return the request's tenant and category, and ignored fields."""
        metadata = (request.model_extra or {}).get("metadata")
        requester, ignored_fields = tenant_of(http.headers, metadata, caller, self.settings.tenants)
        if ignored_fields is not None and self.settings.unknown_params == "reject":
            raise RequestError(
                f"{ignored_fields} names no tenant of this key. Leave it out, or have the operator add it to "
                "`tenants` or to the key's line.",
                param=ignored_fields,
            )
        return requester, [ignored_fields] if ignored_fields is not None else []

    @property
    def tokenizer(self) -> Tokenizer:
        return require_tokenizer(self.engine.tokenizer)


def _header_priority(http: Request) -> int:
    value = http.headers.get("x-vllm-priority") or http.headers.get("x-priority") or "0"
    try:
        return int(value)
    except ValueError:
        raise RequestError("The header X-Priority must be an integer.", param="priority") from None
