"""Reference page of the metrics: the catalogue as tables, by exporter."""

from __future__ import annotations

from collections.abc import Sequence

from manta.cluster.metrics.engine_metrics import CATALOGUE
from manta.cluster.metrics.fleet_metrics import BATCH_CATALOGUE, GATEWAY_CATALOGUE, SCALING_CATALOGUE
from manta.cluster.metrics.metric import Metric

from .markdown import cell, code, table

_INTRODUCTION = """# Metrics

All exported metrics, from the catalogue (`cluster/metrics/engine_metrics.py` and its neighbors), which also
defines the [dashboards and alerts](../how-to/observe.md). Counters get `_total` on `/metrics`, histograms
`_bucket`, `_sum` and `_count`. Names with the prefix `vllm:` have vLLM's meaning.
"""
_PLACES: tuple[tuple[str, str, Sequence[Metric]], ...] = (
    (
        "A replica",
        "On `/metrics`; HAProxy and gateways return those of all replicas.",
        CATALOGUE,
    ),
    ("A gateway", "With its replicas' metrics if there are several.", GATEWAY_CATALOGUE),
    ("The autoscaler", "In Ray's metrics, with the prefix `ray_`.", SCALING_CATALOGUE),
    ("A batch job", "In Ray's metrics, with the prefix `ray_`.", BATCH_CATALOGUE),
)


def metrics_page() -> str:
    sections = (f"## {title}\n\n{where}\n\n{_table(metrics)}" for title, where, metrics in _PLACES)
    return "\n".join([_INTRODUCTION, *sections])


def _table(metrics: Sequence[Metric]) -> str:
    rows = (
        (code(each.name), each.kind, each.unit, cell(each.help), " ".join(map(code, each.labels)))
        for each in metrics
    )
    return table(("name", "kind", "unit", "meaning", "labels"), rows)
