"""The catalogue of metrics: every name that this software exports, and what it means.

Names are vLLM's (`vllm:...`), so that dashboards and routers made for vLLM work. Exported by
`actors/telemetry.py`, where counters get `_total`; a few also by `actors/ray_metrics.py`. A test serves
requests and finds a sample of every one. Those of a batch job stand apart: its driver gives them to Ray
(`jobs/batch/gauges.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["counter", "gauge", "histogram"]
Unit = Literal[
    "requests", "tokens", "seconds", "ratio", "drafts", "preemptions", "rows", "engines", "drafters"
]

SHARED_LABELS = ("model_name", "engine", "replica")

# vLLM's bounds; between tokens it starts at 10 ms, too coarse for blocks of accepted drafts.
_FIRST_TOKEN_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
_PER_TOKEN_S = (
    *(0.0005, 0.001, 0.002, 0.003, 0.005, 0.007, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2),
    *(0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
_REQUEST_S = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
_HTTP_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric.

    Attributes:
        name: without the `_total` of counters.
        kind: counter, gauge or histogram.
        unit: of its values.
        help: what it means, as shown by Prometheus.
        labels: all of its labels.
        buckets: upper bounds of a histogram, without infinity.
    """

    name: str
    kind: Kind
    unit: Unit
    help: str
    labels: tuple[str, ...] = SHARED_LABELS
    buckets: tuple[float, ...] = ()


CATALOGUE: tuple[Metric, ...] = (
    # Load.
    Metric("vllm:num_requests_running", "gauge", "requests", "Requests that run now."),
    Metric("vllm:num_requests_waiting", "gauge", "requests", "Requests that wait for a slot or for pages."),
    Metric("vllm:kv_cache_usage_perc", "gauge", "ratio", "Share of the K/V pages in use, 0 to 1."),
    # Tokens.
    Metric("vllm:prompt_tokens", "counter", "tokens", "Prompt tokens of requests that began to run."),
    Metric("vllm:generation_tokens", "counter", "tokens", "Tokens that came out."),
    Metric(
        "vllm:request_success",
        "counter",
        "requests",
        "Requests that ended, by reason.",
        (*SHARED_LABELS, "finished_reason"),
    ),
    # Latency.
    Metric(
        "vllm:time_to_first_token_seconds",
        "histogram",
        "seconds",
        "From arrival to the first token.",
        buckets=_FIRST_TOKEN_S,
    ),
    Metric(
        "vllm:inter_token_latency_seconds",
        "histogram",
        "seconds",
        "Between tokens; tokens of one block share the time since the block before.",
        buckets=_PER_TOKEN_S,
    ),
    Metric(
        "vllm:request_time_per_output_token_seconds",
        "histogram",
        "seconds",
        "Mean time per token after the first, per request.",
        buckets=_PER_TOKEN_S,
    ),
    Metric(
        "vllm:e2e_request_latency_seconds",
        "histogram",
        "seconds",
        "From arrival to the last token.",
        buckets=_REQUEST_S,
    ),
    Metric(
        "vllm:request_queue_time_seconds",
        "histogram",
        "seconds",
        "From arrival until the request first ran.",
        buckets=_REQUEST_S,
    ),
    # Cache.
    Metric("vllm:prefix_cache_queries", "counter", "tokens", "Prompt tokens looked up in the prefix cache."),
    Metric("vllm:prefix_cache_hits", "counter", "tokens", "Prompt tokens found in the prefix cache."),
    Metric(
        "vllm:num_preemptions", "counter", "preemptions", "Times a running request gave its pages to another."
    ),
    # Speculation.
    Metric(
        "vllm:spec_decode_num_drafts", "counter", "drafts", "Blocks that were verified (requests x steps)."
    ),
    Metric("vllm:spec_decode_num_draft_tokens", "counter", "tokens", "Drafted tokens that were verified."),
    Metric("vllm:spec_decode_num_accepted_tokens", "counter", "tokens", "Drafted tokens that came out."),
    Metric(
        "vllm:spec_decode_num_accepted_tokens_per_pos",
        "counter",
        "tokens",
        "Drafted tokens that came out, by position in the block.",
        (*SHARED_LABELS, "position"),
    ),
    Metric(
        "vllm:spec_decode_mean_accepted_length",
        "gauge",
        "tokens",
        "Mean acceptance length since the start, the bonus token included; no value before the first draft.",
    ),
    # The drafter's life.
    Metric(
        "manta:drafter_up",
        "gauge",
        "drafters",
        "1 while drafts can be asked for, else 0; no value where there is no drafter.",
    ),
    Metric(
        "manta:drafter_losses",
        "counter",
        "drafters",
        "Times that the drafter failed or was replaced; requests went on without drafts.",
    ),
    Metric(
        "manta:drafter_refilled_tokens",
        "counter",
        "tokens",
        "Tokens that were computed anew to give a new drafter their context.",
    ),
    # Batches of /v1/batches.
    Metric(
        "dflash:batch_rows_running",
        "gauge",
        "rows",
        "Lines of batches that have a slot, among vllm:num_requests_running; they may pause.",
    ),
    Metric(
        "dflash:batch_rows_waiting",
        "gauge",
        "rows",
        "Lines of batches that wait for a slot or for pages, among vllm:num_requests_waiting.",
    ),
    Metric(
        "dflash:batch_rows",
        "counter",
        "rows",
        "Lines of batches that this replica has brought to their end, by what became of them.",
        (*SHARED_LABELS, "status"),
    ),
    # HTTP.
    Metric(
        "http_requests",
        "counter",
        "requests",
        "HTTP requests, by route and status.",
        ("handler", "method", "status", "replica"),
    ),
    Metric(
        "http_request_duration_seconds",
        "histogram",
        "seconds",
        "From an HTTP request to the end of its response.",
        ("replica",),
        _HTTP_S,
    ),
)

_JOB = ("job",)

BATCH_CATALOGUE: tuple[Metric, ...] = (
    Metric("manta_batch_rows", "gauge", "rows", "Rows of the dataset.", _JOB),
    Metric("manta_batch_rows_done", "gauge", "rows", "Rows that are answered or failed, of all runs.", _JOB),
    Metric("manta_batch_rows_failed", "gauge", "rows", "Rows that failed, of all runs.", _JOB),
    Metric("manta_batch_prompt_tokens", "gauge", "tokens", "Prompt tokens so far, of all runs.", _JOB),
    Metric("manta_batch_generation_tokens", "gauge", "tokens", "Tokens that came out, of all runs.", _JOB),
    Metric(
        "manta_batch_tokens_per_second", "gauge", "tokens", "Tokens out per second over the last 10 s.", _JOB
    ),
    Metric(
        "manta_batch_seconds_left",
        "gauge",
        "seconds",
        "Until all rows are done, at the pace of the last minute; no value before one can tell.",
        _JOB,
    ),
    Metric(
        "manta_batch_mean_accepted_length",
        "gauge",
        "tokens",
        "Mean acceptance length of this run, the bonus token included; no value before the first draft.",
        _JOB,
    ),
    Metric(
        "manta_batch_speedup",
        "gauge",
        "ratio",
        "Tokens per second against the job's plain sample; no value unless it was measured.",
        _JOB,
    ),
    Metric("manta_batch_engines", "gauge", "engines", "Engines that live.", _JOB),
)
