"""An engine's metrics and logs: one log line per request, and two lines every ten seconds.

Names, buckets and meanings are in `cluster/metrics/engine_metrics.py`. Counters that the engine keeps are
read at each scrape (`engine_metrics.py`); events on the event loop are observed here: finished requests,
HTTP, batch rows.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, get_args

from ...cluster.engine.engine_stats import EngineStats
from ...cluster.engine.speedup_meter import SpeedupMeter
from ...cluster.errors import (
    DrainingError,
    EngineDeadError,
    EngineGoneError,
    EngineStalledError,
    MantaError,
    RateLimitError,
    TooManyRequestsError,
)
from ...cluster.metrics.engine_metrics import ACCOUNT_METRICS, CATALOGUE
from ...cluster.metrics.metric import ANY, BoundedLabels, Histogram
from ...cluster.request.caller import Tenant
from ...cluster.speculation.acceptance_length import mean_acceptance_length
from ..capture.collector import CaptureResult
from ..engine.async_engine import AsyncEngine
from ..engine.lossless_audit import AuditResult
from ..system.log_setup import Event
from .engine_metrics import engine_values, info_values, rejection_values
from .prometheus_text import Exposition, Values

logger = logging.getLogger(__name__)
request_logger = logging.getLogger("manta.requests")

REPORT_INTERVAL_S = 10.0
# Reasons for rejected requests, besides those that the engine counts (its queue is full).
REJECTIONS: Mapping[type[MantaError], str] = {
    TooManyRequestsError: "too_many_requests",
    DrainingError: "draining",
    EngineDeadError: "engine_dead",
    EngineGoneError: "engine_dead",
    EngineStalledError: "engine_dead",
    RateLimitError: "key_limit",
}

# Receives all metric values every few seconds. Called in a thread.
MetricsMirror = Callable[[Mapping[str, Values]], None]


@dataclass(frozen=True, slots=True)
class FinishedCompletion:
    """Seconds since the request arrived. `max_tokens`: None if the context is the limit."""

    num_tokens: int
    max_tokens: int | None
    queue_s: float
    first_s: float | None
    last_s: float | None


@dataclass(frozen=True, slots=True)
class EndedPrompt:
    """`longest`: maximum tokens of a completion."""

    num_tokens: int
    num_cached_tokens: int
    num_completions: int
    longest: int


class BatchLines(NamedTuple):
    """Rows of batches that have become durable; tokens are those of the completed ones.

    `by_category`: generated tokens, verify steps and accepted drafts.
    """

    completed: int
    failed: int
    prompt_tokens: int
    generation_tokens: int
    tenant: str | None
    by_category: Mapping[str | None, tuple[int, int, int]]


class RequestTelemetry:
    """All metrics of one engine.

    Args:
        replica: included in log lines, and label of all metrics. (The label `engine`, here always "0", is
            vLLM's number of an engine in its process.)
        max_label_values: maximum number of distinct tenants, and of categories.
        categories: categories counted by name.
    """

    def __init__(
        self,
        engine: AsyncEngine,
        model_name: str,
        replica: str,
        mirror: MetricsMirror | None = None,
        max_label_values: int = 0,
        categories: Sequence[str] = (ANY,),
    ) -> None:
        self._engine = engine
        self._replica = replica
        self._mirror = mirror
        # Values of the engine's own histograms are not observed here.
        self._histograms = {m.name: Histogram(m.buckets) for m in CATALOGUE if m.kind == "histogram"}
        self._http: Counter[tuple[str, ...]] = Counter()
        self._batch_rows = Counter({("completed",): 0, ("failed",): 0})
        self._batch_tokens = Counter({("prompt",): 0, ("generation",): 0})
        self._rejected = Counter({(reason,): 0 for reason in REJECTIONS.values()})
        self._audits = Counter({(result,): 0 for result in get_args(AuditResult)})
        self._captured = Counter({(result,): 0 for result in get_args(CaptureResult)})
        self._tenants = BoundedLabels(max_label_values)
        self._categories = BoundedLabels(max_label_values, categories)
        self._by_tenant: dict[str, Counter[tuple[str, ...]]] = {
            f"{what}_by_{label}": Counter()
            for what, _, _ in ACCOUNT_METRICS
            for label in ("tenant", "category")
        }
        self._speedup = SpeedupMeter()
        labels = {"model_name": model_name, "engine": "0", "replica": replica}
        self._exposition = Exposition(CATALOGUE, labels, self._values)

    # Observations.

    def observe_first_token(self, since_arrival_s: float) -> None:
        self._histograms["vllm:time_to_first_token_seconds"].observe(since_arrival_s)

    def observe_tokens(self, count: int, gap_s: float) -> None:
        """Observe a completion's next tokens, `gap_s` after the previous ones."""
        self._histograms["vllm:inter_token_latency_seconds"].observe(gap_s / count, count)

    def end_completion(self, ended: FinishedCompletion) -> None:
        self._histograms["vllm:request_generation_tokens"].observe(ended.num_tokens)
        if ended.max_tokens is not None:
            self._histograms["vllm:request_params_max_tokens"].observe(ended.max_tokens)
        first_s, last_s = ended.first_s, ended.last_s
        if first_s is None or last_s is None:
            return
        # The engine's clock starts slightly later than ours.
        queue_s = min(ended.queue_s, first_s)
        self._histograms["vllm:e2e_request_latency_seconds"].observe(last_s)
        self._histograms["vllm:request_queue_time_seconds"].observe(queue_s)
        self._histograms["vllm:request_prefill_time_seconds"].observe(first_s - queue_s)
        self._histograms["vllm:request_decode_time_seconds"].observe(last_s - first_s)
        self._histograms["vllm:request_inference_time_seconds"].observe(last_s - queue_s)
        if ended.num_tokens > 1:
            per_token_s = (last_s - first_s) / (ended.num_tokens - 1)
            self._histograms["vllm:request_time_per_output_token_seconds"].observe(per_token_s)

    def end_prompt(self, ended: EndedPrompt) -> None:
        computed = max(ended.num_tokens - ended.num_cached_tokens, 0)
        self._histograms["vllm:request_prompt_tokens"].observe(ended.num_tokens)
        self._histograms["vllm:request_prefill_kv_computed_tokens"].observe(computed)
        self._histograms["vllm:request_params_n"].observe(ended.num_completions)
        self._histograms["vllm:request_max_num_generation_tokens"].observe(ended.longest)

    def count_by_tenant(self, tenant: Tenant, *counts: int) -> None:
        """Count what a request that has ended for any reason took: see `ACCOUNT_METRICS`."""
        named = self._tenants.of(tenant.tenant), self._categories.of(tenant.category)
        for label, value in zip(("tenant", "category"), named, strict=True):
            for (what, _, _), count in zip(ACCOUNT_METRICS, counts, strict=True):
                self._by_tenant[f"{what}_by_{label}"][value,] += count

    def observe_http(self, handler: str, method: str, status: int, seconds: float) -> None:
        self._http[handler, method, str(status)] += 1
        self._histograms["http_request_duration_seconds"].observe(seconds)

    def count_batch_lines(self, lines: BatchLines) -> None:
        self._batch_rows["completed",] += lines.completed
        self._batch_rows["failed",] += lines.failed
        self._batch_tokens["prompt",] += lines.prompt_tokens
        self._batch_tokens["generation",] += lines.generation_tokens
        for category, counts in lines.by_category.items():
            self.count_by_tenant(Tenant(lines.tenant, category), *counts)

    def count_rejection(self, error: MantaError) -> None:
        """Count a request that ended before its first token, unless it is invalid."""
        if (reason := REJECTIONS.get(type(error))) is not None:
            self._rejected[reason,] += 1

    def count_audit(self, result: AuditResult) -> None:
        self._audits[result,] += 1

    def count_captured(self, result: CaptureResult) -> None:
        self._captured[result,] += 1

    def log_request(self, request: Mapping[str, object]) -> None:
        """Log an HTTP request at its end, without prompts and outputs."""
        origin = {"replica": self._replica, "drafter": self._engine.drafter}
        request_logger.info(Event("request", {**request, **origin}))

    # Output.

    def render(self) -> bytes:
        return self._exposition.text()

    async def report_forever(self) -> None:
        """Log the engine's activity while there is any, and update the mirror. Runs until cancelled."""
        before = self._engine.stats()
        while True:
            await asyncio.sleep(REPORT_INTERVAL_S)
            try:
                before = self._report(before)
                if self._mirror is not None:
                    # Hundreds of calls into Ray, which would block streams on the event loop.
                    await asyncio.to_thread(self._mirror, self._values())
            except Exception:  # the task's outermost level: a failure must not end the reports
                logger.exception("the engine's figures could not be reported")

    def _report(self, before: EngineStats) -> EngineStats:
        now = self._engine.stats()
        if now.steps > before.steps or now.running or now.waiting:
            logger.info(engine_line(before, now, REPORT_INTERVAL_S))
        if now.num_drafts > before.num_drafts:
            logger.info(acceptance_line(before, now, REPORT_INTERVAL_S, self._speedup.logged_ratio(now)))
        return now

    def _values(self) -> dict[str, Values]:
        stats = self._engine.stats()
        return {
            **{name: histogram.counts() for name, histogram in self._histograms.items()},
            **engine_values(stats, self._speedup.ratio(stats)),
            "vllm:admission_rejections": {**rejection_values(stats), **self._rejected},
            **info_values(self._engine, stats),
            **{name: dict(counts) for name, counts in self._by_tenant.items()},
            "dflash:batch_rows": dict(self._batch_rows),
            "dflash:batch_tokens": dict(self._batch_tokens),
            "dflash:lossless_audit": dict(self._audits),
            "manta:captured_completions": dict(self._captured),
            "http_requests": dict(self._http),
        }


def engine_line(before: EngineStats, now: EngineStats, seconds: float) -> str:
    prompts = now.prompt_tokens - before.prompt_tokens
    tokens = now.generation_tokens - before.generation_tokens
    queries = now.prefix_cache_queries - before.prefix_cache_queries
    hits = now.prefix_cache_hits - before.prefix_cache_hits
    return (
        f"Engine 000: Avg prompt throughput: {prompts / seconds:.1f} tokens/s, "
        f"Avg generation throughput: {tokens / seconds:.1f} tokens/s, "
        f"Running: {now.running} reqs, Waiting: {now.waiting} reqs, "
        f"KV cache usage: {100 * now.kv_usage:.1f}%, "
        f"Prefix cache hit rate: {100 * hits / queries if queries else 0:.1f}%"
    )


def acceptance_line(before: EngineStats, now: EngineStats, seconds: float, speedup: float | None) -> str:
    drafts = now.num_drafts - before.num_drafts
    drafted = now.num_draft_tokens - before.num_draft_tokens
    accepted = now.num_accepted_tokens - before.num_accepted_tokens
    length = mean_acceptance_length(drafts, accepted)
    assert length is not None, "there are drafts between the snapshots"
    earlier = [*before.accepted_per_pos, *[0] * len(now.accepted_per_pos)]
    rates = [(a - b) / drafts for a, b in zip(now.accepted_per_pos, earlier, strict=False)]
    return (
        f"SpecDecoding metrics: Mean acceptance length: {length:.2f}, "
        f"Accepted throughput: {accepted / seconds:.2f} tokens/s, "
        f"Drafted throughput: {drafted / seconds:.2f} tokens/s, "
        f"Accepted: {accepted} tokens, Drafted: {drafted} tokens, "
        f"Per-position acceptance rate: {', '.join(f'{rate:.3f}' for rate in rates)}, "
        f"Avg Draft acceptance rate: {100 * accepted / drafted if drafted else 0:.1f}%"
        + (f", Measured speed-up: {speedup:.2f}x" if speedup is not None else "")
    )
