"""The engine, the settings and the model's names, for all routes. Created once per application."""

from __future__ import annotations

import hashlib
import json
import time
from dataclasses import asdict

from ...capture.collector import TrafficCapture
from ...chat.chat_model import ChatModel
from ...engine.async_engine import AsyncEngine
from ...engine.lossless_audit import LosslessAudit
from ...observability.telemetry import RequestTelemetry
from ...tokenization.generation_config import GenerationDefaults
from ...tokenization.prompts import require_tokenizer
from ...tokenization.tokenizer import Tokenizer
from ..config.settings import ServerSettings
from ..middleware.api_keys import KeyLimits
from .tracing import Tracing


class ServerContext:
    def __init__(
        self,
        engine: AsyncEngine,
        settings: ServerSettings,
        defaults: GenerationDefaults,
        telemetry: RequestTelemetry,
        audit: LosslessAudit | None = None,
        tracing: Tracing | None = None,
        capture: TrafficCapture | None = None,
    ) -> None:
        self.engine = engine
        self.settings = settings
        self.key_limits = KeyLimits(settings)
        self.defaults = defaults
        self.telemetry = telemetry
        self.audit = audit
        self.tracing = tracing
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

    @property
    def tokenizer(self) -> Tokenizer:
        return require_tokenizer(self.engine.tokenizer)
