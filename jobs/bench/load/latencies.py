"""Latencies of requests: time to first token, between tokens, and end to end.

Definitions are those of `vllm bench serve`. For a request that arrived at a and whose n tokens came at
t_1 <= .. <= t_m (several at once where a block of drafts was accepted):

    ttft = t_1 - a      e2el = t_m - a      tpot = (e2el - ttft) / (n - 1), n > 1      itl: t_(i+1) - t_i

Used by `sweep/` and by `tests/benchmarks/http_load.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

PERCENTILES = (50, 90, 95, 99)
# Percentiles that are stored for charts of a distribution.
CURVE_PERCENTILES = (*range(0, 95, 5), *range(95, 101))


@dataclass(frozen=True, slots=True)
class RequestLatencies:
    """Latencies of one finished request in seconds; `tpot_s` is None for a single token."""

    ttft_s: float
    e2el_s: float
    tpot_s: float | None
    itl_s: tuple[float, ...]

    @classmethod
    def of(cls, asked_s: float, times_s: Sequence[float], num_tokens: int) -> RequestLatencies:
        """Compute the latencies from the arrival time and the times of events with tokens (at least one)."""
        ttft_s, e2el_s = times_s[0] - asked_s, times_s[-1] - asked_s
        tpot_s = (e2el_s - ttft_s) / (num_tokens - 1) if num_tokens > 1 else None
        return cls(ttft_s, e2el_s, tpot_s, tuple(later - sooner for sooner, later in pairwise(times_s)))


def describe(waits: Sequence[RequestLatencies]) -> dict[str, Any]:  # Any: JSON
    """Return mean and percentiles of each latency in milliseconds; None without values."""
    values = {
        "ttft": [each.ttft_s for each in waits],
        "tpot": [each.tpot_s for each in waits if each.tpot_s is not None],
        "e2el": [each.e2el_s for each in waits],
        "itl": [gap for each in waits for gap in each.itl_s],
    }
    return {f"{name}_ms": _describe(found) for name, found in values.items()}


def curves(waits: Sequence[RequestLatencies]) -> dict[str, list[float]]:
    """Return ttft and itl in milliseconds at each of CURVE_PERCENTILES, for charts."""
    gaps = [gap for one in waits for gap in one.itl_s]
    return {"ttft_ms": _curve([one.ttft_s for one in waits]), "itl_ms": _curve(gaps)}


def _describe(seconds: Sequence[float]) -> dict[str, Any] | None:
    if not seconds:
        return None
    ms = 1e3 * np.asarray(seconds)
    found = {f"p{q}": round(float(np.percentile(ms, q)), 3) for q in PERCENTILES}
    return {"count": len(ms), "mean": round(float(ms.mean()), 3), **found}


def _curve(seconds: Sequence[float]) -> list[float]:
    if not seconds:
        return []
    return [round(float(ms), 3) for ms in np.percentile(1e3 * np.asarray(seconds), CURVE_PERCENTILES)]
