"""Settings of rows that sample, and the distribution of what they choose."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from manta.drafter.step.inputs.sampling_metadata import SamplingMetadata

NEUTRAL: dict[str, Any] = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
FLOATS = ("temperature", "top_p", "min_p")


def batch(rows: int, *, forbidden: list[tuple[int, int]] | None = None, **settings: Any) -> SamplingMetadata:
    """Return the settings of a number of rows; each is one value for all rows, or one value for each."""
    given = {**NEUTRAL, "seed": 0, "position": 0, **settings}
    columns: dict[str, Any] = {
        name: np.broadcast_to(np.asarray(value, np.float32 if name in FLOATS else np.int64), rows).copy()
        for name, value in given.items()
    }
    return SamplingMetadata.build(**columns, forbidden_F=torch.tensor(forbidden).T if forbidden else None)


def chi_square_p(counts: np.ndarray, expected: np.ndarray) -> float:
    """Return the upper tail by Wilson-Hilferty: exact enough to distinguish 1e-4 from 0.5.

    Cells of which fewer than five are expected are counted as one.
    """
    small = expected < 5
    if small.any():
        counts, expected = (np.append(each[~small], each[small].sum()) for each in (counts, expected))
    x, k = float(((counts - expected) ** 2 / expected).sum()), len(counts) - 1
    z = ((x / k) ** (1 / 3) - (1 - 2 / (9 * k))) / math.sqrt(2 / (9 * k))
    return 0.5 * math.erfc(z / math.sqrt(2))
