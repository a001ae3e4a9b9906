"""A fleet of simulated replicas under a scaling policy: cost and waiting times of a day of traffic.

The simulation is coarse, so that a day over thousands of replicas takes minutes: a replica is a table
(`replica.py`), and all replicas advance by a quarter of a second at once (`slots.py`), however many
requests and tokens this includes.

A request goes to the replica with the fewest requests, as HAProxy sends it. A starting replica gets none; a
replica that stops finishes its requests first. Deterministic: only the arrivals are random. Called by
`replica_set.py`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from manta.cluster.fleet.autoscaling import FleetLoad

from .replica import ReplicaModel
from .slots import FleetSlots, Floats, Ints

TICK_S = 2.0  # interval of the policy; Serve's figures are as old as that, too
STEPS_PER_TICK = 8


@dataclass(frozen=True, slots=True)
class Arrivals:
    """Requests ordered by arrival (seconds); all arrays have the same length."""

    arrival_s: Floats
    prompt_tokens: Ints
    output_tokens: Ints


@dataclass(frozen=True, slots=True)
class FleetReport:
    """The result of a simulation.

    Attributes:
        ttft_s, tpot_s: of each request; NaN if it was refused.
        failed: number of refused requests.
        replica_s: sum of the seconds in which replicas started, served or stopped.
        moments: (seconds, serving replicas, wanted replicas) at each change.
    """

    ttft_s: Floats
    tpot_s: Floats
    failed: int
    replica_s: float
    moments: list[tuple[float, int, int]]


class FleetPolicy(Protocol):
    """A scaling policy: returns the number of replicas that there should be. Called every TICK_S."""

    def wanted(self, fleet: Fleet, now_s: float) -> int: ...


class Fleet:
    """The replicas of one simulation.

    Args:
        model: table of every replica.
        arrivals: the requests.
        policy: the scaling policy.
        start: number of serving replicas at the beginning.
    """

    def __init__(self, model: ReplicaModel, arrivals: Arrivals, policy: FleetPolicy, start: int) -> None:
        self.model = model
        self.target = start
        self.queue: deque[int] = deque()  # requests that wait while no replica serves
        self._policy = policy
        self._arrivals = arrivals
        self._slots = FleetSlots(model, arrivals.arrival_s, arrivals.prompt_tokens, arrivals.output_tokens)
        self._last_s = float(arrivals.arrival_s[-1]) if len(arrivals.arrival_s) else 0.0
        self._serving: Ints = np.empty(0, dtype=np.int64)  # rows, in the order of their start
        self._starting: deque[int] = deque()  # rows, in the order in which they will serve
        self._stopping: list[int] = []
        self._free: list[int] = []
        self._born_s: list[float] = []  # of each row
        self._numbers: list[int] = []  # of each row: its replica's number
        self._num_replicas = self.failed = 0
        self._replica_s = 0.0
        self._moments: list[tuple[float, int, int]] = []
        self._serve([self._new(-np.inf) for _ in range(start)], 0.0)

    @property
    def there(self) -> int:
        return len(self._serving)

    def load(self) -> FleetLoad:
        """Return the load of the serving replicas, computed like `FleetLoad.of`."""
        slots, rows = self._slots, self._serving
        if len(rows) == 0:
            return FleetLoad(0, queued=float(len(self.queue)))
        running, waiting = slots.count[rows], slots.waiting[rows]
        maximum = self.model.max_num_seqs
        mean_tokens = slots.tokens[rows] / np.maximum(slots.finished[rows], 1)
        rate = running * slots.pace()[rows]
        known = (waiting > 0) & (mean_tokens > 0.0) & (rate > 0.0)
        busy = np.maximum(running / maximum, slots.kv_tokens[rows] / self.model.kv_tokens)
        busy = busy + np.where(known, 0.0, waiting / maximum)
        backlog_s = np.where(known, waiting * mean_tokens / np.where(known, rate, 1.0), 0.0)
        queued = float(len(self.queue))
        there = len(rows)
        return FleetLoad(there, there, float(busy.sum()) + queued / maximum, float(backlog_s.sum()), queued)

    def ongoing(self) -> Mapping[int, int]:
        """Return the number of requests of each serving replica, by the replica's number."""
        loads = self._slots.load
        return {self._numbers[row]: int(loads[row]) for row in self._serving.tolist()}

    def run(self) -> FleetReport:
        """Simulate all arrivals. The policy is called until the last one."""
        arrival_s, slots = self._arrivals.arrival_s, self._slots
        step, arrived, step_s = 0, 0, TICK_S / STEPS_PER_TICK
        while arrived < len(arrival_s) or slots.load.any():
            begin_s, end_s = step * step_s, (step + 1) * step_s
            if step % STEPS_PER_TICK == 0 and begin_s <= self._last_s:
                self._apply_policy(begin_s)
            slots.advance(begin_s, end_s)
            until = arrived + int(np.searchsorted(arrival_s[arrived:], end_s, side="left"))
            if until > arrived:
                self._arrive(np.arange(arrived, until), arrival_s[arrived:until], end_s)
                arrived = until
            self._release_stopped()
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
        """Give each request to a replica with the fewest, one request per replica and round."""
        if len(self._serving) == 0:
            room = max(
                4 * self.model.max_num_seqs - len(self.queue), 0
            )  # the queue limit of `actors/replica.py`
            self.queue.extend(ids[:room].tolist())
            self.failed += len(ids[room:])
            return
        loads = self._slots.load[self._serving]
        maximum = self.model.max_num_seqs + self.model.max_waiting
        while len(ids):
            minimum = int(loads.min())
            if minimum >= maximum:
                self.failed += len(ids)
                return
            places = np.flatnonzero(loads == minimum)[: len(ids)]
            count = len(places)
            self._slots.give(self._serving[places], ids[:count], at_s[:count], now_s)
            loads[places] += 1
            ids, at_s = ids[count:], at_s[count:]

    # Replicas.

    def _apply_policy(self, now_s: float) -> None:
        ready: list[int] = []
        while self._starting and self._born_s[self._starting[0]] + self.model.start_s <= now_s:
            ready.append(self._starting.popleft())
        if ready:
            self._serve(ready, now_s)
        wanted = self._policy.wanted(self, now_s)
        for _ in range(self.target, wanted):
            self._starting.append(self._new(now_s))
        for _ in range(wanted, self.target):
            self._stop_one(now_s)
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

    def _stop_one(self, now_s: float) -> None:
        """Stop the newest starting replica, else the serving one with the fewest requests, after those."""
        if self._starting:
            self._release(self._starting.pop(), now_s)
            return
        place = int(self._slots.load[self._serving].argmin())
        row = int(self._serving[place])
        self._serving = np.delete(self._serving, place)
        if self._slots.load[row]:
            self._stopping.append(row)
        else:
            self._release(row, now_s)

    def _release_stopped(self) -> None:
        """Release the stopping replicas whose requests have ended."""
        if not self._stopping:
            return
        loads = self._slots.load
        for row in [row for row in self._stopping if not loads[row]]:
            self._stopping.remove(row)
            self._release(row, float(self._slots.last_end_s[row]))

    def _release(self, row: int, now_s: float) -> None:
        end_s = min(now_s, self._last_s)
        self._replica_s += end_s - min(max(self._born_s[row], 0.0), end_s)
        self._free.append(row)
