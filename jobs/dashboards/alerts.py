"""Prometheus's alerting rules from `alerts.yaml`: each says what happened, its effect and what to do.

Loaded by Prometheus (`rule_files`) or Mimir; a PrometheusRule of the Prometheus operator takes the same
groups. They use the metric names of replicas' `/metrics`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from .promql import vllm_names

Json = dict[str, Any]  # Any: YAML


def rules(baseline: float | None = None) -> Json:
    """Return the content of the file, with every metric checked against the catalogue.

    `baseline`: mean acceptance length to compare with; by default that of a day before.
    """
    names = vllm_names()
    found: Json = yaml.safe_load(Path(__file__).with_name("alerts.yaml").read_text(encoding="utf-8"))
    for rule in found["groups"][0]["rules"]:
        query = " ".join(rule["expr"].split())
        if rule["alert"] == "MantaAcceptanceDrift" and baseline is not None:
            query = query.replace(query.partition(" < 0.8 * ")[2], f"{baseline:g}")
        rule["expr"] = names.translate(query, filtered=False)
    return found
