"""What the outside learns about an engine: Prometheus metrics, a log line per request, a line on acceptance.

Names, buckets and meanings stand in `cluster/metrics.py`. Counters that the engine keeps are read when
somebody scrapes; only latencies are observed here, as outputs pass by on the event loop. Everything of one
`Telemetry` happens on that loop, but for `render`, which only reads.
"""

from __future__ import annotations

import asyncio
import logging
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from itertools import accumulate
from typing import Protocol

import orjson
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.core import Metric as Family
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from ..cluster.acceptance import mean_acceptance_length
from ..cluster.engine import EngineStats
from ..cluster.metrics import CATALOGUE, Metric
from .engine import AsyncEngine

logger = logging.getLogger(__name__)
request_logger = logging.getLogger("manta.requests")

REPORT_INTERVAL_S = 10.0


class StatsMirror(Protocol):
    """Gets the engine's figures every few seconds (Ray's metrics: `ray_metrics.py`)."""

    def update(self, stats: EngineStats) -> None: ...


@dataclass(frozen=True, slots=True)
class FinishedRequest:
    """One HTTP request at its end, as it is logged. Times in milliseconds; no text of any kind."""

    request_id: str
    id: str
    model: str
    prompt_tokens: int
    output_tokens: int
    ttft_ms: float | None
    tpot_ms: float | None
    e2e_ms: float
    mean_acceptance_length: float | None
    finish_reason: str | None
    status: int


class Telemetry:
    """All figures of one engine.

    Args:
        engine: whose counters are shown.
        model_name: label of all metrics.
        replica: stands in log lines, and is a label of all metrics. (Their label `engine` is vLLM's number of
            an engine in its process: here always "0".)
        mirror: gets the figures too.
    """

    def __init__(
        self, engine: AsyncEngine, model_name: str, replica: str, mirror: StatsMirror | None = None
    ) -> None:
        self._engine = engine
        self._labels = {"model_name": model_name, "engine": "0", "replica": replica}
        spec = engine.config.speculative_config
        self._origin = {"replica": replica, "drafter": None if spec is None else spec.model}
        self._mirror = mirror
        self._histograms = {m.name: Histogram(m.buckets) for m in CATALOGUE if m.kind == "histogram"}
        self._http: Counter[tuple[str, str, str]] = Counter()
        self._batch_rows = Counter({("completed",): 0, ("failed",): 0})
        self._registry = CollectorRegistry()
        self._registry.register(_Scrape(self._families))

    def observe_first_token(self, since_arrival_s: float, queue_s: float) -> None:
        """A completion's first tokens, and how long it waited before it ran."""
        self._histograms["vllm:time_to_first_token_seconds"].observe(since_arrival_s)
        self._histograms["vllm:request_queue_time_seconds"].observe(queue_s)

    def observe_tokens(self, count: int, gap_s: float) -> None:
        """A completion's next tokens, `gap_s` after the ones before."""
        self._histograms["vllm:inter_token_latency_seconds"].observe(gap_s / count, count)

    def observe_http(self, handler: str, method: str, status: int, seconds: float) -> None:
        self._http[handler, method, str(status)] += 1
        self._histograms["http_request_duration_seconds"].observe(seconds)

    def count_batch_rows(self, completed: int, failed: int) -> None:
        """Lines of batches that are durable now."""
        self._batch_rows["completed",] += completed
        self._batch_rows["failed",] += failed

    def finish_request(self, request: FinishedRequest) -> None:
        """Observe and log one request, however it ended."""
        if request.status == 200:
            self._observe(
                ("vllm:e2e_request_latency_seconds", request.e2e_ms),
                ("vllm:request_time_per_output_token_seconds", request.tpot_ms),
            )
        request_logger.info(orjson.dumps({**asdict(request), **self._origin}).decode())

    def render(self) -> bytes:
        """The text that Prometheus scrapes."""
        return generate_latest(self._registry)

    async def report_forever(self) -> None:
        """Log acceptance while there is any, and feed the mirror. Cancelled at the end."""
        before = self._engine.stats()
        while True:
            await asyncio.sleep(REPORT_INTERVAL_S)
            try:
                before = self._report(before)
            except Exception:  # a task's edge: figures must not end for one failure, nor end the engine
                logger.exception("the engine's figures could not be reported")

    def _report(self, before: EngineStats) -> EngineStats:
        now = self._engine.stats()
        if now.num_drafts > before.num_drafts:
            logger.info(acceptance_line(before, now, REPORT_INTERVAL_S))
        if self._mirror is not None:
            self._mirror.update(now)
        return now

    def _observe(self, *values: tuple[str, float | None]) -> None:
        for name, value_ms in values:
            if value_ms is not None:
                self._histograms[name].observe(value_ms / 1000.0)

    def _families(self) -> Iterable[Family]:
        values = {
            **engine_values(self._engine.stats()),
            "dflash:batch_rows": self._batch_rows,
            "http_requests": self._http,
        }
        for metric in CATALOGUE:
            if metric.kind == "histogram":
                yield self._histograms[metric.name].family(metric, self._labels)
            elif metric.name in values:
                yield _simple(metric, self._labels, values[metric.name])


