"""Counts what the steps of one request drafted and accepted, and optionally traces every step.

A step that drafts is a *verify step*, vLLM's `num_spec_steps`. All others produce one plain token, as the
step that completes the prompt does. Fed by `output_processor.py`; `http/generation/request_stats.py`
formats the statistics for HTTP.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Literal, NamedTuple

from ...cluster.engine.engine_core import SequenceUpdate

TokenOrigin = Literal["plain", "draft", "bonus"]


class TracedStep(NamedTuple):
    """A step that produced tokens for a request.

    Attributes:
        num_drafted: drafts verified; 0 in a plain decoding step.
        num_accepted: drafts accepted, as in `RequestMetrics`.
        num_tokens: tokens produced, cut where a stop string ends the text.
    """

    num_drafted: int
    num_accepted: int
    num_tokens: int

    @property
    def origins(self) -> Iterator[TokenOrigin]:
        """Origin of each token: accepted draft, bonus token after drafts, or plain token."""
        for place in range(self.num_tokens):
            if place < self.num_accepted:
                yield "draft"
            else:
                yield "bonus" if self.num_drafted else "plain"


class RequestSteps:
    """Statistics of all completions of one request together.

    Args:
        trace: also record each step. Only meaningful for a single completion.

    Attributes:
        num_decoding: steps that produced tokens after a completion's first.
        num_drafted: drafts verified.
        histogram: histogram[a] counts verify steps in which `a` drafts were accepted.
        trace: the steps in order; None if not requested.
    """

    def __init__(self, *, trace: bool) -> None:
        self.num_decoding = 0
        self.num_drafted = 0
        self.histogram: list[int] = []
        self.trace: list[TracedStep] | None = [] if trace else None

    def feed(self, update: SequenceUpdate, num_tokens: int, *, decodes: bool) -> None:
        """Record a step of which `num_tokens` count; `decodes`: the completion had tokens before it."""
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
    """Yield (step number, origin) of each token in order."""
    for number, step in enumerate(trace):
        for origin in step.origins:
            yield number, origin
