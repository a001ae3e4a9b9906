"""Ratio of sums over prompts with its 95 % confidence interval.

Acceptance is a ratio: tokens per step, or accepted drafts per verified draft. Steps of one answer are
correlated, so the sampling unit is the prompt; treating steps as independent would make intervals several
times too narrow. This is the ratio estimator of cluster sampling with its linearized variance (Cochran,
Sampling Techniques, 3rd ed., § 6.3 and § 9A) and Student's t with one degree of freedom less than units.

Legend: U units.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

MIN_UNITS = 3  # with fewer units there is no interval
_SHARE = 0.95


@dataclass(frozen=True, slots=True)
class RatioEstimate:
    """A ratio, its 95 % confidence interval and standard error, which are None with too few units."""

    value: float
    low: float | None
    high: float | None
    num_units: int
    error: float | None = None

    def as_json(self) -> dict[str, float | int | None]:
        bounds = {
            name: None if x is None else round(x, 4) for name, x in (("low", self.low), ("high", self.high))
        }
        return {"value": round(self.value, 4), **bounds, "units": self.num_units}


def ratio_of_sums(
    above_U: Sequence[float], below_U: Sequence[float], minimum: float = -math.inf, maximum: float = math.inf
) -> RatioEstimate | None:
    """Return the ratio of two sums over units, clipped to the bounds; None if the denominator is 0."""
    above, below = np.asarray(above_U, np.float64), np.asarray(below_U, np.float64)
    above, below = above[below > 0], below[below > 0]
    count = len(below)
    if not count:
        return None
    value = float(above.sum() / below.sum())
    if count < MIN_UNITS:
        return RatioEstimate(value, None, None, count)
    residuals = above - value * below
    error = math.sqrt(count / (count - 1) * float((residuals**2).sum())) / float(below.sum())
    reach = student_t(count - 1) * error
    return RatioEstimate(value, max(value - reach, minimum), min(value + reach, maximum), count, error)


def student_t(degrees: int) -> float:
    """Return the two-sided `_SHARE` quantile of Student's t distribution, for 2 or more degrees of freedom.

    Expansion of Abramowitz and Stegun, 26.7.5: within 1 % at 2 degrees, better with more.
    """
    z = NormalDist().inv_cdf((1 + _SHARE) / 2)
    terms = (
        z,
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return sum(term / degrees**power for power, term in enumerate(terms))
