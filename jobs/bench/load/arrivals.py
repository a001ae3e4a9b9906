"""When requests come: in a closed loop, where each that ends makes room for the next, or in an open one.

An open loop's requests come whether or not others have ended, as users do: a Poisson process.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from typing import Self

from ....cluster.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Arrivals:
    """An open loop.

    Attributes:
        rate: requests per second on average; infinite: all at once.
    """

    rate: float

    def __post_init__(self) -> None:
        if not self.rate > 0:
            raise ConfigError(f"request_rate={self.rate} must be above 0, or inf.", param="request_rate")

    @classmethod
    def parse(cls, text: str) -> Self | None:
        """`closed` (None), or `poisson:RATE`."""
        kind, _, rate = text.partition(":")
        try:
            if kind == "closed" and not rate:
                return None
            if kind == "poisson":
                return cls(float(rate))
        except ValueError:
            pass
        raise ConfigError(
            f"arrivals={text!r} is neither closed nor poisson:RATE, as poisson:4 (requests per second).",
            param="arrivals",
        )

    def offsets_s(self, count: int, seed: int) -> list[float]:
        """Seconds from the beginning at which so many requests come; the same for the same seed."""
        if math.isinf(self.rate):
            return [0.0] * count
        gaps, at_s, found = random.Random(seed), 0.0, []
        for _ in range(count):
            at_s += gaps.expovariate(self.rate)
            found.append(at_s)
        return found

    def __str__(self) -> str:
        return f"{self.rate:g} requests/s"
