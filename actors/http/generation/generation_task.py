"""One HTTP request that generates, when all that can be checked has been. A value; `request_run.py` runs
it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from ....cluster.request.caller import Caller
from ....cluster.request.request import SamplingParams
from ...chat.answer_parser import PLAIN, AnswerParserFactory
from ...engine.output_processor import NOTHING, Begun
from ...engine.tenant import Tenant
from ...tokenization.prompts import EncodedPrompt
from ..protocol.completion_request import CompletionRequest
from ..protocol.protocol import GenerationRequest
from .resume_origin import TOLD_HEADER, ResumeOrigin

_UNPRINTABLE = re.compile(r"[^\w.-]", re.ASCII)


def operation_of(request: GenerationRequest) -> str:
    """OpenTelemetry's word for what is asked."""
    return "text_completion" if isinstance(request, CompletionRequest) else "chat"


@dataclass(frozen=True, slots=True)
class GenerationTask:
    """One HTTP request, ready to run. `id` is the response's and the engine's; `request_id` the client's.

    `created_s` is Unix time; `caller` the key that sent it, `asker` for whom it is counted; `may_be_kept`
    where traffic is captured; `origin` what a gateway fixed of the request;
    `resumable` says whether its stream can go on at another replica, `reading` how its answers are read,
    `trace_headers` what the client says of the trace that it is a part of.
    """

    id: str
    request_id: str
    model: str
    prompts: list[EncodedPrompt]
    params: SamplingParams
    priority: int
    ignored: list[str]
    request: GenerationRequest
    created_s: int
    caller: Caller
    asker: Tenant
    may_be_kept: bool = True
    origin: ResumeOrigin | None = None
    resumable: bool = True
    reading: AnswerParserFactory = PLAIN
    trace_headers: Mapping[str, str] = field(default_factory=dict)

    @property
    def operation(self) -> str:
        """OpenTelemetry's word for what is asked."""
        return operation_of(self.request)

    @property
    def single(self) -> bool:
        return len(self.prompts) == 1 and self.params.n == 1

    @property
    def told(self) -> bool:
        """Whether a gateway is told the stream's tokens.

        Only a single completion can go on elsewhere, and none that begins with its prompt, or whose log
        probabilities were asked for: their offsets count from the beginning of a text that another replica
        has not made.
        """
        alone = self.single and self.params.logprobs is None
        alone = alone and self.resumable and not self.request.echoes
        return self.origin is not None and self.request.stream and alone

    @property
    def begun(self) -> Begun:
        return NOTHING if self.origin is None else self.origin.begun

    @property
    def headers(self) -> dict[str, str]:
        """X-Ignored-Params names what was ignored, as far as names fit a header."""
        names = [_UNPRINTABLE.sub("?", name)[:64] for name in self.ignored[:20]]
        headers = {"X-Ignored-Params": ",".join(names)} if names else {}
        return headers | ({TOLD_HEADER: "1"} if self.told else {})
