"""What tests ask of a live server: clients, refusals, events of a stream, metrics, and whether it is idle."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import httpx
import openai
from prometheus_client.parser import text_string_to_metric_families

from support.checkpoints.text_pair import LiveServer
from support.waiting import WAIT_S, wait_until

Serve = Callable[..., LiveServer]  # the fixture of tests/actors/http


def http_client(url: str, key: str | None = None, *, keeps_connections: bool = True) -> httpx.Client:
    """Return a client of a server, with an API key if it needs one.

    One that keeps no connections fails no request when a proxy in front of the server is replaced.
    """
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    limits = httpx.Limits(max_keepalive_connections=None if keeps_connections else 0)
    return httpx.Client(base_url=url, headers=headers, timeout=WAIT_S, limits=limits)


def openai_client(url: str, key: str = "none") -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0, timeout=WAIT_S)


def error_of(response: httpx.Response) -> dict[str, Any]:
    """Return the error of a refusal, after checking that it has OpenAI's form."""
    assert response.status_code >= 400, response.text
    assert set(response.json()) == {"error"}
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["code"] == response.status_code and error["message"]
    return error


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


RESUMABLE = {"X-Resumable": "true"}


def events_with_ids(text: str) -> tuple[list[str], str, list[str]]:
    """Return the events up to the last one with an id, that id, and the events after it."""
    whole, found, last_id = text.split("\n\n")[:-1], list[str](), ""
    kept = 0
    for number, event in enumerate(whole, 1):
        if event.startswith("id: "):
            last_id, _, event = event.removeprefix("id: ").partition("\n")
            kept = number
        found.append(event)
    return found[:kept], last_id, found[kept:]


def resumed_streams(url: str, other_url: str, body: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Return the events of a whole stream, and of others that are cut and continue at another gateway."""
    whole = ""

    def has_many_ids() -> bool:
        nonlocal whole
        whole = httpx.post(url, json=body, headers=RESUMABLE, timeout=WAIT_S).text
        return whole.count("\n\nid: ") >= 4

    wait_until(has_many_ids)  # a busy gateway passes many tokens on at once, in an event
    blocks, resumed = whole.split("\n\n")[:-1], list[list[str]]()
    for cut in range(1, len(blocks) + 1, 3):
        had, last_id, _ = events_with_ids("".join(f"{block}\n\n" for block in blocks[:cut]))
        if last_id:
            rest = httpx.post(other_url, json=body, headers={"Last-Event-ID": last_id}, timeout=WAIT_S)
            assert rest.status_code == 200, rest.text
            more, _, end = events_with_ids(rest.text)
            resumed.append([*had, *more, *end])
    had, _, end = events_with_ids(whole)
    return [*had, *end], resumed
