"""Computes the number of replicas from the load that they report.

    need(share) = slots or pages in use / share  +  seconds to drain backlogs / drain_s       [replicas]

The first term follows running requests, the second waiting ones: a backlog only justifies replicas if its own
replica, at its measured decode rate with drafts, does not drain it soon enough. Replicas are added when
need(load_high) exceeds the current target, and removed when need(load_low) was below it for `down_after_s`.
In between the number stays, so a steady load never makes it oscillate.

Starting replicas count towards the target, so that they are not requested twice, but not towards the
capacity: need covers what runs and waits now, and no serving replica is removed while others start.
Background work requests no replicas, but keeps the last one.

Serve's protocol is in `actors/serve/autoscaling_policy.py`, which calls `ReplicaCount`.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING

from ..errors import ConfigError
from ..speculation.acceptance_length import mean_acceptance_length

if TYPE_CHECKING:
    from ..engine.engine_stats import EngineStats

_ROUNDING = 1e-9  # so that 3.0000000001 replicas count as three
MEMORY_S = 20.0  # seconds of work after which older measurements have lost two thirds of their weight
BUSY_PARTS = ("schedule", "execute", "commit")


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingRules:
    """Parameters of how the number of replicas follows the load.

    Attributes:
        load_high: share of a replica's slots (or K/V pages) in use above which replicas are added.
        load_low: share that must not be exceeded after replicas are removed. A wider band changes less often.
        drain_s: seconds in which a backlog should be drained; a shorter time adds more replicas.
        up_after_s: replicas are added only after they were needed for this long.
        down_after_s: replicas are removed only after fewer sufficed for this long; restarts after each
            removal.
        idle_s: the last replica is removed after this long without requests, if zero replicas are allowed.
        growth: most replicas at once, as a multiple of those that serve.
    """

    load_high: float = 0.75
    load_low: float = 0.60
    drain_s: float = 20.0
    up_after_s: float = 2.0
    down_after_s: float = 180.0
    idle_s: float = 600.0
    growth: float = 2.0

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
                raise ConfigError(f"{field.name}={value!r} must be a number.", param=field.name)
        if not 0.0 < self.load_low < self.load_high <= 1.0:
            raise ConfigError(
                f"load_low={self.load_low:g} and load_high={self.load_high:g} must be shares with "
                "0 < load_low < load_high <= 1, such as 0.60 and 0.75.",
                param="load_low",
            )
        if self.drain_s <= 0.0:
            raise ConfigError(f"drain_s={self.drain_s:g} must be seconds above 0.", param="drain_s")
        for name in ("up_after_s", "down_after_s", "idle_s"):
            if getattr(self, name) < 0.0:
                raise ConfigError(f"{name}={getattr(self, name):g} must be 0 or more seconds.", param=name)
        if self.growth <= 1.0:
            raise ConfigError(f"growth={self.growth:g} must be above 1, such as 2 to double.", param="growth")


@dataclass(frozen=True, slots=True)
class FleetLoad:
    """The combined load of all serving replicas of a deployment; `busy` is in units of replicas."""

    there: int
    num_reporting: int = 0
    busy: float = 0.0
    backlog_s: float = 0.0
    queued: float = 0.0
    background: float = 0.0

    @classmethod
    def of(cls, replicas: Iterable[ReplicaStats], num_replicas: int, queued: float = 0.0) -> FleetLoad:
        """Combine the reports of some replicas; the others are assumed to be equally busy."""
        num_reporting, busy, backlog_s, background, slots = 0, 0.0, 0.0, 0.0, 0.0
        for replica in replicas:
            num_reporting += 1
            slots = max(slots, replica.max_num_seqs)
            busy += max(replica.running / replica.max_num_seqs, replica.kv_usage)
            background += replica.background
            if replica.waiting and replica.waiting_tokens and replica.decode_tokens_per_s:
                backlog_s += replica.waiting_tokens / replica.decode_tokens_per_s
            else:  # Their length is not known yet, so they count as slots.
                busy += replica.waiting / replica.max_num_seqs
        if num_reporting:
            busy = busy * max(num_replicas, num_reporting) / num_reporting + queued / slots
        return cls(num_replicas, num_reporting, busy, backlog_s, queued, background)

    @property
    def is_idle(self) -> bool:
        return self.busy == self.backlog_s == self.queued == self.background == 0.0

    def replicas_needed(self, share: float, drain_s: float) -> int:
        """Return the replicas needed if each has `share` of itself in use; at least one."""
        return max(1, math.ceil(self.busy / share + self.backlog_s / drain_s - _ROUNDING))


class ReplicaCount:
    """The target number of replicas of one deployment. Call it at least once per second."""

    def __init__(self, rules: ScalingRules) -> None:
        self._rules = rules
        # The minimum over recent values, as the maximum of their negatives.
        self._needed = _WindowMax(rules.up_after_s)
        self._enough = _WindowMax(rules.down_after_s)
        self._idle = _WindowMax(rules.idle_s)

    def target(self, load: FleetLoad, target: int, minimum: int, maximum: int, now_s: float) -> int:
        """Return the number of replicas that there should be; `target` is the last result."""
        free = self._unbounded(load, target, now_s)
        return min(max(free, minimum), maximum)

    def _unbounded(self, load: FleetLoad, target: int, now_s: float) -> int:
        rules = self._rules
        if load.there == 0:
            self._idle.forget()  # loading a replica may take longer than it may idle
            return max(target, 1) if load.queued else target
        if load.num_reporting == 0:
            return target
        active = self._idle(now_s, 0 if load.is_idle else 1)
        needed = self._needed(now_s, -load.replicas_needed(rules.load_high, rules.drain_s))
        enough = self._enough(now_s, load.replicas_needed(rules.load_low, rules.drain_s))
        if needed is not None and -needed > target:
            return max(target, min(-needed, math.ceil(load.there * rules.growth)))
        if enough is not None and enough < target:
            self._enough.forget()
            serving = load.there if load.there < target else 0
            return max(enough, serving, target // 2)
        return 0 if active == 0 and target == 1 else target


class _WindowMax:
    """The maximum of the values of the last `seconds`; None until that much time has passed."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._since_s: float | None = None
        self._values: deque[tuple[float, int]] = deque()  # decreasing values

    def __call__(self, now_s: float, value: int) -> int | None:
        if self._since_s is None:
            self._since_s = now_s
        while self._values and self._values[-1][1] <= value:
            self._values.pop()
        self._values.append((now_s, value))
        while self._values[0][0] < now_s - self._seconds:
            self._values.popleft()
        return self._values[0][1] if now_s - self._since_s >= self._seconds else None

    def forget(self) -> None:
        self._since_s = None
        self._values.clear()


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaStats:
    """A replica's online requests, their K/V pages, expected tokens, and rates (0 before the first)."""

    running: float = 0.0
    waiting: float = 0.0
    max_num_seqs: float = 1.0
    kv_usage: float = 0.0
    waiting_tokens: float = 0.0
    decode_tokens_per_s: float = 0.0
    mean_acceptance_length: float = 1.0
    step_s: float = 0.0
    background: float = 0.0

    def as_dict(self) -> dict[str, float]:
        return asdict(self)