class Histogram:
    """Counts per bucket. Cheaper than prometheus_client's, and takes several equal values at once."""

    def __init__(self, buckets: tuple[float, ...]) -> None:
        self._bounds = buckets
        self._counts = [0] * (len(buckets) + 1)
        self._sum = 0.0

    def observe(self, value: float, count: int = 1) -> None:
        self._counts[bisect_left(self._bounds, value)] += count
        self._sum += value * count

    def family(self, metric: Metric, labels: Mapping[str, str]) -> Family:
        names = [*map(floatToGoString, self._bounds), "+Inf"]
        buckets = list(zip(names, map(float, accumulate(self._counts)), strict=True))
        shown = {name: value for name, value in labels.items() if name in metric.labels}
        family = HistogramMetricFamily(metric.name, metric.help, labels=list(shown))
        family.add_metric(list(shown.values()), buckets, self._sum)
        return family


class _Scrape(Collector):
    """What prometheus_client's registry asks for when somebody scrapes."""

    def __init__(self, collect: Callable[[], Iterable[Family]]) -> None:
        self._collect = collect

    def collect(self) -> Iterable[Family]:
        return self._collect()


Values = float | Mapping[tuple[str, ...], float]


def engine_values(stats: EngineStats) -> dict[str, Values]:
    """The engine's figures by metric name; a mapping where a metric has labels of its own or no value."""
    length = mean_acceptance_length(stats.num_drafts, stats.num_accepted_tokens)
    return {
        "vllm:num_requests_running": stats.running,
        "vllm:num_requests_waiting": stats.waiting,
        "vllm:kv_cache_usage_perc": stats.kv_usage,
        "dflash:batch_rows_running": stats.background_running,
        "dflash:batch_rows_waiting": stats.background_waiting,
        "vllm:prompt_tokens": stats.prompt_tokens,
        "vllm:generation_tokens": stats.generation_tokens,
        "vllm:request_success": {(reason,): count for reason, count in stats.finished.items()},
        "vllm:prefix_cache_queries": stats.prefix_cache_queries,
        "vllm:prefix_cache_hits": stats.prefix_cache_hits,
        "vllm:num_preemptions": stats.preemptions,
        "vllm:spec_decode_num_drafts": stats.num_drafts,
        "vllm:spec_decode_num_draft_tokens": stats.num_draft_tokens,
        "vllm:spec_decode_num_accepted_tokens": stats.num_accepted_tokens,
        "vllm:spec_decode_num_accepted_tokens_per_pos": {
            (str(i),): count for i, count in enumerate(stats.accepted_per_pos)
        },
        "vllm:spec_decode_mean_accepted_length": {} if length is None else length,
        "manta:drafter_up": float(stats.drafter_up) if stats.accepted_per_pos else {},
        "manta:drafter_losses": stats.drafter_losses,
        "manta:drafter_refilled_tokens": stats.drafter_refilled_tokens,
    }


def acceptance_line(before: EngineStats, now: EngineStats, seconds: float) -> str:
    """How speculation went between two snapshots with drafts, in the words that people search logs for."""
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
    )


def _simple(metric: Metric, labels: Mapping[str, str], values: Values) -> Family:
    """A counter or gauge, with one sample or one for each of its own labels' values."""
    kind = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
    shared = {name: value for name, value in labels.items() if name in metric.labels}
    own = [name for name in metric.labels if name not in shared]
    family = kind(metric.name, metric.help, labels=[*shared, *own])
    samples = values.items() if isinstance(values, Mapping) else [((), values)]
    for own_values, value in samples:
        family.add_metric([*shared.values(), *own_values], value)
    return family
