"""Which engine answers which rows of a batch: leases, deaths, and the search for poison rows. Pure.

    fresh ─ take ─▶ leased ─ answered ─▶ done
      ▲               │ death with blame
      │               ├─ first:  suspect, leased again in small leases, beside others
      │               ├─ second: quarantined, one lease on an engine that holds nothing else
      └─ returned ◀───┤ then:    in halves, until a row that was alone has killed: poison, which is done
                      └ death without blame: as if returned

Leases shrink towards the end, so that engines end together. Suspected rows come after all others: whatever
they do, the rest is answered first. The driver of `manta batch` owns one (`jobs/batch/engine_pool.py`). So
does the replica that runs a batch of `/v1/batches` (`actors/batch/openai/batch_run.py`); it dies with its
engine, so it saves the book before rows go to the engine (`to_json`) and its successor goes on with it
(`after_death`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from .row_ranges import RowRanges, both, count, minus, row_ranges, split_off, union

_DEAD = "dead"  # the engine of a driver that died with it


@dataclass(frozen=True, slots=True)
class Lease:
    """Rows that one engine answers; `deaths` engines died with them, `deaths_alone` with this row alone."""

    number: int
    engine: str
    rows: RowRanges
    deaths: int
    shard: int | None
    deaths_alone: int = 0

    @property
    def alone(self) -> bool:
        """Return whether the engine may hold no other lease meanwhile."""
        return self.deaths >= 2


@dataclass(slots=True)
class _OpenLease:
    lease: Lease
    rows: RowRanges  # that are neither answered nor returned


class LeaseBook:
    """The rows of a batch until each is answered or known as poison.

    Args:
        rows: to be answered.
        largest: rows of a lease while there are many. With `ordered`, of a shard: rows [k x largest,
            (k + 1) x largest) are shard k.
        smallest: rows of a lease towards the end, and of suspected rows.
        ordered: a lease is what is left of one shard.
        trials: a row is poison when so many engines have died with it alone. More than one where a death
            may have causes that the driver cannot see.
    """

    def __init__(
        self, rows: RowRanges, *, largest: int, smallest: int, ordered: bool = False, trials: int = 1
    ) -> None:
        assert 1 <= smallest <= largest, f"leases of {smallest} to {largest} rows"
        self._rows = rows
        self._largest = largest
        self._smallest = smallest
        self._ordered = ordered
        self._trials = trials
        self._fresh = rows
        self._suspects: RowRanges = ()
        self._quarantine: deque[tuple[RowRanges, int, int]] = deque()  # with deaths and deaths alone
        self._held: dict[int, _OpenLease] = {}
        self._done: RowRanges = ()
        self._next_number = 0
        self.poison: dict[int, int] = {}  # poison rows, with the engines that died with them

    @classmethod
    def after_death(
        cls, saved: Mapping[str, Any], rows: RowRanges, *, largest: int, smallest: int, trials: int
    ) -> tuple[Self, RowRanges]:
        """Return the book of a driver that died with its engine, and the rows now known as poison.

        Args:
            saved: `to_json` of the dead driver's book; empty if it had none.
            rows: that are not durable.
        """
        book = cls(rows, largest=largest, smallest=smallest, trials=trials)
        if not saved:
            return book, ()
        book._suspects = both(_ranges(saved["suspects"]), rows)
        groups = ((both(_ranges(group), rows), *deaths) for group, *deaths in saved["quarantine"])
        book._quarantine.extend(group for group in groups if group[0])
        for number, (leased, deaths, alone) in enumerate(saved["leases"]):
            if lost := both(_ranges(leased), rows):
                lease = Lease(number, _DEAD, _ranges(leased), deaths, None, alone)
                book._held[number] = _OpenLease(lease, lost)
        book._next_number = len(saved["leases"])
        elsewhere = (*(group for group, *_ in book._quarantine), *(held.rows for held in book._held.values()))
        book._fresh = minus(rows, union(book._suspects, *elsewhere))
        return book, book.died(_DEAD, (), blame=True)

    def to_json(self) -> dict[str, Any]:  # Any: JSON
        """Return what `after_death` needs."""
        return {
            "leases": [
                (held.lease.rows, held.lease.deaths, held.lease.deaths_alone) for held in self._held.values()
            ],
            "suspects": self._suspects,
            "quarantine": list(self._quarantine),
        }

    @property
    def left(self) -> int:
        """Return the number of rows that no engine holds."""
        return count(self._fresh) + count(self._suspects) + sum(count(rows) for rows, *_ in self._quarantine)

    @property
    def done(self) -> bool:
        return not self._held and not self.left

    def holds(self, engine: str) -> list[Lease]:
        """Return the leases of an engine."""
        return [held.lease for held in self._held.values() if held.lease.engine == engine]

    def take(self, engine: str, num_engines: int) -> Lease | None:
        """Return rows for an engine; None if there are none for it now.

        Args:
            num_engines: that share the rows that are left.
        """
        holds = self.holds(engine)
        if any(lease.alone for lease in holds):
            return None
        if self._fresh:
            rows, self._fresh = self._cut(self._fresh, self._share(count(self._fresh), num_engines))
            return self._lease(engine, rows, 0)
        if self._suspects:
            rows, self._suspects = self._cut(self._suspects, self._smallest)
            return self._lease(engine, rows, 1)
        if self._quarantine and not holds:
            return self._lease(engine, *self._quarantine.popleft())
        return None

    def answered(self, lease: int, rows: RowRanges) -> None:
        """Record that these rows of the lease are durable."""
        self._done = union(self._done, self._release(lease, rows))

    def returned(self, lease: int, rows: RowRanges) -> None:
        """Record that these rows of the lease were returned without a result."""
        if held := self._held.get(lease):
            self._put_back(self._release(lease, rows), held.lease.deaths, held.lease.deaths_alone)

    def died(self, engine: str, durable: RowRanges, *, blame: bool) -> RowRanges:
        """Record that an engine is gone. Returns the rows now known as poison.

        Args:
            durable: rows of its leases that are durable.
            blame: its rows may be the reason. False if its node was lost or it was ended on purpose.
        """
        poison: RowRanges = ()
        for lease in self.holds(engine):
            left = self._held[lease.number].rows
            self.answered(lease.number, both(left, durable))
            if not (lost := minus(left, durable)):
                continue
            self._release(lease.number, lost)
            if not blame:
                self._put_back(lost, lease.deaths, lease.deaths_alone)
            elif lease.alone and count(lease.rows) == 1 and lease.deaths_alone + 1 >= self._trials:
                self.poison[lost[0][0]] = lease.deaths + 1
                poison = union(poison, lost)
            else:
                self._put_back_suspects(lost, lease)
        self._done = union(self._done, poison)
        return poison

    def check_invariants(self) -> None:
        """Check that every row is in one place."""
        places = [self._fresh, self._suspects, self._done, *(held.rows for held in self._held.values())]
        places += [rows for rows, *_ in self._quarantine]
        assert union(*places) == self._rows, "rows are lost, or were never asked for"
        assert sum(count(rows) for rows in places) == count(self._rows), "rows are in two places"
        assert all(held.rows for held in self._held.values()), "a lease of nothing"
        assert all(rows for rows, *_ in self._quarantine), "nothing in quarantine"
        for held in self._held.values():
            alone = len(self.holds(held.lease.engine)) == 1
            assert alone or not held.lease.alone, "an engine has another lease next to a quarantined one"

    def _share(self, num_rows: int, num_engines: int) -> int:
        """Return half of an equal share of the rows that are left (guided self-scheduling)."""
        return min(max(num_rows // (2 * max(num_engines, 1)), self._smallest), self._largest)

    def _cut(self, rows: RowRanges, num_rows: int) -> tuple[RowRanges, RowRanges]:
        if not self._ordered:
            return split_off(rows, num_rows)
        shard = rows[0][0] // self._largest
        first = both(rows, ((shard * self._largest, (shard + 1) * self._largest),))
        return first, minus(rows, first)

    def _lease(self, engine: str, rows: RowRanges, deaths: int, alone: int = 0) -> Lease:
        shard = rows[0][0] // self._largest if self._ordered else None
        lease = Lease(self._next_number, engine, rows, deaths, shard, alone)
        self._next_number += 1
        self._held[lease.number] = _OpenLease(lease, rows)
        return lease

    def _release(self, lease: int, rows: RowRanges) -> RowRanges:
        """Take rows out of a lease. Returns those that were in it; none if the lease has ended."""
        if (held := self._held.get(lease)) is None:
            return ()
        released = both(held.rows, rows)
        held.rows = minus(held.rows, released)
        if not held.rows:
            del self._held[lease]
        return released

    def _put_back(self, rows: RowRanges, deaths: int, alone: int = 0) -> None:
        if not rows:
            return
        if deaths == 0:
            self._fresh = union(self._fresh, rows)
        elif deaths == 1:
            self._suspects = union(self._suspects, rows)
        else:
            self._quarantine.appendleft((rows, deaths, alone))

    def _put_back_suspects(self, rows: RowRanges, lease: Lease) -> None:
        """Put back rows of a lease after its engine died with them."""
        first, rest = split_off(rows, count(rows) // 2 if lease.alone else 0)
        alone = lease.deaths_alone + (lease.alone and count(lease.rows) == 1)
        for half in (rest, first):  # the first half is leased first
            self._put_back(half, lease.deaths + 1, alone)


def _ranges(saved: list[list[int]]) -> RowRanges:
    return row_ranges((begin, end) for begin, end in saved)
