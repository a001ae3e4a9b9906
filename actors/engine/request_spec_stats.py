"""Counts what the steps of one request drafted and accepted, and optionally traces every step.

A step that drafts is a *verify step*, vLLM's `num_spec_steps`. All others produce one plain token, as the
step that completes the prompt does.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Literal, NamedTuple

from ...cluster.engine.engine_core import SequenceUpdate

TokenOrigin = Literal["plain", "draft", "bonus"]


class TracedStep(NamedTuple):
    num_drafted: int  # drafts verified; 0 in a plain decoding step
    num_accepted: int  # drafts accepted, as in `RequestMetrics`
    num_tokens: int  # tokens produced, cut where a stop string ends the text

    @property
    def origins(self) -> Iterator[TokenOrigin]:
        """Yield the origin of each token: accepted draft, bonus token after drafts, or plain token."""
        for place in range(self.num_tokens):
            if place < self.num_accepted:
                yield "draft"
            else:
                yield "bonus" if self.num_drafted else "plain"


class RequestSteps:
    """`trace`: also record each step; only for a single completion."""

    def __init__(self, *, trace: bool) -> None:
        self.num_decoding = 0  # steps that produced tokens after a completion's first
        self.num_drafted = 0  # drafts verified
        self.histogram: list[int] = []  # histogram[a] counts verify steps in which `a` drafts were accepted
        # the steps in order; None if not requested
        self.trace: list[TracedStep] | None = [] if trace else None

    def feed(self, update: SequenceUpdate, num_tokens: int, *, decodes: bool) -> None:
        """Record a step of which `num_tokens` count; `decodes`: the completion had tokens before."""
        self.num_decoding += decodes and bool(update.token_ids)
        if update.num_drafted:
            self.num_drafted += update.num_drafted
            missing = update.num_accepted + 1 - len(self.histogram)
            self.histogram.extend([0] * missing)
            self.histogram[update.num_accepted] += 1
        if self.trace is not None:
            self.trace.append(TracedStep(update.num_drafted, update.num_accepted, num_tokens))

    @property
    def num_verify_steps(self) -> int:
        return sum(self.histogram)

    @property
    def num_accepted(self) -> int:
        return sum(accepted * count for accepted, count in enumerate(self.histogram))


def token_origins(trace: Iterable[TracedStep]) -> Iterator[tuple[int, TokenOrigin]]:
    for number, step in enumerate(trace):
        for origin in step.origins:
            yield number, origin
