"""How many replicas there should be, from what the replicas say of themselves. Arithmetic and a short memory.

    need(share) = slots or pages in use / share  +  seconds that backlogs take / drain_s       [replicas]

The first part follows what runs, the second what waits: a backlog is worth replicas only if the rate at which
its replica decodes, drafts and all, does not drain it soon enough. More replicas are wanted when
need(load_high) is above what is wanted already, fewer when need(load_low) was below it for `down_after_s`; in
between nothing changes, so a steady load never makes the number swing. Replicas that are starting count for
what is wanted (they are not asked for twice), not for what there is: need is what runs and waits now, and no
replica that serves is given up while others still start. Background work asks for nothing, but keeps the last
replica.

Not Serve's protocol (`actors/autoscaling.py`), not a simulation (`tests/benchmarks/simulate/`): both call
`ReplicaCount`.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, fields

from .errors import ConfigError
from .replica_figures import ReplicaFigures

_ROUNDING = 1e-9  # so that 3.0000000001 replicas are three


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingRules:
    """How eagerly the number of replicas follows the load.

    Attributes:
        load_high: share of a replica's slots (or K/V pages) in use above which there are more replicas.
        load_low: share that must not be exceeded after replicas have gone. The wider the band, the calmer.
        drain_s: a backlog is to be gone after so many seconds; shorter asks for more replicas.
        up_after_s: more replicas only if they were wanted for so long.
        down_after_s: fewer only if fewer were enough for so long; starts anew when some have gone.
        idle_s: without any request for so long the last replica goes too, where none is allowed.
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
                "0 < load_low < load_high <= 1, as 0.60 and 0.75.",
                param="load_low",
            )
        if self.drain_s <= 0.0:
            raise ConfigError(f"drain_s={self.drain_s:g} must be seconds above 0.", param="drain_s")
        for name in ("up_after_s", "down_after_s", "idle_s"):
            if getattr(self, name) < 0.0:
                raise ConfigError(f"{name}={getattr(self, name):g} must be 0 or more seconds.", param=name)
        if self.growth <= 1.0:
            raise ConfigError(f"growth={self.growth:g} must be above 1, as 2 for twice.", param="growth")


@dataclass(frozen=True, slots=True)
class FleetLoad:
    """What all replicas of a deployment say together.

    Attributes:
        there: replicas that serve.
        heard: of them, those whose figures are known.
        busy: replicas' worth of slots or pages in use, whichever is scarcer in each.
        backlog_s: seconds that the replicas need for what waits in them, each for its own, summed up.
        queued: requests that wait in front of the replicas.
        background: requests of background work.
    """

    there: int
    heard: int = 0
    busy: float = 0.0
    backlog_s: float = 0.0
    queued: float = 0.0
    background: float = 0.0

    @classmethod
    def of(cls, replicas: Iterable[ReplicaFigures], there: int, queued: float = 0.0) -> FleetLoad:
        """Of the figures of some replicas; those not heard of are taken to be as busy as the others."""
        heard, busy, backlog_s, background, slots = 0, 0.0, 0.0, 0.0, 0.0
        for replica in replicas:
            heard += 1
            slots = max(slots, replica.max_num_seqs)
            busy += max(replica.running / replica.max_num_seqs, replica.kv_usage)
            background += replica.background
            if replica.waiting and replica.waiting_tokens and replica.decode_tokens_per_s:
                backlog_s += replica.waiting_tokens / replica.decode_tokens_per_s
            else:  # how long they will be is not known yet: they need slots, at least
                busy += replica.waiting / replica.max_num_seqs
        if heard:
            busy = busy * max(there, heard) / heard + queued / slots
        return cls(there, heard, busy, backlog_s, queued, background)

    @property
    def is_idle(self) -> bool:
        return self.busy == self.backlog_s == self.queued == self.background == 0.0

    def need(self, share: float, drain_s: float) -> int:
        """Replicas of which each has `share` of itself in use; one at least."""
        return max(1, math.ceil(self.busy / share + self.backlog_s / drain_s - _ROUNDING))


class ReplicaCount:
    """The number that is wanted of one deployment. Call it every second or oftener."""

    def __init__(self, rules: ScalingRules) -> None:
        self._rules = rules
        # Lowest of the last moments: the highest of the negative numbers.
        self._more = _Highest(rules.up_after_s)
        self._enough = _Highest(rules.down_after_s)
        self._idle = _Highest(rules.idle_s)

    def wanted(self, load: FleetLoad, target: int, fewest: int, most: int, now_s: float) -> int:
        """How many replicas there should be.

        Args:
            load: of those that serve.
            target: that were wanted last; those that are starting are among them.
            fewest, most: bounds of the answer.
            now_s: on a clock that only grows.
        """
        free = self._within_rules(load, target, now_s)
        return min(max(free, fewest), most)

    def _within_rules(self, load: FleetLoad, target: int, now_s: float) -> int:
        rules = self._rules
        if load.there == 0:
            self._idle.forget()  # loading may take longer than a replica may idle
            return max(target, 1) if load.queued else target
        if load.heard == 0:
            return target
        active = self._idle(now_s, 0 if load.is_idle else 1)
        more = self._more(now_s, -load.need(rules.load_high, rules.drain_s))
        enough = self._enough(now_s, load.need(rules.load_low, rules.drain_s))
        if more is not None and -more > target:
            return max(target, min(-more, math.ceil(load.there * rules.growth)))
        if enough is not None and enough < target:
            self._enough.forget()
            kept = load.there if load.there < target else 0
            return max(enough, kept, target // 2)
        return 0 if active == 0 and target == 1 else target


class _Highest:
    """The highest of the values of the last `seconds`; None until as many have passed."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._since_s: float | None = None
        self._kept: deque[tuple[float, int]] = deque()  # later ones are lower

    def __call__(self, now_s: float, value: int) -> int | None:
        if self._since_s is None:
            self._since_s = now_s
        while self._kept and self._kept[-1][1] <= value:
            self._kept.pop()
        self._kept.append((now_s, value))
        while self._kept[0][0] < now_s - self._seconds:
            self._kept.popleft()
        return self._kept[0][1] if now_s - self._since_s >= self._seconds else None

    def forget(self) -> None:
        self._since_s = None
        self._kept.clear()
