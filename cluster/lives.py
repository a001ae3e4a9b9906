"""A request's life as it is told: when it came, what it waited for, what every step did for it, how it ended.

Values alone; `journal.py` keeps what they are made of. Times are seconds on the engine's clock.

Shape legend: N steps of a request, C counts, T times.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from .plan import IntArray
from .request import FinishReason

# What keeps the first of a queue waiting: no slot is free; pages are lacking; those before it have taken the
# step's rows; its prompt may not be cut, and the step has no room for the whole of it.
Reason = Literal["slots", "pages", "rows", "whole_prompt"]
# How a stay in a slot ends: its pages went to others; it is computed anew for the drafter; for good.
Why = Literal["preempted", "refilled", "ended"]
StepKind = Literal["prefill", "verify", "plain"]

COUNTS = ("known", "planned", "verified", "accepted", "out")
TIMES = ("planned_s", "ended_s", "draft_s", "verify_s", "sample_s", "inject_s", "num_requests", "num_rows")


@dataclass(frozen=True, slots=True, kw_only=True)
class LifeStep:
    """A step that computed something of the request.

    Attributes:
        kind: "prefill" computes tokens that are known (a prompt's, or others after a preemption), "verify"
            drafts, "plain" one token.
        planned_s, ended_s: when it was planned and committed; others may have been in flight meanwhile.
        num_known: rows of known tokens; 1 is the anchor.
        num_drafted: drafts that were made, at the most.
        num_verified: of these, after the step's trim.
        num_accepted: of these, those that came out.
        num_tokens: that came out; those that are no accepted drafts are the target's own (the bonus token).
        draft_s, verify_s, sample_s, inject_s: parts of the whole step, on the first rank.
        num_requests, num_rows: of the whole step, as it was planned.
    """

    kind: StepKind
    planned_s: float
    ended_s: float
    num_known: int
    num_drafted: int
    num_verified: int
    num_accepted: int
    num_tokens: int
    draft_s: float
    verify_s: float
    sample_s: float
    inject_s: float
    num_requests: int
    num_rows: int


class SlotSteps(NamedTuple):
    """Steps of one request, as they are kept; `num_forgotten` steps of the engine came before them."""

    counts_NC: IntArray
    times_NT: NDArray[np.float64]
    num_forgotten: int

    def told(self) -> Iterator[LifeStep]:
        for counts, times in zip(self.counts_NC.tolist(), self.times_NT.tolist(), strict=True):
            known, planned, verified, accepted, out = counts
            planned_s, ended_s, draft_s, verify_s, sample_s, inject_s, num_requests, num_rows = times
            yield LifeStep(
                kind="verify" if planned else "plain" if known == 1 and out else "prefill",
                planned_s=planned_s,
                ended_s=ended_s,
                num_known=known,
                num_drafted=planned,
                num_verified=verified,
                num_accepted=accepted,
                num_tokens=out,
                draft_s=draft_s,
                verify_s=verify_s,
                sample_s=sample_s,
                inject_s=inject_s,
                num_requests=int(num_requests),
                num_rows=int(num_rows),
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Stay:
    """A time in which the request had a slot.

    Attributes:
        num_cached: tokens that were found in the prefix cache.
        waited: seconds that it waited before, by what held the queue; the rest was for a step to end.
        left_s, why: None while it runs.
        num_forgotten: steps of the engine at its beginning that are not kept any more.
    """

    entered_s: float
    num_cached: int
    waited: Mapping[Reason, float]
    left_s: float | None
    why: Why | None
    num_forgotten: int
    steps: tuple[LifeStep, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Life:
    """One request of the engine.

    Attributes:
        request_id, client_id, owner, arrival_s, priority, background, max_draft_tokens: as in `Request`.
        num_begun: output that it came with.
        ended_s, finish_reason: None while it lives.
    """

    request_id: str
    client_id: str | None
    owner: str | None
    arrival_s: float
    num_prompt_tokens: int
    num_begun: int
    max_tokens: int | None
    priority: int
    background: bool
    max_draft_tokens: int | None
    stays: tuple[Stay, ...]
    ended_s: float | None
    finish_reason: FinishReason | None
