"""Makes Grafana's JSON of the dashboards in `boards.yaml`: overview, speculation, cluster, batch.

An operator should see within a minute whether speculation pays off: what users notice comes first, then the
causes. A panel with metrics that an exporter lacks is left out, and so is a row or dashboard without panels.
Panels are placed in rows of 24 columns in the order of the file. Dashboards have fixed ids, so that a second
push replaces the first (`grafana_push.py`). The JSON is schema version 39: Grafana 10 and later.

`boards.yaml` gives a panel its title, `about` (what it shows and when to worry), and one of

* `queries`: legend -> PromQL in the names of `/metrics`, without filters;
* `quantiles`: a histogram, of which p50, p95 and p99 are shown;
* `means`: legend -> histogram.

`unit` and `kind` are Grafana's (short, timeseries), `width` counts columns (8), `thresholds` are pairs of
lower bound and color.

Two exporters have the same metrics under different names: a replica's own `/metrics` (vLLM's names), and
Ray's agent on every node, which lacks gateways but has the autoscaler and batch jobs. `Dialect.translate`
checks and rewrites every name of a query.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from ...cluster.metrics.engine_metrics import CATALOGUE
from ...cluster.metrics.fleet_metrics import BATCH_CATALOGUE, GATEWAY_CATALOGUE, SCALING_CATALOGUE
from ...cluster.metrics.metric import Metric

Json = dict[str, Any]  # Any: JSON, and YAML of `boards.yaml`

_BOARDS = Path(__file__).with_name("boards.yaml")
_COLUMNS = 24
_SOURCE = {"type": "prometheus", "uid": "${datasource}"}
_SCHEMA = 39
_QUANTILES = (0.5, 0.95, 0.99)
_SUFFIXES = {"counter": ("_total",), "gauge": ("",), "histogram": ("_bucket", "_sum", "_count")}
_NAME = re.compile(r"(?<![\w:$])([a-z_]\w*(?::\w+)?)(?:\{([^}]*)\})?")
_OURS = re.compile(r"\w+:|manta_|http_")  # prefixes of exported names


def boards(names: Dialect) -> list[Json]:
    found: list[Json] = []
    for board in yaml.safe_load(_BOARDS.read_text(encoding="utf-8")):
        rows = [(row["title"], list(_panels(row["panels"], names))) for row in board["rows"]]
        if rows := [(title, panels) for title, panels in rows if panels]:
            found.append(_board(board, rows, names))
    return found


def _board(board: Json, rows: Sequence[tuple[str, Sequence[Json]]], names: Dialect) -> Json:
    labels = {"model": "model_name", "replica": names.replica}
    return {
        "uid": f"manta-{board['key']}-{names.name}",
        "title": f"Manta: {board['title']} ({names.name} names)",
        "description": board["about"],
        "tags": ["manta"],
        "schemaVersion": _SCHEMA,
        "editable": True,
        "graphTooltip": 1,  # shared crosshair
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {
            "list": [
                {"name": "datasource", "type": "datasource", "query": "prometheus", "label": "Data source"},
                *(_variable(name, label, names) for name, label in labels.items()),
            ]
        },
        "panels": _placed(rows),
    }


def _variable(name: str, label: str, names: Dialect) -> Json:
    query = f"label_values({names.exported('vllm:num_requests_running')}, {label})"
    return {
        "name": name,
        "type": "query",
        "datasource": _SOURCE,
        "query": {"query": query, "refId": name},
        "definition": query,
        "refresh": 2,  # when the time range changes
        "sort": 1,
        "multi": True,
        "includeAll": True,
        "allValue": ".*",
        "current": {"text": "All", "value": "$__all"},
    }


def _placed(rows: Sequence[tuple[str, Sequence[Json]]]) -> list[Json]:
    found: list[Json] = []
    top = 0
    for title, panels in rows:
        heading = {"type": "row", "title": title, "collapsed": False, "panels": []}
        found.append(heading | {"id": len(found) + 1, "gridPos": {"x": 0, "y": top, "w": _COLUMNS, "h": 1}})
        top, left, height = top + 1, 0, 0
        for panel in panels:
            size = panel["gridPos"]
            if left + size["w"] > _COLUMNS:
                top, left, height = top + height, 0, 0
            found.append(panel | {"id": len(found) + 1, "gridPos": {"x": left, "y": top, **size}})
            left, height = left + size["w"], max(height, size["h"])
        top += height
    return found


def _panels(panels: Sequence[Json], names: Dialect) -> Iterator[Json]:
    for panel in panels:
        try:
            queries = {
                legend.replace("{{replica}}", f"{{{{{names.replica}}}}}"): names.translate(query)
                for legend, query in _queries(panel)
            }
        except UnknownMetricError:
            continue
        yield _panel(panel, queries)


def _queries(panel: Json) -> Iterator[tuple[str, str]]:
    if metric := panel.get("quantiles"):
        buckets = f"sum by (le) (rate({metric}_bucket[$__rate_interval]))"
        yield from ((f"p{100 * q:g}", f"histogram_quantile({q:g}, {buckets})") for q in _QUANTILES)
    for legend, metric in panel.get("means", {}).items():
        sums, counts = (f"sum(rate({metric}_{part}[$__rate_interval]))" for part in ("sum", "count"))
        yield legend, f"{sums} / ({counts} > 0)"
    yield from panel.get("queries", {}).items()


def _panel(panel: Json, queries: dict[str, str]) -> Json:
    """Return Grafana's JSON of a panel of the catalogue; `queries` are by legend."""
    kind = panel.get("kind", "timeseries")
    if kind == "timeseries":
        options = {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi"}}
    else:
        options = {"reduceOptions": {"calcs": ["lastNotNull"]}, "orientation": "auto"}
    steps = [(None, "green"), *panel.get("thresholds", ())]
    return {
        "type": kind,
        "title": panel["title"],
        "description": panel["about"],
        "datasource": _SOURCE,
        "gridPos": {"w": panel.get("width", 8), "h": panel.get("height", 8)},
        "fieldConfig": {
            "defaults": {
                "unit": panel.get("unit", "short"),
                "thresholds": {
                    "mode": "absolute",
                    "steps": [{"value": value, "color": color} for value, color in steps],
                },
                "custom": {"stacking": {"mode": "normal"}, "fillOpacity": 30} if panel.get("stacked") else {},
            },
            "overrides": [],
        },
        "options": options,
        "targets": [
            {
                "refId": chr(ord("A") + i),
                "datasource": _SOURCE,
                "expr": query,
                "legendFormat": legend,
                "range": True,
            }
            for i, (legend, query) in enumerate(queries.items())
        ],
    }


def rules(baseline: float | None = None) -> Json:
    """Return the rules file with checked metrics; acceptance is compared with `baseline`, or a day before."""
    names = vllm_names()
    found: Json = yaml.safe_load(Path(__file__).with_name("alerts.yaml").read_text(encoding="utf-8"))
    for rule in found["groups"][0]["rules"]:
        query = " ".join(rule["expr"].split())
        if rule["alert"] == "MantaAcceptanceDrift" and baseline is not None:
            query = query.replace(query.partition(" < 0.8 * ")[2], f"{baseline:g}")
        rule["expr"] = names.translate(query, filtered=False)
    return found


class UnknownMetricError(KeyError):
    """The exporter does not have the metric."""


def _exported(metrics: Iterable[Metric]) -> dict[str, Metric]:
    """Return the metrics by sample name: counters end in `_total`, histograms have three samples."""
    return {metric.name + suffix: metric for metric in metrics for suffix in _SUFFIXES[metric.kind]}


_ALL = _exported((*CATALOGUE, *GATEWAY_CATALOGUE, *SCALING_CATALOGUE, *BATCH_CATALOGUE))


@dataclass(frozen=True)
class Dialect:
    """The metric names of an exporter; `used` are those that were translated so far."""

    name: str
    samples: Mapping[str, Metric]
    replica: str
    prefix: str = ""
    colon: str = ":"
    used: set[str] = field(default_factory=set, compare=False)

    def translate(self, query: str, *, filtered: bool = True) -> str:
        """Return a query in this exporter's names; `filtered` narrows metrics to `$model` and `$replica`."""

        def rewrite(found: re.Match[str]) -> str:
            name, matchers = found[1], found[2]
            if name == "replica":
                return self.replica
            if name not in _ALL:
                assert not _OURS.match(name), f"{name} is not in the catalogue"
                return found[0]
            metric = self.samples.get(name)
            if metric is None:
                raise UnknownMetricError(name)
            self.used.add(metric.name)
            filters = [matchers] if matchers else []
            filters += self._variables(metric) if filtered else []
            return self.exported(name) + (f"{{{','.join(filters)}}}" if filters else "")

        return _NAME.sub(rewrite, query)

    def exported(self, sample: str) -> str:
        return self.prefix + sample.replace(":", self.colon)

    def _variables(self, metric: Metric) -> Iterator[str]:
        if "model_name" in metric.labels:
            yield 'model_name=~"$model"'
        if "replica" in metric.labels:
            yield f'{self.replica}=~"$replica"'


def vllm_names() -> Dialect:
    return Dialect("vllm", _exported((*CATALOGUE, *GATEWAY_CATALOGUE)), "replica")


def ray_names() -> Dialect:
    samples = _exported((*CATALOGUE, *SCALING_CATALOGUE, *BATCH_CATALOGUE))
    return Dialect("ray", samples, "ReplicaId", prefix="ray_", colon="_")
