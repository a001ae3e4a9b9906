"""Which rows an engine is given next, where engines have died before: poison rows are found by being alone.

For work whose driver dies with its engine (a batch of the Serve endpoint): the value is kept in a file,
written before rows go to an engine and taken up by whoever comes after a death. Rows that were in flight
then are suspects: they run apart from the others, in ever smaller flights as long as engines die of them, in
larger ones as they do not. A row that was alone each time, and often enough, is poison. Pure. (Where the
driver outlives its engines, `leases.py` does this.)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from .row_ranges import RowRanges, count, minus, row_ranges, split_off, union

ATTEMPTS = 3  # of a row alone: the engine may have died of something else


@dataclass(frozen=True, slots=True, kw_only=True)
class Trials:
    """Where the search stands.

    Attributes:
        flight: rows that an engine was given and that were not durable when last looked.
        suspects: rows that were in flight when an engine died.
        size: of the next flight of suspects.
        deaths: of engines that had the first suspect alone.
    """

    flight: RowRanges = ()
    suspects: RowRanges = ()
    size: int = 1
    deaths: int = 0

    def after_death(self, done: RowRanges) -> tuple[Trials, RowRanges]:
        """The engine of the flight is no more; what of it is not done may be why.

        Returns:
            where the search stands now, and the rows that are found to be poison.
        """
        flight = minus(self.flight, done)
        suspects = minus(union(self.suspects, flight), done)
        left = count(flight)
        if left != 1:
            return Trials(suspects=suspects, size=max(left // 2, 1)), ()
        if self.deaths + 1 < ATTEMPTS:
            return Trials(suspects=suspects, size=1, deaths=self.deaths + 1), ()
        return Trials(suspects=minus(suspects, flight), size=1), flight

    def begin(self, left: RowRanges, most: int) -> tuple[Trials, RowRanges]:
        """The rows that go next: suspects alone, else at most so many of those that are left."""
        rows, _ = split_off(self.suspects, self.size) if self.suspects else split_off(left, most)
        return replace(self, flight=union(self.flight, rows)), rows

    def after_flight(self, done: RowRanges) -> Trials:
        """Rows have become durable."""
        suspects = minus(self.suspects, done)
        gone = suspects != self.suspects
        return Trials(
            flight=minus(self.flight, done),
            suspects=suspects,
            size=2 * self.size if gone else self.size,
            deaths=0 if gone else self.deaths,
        )

    def as_json(self) -> dict[str, Any]:  # Any: JSON
        return asdict(self)

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> Trials:
        flight, suspects = (row_ranges(map(tuple, found[name])) for name in ("flight", "suspects"))
        return cls(flight=flight, suspects=suspects, size=found["size"], deaths=found["deaths"])
