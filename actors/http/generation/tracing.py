"""OpenTelemetry spans, one for each request.

Requests that an engine served have child spans: queue, prefill, decode.

Spans are created when a request has ended, from statistics that are recorded anyway. Names follow the
semantic conventions for generative AI (`gen_ai.*`); what these lack is `speculation.*`. Spans contain no
text. The client's `traceparent` is the parent. Without an endpoint, OpenTelemetry is not imported (the extra
`otel` installs it).
"""

from __future__ import annotations

import importlib.util
import logging
import os
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from ....cluster.errors import ConfigError
from ....cluster.speculation.acceptance_length import mean_acceptance_length
from ...engine.outputs import RequestMetrics
from ..config.settings import ServerSettings
from ..wire.errors import Rejection
from .generation_task import GenerationTask, RequestStats

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Span


logger = logging.getLogger(__name__)

_EXPORTER = "opentelemetry.exporter.otlp.proto.http"
_ENVIRONMENT = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_INSTALL = "pip install opentelemetry-sdk opentelemetry-exporter-otlp-proto-http"
_PATH = "/v1/traces"  # of a collector
Attributes = Mapping[str, str | int | float | list[str]]


def check_tracing(settings: ServerSettings) -> None:
    if settings.otlp_traces_endpoint is not None and not _can_export():
        raise ConfigError(
            f"otlp_traces_endpoint: OpenTelemetry's exporter is not installed. Install it ({_INSTALL}) where "
            "the replicas run, or leave the setting out.",
            param="otlp_traces_endpoint",
        )


def open_tracing(settings: ServerSettings, replica: str) -> Tracing | None:
    """Return the exporter; None if no collector is configured. Raises ConfigError without the extra."""
    check_tracing(settings)
    if settings.otlp_traces_endpoint is not None:
        return Tracing(_with_path(settings.otlp_traces_endpoint), replica)
    named = [name for name in _ENVIRONMENT if os.environ.get(name)]
    if not named:
        return None
    if not _can_export():  # the variable may be meant for other programs, so this is no reason not to start
        logger.warning("%s is set, but OpenTelemetry's exporter is missing: %s", named[0], _INSTALL)
        return None
    return Tracing(None, replica)


def _can_export() -> bool:
    try:
        return importlib.util.find_spec(_EXPORTER) is not None
    except ModuleNotFoundError:  # its parent packages are missing, too
        return False


def _with_path(endpoint: str) -> str:
    return endpoint if urlsplit(endpoint).path.strip("/") else endpoint.rstrip("/") + _PATH


class Tracing:
    """Exports the spans of one replica. `endpoint`: None leaves it to OpenTelemetry's variables."""

    def __init__(self, endpoint: str | None, replica: str) -> None:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        name = os.environ.get("OTEL_SERVICE_NAME", "manta")
        resource = Resource.create({"service.name": name, "service.instance.id": replica})
        self._provider: TracerProvider = TracerProvider(resource=resource)
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))
        self._tracer = self._provider.get_tracer("manta")

    def end(self, task: GenerationTask, figures: RequestStats, status: int, drafter: str | None) -> None:
        from opentelemetry.trace import SpanKind, Status, StatusCode

        clock = _WallClock()
        span = self._tracer.start_span(
            f"{task.operation} {task.model}",
            context=_parent(task.trace_headers),
            kind=SpanKind.SERVER,
            start_time=clock.ns(figures.started_s),
            attributes={
                **_of_request(task),
                **_of_response(task, figures, status),
                **_of_speculation(figures.costs, drafter),
            },
        )
        if status >= 500:
            span.set_status(Status(StatusCode.ERROR))
        cost, first_s, last_s = figures.cost, figures.first_token_s, figures.last_token_s
        if cost is not None and first_s is not None and last_s is not None:
            begin_s = figures.started_s
            self._phases(span, *map(clock.ns, (begin_s, begin_s + cost.queue_s, first_s, last_s)))
        span.end(clock.ns(figures.started_s + figures.e2e_s))

    def refuse(self, refusal: Rejection) -> None:
        """Export a request that failed before reaching an engine; no client text but the id."""
        from opentelemetry.trace import SpanKind, Status, StatusCode

        clock, now_s = _WallClock(), time.monotonic()
        attributes: dict[str, str | int | float | list[str]] = {
            "http.request.method": refusal.method,
            "http.response.status_code": refusal.status,
            "error.type": str(refusal.status),
            "manta.request_id": refusal.request_id or "",
        }
        optional = {
            "http.route": refusal.route,
            "manta.refusal.param": refusal.param,
            "manta.refusal.reason": refusal.reason,
        }
        span = self._tracer.start_span(
            f"{refusal.method} {refusal.route or 'none'}",
            context=_parent(refusal.trace_headers),
            kind=SpanKind.SERVER,
            start_time=clock.ns(now_s - refusal.seconds),
            attributes={
                **attributes,
                **{name: value for name, value in optional.items() if value is not None},
            },
        )
        if refusal.status >= 500:
            span.set_status(Status(StatusCode.ERROR))
        span.end(clock.ns(now_s))

    def _phases(self, parent: Span, begin_ns: int, runs_ns: int, first_ns: int, last_ns: int) -> None:
        """Add child spans, in Unix time, from the earliest first token to the latest last token."""
        from opentelemetry.trace import set_span_in_context

        runs_ns = min(runs_ns, first_ns)
        context = set_span_in_context(parent)
        for name, from_ns, to_ns in (
            ("queue", begin_ns, runs_ns),
            ("prefill", runs_ns, first_ns),
            ("decode", first_ns, last_ns),
        ):
            self._tracer.start_span(name, context=context, start_time=from_ns).end(to_ns)

    def close(self) -> None:
        """Send the remaining spans; waits at most the exporter's time-out."""
        self._provider.shutdown()