class ReplicaStatsMeter:
    def __init__(self, max_num_seqs: int) -> None:
        self._max_num_seqs = max_num_seqs
        self._last: EngineStats | None = None
        self._busy_s = self._steps = self._tokens = self._finished = 0.0
        self._drafts = self._accepted = 0.0

    def update(self, stats: EngineStats) -> ReplicaStats:
        """Return the current figures. They use differences to the last snapshot; older work decays."""
        if self._last is not None:
            self._learn(self._last, stats)
        self._last = stats
        online = stats.running - stats.background_running
        waiting = stats.waiting - stats.background_waiting
        request_tokens = self._tokens / self._finished if self._finished else 0.0
        drafts, accepted = round(self._drafts), round(self._accepted)
        return ReplicaStats(
            running=online,
            waiting=waiting,
            max_num_seqs=self._max_num_seqs,
            kv_usage=stats.kv_usage * online / stats.running if stats.running else 0.0,
            waiting_tokens=waiting * request_tokens,
            decode_tokens_per_s=self._tokens / self._busy_s if self._busy_s else 0.0,
            mean_acceptance_length=mean_acceptance_length(drafts, accepted) or 1.0,
            step_s=self._busy_s / self._steps if self._steps else 0.0,
            background=stats.background_running + stats.background_waiting,
        )

    def _learn(self, last: EngineStats, now: EngineStats) -> None:
        busy_s = _busy_s(now) - _busy_s(last)
        decay = max(0.0, 1.0 - busy_s / MEMORY_S)
        self._busy_s = decay * self._busy_s + busy_s
        self._steps = decay * self._steps + now.steps - last.steps
        self._tokens = decay * self._tokens + now.generation_tokens - last.generation_tokens
        self._finished = decay * self._finished + _finished(now) - _finished(last)
        self._drafts = decay * self._drafts + now.num_drafts - last.num_drafts
        self._accepted = decay * self._accepted + now.num_accepted_tokens - last.num_accepted_tokens


def _busy_s(stats: EngineStats) -> float:
    return sum(stats.step_seconds[part] for part in BUSY_PARTS)


def _finished(stats: EngineStats) -> int:
    return sum(stats.finished.values())
