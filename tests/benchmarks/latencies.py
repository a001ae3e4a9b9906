"""Latencies of requests, as those of `vllm bench serve`.

For a request that arrived at a, with n tokens at t_1 <= .. <= t_m (several at once where a block of drafts
was accepted):

    ttft = t_1 - a      e2el = t_m - a      tpot = (e2el - ttft) / (n - 1), n > 1      itl: t_(i+1) - t_i
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from manta.cluster.records.percentiles import percentiles


@dataclass(frozen=True, slots=True)
class RequestLatencies:
    """Latencies of one finished request in seconds; `tpot_s` is None for a single token."""

    ttft_s: float
    e2el_s: float
    tpot_s: float | None
    itl_s: tuple[float, ...]

    @classmethod
    def of(cls, requested_s: float, times_s: Sequence[float], num_tokens: int) -> RequestLatencies:
        ttft_s, e2el_s = times_s[0] - requested_s, times_s[-1] - requested_s
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


def _describe(seconds: Sequence[float]) -> dict[str, Any] | None:
    found = percentiles([1e3 * each for each in seconds])
    if not found:
        return None
    return {"count": len(seconds), **{name: round(ms, 3) for name, ms in found.items()}}
