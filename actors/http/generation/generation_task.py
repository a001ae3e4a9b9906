"""One HTTP request to generate, after all checks that need no engine. A value; `request_run.py` runs it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from ....cluster.request.caller import Caller, Tenant
from ....cluster.request.request import SamplingParams
from ...chat.chat_model import PLAIN, AnswerParserFactory
from ...engine.outputs import NOT_RESUMED, ResumeState
from ...tokenization.prompts import EncodedPrompt
from ..protocol.completion_request import CompletionRequest
from ..protocol.protocol import GenerationRequest
from .resume_origin import TOKENS_HEADER, ResumeOrigin

_UNPRINTABLE = re.compile(r"[^\w.-]", re.ASCII)


def operation_of(request: GenerationRequest) -> str:
    return "text_completion" if isinstance(request, CompletionRequest) else "chat"


@dataclass(frozen=True, slots=True)
class GenerationTask:
    id: str  # of the response, also the engine's
    request_id: str  # the client's
    model: str
    prompts: list[EncodedPrompt]
    params: SamplingParams
    priority: int
    ignored: list[str]
    request: GenerationRequest
    created_s: int  # Unix time
    caller: Caller  # the key that sent it
    requester: Tenant  # tenant and category that it is counted for
    may_be_captured: bool = True  # traffic capture may keep it
    origin: ResumeOrigin | None = None  # what a gateway has fixed for the request
    resumable: bool = True  # its stream can continue at another replica
    reading: AnswerParserFactory = PLAIN  # parses its answers
    trace_headers: Mapping[str, str] = field(default_factory=dict)  # the client's trace context

    @property
    def operation(self) -> str:
        return operation_of(self.request)

    @property
    def single(self) -> bool:
        return len(self.prompts) == 1 and self.params.n == 1

    @property
    def reports_tokens(self) -> bool:
        """Return whether the stream reports its tokens to a gateway.

        Only a single completion can continue at another replica, without an echo or log probabilities: their
        offsets count from the beginning of the text, which the other replica has not generated.
        """
        is_single = self.single and self.params.logprobs is None
        is_single = is_single and self.resumable and not self.request.echoes
        return self.origin is not None and self.request.stream and is_single

    @property
    def resume_state(self) -> ResumeState:
        return NOT_RESUMED if self.origin is None else self.origin.resume_state

    @property
    def headers(self) -> dict[str, str]:
        """X-Ignored-Params, as far as the names fit a header, and the header for the gateway."""
        names = [_UNPRINTABLE.sub("?", name)[:64] for name in self.ignored[:20]]
        headers = {"X-Ignored-Params": ",".join(names)} if names else {}
        return headers | ({TOKENS_HEADER: "1"} if self.reports_tokens else {})
