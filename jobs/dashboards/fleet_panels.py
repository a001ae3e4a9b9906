"""Panels of replicas beside each other, of gateways, the autoscaler, and batches."""

from __future__ import annotations

from .load_panels import http, http_s, pages
from .makers import Rows, by_label, gauges, per_replica, rates
from .panels import Panel, Query
from .queries import Dialect
from .speculation_panels import length_per_replica

_SCALED = ("application", "deployment")
_JOB = ("job",)


def _replicas(names: Dialect) -> Panel:
    count = f"count({names.gauge('vllm:num_requests_running', by=(names.replica,))})"
    return Panel(title="Replicas", about="That are scraped.", queries=[Query(count, "replicas")], kind="stat")


def _up(names: Dialect) -> Panel:
    up = names.gauge("manta:gateway_replica_up", by=("replica",), how="min")
    return Panel(
        title="Replicas that can get requests",
        about="As the gateways see them.",
        queries=[Query(up, "{{replica}}")],
    )


def _decisions(names: Dialect) -> Panel:
    changes = names.increase("manta_autoscaler_decisions", by=("deployment", "direction"))
    return Panel(
        title="Changes of the number of replicas",
        about="Up and down in turn for hours: widen load_low and load_high.",
        queries=[Query(changes, "{{deployment}} {{direction}}")],
        stacked=True,
    )


CLUSTER: Rows = (
    (
        "Replicas",
        (
            _replicas,
            per_replica("vllm:num_requests_running", "Running requests", "Even lines are an even balance."),
            per_replica("vllm:num_requests_waiting", "Waiting requests", "Of each replica."),
            per_replica("vllm:generation_tokens", "Tokens per second", "Of each replica."),
            length_per_replica,
            pages,
        ),
    ),
    (
        "Autoscaling",
        (
            gauges(
                "Replicas that serve and are wanted",
                "A gap that stays: the cluster has no room, or replicas do not start.",
                ("manta_autoscaler_replicas", "serve"),
                ("manta_autoscaler_wanted_replicas", "wanted"),
                ("manta_autoscaler_busy_replicas", "busy"),
                by=_SCALED,
            ),
            gauges(
                "Backlog",
                "Seconds that the replicas need for what waits in them, summed up.",
                ("manta_autoscaler_backlog_seconds", ""),
                by=_SCALED,
                unit="s",
            ),
            gauges(
                "Requests in front of the replicas",
                "That none has taken yet.",
                ("manta_autoscaler_queued_requests", ""),
                by=_SCALED,
            ),
            _decisions,
        ),
    ),
    (
        "Gateways",
        (
            by_label(
                "manta:gateway_requests",
                "reason",
                "What chose a request's replica",
                "session and prefix find K/V that is there already; load is the emptiest.",
            ),
            rates(
                "Requests after a replica's end",
                "Streams that went on at another replica, requests that began again there, those that were "
                "tested alone because they may have killed it, and requests that were found to kill.",
                ("manta:gateway_resumed_streams", "went on"),
                ("manta:gateway_retried_requests", "began again"),
                ("manta:gateway_isolated_requests", "tested alone"),
                ("manta:gateway_poisonous_requests", "found to kill"),
                unit="reqps",
            ),
            _up,
            by_label(
                "manta:gateway_http_requests",
                "status",
                "HTTP at the gateways, by status",
                "What clients see.",
            ),
        ),
    ),
    ("HTTP", (http, http_s)),
)
BATCH: Rows = (
    (
        "Batches of /v1/batches",
        (
            gauges(
                "Lines of batches",
                "That have a slot (they may pause), and that wait.",
                ("dflash:batch_rows_running", "running"),
                ("dflash:batch_rows_waiting", "waiting"),
            ),
            by_label(
                "dflash:batch_rows",
                "status",
                "Lines of batches that end, by status",
                "Of /v1/batches.",
                "ops",
            ),
            by_label("dflash:batch_tokens", "kind", "Tokens of lines", "Of those that are answered.", "ops"),
        ),
    ),
    (
        "Jobs over datasets",
        (
            gauges(
                "Rows",
                "Of the dataset, done, failed.",
                ("manta_batch_rows", "rows"),
                ("manta_batch_rows_done", "done"),
                ("manta_batch_rows_failed", "failed"),
                by=_JOB,
            ),
            gauges(
                "Tokens per second",
                "Over the last 10 s.",
                ("manta_batch_tokens_per_second", "out"),
                by=_JOB,
                unit="ops",
            ),
            gauges(
                "Time left",
                "At the pace of the last minute.",
                ("manta_batch_seconds_left", ""),
                by=_JOB,
                unit="s",
            ),
            gauges(
                "Mean acceptance length and speed-up",
                "Speed-up is against the job's plain sample.",
                ("manta_batch_mean_accepted_length", "tokens per block"),
                ("manta_batch_speedup", "speed-up"),
                by=_JOB,
            ),
            gauges("Engines", "That live.", ("manta_batch_engines", ""), by=_JOB),
            gauges(
                "Tokens so far",
                "Of all runs of the job.",
                ("manta_batch_prompt_tokens", "prompt"),
                ("manta_batch_generation_tokens", "out"),
                by=_JOB,
            ),
        ),
    ),
)
