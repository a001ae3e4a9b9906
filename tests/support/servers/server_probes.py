"""What tests ask of a live server: events of a stream, metrics, and waiting until it is idle."""

from __future__ import annotations

import json
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from support.checkpoints.text_pair import LiveServer
from support.waiting import wait_until

wait_for = wait_until


def events(response: httpx.Response) -> list[Any]:
    """The payloads of a stream, after checking its grammar: `data: ...`, a blank line, ..., [DONE]."""
    assert response.headers["content-type"].startswith("text/event-stream")
    pieces = response.read().decode().split("\n\n")
    assert pieces[-2:] == ["data: [DONE]", ""]
    assert all(piece.startswith("data: ") for piece in pieces[:-1])
    return [json.loads(piece.removeprefix("data: ")) for piece in pieces[:-2]]


def scrape(http: httpx.Client) -> dict[str, float]:
    """Sample name with its labels -> value."""
    response = http.get("/metrics")
    return {
        sample.name
        + json.dumps({k: v for k, v in sample.labels.items() if k in ("position", "finished_reason")}): (
            sample.value
        )
        for family in text_string_to_metric_families(response.text)
        for sample in family.samples
        if not sample.name.endswith("_bucket")
    }


def idle(server: LiveServer) -> bool:
    stats = server.engine.stats()
    return stats.running == 0 and stats.waiting == 0 and stats.kv_usage == 0.0
