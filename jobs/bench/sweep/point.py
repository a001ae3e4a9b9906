"""Measures one point of a sweep: all sides under the same load, in alternation, within a time budget.

A turn is one side's pass over some requests; the other sides' turns over the same requests follow, in
rotating order. Speeds and ratios of a round are thus for the same work at nearly the same time. Medians are
taken over rounds.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass

from ..common.arrivals import Arrivals
from ..common.engine_passes import say
from ..common.idle_check import Watch
from ..common.interleaving import rotated
from ..load.request_source import RequestSource, Traffic
from .engine_driver import Driver
from .engines import PLAIN
from .load_records import LoadPass

LEAST_ROUNDS = 3
PROBE_S = 1.0  # seconds of arrivals in the first, uncounted pass of an open loop


@dataclass(frozen=True, slots=True)
class SweepPoint:
    """A load: `requests` in flight (closed loop), or `arrivals` (open loop)."""

    traffic: Traffic
    requests: int | None
    arrivals: Arrivals | None = None

    def __str__(self) -> str:
        load = str(self.arrivals) if self.requests is None else f"{self.requests} request(s)"
        return load if self.traffic == "prompts" else f"{load}, {self.traffic} traffic"

    @property
    def load(self) -> tuple[Traffic, int | None, float | None]:
        """Return the key under which figures store the point."""
        return self.traffic, self.requests, None if self.arrivals is None else self.arrivals.rate

    def run(self, driver: Driver, source: RequestSource, part: range) -> LoadPass:
        if self.requests is not None:
            return driver.closed(source, part, self.requests)
        assert self.arrivals is not None, "a point has requests or arrivals"
        return driver.open(source, part, self.arrivals)

    @property
    def least(self) -> int:
        """Return the minimum number of requests of a turn."""
        if self.requests is not None:
            return max(self.requests, 2)
        assert self.arrivals is not None, "a point has requests or arrivals"
        return max(2, round(PROBE_S * min(self.arrivals.rate, 64.0)))


@dataclass(frozen=True, slots=True)
class PointPasses:
    """Passes of all sides, one per round; round i ran the requests of `parts[i]`."""

    point: SweepPoint
    parts: list[range]
    passes: dict[str, list[LoadPass]]
    watch: Watch


def measure(
    point: SweepPoint, drivers: Mapping[str, Driver], source: RequestSource, rounds: int, budget_s: float
) -> PointPasses:
    """Measure all sides in at most `rounds` rounds.

    `budget_s` covers all sides together; it is exceeded if it is too short for LEAST_ROUNDS.
    """
    begin_s = time.monotonic()
    probe = range(point.least)
    # Warm-up. Its duration also determines how many requests fit into the budget.
    slowest_s = max(point.run(driver, source, probe).seconds for driver in drivers.values())
    left_s = max(budget_s - (time.monotonic() - begin_s), 0.0)
    rounds, count = _plan(point.least, slowest_s, left_s / len(drivers), rounds)
    parts = [range(begin, begin + count) for begin in range(0, rounds * count, count)]
    passes: dict[str, list[LoadPass]] = {name: [] for name in drivers}
    watch = Watch()
    with watch.open():
        for number, part in enumerate(parts):
            say(f"{point}, round {number + 1}/{rounds}, {count} requests")
            for name in rotated(list(drivers), number):
                passes[name].append(point.run(drivers[name], source, part))
    return PointPasses(point, parts, passes, watch)


def _plan(least: int, least_s: float, side_s: float, most_rounds: int) -> tuple[int, int]:
    """Return rounds and requests per round for `side_s` seconds, if `least` requests take `least_s`.

    Longer rounds are preferred to more rounds, since all requests of a round start together.
    """
    fit = side_s / least_s
    rounds = max(min(most_rounds, int(fit / 2)), min(LEAST_ROUNDS, most_rounds))
    return rounds, max(least, int(least * fit / rounds))


def same_tokens(measured: PointPasses) -> dict[str, bool]:
    """Return by side whether all requests have the same tokens as plain decoding."""

    def tokens(name: str) -> list[list[int]]:
        return [
            answer.token_ids
            for part, done in zip(measured.parts, measured.passes[name], strict=True)
            for answer in sorted(done.answers, key=lambda answer: answer.number)
            if answer.number in part
        ]

    expected = tokens(PLAIN)
    return {name: tokens(name) == expected for name in measured.passes}
