"""Arrival times of open loops: a Poisson process, independent of when requests finish, as with real users.

In a closed loop each request that finishes is replaced by the next one, so it needs no arrival times.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

from manta.cluster.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Arrivals:
    """Arrivals of a Poisson process.

    Attributes:
        rate: mean requests per second; infinite: all at once.
    """

    rate: float

    def __post_init__(self) -> None:
        if not self.rate > 0:
            raise ConfigError(f"request_rate={self.rate} must be above 0, or inf.", param="request_rate")

    def offsets_s(self, count: int, seed: int) -> list[float]:
        """Return the arrival times of `count` requests in seconds from the start; reproducible by seed."""
        if math.isinf(self.rate):
            return [0.0] * count
        gaps, at_s, found = random.Random(seed), 0.0, []
        for _ in range(count):
            at_s += gaps.expovariate(self.rate)
            found.append(at_s)
        return found

    def __str__(self) -> str:
        return f"{self.rate:g} requests/s"
