"""Mean and percentiles of measured values, under the names in which every report has them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

_RANKS = (50, 90, 95, 99)
Percentiles = dict[str, float]


def percentiles(values: Sequence[float]) -> Percentiles:
    """Return {"mean": .., "p50": .., "p90": .., "p95": .., "p99": ..}; empty if there are no values.

    Percentiles between two values are interpolated, as in `vllm bench serve`.
    """
    if not len(values):
        return {}
    found = np.percentile(values, _RANKS).tolist()
    return {"mean": float(np.mean(values)), **{f"p{p}": x for p, x in zip(_RANKS, found, strict=True)}}
