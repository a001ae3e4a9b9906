"""The catalogue beside the engines': what gateways, the autoscaler and batch jobs export.

Gateways show theirs on their own `/metrics` (`actors/gateway/figures.py`); the autoscaler's policy, which
lives in Serve's controller (`actors/scaling_metrics.py`), and a batch job's driver (`jobs/batch/progress.py`)
give theirs to Ray.
"""

from __future__ import annotations

from .metric import Metric

GATEWAY_CATALOGUE: tuple[Metric, ...] = (
    Metric(
        "manta:gateway_requests",
        "counter",
        "requests",
        "Requests that were sent to a replica, by what chose it: session, prefix or load.",
        ("gateway", "model_name", "reason"),
    ),
    Metric(
        "manta:gateway_resumed_streams",
        "counter",
        "requests",
        "Times a stream that had begun went on at another replica.",
        ("gateway", "model_name"),
    ),
    Metric(
        "manta:gateway_retried_requests",
        "counter",
        "requests",
        "Times a request of which nothing had come out went to another replica.",
        ("gateway", "model_name"),
    ),
    Metric(
        "manta:gateway_isolated_requests",
        "counter",
        "requests",
        "Times a request under which a replica died went to another one as the only suspect there.",
        ("gateway", "model_name"),
    ),
    Metric(
        "manta:gateway_poisonous_requests",
        "counter",
        "requests",
        "Requests that ended with 422 because replicas died each time they served them.",
        ("gateway", "model_name"),
    ),
    Metric(
        "manta:gateway_replica_up",
        "gauge",
        "replicas",
        "Whether a replica that was heard of lately can get requests, 0 or 1.",
        ("gateway", "model_name", "replica"),
    ),
    Metric(
        "manta:gateway_http_requests",
        "counter",
        "requests",
        "HTTP requests at the gateway, by route and status.",
        ("gateway", "handler", "method", "status"),
    ),
)

_DEPLOYMENT = ("application", "deployment")

SCALING_CATALOGUE: tuple[Metric, ...] = (
    Metric("manta_autoscaler_replicas", "gauge", "replicas", "Replicas that serve.", _DEPLOYMENT),
    Metric(
        "manta_autoscaler_wanted_replicas",
        "gauge",
        "replicas",
        "Replicas that the load is worth, within the bounds: what Serve is told.",
        _DEPLOYMENT,
    ),
    Metric(
        "manta_autoscaler_busy_replicas",
        "gauge",
        "replicas",
        "Replicas' worth of slots or pages in use, whichever is scarcer in each.",
        _DEPLOYMENT,
    ),
    Metric(
        "manta_autoscaler_backlog_seconds",
        "gauge",
        "seconds",
        "That the replicas need for what waits in them, each for its own, summed up.",
        _DEPLOYMENT,
    ),
    Metric(
        "manta_autoscaler_queued_requests",
        "gauge",
        "requests",
        "Requests that wait in front of the replicas.",
        _DEPLOYMENT,
    ),
    Metric(
        "manta_autoscaler_decisions",
        "counter",
        "decisions",
        "Changes of the number of wanted replicas, up or down.",
        (*_DEPLOYMENT, "direction"),
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