class _WallClock:
    def __init__(self) -> None:
        self._ahead_ns = time.time_ns() - time.monotonic_ns()

    def ns(self, monotonic_s: float) -> int:
        return self._ahead_ns + int(monotonic_s * 1e9)


def _parent(headers: Mapping[str, str]) -> Context:
    from opentelemetry.context import Context
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    return TraceContextTextMapPropagator().extract(headers, context=Context())


def _of_request(task: GenerationTask) -> Attributes:
    params, request = task.params, task.request
    found: dict[str, str | int | float | list[str]] = {
        "gen_ai.operation.name": task.operation,
        "gen_ai.provider.name": "manta",
        "gen_ai.request.model": request.model or task.model,
        "gen_ai.request.temperature": params.temperature,
        "gen_ai.request.top_p": params.top_p,
        "manta.request_id": task.request_id,
    }
    optional = {
        "gen_ai.request.choice.count": params.n if params.n != 1 else None,
        "gen_ai.request.frequency_penalty": params.frequency_penalty or None,
        "gen_ai.request.max_tokens": params.max_tokens,
        "gen_ai.request.presence_penalty": params.presence_penalty or None,
        "gen_ai.request.seed": request.seed,
        "gen_ai.request.top_k": params.top_k if params.top_k > 0 else None,
    }
    return {**found, **{name: value for name, value in optional.items() if value is not None}}


def _of_response(task: GenerationTask, figures: RequestStats, status: int) -> Attributes:
    usage = figures.usage()
    found: dict[str, str | int | float | list[str]] = {
        "http.response.status_code": status,
        "gen_ai.response.id": task.id,
        "gen_ai.response.model": task.model,
        "gen_ai.usage.input_tokens": usage["prompt_tokens"],
        "gen_ai.usage.output_tokens": usage["completion_tokens"],
        "gen_ai.usage.cache_read.input_tokens": usage["prompt_tokens_details"]["cached_tokens"],
    }
    if (details := usage.get("completion_tokens_details")) is not None:
        found["gen_ai.usage.reasoning.output_tokens"] = details["reasoning_tokens"]
    if figures.ttft_s is not None:
        found["gen_ai.response.time_to_first_chunk"] = figures.ttft_s
    if figures.finish_reasons:
        found["gen_ai.response.finish_reasons"] = list(figures.finish_reasons)
    if status >= 400:
        found["error.type"] = str(status)
    return found


def _of_speculation(costs: Sequence[RequestMetrics], drafter: str | None) -> Attributes:
    """Count the steps that verified drafts; no attributes without a drafter."""
    if drafter is None:
        return {}
    num_steps = sum(cost.num_steps for cost in costs)
    num_accepted = sum(cost.num_accepted_tokens for cost in costs)
    found: dict[str, str | int | float | list[str]] = {
        "speculation.drafter": drafter,
        "speculation.verify_steps": num_steps,
        "speculation.drafted_tokens": sum(cost.num_draft_tokens for cost in costs),
        "speculation.accepted_tokens": num_accepted,
    }
    if (length := mean_acceptance_length(num_steps, num_accepted)) is not None:
        found["speculation.mean_acceptance_length"] = length
    return found
