"""Answers of one engine under load, block by block, their latencies, and sums over blocks.

A *block* here is the output of one step for one request. All figures of a sweep are computed from blocks;
from the engine's own counters only the seconds per part of a step, and the steps, are used.

Latencies are those of `vllm bench serve`. For a request that arrived at a, with n tokens at
t_1 <= .. <= t_m (several at once where a block of drafts was accepted):

    ttft = t_1 - a      e2el = t_m - a      tpot = (e2el - ttft) / (n - 1), n > 1      itl: t_(i+1) - t_i
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

from ....cluster.records.percentiles import percentiles
from ....cluster.speculation.acceptance_length import mean_acceptance_length


@dataclass(frozen=True, slots=True)
class RequestLatencies:
    """Latencies of one finished request in seconds; `tpot_s` is None for a single token."""

    ttft_s: float
    e2el_s: float
    tpot_s: float | None
    itl_s: tuple[float, ...]

    @classmethod
    def of(cls, requested_s: float, times_s: Sequence[float], num_tokens: int) -> RequestLatencies:
        ttft_s, e2el_s = times_s[0] - requested_s, times_s[-1] - requested_s
        tpot_s = (e2el_s - ttft_s) / (num_tokens - 1) if num_tokens > 1 else None
        return cls(ttft_s, e2el_s, tpot_s, tuple(later - sooner for sooner, later in pairwise(times_s)))


def describe(waits: Sequence[RequestLatencies]) -> dict[str, Any]:  # Any: JSON
    """Return mean and percentiles of each latency in milliseconds; None without values."""
    values = {
        "ttft": [each.ttft_s for each in waits],
        "tpot": [each.tpot_s for each in waits if each.tpot_s is not None],
        "e2el": [each.e2el_s for each in waits],
        "itl": [gap for each in waits for gap in each.itl_s],
    }
    return {f"{name}_ms": _describe(found) for name, found in values.items()}


def _describe(seconds: Sequence[float]) -> dict[str, Any] | None:
    found = percentiles([1e3 * each for each in seconds])
    if not found:
        return None
    return {"count": len(seconds), **{name: round(ms, 3) for name, ms in found.items()}}


class DraftBlock(NamedTuple):
    """Output of a step for a request: `num_tokens` at time `at_s`; `num_accepted` of them were drafts."""

    at_s: float
    num_tokens: int
    num_drafted: int
    num_accepted: int


@dataclass(slots=True)
class AnswerRecord:
    """Answer to one request; `ended_s` is None while it runs, or if it was aborted."""

    number: int
    category: str
    requested_s: float
    blocks: list[DraftBlock] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    ended_s: float | None = None

    @property
    def waits(self) -> RequestLatencies:
        return RequestLatencies.of(
            self.requested_s, [block.at_s for block in self.blocks], len(self.token_ids)
        )


@dataclass(frozen=True, slots=True)
class LoadPass:
    """Result of a period of load on one engine; `answers` include those aborted at its end.

    Attributes:
        num_skipped: of the steps, those that left out the drafter's pass for copies.
    """

    begin_s: float
    end_s: float
    answers: Sequence[AnswerRecord]
    step_seconds: dict[str, float]
    num_steps: int
    num_skipped: int

    @property
    def seconds(self) -> float:
        return self.end_s - self.begin_s

    @property
    def tokens(self) -> int:
        return sum(block.num_tokens for block in self._blocks)

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds

    @property
    def request_seconds(self) -> float:
        ends = ((answer, self.end_s if answer.ended_s is None else answer.ended_s) for answer in self.answers)
        return sum(end_s - answer.requested_s for answer, end_s in ends)

    @property
    def user_tokens_per_s(self) -> float:
        """Return tokens/s of one request; in a closed loop, tokens/s divided by the number of requests."""
        return self.tokens / max(self.request_seconds, 1e-9)

    @property
    def _blocks(self) -> list[DraftBlock]:
        return [block for answer in self.answers for block in answer.blocks]

    def sums(self) -> Sums:
        return Sums.of(self._blocks)


@dataclass(frozen=True, slots=True)
class Sums:
    """Sums over blocks; `drafted` and `accepted` count blocks by draft position."""

    num_blocks: int
    num_tokens: int
    num_verified: int
    drafted: tuple[int, ...]
    accepted: tuple[int, ...]

    @classmethod
    def of(cls, blocks: Sequence[DraftBlock]) -> Sums:
        """Sum over blocks, including each request's first block, which ends the prefill and has no drafts."""
        maximum = max((block.num_drafted for block in blocks), default=0)
        drafted, accepted = [0] * maximum, [0] * maximum
        for block in blocks:
            for i in range(block.num_drafted):
                drafted[i] += 1
            for i in range(block.num_accepted):
                accepted[i] += 1
        return cls(
            len(blocks),
            sum(block.num_tokens for block in blocks),
            sum(block.num_drafted > 0 for block in blocks),
            tuple(drafted),
            tuple(accepted),
        )

    @property
    def tokens_per_step(self) -> float | None:
        return self.num_tokens / self.num_blocks if self.num_blocks else None

    @property
    def mean_acceptance_length(self) -> float | None:
        return mean_acceptance_length(self.num_verified, sum(self.accepted))

    @property
    def by_position(self) -> list[float]:
        """Return, by draft position, the accepted share of the drafts that were verified."""
        return [hits / tries for hits, tries in zip(self.accepted, self.drafted, strict=True)]


def by_category(answers: Sequence[AnswerRecord]) -> dict[str, Sums]:
    blocks: dict[str, list[DraftBlock]] = defaultdict(list)
    for answer in answers:
        blocks[answer.category] += answer.blocks
    return {name: Sums.of(found) for name, found in sorted(blocks.items())}


def acceptance_json(answers: Sequence[AnswerRecord]) -> dict[str, Any]:  # Any: JSON
    """Return, by category, blocks with drafts and accepted share per position; {} without drafts."""
    return {
        name: {
            "blocks": sums.num_verified,
            "drafted": list(sums.drafted),
            "accepted": [round(share, 4) for share in sums.by_position],
        }
        for name, sums in by_category(answers).items()
        if sums.num_verified
    }
