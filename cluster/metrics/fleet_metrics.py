"""Metrics that gateways, the autoscaler and batch jobs export, in addition to the engines'.

Gateways export theirs on their own `/metrics` (`actors/gateway/gateway_metrics.py`). The autoscaler's policy,
which runs in Serve's controller (`actors/serve/autoscaling_policy.py`), and a batch job's driver
(`jobs/batch/progress.py`) export theirs through Ray.
"""

from __future__ import annotations

from .metric import Metric, counter, gauge

_GATEWAY = ("gateway", "model_name")

GATEWAY_CATALOGUE: tuple[Metric, ...] = (
    counter(
        "manta:gateway_requests",
        "requests",
        "Requests sent to a replica, by the reason for the choice: session, prefix, tier or load.",
        "reason",
        shared=_GATEWAY,
    ),
    counter(
        "manta:gateway_resumed_streams",
        "requests",
        "Times that a started stream continued on another replica.",
        shared=_GATEWAY,
    ),
    counter(
        "manta:gateway_retried_requests",
        "requests",
        "Times that a request without any output was sent to another replica.",
        shared=_GATEWAY,
    ),
    counter(
        "manta:gateway_isolated_requests",
        "requests",
        "Times that a request under which a replica died was tried as the only suspect on another one.",
        shared=_GATEWAY,
    ),
    counter(
        "manta:gateway_poisonous_requests",
        "requests",
        "Requests that ended with 422 because replicas died each time they served them.",
        shared=_GATEWAY,
    ),
    gauge(
        "manta:gateway_replica_up",
        "replicas",
        "Whether a replica that reported recently can get requests, 0 or 1.",
        "replica",
        shared=_GATEWAY,
    ),
    counter(
        "manta:gateway_http_requests",
        "requests",
        "HTTP requests at the gateway, by route and status.",
        shared=("gateway", "handler", "method", "status"),
    ),
)

_DEPLOYMENT = ("application", "deployment")

SCALING_CATALOGUE: tuple[Metric, ...] = (
    gauge("manta_autoscaler_replicas", "replicas", "Replicas that serve.", shared=_DEPLOYMENT),
    gauge(
        "manta_autoscaler_wanted_replicas",
        "replicas",
        "Target number of replicas, within the bounds, as passed to Serve.",
        shared=_DEPLOYMENT,
    ),
    gauge(
        "manta_autoscaler_busy_replicas",
        "replicas",
        "Slots or pages in use, whichever is scarcer on each replica, in units of replicas.",
        shared=_DEPLOYMENT,
    ),
    gauge(
        "manta_autoscaler_backlog_seconds",
        "seconds",
        "Sum of the seconds that each replica needs for its own waiting requests.",
        shared=_DEPLOYMENT,
    ),
    gauge(
        "manta_autoscaler_queued_requests",
        "requests",
        "Requests that wait in front of the replicas.",
        shared=_DEPLOYMENT,
    ),
    counter(
        "manta_autoscaler_decisions",
        "decisions",
        "Changes of the target number of replicas, up or down.",
        "direction",
        shared=_DEPLOYMENT,
    ),
)

_JOB = ("job",)

BATCH_CATALOGUE: tuple[Metric, ...] = (
    gauge("manta_batch_rows", "rows", "Rows of the dataset.", shared=_JOB),
    gauge("manta_batch_rows_done", "rows", "Rows that were answered or failed, over all runs.", shared=_JOB),
    gauge("manta_batch_rows_failed", "rows", "Rows that failed, over all runs.", shared=_JOB),
    gauge("manta_batch_prompt_tokens", "tokens", "Prompt tokens so far, over all runs.", shared=_JOB),
    gauge("manta_batch_generation_tokens", "tokens", "Generated tokens, over all runs.", shared=_JOB),
    gauge(
        "manta_batch_tokens_per_second",
        "tokens",
        "Generated tokens per second over the last 10 s.",
        shared=_JOB,
    ),
    gauge(
        "manta_batch_seconds_left",
        "seconds",
        "Estimated time until all rows are done, at the rate of the last minute; no value before that is "
        "known.",
        shared=_JOB,
    ),
    gauge(
        "manta_batch_mean_accepted_length",
        "tokens",
        "Mean acceptance length of this run, including the bonus token; no value before the first draft.",
        shared=_JOB,
    ),
    gauge("manta_batch_engines", "engines", "Running engines.", shared=_JOB),
)
