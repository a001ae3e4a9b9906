"""A gateway's own metrics, and one exposition of all: its own and those of the replicas behind it.

Names and meanings stand in `cluster/metrics.py`.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.core import Metric as Family
from prometheus_client.registry import Collector

from ...cluster.metrics import GATEWAY_CATALOGUE
from ...cluster.routing import Choice
from .fleet import Fleet

_SAMPLE = re.compile(r"([^\s{]+)(?:\{(.*)\})? (.*)")


class GatewayFigures(Collector):
    """Counts what one gateway does."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._http: Counter[tuple[str, ...]] = Counter()
        self._routed: Counter[tuple[str, ...]] = Counter()
        self._resumed: Counter[tuple[str, ...]] = Counter()
        self._retried: Counter[tuple[str, ...]] = Counter()
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def observe_http(self, handler: str, method: str, status: int, seconds: float) -> None:
        self._http[handler, method, str(status)] += 1

    def routed(self, model: str, choice: Choice) -> None:
        self._routed[model, choice.reason] += 1

    def resumed(self, model: str) -> None:
        """A stream that had begun goes on at another replica."""
        self._resumed[model,] += 1

    def retried(self, model: str) -> None:
        """A request of which nothing had come out goes to another replica."""
        self._retried[model,] += 1

    def render(self) -> str:
        return generate_latest(self._registry).decode()

    def collect(self) -> Iterable[Family]:
        values: dict[str, Mapping[tuple[str, ...], float]] = {
            "manta:gateway_http_requests": self._http,
            "manta:gateway_requests": self._routed,
            "manta:gateway_resumed_streams": self._resumed,
            "manta:gateway_retried_requests": self._retried,
            "manta:gateway_replica_up": self._ups(),
        }
        for metric in GATEWAY_CATALOGUE:
            kind = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
            family = kind(metric.name, metric.help, labels=metric.labels)
            for labels, value in values[metric.name].items():
                family.add_metric(labels, value)
            yield family

    def _ups(self) -> dict[tuple[str, ...], float]:
        ready = {member.name for model in self._fleet.models for member in self._fleet.ready(model)}
        return {
            (member.record.names[0], member.name): float(member.name in ready)
            for member in self._fleet.members
        }


def joined(expositions: Mapping[str, str], own: str) -> str:
    """One exposition of several: samples of a metric stand together, each with its replica's label.

    Args:
        expositions: by the name of their replica.
        own: text that needs no label.
    """
    heads: dict[str, list[str]] = {}
    samples: dict[str, list[str]] = {}
    for replica, text in expositions.items():
        family = ""
        for line in text.splitlines():
            if line.startswith("# "):
                family = line.split(" ", 3)[2]
                known = heads.setdefault(family, [])
                if len(known) < 2 and line not in known:
                    known.append(line)
            elif line:
                samples.setdefault(family, []).append(_labelled(line, replica))
    blocks = ["\n".join([*head, *samples.get(family, [])]) for family, head in heads.items()]
    return "\n".join([*blocks, own])


def _labelled(sample: str, replica: str) -> str:
    """A sample line with the replica's label, unless it names it already."""
    found = _SAMPLE.fullmatch(sample)
    if found is None or 'replica="' in (found[2] or ""):
        return sample
    labels = ",".join(filter(None, (f'replica="{replica}"', found[2])))
    return f"{found[1]}{{{labels}}} {found[3]}"
