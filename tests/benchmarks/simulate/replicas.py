"""A fleet of simulated replicas under a scaling policy: what a day of traffic costs, and how long users wait.

Coarse on purpose, so that a day over thousands of replicas takes minutes: a replica is a table
(`replica.py`), and all replicas go on a quarter of a second at once (`slots.py`), however many
requests and tokens lie in it.

Requests go to the replica with fewest, as HAProxy sends them; a replica that starts gets none, one that is to
go ends what it has. Deterministic: all chance lies in the arrivals. Called by `fleet.py`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from manta.cluster.autoscaling import FleetLoad

from .replica import ReplicaModel
from .slots import FleetSlots, Floats, Ints

TICK_S = 2.0  # between two looks of the policy; Serve's figures are as old as that, too
STEPS_PER_TICK = 8


@dataclass(frozen=True, slots=True)
class Arrivals:
    """Requests by the time of their arrival (seconds, ascending), all arrays of one length."""

    arrival_s: Floats
    prompt_tokens: Ints
    output_tokens: Ints


@dataclass(frozen=True, slots=True)
class FleetReport:
    """What became of the arrivals.

    Attributes:
        ttft_s, tpot_s: of each request; NaN where it was refused.
        failed: requests that were refused.
        replica_s: seconds that replicas were held: starting, serving or ending.
        moments: (seconds, replicas that serve, replicas that are wanted), as they changed.
    """

    ttft_s: Floats
    tpot_s: Floats
    failed: int
    replica_s: float
    moments: list[tuple[float, int, int]]


class FleetPolicy(Protocol):
    """Says how many replicas there should be; called every TICK_S."""

    def wanted(self, fleet: Fleet, now_s: float) -> int: ...


class Fleet:
    """The replicas of one simulation.

    Args:
        model: of every replica.
        arrivals: what comes.
        policy: how many replicas there should be.
        start: replicas that serve at the beginning.
    """

    def __init__(self, model: ReplicaModel, arrivals: Arrivals, policy: FleetPolicy, start: int) -> None:
        self.model = model
        self.target = start
        self.queue: deque[int] = deque()  # in front of the replicas, while there is none
        self._policy = policy
        self._arrivals = arrivals
        self._slots = FleetSlots(model, arrivals.arrival_s, arrivals.prompt_tokens, arrivals.output_tokens)
        self._last_s = float(arrivals.arrival_s[-1]) if len(arrivals.arrival_s) else 0.0
        self._serving: Ints = np.empty(0, dtype=np.int64)  # rows, in the order in which they came
        self._starting: deque[int] = deque()  # rows, by the time when they will serve
        self._ending: list[int] = []
        self._free: list[int] = []
        self._born_s: list[float] = []  # of each row
        self._numbers: list[int] = []  # of each row: a replica's name
        self._num_replicas = self.failed = 0
        self._replica_s = 0.0
        self._moments: list[tuple[float, int, int]] = []
        self._serve([self._new(-np.inf) for _ in range(start)], 0.0)

    @property
    def there(self) -> int:
        return len(self._serving)

    def load(self) -> FleetLoad:
        """What the replicas that serve say of themselves, as `FleetLoad.of` adds it up."""
        slots, rows = self._slots, self._serving
        if len(rows) == 0:
            return FleetLoad(0, queued=float(len(self.queue)))
        running, waiting = slots.count[rows], slots.waiting[rows]
        most = self.model.max_num_seqs
        mean_tokens = slots.tokens[rows] / np.maximum(slots.finished[rows], 1)
        rate = running * slots.pace()[rows]
        known = (waiting > 0) & (mean_tokens > 0.0) & (rate > 0.0)
        busy = np.maximum(running / most, slots.kv_tokens[rows] / self.model.kv_tokens)
        busy = busy + np.where(known, 0.0, waiting / most)
        backlog_s = np.where(known, waiting * mean_tokens / np.where(known, rate, 1.0), 0.0)
        queued = float(len(self.queue))
        there = len(rows)
        return FleetLoad(there, there, float(busy.sum()) + queued / most, float(backlog_s.sum()), queued)

    def ongoing(self) -> Mapping[int, int]:
        """Requests of each replica that serves, by its number."""
        loads = self._slots.load
        return {self._numbers[row]: int(loads[row]) for row in self._serving.tolist()}

    def run(self) -> FleetReport:
        """Play all arrivals; the policy looks until the last one."""
        arrival_s, slots = self._arrivals.arrival_s, self._slots
        step, come, step_s = 0, 0, TICK_S / STEPS_PER_TICK
        while come < len(arrival_s) or slots.load.any():
            begin_s, end_s = step * step_s, (step + 1) * step_s
            if step % STEPS_PER_TICK == 0 and begin_s <= self._last_s:
                self._look(begin_s)
            slots.advance(begin_s, end_s)
            until = come + int(np.searchsorted(arrival_s[come:], end_s, side="left"))
            if until > come:
                self._arrive(np.arange(come, until), arrival_s[come:until], end_s)
                come = until
            self._bury()
            step += 1
        return self._report()

    def _report(self) -> FleetReport:
        rows = [*self._serving.tolist(), *self._starting]
        held_s = self._replica_s + sum(self._last_s - max(self._born_s[row], 0.0) for row in rows)
        tokens = np.maximum(self._arrivals.output_tokens - 1.0, 1.0)
        first_s = self._slots.first_s
        ttft_s, tpot_s = first_s - self._arrivals.arrival_s, (self._slots.end_s - first_s) / tokens
        return FleetReport(ttft_s, tpot_s, self.failed, held_s, self._moments)

    # Requests.

    def _arrive(self, ids: Ints, at_s: Floats, now_s: float) -> None:
        """Each to the replica with fewest: all of those first, one each, and then again."""
        if len(self._serving) == 0:
            room = max(4 * self.model.max_num_seqs - len(self.queue), 0)  # as `actors/replica.py` lets queue
            self.queue.extend(ids[:room].tolist())
            self.failed += len(ids[room:])
            return
        loads = self._slots.load[self._serving]
        most = self.model.max_num_seqs + self.model.most_waiting
        while len(ids):
            fewest = int(loads.min())
            if fewest >= most:
                self.failed += len(ids)
                return
            places = np.flatnonzero(loads == fewest)[: len(ids)]
            count = len(places)
            self._slots.give(self._serving[places], ids[:count], at_s[:count], now_s)
            loads[places] += 1
            ids, at_s = ids[count:], at_s[count:]

    # Replicas.

    def _look(self, now_s: float) -> None:
        ready: list[int] = []
        while self._starting and self._born_s[self._starting[0]] + self.model.start_s <= now_s:
            ready.append(self._starting.popleft())
        if ready:
            self._serve(ready, now_s)
        wanted = self._policy.wanted(self, now_s)
        for _ in range(self.target, wanted):
            self._starting.append(self._new(now_s))
        for _ in range(wanted, self.target):
            self._give_up(now_s)
        self.target = wanted
        moment = (self.there, wanted)
        if not self._moments or self._moments[-1][1:] != moment:
            self._moments.append((now_s, *moment))

    def _new(self, now_s: float) -> int:
        if self._free:
            row = self._free.pop()
        else:
            row = len(self._born_s)
            self._born_s.append(0.0)
            self._numbers.append(0)
        self._slots.clear(row)
        self._num_replicas += 1
        self._born_s[row], self._numbers[row] = now_s, self._num_replicas
        return row

    def _serve(self, rows: list[int], now_s: float) -> None:
        self._serving = np.append(self._serving, np.array(rows, dtype=np.int64))
        if self.queue and len(self._serving):
            ids = np.array(self.queue, dtype=np.int64)
            self.queue.clear()
            self._arrive(ids, np.full(len(ids), now_s), now_s)

    def _give_up(self, now_s: float) -> None:
        """One that starts, or else the one with least to do: it ends that."""
        if self._starting:
            self._release(self._starting.pop(), now_s)
            return
        place = int(self._slots.load[self._serving].argmin())
        row = int(self._serving[place])
        self._serving = np.delete(self._serving, place)
        if self._slots.load[row]:
            self._ending.append(row)
        else:
            self._release(row, now_s)

    def _bury(self) -> None:
        """Replicas that were to go and have ended what they had."""
        if not self._ending:
            return
        loads = self._slots.load
        for row in [row for row in self._ending if not loads[row]]:
            self._ending.remove(row)
            self._release(row, float(self._slots.last_end_s[row]))

    def _release(self, row: int, now_s: float) -> None:
        end_s = min(now_s, self._last_s)
        self._replica_s += end_s - min(max(self._born_s[row], 0.0), end_s)
        self._free.append(row)
