"""Who answers which rows of a job: leases, deaths, and the search for rows that kill. Pure.

    fresh ─ take ─▶ leased ─ answered ─▶ done
      ▲               │ death with blame
      │               ├─ first:  suspect, leased once more in small leases, beside others
      │               ├─ second: quarantined, one lease on an engine that holds nothing else
      └─ returned ◀───┤ then:    in halves, until a row that was alone has killed: poison, which is done
                      └ death without blame: as if returned

Leases shrink towards the end, so that engines end together. Rows that stand under suspicion come after all
others: whatever they do, the rest is answered first. Knows neither files nor processes: `jobs/batch/pool.py`
owns one and tells it what happened.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from .row_ranges import RowRanges, both, count, minus, split_off, union


@dataclass(frozen=True, slots=True)
class Lease:
    """Rows in one engine's hands.

    Attributes:
        number: names the lease.
        engine: who has it.
        rows: never empty.
        deaths: engines that these rows have seen die.
        shard: of the rows, if order is preserved.
    """

    number: int
    engine: str
    rows: RowRanges
    deaths: int
    shard: int | None

    @property
    def alone(self) -> bool:
        """Whether the engine may hold nothing else meanwhile."""
        return self.deaths >= 2


@dataclass(slots=True)
class _Held:
    lease: Lease
    rows: RowRanges  # of it, that are neither answered nor returned


class LeaseBook:
    """The rows of a job until each is answered or known as poison.

    Args:
        rows: to be answered.
        largest: rows of a lease while there is plenty. With `ordered`, of a shard: rows [k x largest,
            (k + 1) x largest) are shard k.
        smallest: rows of a lease towards the end, and of one under suspicion.
        ordered: leases are what is left of a shard, never of two.
    """

    def __init__(self, rows: RowRanges, *, largest: int, smallest: int, ordered: bool = False) -> None:
        assert 1 <= smallest <= largest, f"leases of {smallest} to {largest} rows"
        self._rows = rows
        self._largest = largest
        self._smallest = smallest
        self._ordered = ordered
        self._fresh = rows
        self._suspects: RowRanges = ()
        self._quarantine: deque[tuple[RowRanges, int]] = deque()  # with the deaths they have seen
        self._held: dict[int, _Held] = {}
        self._done: RowRanges = ()
        self._next_number = 0
        self.poison: dict[int, int] = {}  # rows that kill, with the deaths they have seen

    @property
    def left(self) -> int:
        """Rows in nobody's hands."""
        return count(self._fresh) + count(self._suspects) + sum(count(rows) for rows, _ in self._quarantine)

    @property
    def done(self) -> bool:
        return not self._held and not self.left

    def holds(self, engine: str) -> list[Lease]:
        """The leases of an engine."""
        return [held.lease for held in self._held.values() if held.lease.engine == engine]

    def take(self, engine: str, num_engines: int) -> Lease | None:
        """Rows for an engine; None if there are none for it now.

        Args:
            num_engines: that share what is left.
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
        """These rows of the lease are durable."""
        self._done = union(self._done, self._release(lease, rows))

    def returned(self, lease: int, rows: RowRanges) -> None:
        """These rows of the lease were given back, untouched or half done; somebody will answer them."""
        if held := self._held.get(lease):
            self._put_back(self._release(lease, rows), held.lease.deaths)

    def died(self, engine: str, durable: RowRanges, *, blame: bool) -> RowRanges:
        """An engine is gone. Returns the rows that are now known as poison.

        Args:
            durable: rows that it answered, of whichever lease.
            blame: whether its rows may be the reason. Not where a node was lost, or we ended it.
        """
        poison: RowRanges = ()
        for lease in self.holds(engine):
            left = self._held[lease.number].rows
            self.answered(lease.number, both(left, durable))
            if not (lost := minus(left, durable)):
                continue
            self._release(lease.number, lost)
            if not blame:
                self._put_back(lost, lease.deaths)
            elif lease.alone and count(lease.rows) == 1:
                self.poison[lost[0][0]] = lease.deaths + 1
                poison = union(poison, lost)
            else:
                self._suspect(lost, lease)
        self._done = union(self._done, poison)
        return poison

    def check_invariants(self) -> None:
        """Every row is in one place."""
        places = [self._fresh, self._suspects, self._done, *(held.rows for held in self._held.values())]
        places += [rows for rows, _ in self._quarantine]
        assert union(*places) == self._rows, "rows are lost, or were never asked for"
        assert sum(count(rows) for rows in places) == count(self._rows), "rows are in two places"
        assert all(held.rows for held in self._held.values()), "a lease of nothing"
        assert all(rows for rows, _ in self._quarantine), "nothing in quarantine"
        for held in self._held.values():
            alone = len(self.holds(held.lease.engine)) == 1
            assert alone or not held.lease.alone, "something beside a quarantined lease"

    def _share(self, num_rows: int, num_engines: int) -> int:
        """Guided self-scheduling: half of an equal share of what is left."""
        return min(max(num_rows // (2 * max(num_engines, 1)), self._smallest), self._largest)

    def _cut(self, rows: RowRanges, num_rows: int) -> tuple[RowRanges, RowRanges]:
        if not self._ordered:
            return split_off(rows, num_rows)
        shard = rows[0][0] // self._largest
        first = both(rows, ((shard * self._largest, (shard + 1) * self._largest),))
        return first, minus(rows, first)

    def _lease(self, engine: str, rows: RowRanges, deaths: int) -> Lease:
        shard = rows[0][0] // self._largest if self._ordered else None
        lease = Lease(self._next_number, engine, rows, deaths, shard)
        self._next_number += 1
        self._held[lease.number] = _Held(lease, rows)
        return lease

    def _release(self, lease: int, rows: RowRanges) -> RowRanges:
        """Take rows out of a lease; those that were in it. News of a lease that is over come late: none."""
        if (held := self._held.get(lease)) is None:
            return ()
        released = both(held.rows, rows)
        held.rows = minus(held.rows, released)
        if not held.rows:
            del self._held[lease]
        return released

    def _put_back(self, rows: RowRanges, deaths: int) -> None:
        if not rows:
            return
        if deaths == 0:
            self._fresh = union(self._fresh, rows)
        elif deaths == 1:
            self._suspects = union(self._suspects, rows)
        else:
            self._quarantine.appendleft((rows, deaths))

    def _suspect(self, rows: RowRanges, lease: Lease) -> None:
        """Rows of a lease whose engine died with them."""
        first, rest = split_off(rows, count(rows) // 2 if lease.alone else 0)
        for half in (rest, first):  # the first half is leased first
            self._put_back(half, lease.deaths + 1)
