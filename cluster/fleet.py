"""A fleet of simulated replicas under a scaling policy: what a day of traffic costs, and how long users wait.

Coarse on purpose, so that a day over a hundred replicas takes seconds: a replica is a table
(`fleet_replica.py`), and an event is a request that comes or ends, however many tokens lie between.

Requests go to the replica with fewest, as HAProxy sends them; a replica that starts gets none, one that is to
go ends what it has. Deterministic: all chance lies in the arrivals. Called by `jobs/simulate/`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from heapq import heappop, heappush
from math import inf
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from .fleet_replica import Replica, ReplicaModel
from .replica_figures import ReplicaFigures

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

TICK_S = 2.0  # between two looks of the policy; Serve's figures are as old as that, too
_EPS = 1e-9


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
        self._arrival_s: list[float] = arrivals.arrival_s.tolist()
        self._prompts: list[int] = arrivals.prompt_tokens.tolist()
        self._outputs: list[int] = arrivals.output_tokens.tolist()
        self._first_s = np.full(len(self._outputs), np.nan)
        self._end_s = np.full(len(self._outputs), np.nan)
        self._serving: list[Replica] = []
        self._loads = np.zeros(0, dtype=np.int64)  # requests of those that serve
        self._starting: deque[Replica] = deque()  # by the time when they will serve
        self._ends: list[tuple[float, int, int, Replica]] = []  # heap: when, a number, version, who
        self._num_events = self._num_replicas = self.failed = 0
        self._replica_s = 0.0
        self._moments: list[tuple[float, int, int]] = []
        self._serve([self._new(-inf) for _ in range(start)], 0.0)

    @property
    def there(self) -> int:
        return len(self._serving)

    def figures(self) -> Iterator[ReplicaFigures]:
        """What the replicas that serve say of themselves."""
        slots = self.model.max_num_seqs
        for replica in self._serving:
            running, waiting = len(replica.running), len(replica.waiting)
            mean_tokens = replica.tokens / replica.finished if replica.finished else 0.0
            yield ReplicaFigures(
                running=running,
                waiting=waiting,
                max_num_seqs=slots,
                kv_usage=replica.kv_tokens / self.model.kv_tokens,
                waiting_tokens=waiting * mean_tokens,
                decode_tokens_per_s=running * replica.pace(running) if running else 0.0,
            )

    def ongoing(self) -> Mapping[int, int]:
        """Requests of each replica that serves, by its number."""
        return {replica.number: replica.load for replica in self._serving}

    def run(self) -> FleetReport:
        """Play all arrivals; the policy looks until the last one."""
        arrivals, ends, tick_s = self._arrival_s, self._ends, 0.0
        last_s = arrivals[-1] if arrivals else 0.0
        for i, arrival_s in enumerate([*arrivals, inf]):
            while (event_s := min(ends[0][0] if ends else inf, tick_s)) < arrival_s:
                if event_s == tick_s:
                    self._look(tick_s)
                    tick_s = tick_s + TICK_S if tick_s + TICK_S <= last_s else inf
                else:
                    _, _, version, replica = heappop(ends)
                    if version == replica.version:
                        self._finish(replica, event_s)
            if arrival_s < inf:
                self._arrive(i, arrival_s)
        return self._report(last_s)

    def _report(self, last_s: float) -> FleetReport:
        left = [*self._serving, *self._starting]
        held_s = self._replica_s + sum(last_s - max(replica.born_s, 0.0) for replica in left)
        tokens = np.maximum(np.array(self._outputs, dtype=np.float64) - 1.0, 1.0)
        ttft_s = self._first_s - np.array(self._arrival_s)
        return FleetReport(ttft_s, (self._end_s - self._first_s) / tokens, self.failed, held_s, self._moments)

    # Requests.

    def _arrive(self, i: int, now_s: float) -> None:
        if not self._serving:
            if len(self.queue) < 4 * self.model.max_num_seqs:  # as `actors/replica.py` lets Serve queue
                self.queue.append(i)
            else:
                self.failed += 1
            return
        place = int(self._loads.argmin())
        if self._loads[place] >= self.model.max_num_seqs + self.model.most_waiting:
            self.failed += 1
            return
        self._give(self._serving[place], i, now_s)

    def _give(self, replica: Replica, i: int, now_s: float) -> None:
        replica.waiting.append(i)
        self._loads[replica.place] += 1
        replica.advance(now_s)
        self._admit(replica, now_s)

    def _admit(self, replica: Replica, now_s: float) -> None:
        """Let in who waits, as far as slots and pages last; then see who ends next."""
        model = self.model
        while replica.waiting and len(replica.running) < model.max_num_seqs:
            i = replica.waiting[0]
            held = min(self._prompts[i] + self._outputs[i], model.kv_tokens)
            if replica.kv_tokens + held > model.kv_tokens:
                break
            replica.waiting.popleft()
            replica.kv_tokens += held
            heappush(replica.running, (replica.done + self._outputs[i], i))
            replica.free_s = max(replica.free_s, now_s) + self._prompts[i] * model.prompt_token_s
            self._first_s[i] = replica.free_s + model.step_s[len(replica.running) - 1]
        self._await(replica, now_s)

    def _await(self, replica: Replica, now_s: float) -> None:
        replica.version += 1
        if replica.running:
            tokens = replica.running[0][0] - replica.done
            end_s = max(now_s, replica.free_s) + tokens / replica.pace(len(replica.running))
            self._num_events += 1
            heappush(self._ends, (end_s, self._num_events, replica.version, replica))

    def _finish(self, replica: Replica, now_s: float) -> None:
        replica.advance(now_s)
        while replica.running and replica.running[0][0] <= replica.done + _EPS * (1.0 + replica.done):
            _, i = heappop(replica.running)
            replica.kv_tokens -= min(self._prompts[i] + self._outputs[i], self.model.kv_tokens)
            replica.finished += 1
            replica.tokens += self._outputs[i]
            self._end_s[i] = max(now_s, self._first_s[i])
            if replica.place >= 0:
                self._loads[replica.place] -= 1
        self._admit(replica, now_s)
        if replica.place < 0 and not replica.load:
            self._release(replica, now_s)

    # Replicas.

    def _look(self, now_s: float) -> None:
        ready = 0
        while ready < len(self._starting) and self._starting[ready].born_s + self.model.start_s <= now_s:
            ready += 1
        if ready:
            self._serve([self._starting.popleft() for _ in range(ready)], now_s)
        wanted = self._policy.wanted(self, now_s)
        for _ in range(self.target, wanted):
            self._starting.append(self._new(now_s))
        for _ in range(wanted, self.target):
            self._give_up(now_s)
        self.target = wanted
        moment = (self.there, wanted)
        if not self._moments or self._moments[-1][1:] != moment:
            self._moments.append((now_s, *moment))

    def _new(self, now_s: float) -> Replica:
        self._num_replicas += 1
        return Replica(self.model, self._num_replicas, now_s)

    def _serve(self, replicas: list[Replica], now_s: float) -> None:
        self._serving += replicas
        self._place()
        while self.queue and self._serving:
            self._give(self._serving[int(self._loads.argmin())], self.queue.popleft(), now_s)

    def _give_up(self, now_s: float) -> None:
        """One that starts, or else the one with least to do: it ends that."""
        if self._starting:
            self._release(self._starting.pop(), now_s)
            return
        replica = self._serving.pop(int(self._loads.argmin()))
        self._place()
        replica.place = -1
        if not replica.load:
            self._release(replica, now_s)

    def _place(self) -> None:
        for place, replica in enumerate(self._serving):
            replica.place = place
        self._loads = np.array([replica.load for replica in self._serving], dtype=np.int64)

    def _release(self, replica: Replica, now_s: float) -> None:
        end_s = min(now_s, self._arrival_s[-1])
        self._replica_s += end_s - min(max(replica.born_s, 0.0), end_s)
