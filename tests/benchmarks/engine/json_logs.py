"""Synthetic JSON logs of services, reproducible by seed: a kind of text that the drafter has not seen.

A prompt is the beginning of a service's log, with whole lines and part of the next; the target continues it.
Used by the benchmark of `manta drafter adapt` and its tests.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

CATEGORY = "json_log"
_SERVICES = (
    "auth",
    "cart",
    "catalog",
    "checkout",
    "gateway",
    "ledger",
    "mailer",
    "orders",
    "profile",
    "search",
)
_VERBS = (
    "accepted",
    "cached",
    "completed",
    "delayed",
    "expired",
    "queued",
    "received",
    "rejected",
    "retried",
)
_LEVELS = ("INFO", "INFO", "INFO", "DEBUG", "WARNING", "ERROR")
_ROUTES = ("/", "/api/v1/items", "/api/v1/items/{id}", "/api/v2/users/{id}/orders", "/health", "/login")


@dataclass(frozen=True)
class _Service:
    """The log format of a service: its fields in order."""

    name: str
    fields: tuple[str, ...]


def write_logs(path: Path, num_prompts: int, seed: int = 0) -> None:
    """Write JSONL with `id`, `category` and `prompt`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8") as file:
        for number, prompt in zip(range(num_prompts), log_prompts(seed), strict=False):
            row = {"id": f"log-{seed}-{number}", "category": CATEGORY, "prompt": prompt}
            file.write(json.dumps(row, ensure_ascii=False) + "\n")


def log_prompts(seed: int) -> Iterator[str]:
    chance = random.Random(seed)
    while True:
        lines = _lines(chance)
        whole = [next(lines) for _ in range(chance.randint(2, 3))]
        following = next(lines)
        yield "\n".join([*whole, following[: chance.randint(1, len(following) // 2)]])


def _lines(chance: random.Random) -> Iterator[str]:
    service = _service(chance)
    when = datetime(2026, 1, 1, tzinfo=UTC) + timedelta(seconds=chance.randrange(10**7))
    while True:
        when += timedelta(milliseconds=chance.randint(1, 3000))
        values = _values(chance, service.name, when)
        yield json.dumps({field: values[field] for field in service.fields})


def _service(chance: random.Random) -> _Service:
    others = ["status", "route", "duration_ms", "user_id", "attempt", "trace_id", "bytes", "host"]
    chosen = chance.sample(others, chance.randint(2, 4))
    return _Service(chance.choice(_SERVICES), ("time", "level", "service", "message", *chosen))


def _values(chance: random.Random, name: str, when: datetime) -> dict[str, Any]:
    number = chance.randint(1, 99999)
    return {
        "time": when.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
        "level": chance.choice(_LEVELS),
        "service": name,
        "message": f"{name} request {chance.choice(_VERBS)}",
        "status": chance.choice((200, 200, 200, 201, 204, 302, 404, 500)),
        "route": chance.choice(_ROUTES).replace("{id}", str(number)),
        "duration_ms": round(chance.expovariate(0.05), 1),
        "user_id": f"u{number}",
        "attempt": chance.choice((1, 1, 1, 2, 3)),
        "trace_id": f"{chance.getrandbits(32):08x}",
        "bytes": chance.randint(100, 20000),
        "host": f"{name}-{chance.randint(1, 9)}",
    }
