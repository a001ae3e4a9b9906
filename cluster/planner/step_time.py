"""Seconds of a round: every running request of an engine drafted for, verified, and the drafter told.

The roofline's floor, per rank, and what it leaves out: a loss at every launch, the sums over ranks, and what
crosses to a drafter on a GPU of its own. Still left out: HTTP, prompts that come in between, and products
that do not reach the rates (some hundred rows reach about 80 % of the arithmetic).

    colocated   draft + verify + inject, the drafter whole on every rank, its head on all of them
    split       the same one after another, or one half drafted while the other is verified, if that is less
    shared      as split, waiting for a drafter that serves the other engines in turn
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
        lent = pair.drafter is not None and pair.drafter.vocab == pair.target.vocab
        self._draft_head = self._target if lent and not layout.drafts_apart else pair.drafter or self._target

    def verify(self, batch: int, rows: int, context: int, chunk: Chunk = NO_CHUNK) -> Spent:
        """The target's pass over `rows` of each request, which all choose a token, and over a chunk.

        A plain step has rows = 1.
        """
        target, tokens = self._target, batch * rows + chunk.rows
        works = [target.linears(tokens), target.experts(tokens), target.head(batch * rows + 1)]
        works += [target.attention(batch, rows, context)] if batch else []
        works += [target.attention(1, chunk.rows, chunk.context)] if chunk.rows else []
        return self._spend(works) + self._sums(2 * target.num_layers + 1, tokens) + _launches(target)

    def draft(self, batch: int, rows: int, context: int) -> Spent:
        """The drafter's pass over blocks of `rows`; nothing if they hold no draft."""
        drafter = self._drafter
        if drafter is None or rows <= 1 or not batch:
            return Spent()
        tokens, chosen = batch * rows, batch * (rows - 1)
        works = [
            drafter.linears(tokens),
            self._draft_head.head(chosen),
            drafter.attention(batch, rows, context),
        ]
        sums = Spent() if self._layout.drafts_apart else self._sums(2, tokens)  # embedding, choice
        return self._spend(works) + sums + Spent(launches=LAUNCH_S * LAUNCHES_PER_LAYER * drafter.num_layers)

    def inject(self, rows: int) -> Spent:
        """The drafter's context of so many rows."""
        return Spent() if self._drafter is None or not rows else self._spend([self._drafter.context(rows)])

    def transfer(self, rows: int) -> Spent:
        """Features of so many rows to a drafter apart, and its drafts back."""
        if not self._layout.drafts_apart or not rows:
            return Spent()
        link, size = self._gpu.link, self._target.itemsize
        return Spent(link=link.send_s(rows * self._hidden * size) + link.latency_s)

    def round(self, batch: int, rows: int, context: int, chunk: Chunk = NO_CHUNK) -> Spent:
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

    def _in_halves(self, batch: int, rows: int, context: int) -> Spent:
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

    def _sums(self, count: int, rows: int) -> Spent:
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
