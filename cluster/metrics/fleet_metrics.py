"""Metrics that gateways, the autoscaler and batch jobs export, in addition to the engines'.

Gateways export theirs on their own `/metrics` (`actors/gateway/gateway_metrics.py`). The autoscaler's policy,
which runs in Serve's controller (`actors/serve/autoscaling_policy.py`), and a batch job's driver
(`jobs/batch/progress.py`) export theirs through Ray.
"""

from __future__ import annotations

from .metric import Metric

GATEWAY_CATALOGUE: tuple[Metric, ...] = (
    Metric(
        "manta:gateway_requests",
        "counter",
        "requests",
        "Requests sent to a replica, by the reason for the choice: session, prefix or load.",
        ("gateway", "model_name", "reason"),
    ),
    Metric(
        "manta:gateway_resumed_streams",
        "counter",
        "requests",
        "Times that a started stream continued on another replica.",
        ("gateway", "model_name"),
    ),
    Metric(
        "manta:gateway_retried_requests",
        "counter",
        "requests",
        "Times that a request without any output was sent to another replica.",
        ("gateway", "model_name"),
    ),
    Metric(
        "manta:gateway_isolated_requests",
        "counter",
        "requests",
        "Times that a request under which a replica died was tried as the only suspect on another one.",
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
        "Whether a replica that reported recently can get requests, 0 or 1.",
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
        "Target number of replicas, within the bounds, as passed to Serve.",
        _DEPLOYMENT,
    ),
    Metric(
        "manta_autoscaler_busy_replicas",
        "gauge",
        "replicas",
        "Slots or pages in use, whichever is scarcer on each replica, in units of replicas.",
        _DEPLOYMENT,
    ),
    Metric(
        "manta_autoscaler_backlog_seconds",
        "gauge",
        "seconds",
        "Sum of the seconds that each replica needs for its own waiting requests.",
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
        "Changes of the target number of replicas, up or down.",
        (*_DEPLOYMENT, "direction"),
    ),
)

_JOB = ("job",)

BATCH_CATALOGUE: tuple[Metric, ...] = (
    Metric("manta_batch_rows", "gauge", "rows", "Rows of the dataset.", _JOB),
    Metric(
        "manta_batch_rows_done", "gauge", "rows", "Rows that were answered or failed, over all runs.", _JOB
    ),
    Metric("manta_batch_rows_failed", "gauge", "rows", "Rows that failed, over all runs.", _JOB),
    Metric("manta_batch_prompt_tokens", "gauge", "tokens", "Prompt tokens so far, over all runs.", _JOB),
    Metric("manta_batch_generation_tokens", "gauge", "tokens", "Generated tokens, over all runs.", _JOB),
    Metric(
        "manta_batch_tokens_per_second",
        "gauge",
        "tokens",
        "Generated tokens per second over the last 10 s.",
        _JOB,
    ),
    Metric(
        "manta_batch_seconds_left",
        "gauge",
        "seconds",
        "Estimated time until all rows are done, at the rate of the last minute; no value before that is "
        "known.",
        _JOB,
    ),
    Metric(
        "manta_batch_mean_accepted_length",
        "gauge",
        "tokens",
        "Mean acceptance length of this run, including the bonus token; no value before the first draft.",
        _JOB,
    ),
    Metric("manta_batch_engines", "gauge", "engines", "Running engines.", _JOB),
)
