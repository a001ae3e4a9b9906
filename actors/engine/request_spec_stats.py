"""What the steps of one request drafted and accepted, counted as they end; and a trace of them for who asks.

A step that drafts is a *verify step*: vLLM's `num_spec_steps`. Others bring one plain token, as the step that
ends the prompt does. Fed by `output_processor.py`; what HTTP shows of it is
`http/protocol/speculation_usage.py`'s.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Literal, NamedTuple

from ...cluster.engine.engine_core import SequenceUpdate

TokenOrigin = Literal["plain", "draft", "bonus"]


class TracedStep(NamedTuple):
    """A step that brought tokens to a request.

    Attributes:
        num_drafted: drafts that it verified; 0 where it decoded plainly.
        num_accepted: of these, as in `RequestMetrics`.
        num_tokens: that came out of it, cut where a stop string ends the text.
    """

    num_drafted: int
    num_accepted: int
    num_tokens: int

    @property
    def origins(self) -> Iterator[TokenOrigin]:
        """Of each of its tokens: an accepted draft; the target's own behind drafts, or without any."""
        for place in range(self.num_tokens):
            if place < self.num_accepted:
                yield "draft"
            else:
                yield "bonus" if self.num_drafted else "plain"


class RequestSteps:
    """Of all completions of one request together.

    Args:
        trace: also keep each step. Makes sense of a single completion only.

    Attributes:
        num_decoding: steps that brought tokens behind a completion's first.
        num_drafted: drafts verified.
        histogram: histogram[a] counts verify steps in which `a` drafts were accepted.
        trace: the steps in their order, None if not asked for.
    """

    def __init__(self, *, trace: bool) -> None:
        self.num_decoding = 0
        self.num_drafted = 0
        self.histogram: list[int] = []
        self.trace: list[TracedStep] | None = [] if trace else None

    def feed(self, update: SequenceUpdate, num_tokens: int, *, decodes: bool) -> None:
        """A step has ended; so many of its tokens count; `decodes`: the completion had tokens before it."""
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
    """(number of its step, where it comes from) of each token in turn."""
    for number, step in enumerate(trace):
        for origin in step.origins:
            yield number, origin
