"""What every route needs: the engine, the settings, the names, the tokenizer's doors. Made once per app."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from starlette.requests import Request

from ...cluster.errors import ModelNotFoundError, RequestError
from ..encoding import LONG_TEXT_CHARS
from ..engine import AsyncEngine
from ..telemetry import Telemetry
from ..tokenizer import Tokenizer
from .defaults import GenerationDefaults
from .fields import check_extra_fields
from .protocol import GenerationRequest
from .settings import ServerSettings


@dataclass(frozen=True, slots=True)
class EncodedPrompt:
    text: str | None
    token_ids: list[int]

    def for_engine(self) -> dict[str, Any]:
        return {"prompt": self.text, "prompt_token_ids": self.token_ids}


class Frontend:
    """The engine as the routes see it.

    Attributes:
        names: under which the model is served, the reported one first.
        fingerprint: equal for equal models and engine settings.
        created_s: Unix time of the start.
    """

    def __init__(
        self,
        engine: AsyncEngine,
        settings: ServerSettings,
        defaults: GenerationDefaults,
        telemetry: Telemetry,
    ) -> None:
        self.engine = engine
        self.settings = settings
        self.defaults = defaults
        self.telemetry = telemetry
        self.names = settings.model_names(engine.config.model)
        self.created_s = int(time.time())
        facts = json.dumps({**asdict(engine.config), "dtype": engine.info.dtype}, sort_keys=True, default=str)
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
            f"The model {name[:200]!r} is not served here. Served: {', '.join(self.names)}.", param="model"
        )

    def ignored_fields(self, request: GenerationRequest) -> list[str]:
        """Refuse what must not be ignored; returns what is (dotted names)."""
        extra, known = request.model_extra or {}, type(request).model_fields
        ignored = check_extra_fields(extra, known, self.settings.unknown_params)
        if "speculative" in request.model_fields_set and request.speculative.enabled and not self.speculates:
            ignored.append("speculative")
        return ignored

    def priority(self, request: GenerationRequest, http: Request) -> int:
        """The body's priority, else the header's; without the policy it must not be asked for."""
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

    @property
    def tokenizer(self) -> Tokenizer:
        if self.engine.tokenizer is None:
            raise RequestError(
                "This server runs without a tokenizer (skip_tokenizer_init); send token ids to "
                "/v1/completions.",
                param="prompt",
            )
        return self.engine.tokenizer

    async def encode(
        self, text: str, *, truncate: int | None, add_special_tokens: bool = True, param: str = "prompt"
    ) -> EncodedPrompt:
        """A prompt that fits the model; see `PromptEncoder.text`. `truncate` is `truncate_prompt_tokens`."""
        token_ids = await self.engine.encoder.text(
            text,
            add_special_tokens=add_special_tokens,
            keep_last=None if truncate is None else self.prompt_room(truncate),
            param=param,
        )
        return EncodedPrompt(text, token_ids)

    def prompt_room(self, truncate: int) -> int:
        """The tokens that `truncate_prompt_tokens` leaves; -1 is as many as the model takes."""
        return self.engine.info.max_model_len - 1 if truncate == -1 else truncate

    async def render_chat(
        self,
        messages: Sequence[dict[str, Any]],
        variables: dict[str, Any],
        *,
        add_generation_prompt: bool,
        continue_final_message: bool,
    ) -> str:
        """The prompt's text. Long messages are rendered apart from the event loop's other turns."""
        render = partial(
            self.tokenizer.apply_chat_template,
            messages,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            variables=variables,
        )
        if sum(len(message["content"]) for message in messages) < LONG_TEXT_CHARS and len(messages) < 100:
            return render()
        return await self.engine.encoder.in_thread(render)

    def template_uses(self, variable: str) -> bool:
        return variable in (self.tokenizer.chat_template or "")


def _header_priority(http: Request) -> int:
    value = http.headers.get("x-vllm-priority") or http.headers.get("x-priority") or "0"
    try:
        return int(value)
    except ValueError:
        raise RequestError("The header X-Priority must be an integer.", param="priority") from None
