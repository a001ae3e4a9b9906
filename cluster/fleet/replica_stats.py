"""The load report of a replica for autoscaling, computed from snapshots of its engine.

Background work requests no replicas, so what it runs, queues and holds is excluded. The decode rate includes
speculation, as it is measured: tokens per second while the engine was busy, with whatever drafter, acceptance
and prompts there were. Made in the replica (`actors/replica.py`), used by `autoscaling.py`.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from ..speculation.acceptance_length import mean_acceptance_length

if TYPE_CHECKING:  # would import NumPy and the scheduler into Serve's controller
    from ..engine.engine_core import EngineStats

MEMORY_S = 20.0  # seconds of work after which older measurements have lost two thirds of their weight
BUSY_PARTS = ("schedule", "execute", "commit")


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaStats:
    """A replica's load and rates.

    Attributes:
        running, waiting: online requests.
        max_num_seqs: requests that can run at once.
        kv_usage: 0 to 1; share of K/V pages held by online requests (in proportion to their number).
        waiting_tokens: expected tokens of waiting requests, by the mean of finished ones; 0 before one has
            finished.
        decode_tokens_per_s: of all running requests together, while the engine was busy; 0 before that.
        mean_acceptance_length: tokens per verified block; 1 without drafts.
        step_s: seconds of a step.
        background: background requests, running or waiting.
    """

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
        """Return the statistics as Serve expects them."""
        return asdict(self)


class ReplicaStatsMeter:
    """Computes a replica's figures from consecutive snapshots of its engine."""

    def __init__(self, max_num_seqs: int) -> None:
        self._max_num_seqs = max_num_seqs
        self._last: EngineStats | None = None
        self._busy_s = self._steps = self._tokens = self._finished = 0.0
        self._drafts = self._accepted = 0.0

    def figures(self, stats: EngineStats) -> ReplicaStats:
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
