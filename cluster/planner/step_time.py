"""Seconds of a round: every running request of an engine drafted for, verified, and the drafter told.

The roofline's floor, per rank, and what it leaves out: a loss at every launch, the sums over ranks, and what
crosses to a drafter on a GPU of its own. Still left out: HTTP, prompts that come in between, and products
that do not reach the rates (some hundred rows reach about 80 % of the arithmetic).

    colocated   draft + verify + inject, the drafter whole on every rank, its head on all of them
    split       the same one after another, or one half drafted while the other is verified, if that is less
    shared      as split, waiting for a drafter that serves the other engines in turn

A drafter that is sequential (EAGLE-3) makes its drafts in as many passes, whole on every rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..model_shape import ModelShape, Work
from .gpus import Gpu
from .layouts import Layout
from .pair import Pair

# Estimates, worked out in docs/benchmarks/gpu.md: seconds that each kernel loses beside its floor, and
# kernels of a step: so many a layer, more where it has experts (router, choice, order, two products, sum in
# place of two products), and around the layers of target and drafter together.
LAUNCH_S = 3e-6
LAUNCHES_PER_LAYER, LAUNCHES_AROUND = 6, 27
LAUNCHES_OF_EXPERTS = 4
LAUNCHES_OF_DRAFT = 5  # around the layers of a pass for one draft: embedding, fc, norm, head, choice


@dataclass(frozen=True, slots=True)
class Spent:
    """Seconds, by what bounds them.

    Attributes:
        bytes: of memory.
        link: between GPUs.
        launches: of kernels.
        queue: for a drafter that serves somebody else.
    """

    bytes: float = 0.0
    arithmetic: float = 0.0
    link: float = 0.0
    launches: float = 0.0
    queue: float = 0.0

    def __add__(self, other: Spent) -> Spent:
        return Spent(
            self.bytes + other.bytes,
            self.arithmetic + other.arithmetic,
            self.link + other.link,
            self.launches + other.launches,
            self.queue + other.queue,
        )

    def times(self, count: float) -> Spent:
        """So many of the same, one after the other."""
        return Spent(
            self.bytes * count,
            self.arithmetic * count,
            self.link * count,
            self.launches * count,
            self.queue * count,
        )

    @property
    def total_s(self) -> float:
        return self.bytes + self.arithmetic + self.link + self.launches + self.queue

    @property
    def bound(self) -> str:
        """What takes most of it."""
        return max(("bytes", "arithmetic", "link", "launches", "queue"), key=lambda name: getattr(self, name))


@dataclass(frozen=True, slots=True)
class Chunk:
    """Rows of prompts in a step, behind so many tokens of context."""

    rows: int = 0
    context: int = 0


NO_CHUNK = Chunk()


class StepTimes:
    """Of one engine of a layout."""

    def __init__(self, pair: Pair, gpu: Gpu, layout: Layout) -> None:
        self._gpu, self._layout = gpu, layout
        self._target, self._hidden = pair.target.rank(layout.tp), pair.target.hidden
        self._drafter = pair.drafter if layout.placement else None
        self._sequential = pair.sequential
        lent = not pair.sequential and pair.drafter is not None and pair.drafter.vocab == pair.target.vocab
        self._draft_head = self._target if lent and not layout.drafts_apart else pair.drafter or self._target

    @property
    def overlaps(self) -> bool:
        """Whether drafter and target work beside each other, so that a round is not the sum of its parts."""
        return self._layout.drafts_apart

    def verify(self, batch: int, rows: float, context: float, chunk: Chunk = NO_CHUNK) -> Spent:
        """The target's pass over `rows` of each request, which all choose a token, and over a chunk.

        A plain step has rows = 1. Where requests differ, `rows` and `context` are their means.
        """
        target, tokens = self._target, batch * rows + chunk.rows
        works = [target.linears(tokens), target.experts(tokens), target.head(batch * rows + 1)]
        works += [target.attention(batch, rows, context), target.states(batch, rows)] if batch else []
        if chunk.rows:  # which leaves no records
            works += [target.prompt_attention(chunk.rows, chunk.context), target.states(1, 1)]
        return self._spend(works) + self._sums(2 * target.num_layers + 1, tokens) + _launches(target)

    def draft(self, batch: int, rows: float, context: float) -> Spent:
        """The drafter's pass over blocks of `rows`; nothing if they hold no draft."""
        drafter = self._drafter
        if drafter is None or rows <= 1 or not batch:
            return Spent()
        if self._sequential:
            return self._draft_one_by_one(drafter, batch, rows - 1, context)
        tokens, chosen = batch * rows, batch * (rows - 1)
        works = [
            drafter.linears(tokens),
            self._draft_head.head(chosen),
            drafter.attention(batch, rows, context),
        ]
        sums = Spent() if self._layout.drafts_apart else self._sums(2, tokens)  # embedding, choice
        return self._spend(works) + sums + Spent(launches=LAUNCH_S * LAUNCHES_PER_LAYER * drafter.num_layers)

    def _draft_one_by_one(self, drafter: ModelShape, batch: int, drafts: float, context: float) -> Spent:
        """A pass for every draft; the drafter and its head are whole on every rank, so nothing is summed."""
        works = [drafter.linears(batch), drafter.head(batch), drafter.attention(batch, 1, context)]
        launches = LAUNCHES_PER_LAYER * drafter.num_layers + LAUNCHES_OF_DRAFT
        return (self._spend(works) + Spent(launches=LAUNCH_S * launches)).times(drafts)

    def inject(self, rows: float) -> Spent:
        """The drafter's context of so many rows."""
        return Spent() if self._drafter is None or not rows else self._spend([self._drafter.context(rows)])

    def transfer(self, rows: float) -> Spent:
        """Features of so many rows to a drafter apart, and its drafts back."""
        if not self._layout.drafts_apart or not rows:
            return Spent()
        link, size = self._gpu.link, self._target.itemsize
        return Spent(link=link.send_s(rows * self._hidden * size) + link.latency_s)

    def round(self, batch: int, rows: float, context: float, chunk: Chunk = NO_CHUNK) -> Spent:
        """All requests of an engine advance by a block of `rows`, and some prompts by a chunk.

        With rows = 1 nothing is drafted.
        """
        tokens = (batch * rows if rows > 1 else 0) + chunk.rows
        draft = self.draft(batch, rows, context) + self.inject(tokens)
        whole = self.verify(batch, rows, context, chunk) + draft + self.transfer(tokens)
        if self._layout.placement == "shared":
            return whole + Spent(queue=_waiting_s(draft.total_s, whole.total_s, self._layout.replicas))
        if self._layout.placement == "split" and batch > 1 and rows > 1 and not chunk.rows:
            return min(whole, self._in_halves(batch, rows, context), key=lambda spent: spent.total_s)
        return whole

    def _in_halves(self, batch: int, rows: float, context: float) -> Spent:
        half = -(-batch // 2)
        sent = self.transfer(half * rows)
        draft = self.draft(half, rows, context) + self.inject(half * rows) + sent
        longer = max(self.verify(half, rows, context) + sent, draft, key=lambda spent: spent.total_s)
        return longer + longer

    def _spend(self, works: Sequence[Work]) -> Spent:
        """One after the other."""
        device, spent = self._gpu.device, Spent()
        for work in works:
            seconds = device.seconds(work)
            moved = work.num_bytes / device.bytes_per_s >= work.flop / device.flops
            spent += Spent(bytes=seconds) if moved else Spent(arithmetic=seconds)
        return spent

    def _sums(self, count: int, rows: float) -> Spent:
        num_bytes = rows * self._hidden * self._target.itemsize
        return Spent(link=count * self._gpu.link.all_reduce_s(self._layout.tp, num_bytes))


def _launches(target: ModelShape) -> Spent:
    routed = LAUNCHES_OF_EXPERTS * sum(times for _, times in target.routed)
    count = LAUNCHES_PER_LAYER * target.num_layers + routed + LAUNCHES_AROUND
    return Spent(launches=LAUNCH_S * count)


def _waiting_s(service_s: float, round_s: float, engines: int) -> float:
    """Seconds of a round in which one of `engines` waits for the drafter that they share.

    Mean value analysis of a closed queue: each comes back when the rest of its round is through. It takes
    service times to be random, and so errs on the long side for engines that are alike.
    """
    away_s, in_line, there_s = round_s - service_s, 0.0, service_s
    for count in range(1, engines + 1):
        there_s = service_s * (1.0 + in_line)
        in_line = count * there_s / (away_s + there_s)
    return there_s - service_s
