"""The search for poison rows that kill engines, for drivers that die with their engine.

For a batch of the Serve endpoint the state is stored in a file, written before rows go to an engine and read
by the process that takes over after a death. Rows that were in flight then are suspects. They run separately
from the others, in ever smaller flights as long as engines die, and in larger ones if they do not. A row that
was alone each time, and often enough, is poison. (`leases.py` does this for drivers that outlive their
engines.)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from .row_ranges import RowRanges, count, minus, row_ranges, split_off, union

ATTEMPTS = 3  # deaths with a row alone before it is poison, as the engine may have died for another reason


@dataclass(frozen=True, slots=True, kw_only=True)
class Trials:
    """The state of the search.

    Attributes:
        flight: rows that an engine was given and that were not durable at the last check.
        suspects: rows that were in flight when an engine died.
        size: size of the next flight of suspects.
        deaths: deaths of engines that had the first suspect alone.
    """

    flight: RowRanges = ()
    suspects: RowRanges = ()
    size: int = 1
    deaths: int = 0

    def after_death(self, done: RowRanges) -> tuple[Trials, RowRanges]:
        """Update after the death of the flight's engine, which its unfinished rows may have caused.

        Returns:
            the new state, and the rows that are found to be poison.
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
        """Choose the next rows: only suspects, else at most `most` of the remaining ones."""
        rows, _ = split_off(self.suspects, self.size) if self.suspects else split_off(left, most)
        return replace(self, flight=union(self.flight, rows)), rows

    def after_flight(self, done: RowRanges) -> Trials:
        """Update after rows have become durable."""
        suspects = minus(self.suspects, done)
        some_cleared = suspects != self.suspects
        return Trials(
            flight=minus(self.flight, done),
            suspects=suspects,
            size=2 * self.size if some_cleared else self.size,
            deaths=0 if some_cleared else self.deaths,
        )

    def as_json(self) -> dict[str, Any]:  # Any: JSON
        return asdict(self)

    @classmethod
    def from_json(cls, stored: Mapping[str, Any]) -> Trials:
        flight, suspects = (row_ranges(map(tuple, stored[name])) for name in ("flight", "suspects"))
        return cls(flight=flight, suspects=suspects, size=stored["size"], deaths=stored["deaths"])
