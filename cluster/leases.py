"""Which engine answers which rows of a batch job: leases, deaths, and the search for rows that kill engines.

    fresh ─ take ─▶ leased ─ answered ─▶ done
      ▲               │ death with blame
      │               ├─ first:  suspect, leased again in small leases, next to others
      │               ├─ second: quarantined, one lease on an engine that holds nothing else
      └─ returned ◀───┤ then:    in halves, until a row that was alone has killed: poison, which is done
                      └ death without blame: as if returned

Leases shrink towards the end, so that engines end together. Suspect rows come after all others, so that the
rest is answered first. Knows neither files nor processes: `jobs/batch/pool.py` owns a book and reports events
to it.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from .row_ranges import RowRanges, both, count, minus, split_off, union


@dataclass(frozen=True, slots=True)
class Lease:
    """Rows leased to one engine.

    Attributes:
        number: identifies the lease.
        engine: the engine that has it.
        rows: never empty.
        deaths: number of engines that died with these rows.
        shard: shard of the rows, if order is preserved.
    """

    number: int
    engine: str
    rows: RowRanges
    deaths: int
    shard: int | None

    @property
    def alone(self) -> bool:
        """Whether the engine may hold no other lease at the same time."""
        return self.deaths >= 2


@dataclass(slots=True)
class _OpenLease:
    lease: Lease
    rows: RowRanges  # neither answered nor returned yet


class LeaseBook:
    """The rows of a job until each is answered or known to be poison.

    Args:
        rows: the rows to answer.
        largest: rows of a lease while there are plenty. With `ordered`, of a shard: rows [k x largest, (k +
            1) x largest) are shard k.
        smallest: rows of a lease towards the end, and of a suspect one.
        ordered: a lease is the rest of one shard.
    """

    def __init__(self, rows: RowRanges, *, largest: int, smallest: int, ordered: bool = False) -> None:
        assert 1 <= smallest <= largest, f"leases of {smallest} to {largest} rows"
        self._rows = rows
        self._largest = largest
        self._smallest = smallest
        self._ordered = ordered
        self._fresh = rows
        self._suspects: RowRanges = ()
        # with the number of deaths that they have seen
        self._quarantine: deque[tuple[RowRanges, int]] = deque()
        self._held: dict[int, _OpenLease] = {}
        self._done: RowRanges = ()
        self._next_number = 0
        self.poison: dict[int, int] = {}  # rows that kill, with the number of deaths that they have seen

    @property
    def left(self) -> int:
        """Number of rows that are not leased."""
        return count(self._fresh) + count(self._suspects) + sum(count(rows) for rows, _ in self._quarantine)

    @property
    def done(self) -> bool:
        return not self._held and not self.left

    def holds(self, engine: str) -> list[Lease]:
        """Return the leases of an engine."""
        return [held.lease for held in self._held.values() if held.lease.engine == engine]

    def take(self, engine: str, num_engines: int) -> Lease | None:
        """Lease rows to an engine; None if there are none for it now.

        Args:
            num_engines: engines that share the remaining rows.
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
        """Mark rows of the lease as durable."""
        self._done = union(self._done, self._release(lease, rows))

    def returned(self, lease: int, rows: RowRanges) -> None:
        """Take back rows of the lease, untouched or half done, to lease them again."""
        if held := self._held.get(lease):
            self._put_back(self._release(lease, rows), held.lease.deaths)

    def died(self, engine: str, durable: RowRanges, *, blame: bool) -> RowRanges:
        """Record that an engine has ended; returns the rows that are now known to be poison.

        Args:
            durable: rows that it answered, of any lease.
            blame: whether its rows may be the reason; False if a node was lost or we ended the engine.
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
                self._put_back_suspects(lost, lease)
        self._done = union(self._done, poison)
        return poison

    def check_invariants(self) -> None:
        """Assert that every row is in exactly one place."""
        places = [self._fresh, self._suspects, self._done, *(held.rows for held in self._held.values())]
        places += [rows for rows, _ in self._quarantine]
        assert union(*places) == self._rows, "rows are lost, or are not part of the job"
        assert sum(count(rows) for rows in places) == count(self._rows), "rows are in two places"
        assert all(held.rows for held in self._held.values()), "a lease is empty"
        assert all(rows for rows, _ in self._quarantine), "a quarantine entry is empty"
        for held in self._held.values():
            alone = len(self.holds(held.lease.engine)) == 1
            assert alone or not held.lease.alone, "an engine has another lease next to a quarantined one"

    def _share(self, num_rows: int, num_engines: int) -> int:
        """Return the rows of a lease by guided self-scheduling (Polychronopoulos and Kuck, 1987), halved."""
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
        self._held[lease.number] = _OpenLease(lease, rows)
        return lease

    def _release(self, lease: int, rows: RowRanges) -> RowRanges:
        """Remove rows from a lease; returns those that were in it, none if the lease has already ended."""
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

    def _put_back_suspects(self, rows: RowRanges, lease: Lease) -> None:
        """Put back a lease's rows after its engine died, in halves if they were alone."""
        first, rest = split_off(rows, count(rows) // 2 if lease.alone else 0)
        for half in (rest, first):  # the first half is leased first
            self._put_back(half, lease.deaths + 1)
