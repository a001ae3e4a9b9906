"""A request's timeline: its arrival, its waiting, what every step did for it, and its end.

Values only; `flight_recorder.py` records them. Times are seconds on the engine's clock.

Shape legend: N steps of a request, C counts, T times.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..request.request import FinishReason
from ..step.scheduler_output import IntArray

# What keeps the head of a queue waiting. slots: no slot is free; pages: too few pages; rows: requests before
# it have used the step's rows; whole_prompt: its prompt may not be chunked, and does not fit the step.
Reason = Literal["slots", "pages", "rows", "whole_prompt"]
# How a slot interval ends. preempted: its pages went to other requests; refilled: it is computed again for
# the drafter's context; ended: for good.
Why = Literal["preempted", "refilled", "ended"]
StepKind = Literal["prefill", "verify", "plain"]

COUNTS = ("known", "planned", "verified", "accepted", "out")
TIMES = ("planned_s", "ended_s", "draft_s", "verify_s", "sample_s", "inject_s", "num_requests", "num_rows")


@dataclass(frozen=True, slots=True, kw_only=True)
class TimelineStep:
    """A step that computed something for the request.

    Attributes:
        kind: "prefill" computes known tokens (a prompt's, or others after a preemption), "verify" drafts,
            "plain" one token.
        planned_s, ended_s: when it was planned and committed; other steps may have been in flight in between.
        num_known: rows of known tokens; 1 is the anchor.
        num_drafted: most drafts that were made.
        num_verified: drafts left after the step's trim.
        num_accepted: verified drafts that were accepted.
        num_tokens: new tokens; those that are not accepted drafts are the target's own (the bonus token).
        draft_s, verify_s, sample_s, inject_s: parts of the whole step, on the first rank.
        num_requests, num_rows: those of the whole step, as planned.
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
    """Recorded steps of one request; `num_forgotten` earlier steps are not recorded any more."""

    counts_NC: IntArray
    times_NT: NDArray[np.float64]
    num_forgotten: int

    def steps(self) -> Iterator[TimelineStep]:
        for counts, times in zip(self.counts_NC.tolist(), self.times_NT.tolist(), strict=True):
            num_known, num_planned, num_verified, num_accepted, num_out = counts
            planned_s, ended_s, draft_s, verify_s, sample_s, inject_s, num_requests, num_rows = times
            yield TimelineStep(
                kind="verify" if num_planned else "plain" if num_known == 1 and num_out else "prefill",
                planned_s=planned_s,
                ended_s=ended_s,
                num_known=num_known,
                num_drafted=num_planned,
                num_verified=num_verified,
                num_accepted=num_accepted,
                num_tokens=num_out,
                draft_s=draft_s,
                verify_s=verify_s,
                sample_s=sample_s,
                inject_s=inject_s,
                num_requests=int(num_requests),
                num_rows=int(num_rows),
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotInterval:
    """An interval in which the request had a slot.

    Attributes:
        num_cached: tokens found in the prefix cache.
        num_read: those that were read into it from a tier below.
        waited: seconds that it waited before, by what held the queue; the rest was waiting for a step to end.
        released_s, why: None while it runs.
        num_forgotten: steps of the engine at its beginning that are not recorded any more.
    """

    admitted_s: float
    num_cached: int
    num_read: int
    waited: Mapping[Reason, float]
    released_s: float | None
    why: Why | None
    num_forgotten: int
    steps: tuple[TimelineStep, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestTimeline:
    """One request of the engine, as in `Request`; its end is None until then."""

    request_id: str
    client_id: str | None
    owner: str | None
    arrival_s: float
    num_prompt_tokens: int
    num_resumed: int
    max_tokens: int | None
    priority: int
    background: bool
    max_draft_tokens: int | None
    intervals: tuple[SlotInterval, ...]
    ended_s: float | None
    finish_reason: FinishReason | None
