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
engine, so it saves the manager before rows go to the engine (`to_json`) and its successor goes on with it
(`after_death`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from .row_ranges import RowRanges, count, difference, intersection, row_ranges, split_off, union

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
        return self.deaths >= 2


@dataclass(slots=True)
class _OpenLease:
    lease: Lease
    rows: RowRanges  # that are neither answered nor returned


class LeaseManager:
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
        self._open_leases: dict[int, _OpenLease] = {}
        self._done: RowRanges = ()
        self._next_number = 0
        self.poison: dict[int, int] = {}  # poison rows, with the engines that died with them

    @classmethod
    def after_death(
        cls, saved: Mapping[str, Any], rows: RowRanges, *, largest: int, smallest: int, trials: int
    ) -> tuple[Self, RowRanges]:
        """Return the manager of a driver that died with its engine, and the rows now known as poison.

        `saved` is the dead driver's `to_json`, empty if it had none; `rows` are those that are not durable.
        """
        manager = cls(rows, largest=largest, smallest=smallest, trials=trials)
        if not saved:
            return manager, ()
        manager._suspects = intersection(_ranges(saved["suspects"]), rows)
        groups = ((intersection(_ranges(group), rows), *deaths) for group, *deaths in saved["quarantine"])
        manager._quarantine.extend(group for group in groups if group[0])
        for number, (leased, deaths, alone) in enumerate(saved["leases"]):
            if lost := intersection(_ranges(leased), rows):
                lease = Lease(number, _DEAD, _ranges(leased), deaths, None, alone)
                manager._open_leases[number] = _OpenLease(lease, lost)
        manager._next_number = len(saved["leases"])
        elsewhere = (
            *(group for group, *_ in manager._quarantine),
            *(open_lease.rows for open_lease in manager._open_leases.values()),
        )
        manager._fresh = difference(rows, union(manager._suspects, *elsewhere))
        return manager, manager.on_engine_death(_DEAD, (), blame=True)

    def to_json(self) -> dict[str, Any]:  # Any: JSON
        return {
            "leases": [
                (open_lease.lease.rows, open_lease.lease.deaths, open_lease.lease.deaths_alone)
                for open_lease in self._open_leases.values()
            ],
            "suspects": self._suspects,
            "quarantine": list(self._quarantine),
        }

    @property
    def num_unleased(self) -> int:
        """Return the number of rows that no engine holds."""
        return count(self._fresh) + count(self._suspects) + sum(count(rows) for rows, *_ in self._quarantine)

    @property
    def done(self) -> bool:
        return not self._open_leases and not self.num_unleased

    def leases_of(self, engine: str) -> list[Lease]:
        return [
            open_lease.lease for open_lease in self._open_leases.values() if open_lease.lease.engine == engine
        ]

    def acquire(self, engine: str, num_engines: int) -> Lease | None:
        """Return rows for one of the `num_engines` engines that share the rest; None if there are none."""
        holds = self.leases_of(engine)
        if any(lease.alone for lease in holds):
            return None
        if self._fresh:
            rows, self._fresh = self._cut(self._fresh, self._lease_size(count(self._fresh), num_engines))
            return self._lease(engine, rows, 0)
        if self._suspects:
            rows, self._suspects = self._cut(self._suspects, self._smallest)
            return self._lease(engine, rows, 1)
        if self._quarantine and not holds:
            return self._lease(engine, *self._quarantine.popleft())
        return None

    def mark_durable(self, lease: int, rows: RowRanges) -> None:
        self._done = union(self._done, self._release(lease, rows))

    def return_rows(self, lease: int, rows: RowRanges) -> None:
        if open_lease := self._open_leases.get(lease):
            self._requeue(self._release(lease, rows), open_lease.lease.deaths, open_lease.lease.deaths_alone)

    def on_engine_death(self, engine: str, durable: RowRanges, *, blame: bool) -> RowRanges:
        """Record that an engine is gone, with `durable` rows of its leases; return the rows known as poison.

        `blame`: its rows may be the reason. False if its node was lost or it was ended on purpose.
        """
        poison: RowRanges = ()
        for lease in self.leases_of(engine):
            left = self._open_leases[lease.number].rows
            self.mark_durable(lease.number, intersection(left, durable))
            if not (lost := difference(left, durable)):
                continue
            self._release(lease.number, lost)
            if not blame:
                self._requeue(lost, lease.deaths, lease.deaths_alone)
            elif lease.alone and count(lease.rows) == 1 and lease.deaths_alone + 1 >= self._trials:
                self.poison[lost[0][0]] = lease.deaths + 1
                poison = union(poison, lost)
            else:
                self._requeue_suspects(lost, lease)
        self._done = union(self._done, poison)
        return poison

    def check_invariants(self) -> None:
        places = [
            self._fresh,
            self._suspects,
            self._done,
            *(open_lease.rows for open_lease in self._open_leases.values()),
        ]
        places += [rows for rows, *_ in self._quarantine]
        assert union(*places) == self._rows, "rows are lost, or were never asked for"
        assert sum(count(rows) for rows in places) == count(self._rows), "rows are in two places"
        assert all(open_lease.rows for open_lease in self._open_leases.values()), "a lease of nothing"
        assert all(rows for rows, *_ in self._quarantine), "nothing in quarantine"
        for open_lease in self._open_leases.values():
            alone = len(self.leases_of(open_lease.lease.engine)) == 1
            assert alone or not open_lease.lease.alone, (
                "an engine has another lease next to a quarantined one"
            )

    def _lease_size(self, num_rows: int, num_engines: int) -> int:
        """Return half of an equal share of the rows that are left (guided self-scheduling)."""
        return min(max(num_rows // (2 * max(num_engines, 1)), self._smallest), self._largest)

    def _cut(self, rows: RowRanges, num_rows: int) -> tuple[RowRanges, RowRanges]:
        if not self._ordered:
            return split_off(rows, num_rows)
        shard = rows[0][0] // self._largest
        first = intersection(rows, ((shard * self._largest, (shard + 1) * self._largest),))
        return first, difference(rows, first)

    def _lease(self, engine: str, rows: RowRanges, deaths: int, alone: int = 0) -> Lease:
        shard = rows[0][0] // self._largest if self._ordered else None
        lease = Lease(self._next_number, engine, rows, deaths, shard, alone)
        self._next_number += 1
        self._open_leases[lease.number] = _OpenLease(lease, rows)
        return lease

    def _release(self, lease: int, rows: RowRanges) -> RowRanges:
        """Take rows out of a lease. Returns those that were in it; none if the lease has ended."""
        if (open_lease := self._open_leases.get(lease)) is None:
            return ()
        released = intersection(open_lease.rows, rows)
        open_lease.rows = difference(open_lease.rows, released)
        if not open_lease.rows:
            del self._open_leases[lease]
        return released

    def _requeue(self, rows: RowRanges, deaths: int, alone: int = 0) -> None:
        if not rows:
            return
        if deaths == 0:
            self._fresh = union(self._fresh, rows)
        elif deaths == 1:
            self._suspects = union(self._suspects, rows)
        else:
            self._quarantine.appendleft((rows, deaths, alone))

    def _requeue_suspects(self, rows: RowRanges, lease: Lease) -> None:
        """Put back rows of a lease after its engine died with them."""
        first, rest = split_off(rows, count(rows) // 2 if lease.alone else 0)
        alone = lease.deaths_alone + (lease.alone and count(lease.rows) == 1)
        for half in (rest, first):  # the first half is leased first
            self._requeue(half, lease.deaths + 1, alone)


def _ranges(saved: list[list[int]]) -> RowRanges:
    return row_ranges((begin, end) for begin, end in saved)
