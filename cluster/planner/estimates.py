"""What a layout would give: tokens per second at a batch, with as many drafts as pay, and what bounds it."""

from __future__ import annotations

from dataclasses import dataclass

from ..acceptance import expected_acceptance_length
from ..errors import PlacementError
from ..speculation.draft_lengths import draft_lengths
from .gpus import Gpu
from .layouts import Layout
from .pair import Demand, Pair
from .room import Room, find_room
from .step_time import StepTimes


@dataclass(frozen=True, slots=True)
class Point:
    """One engine at one batch.

    Attributes:
        batch: requests of each engine at once.
        rows: of each request in a round; 1 drafts nothing.
        tokens: of each request in a round.
        bound: what takes most of the round.
        node_tokens_per_s: of all engines.
    """

    batch: int
    rows: int
    tokens: float
    round_s: float
    bound: str
    node_tokens_per_s: float

    @property
    def tpot_s(self) -> float:
        """Seconds per output token of a user."""
        return self.round_s / self.tokens

    @property
    def user_tokens_per_s(self) -> float:
        return 1.0 / self.tpot_s


@dataclass(frozen=True, slots=True)
class Estimate:
    """A layout that fits.

    Attributes:
        alone: one request per engine.
        best: at the batch that was asked for, or at that of most tokens per second within the SLO.
        misses: what is asked and does not hold, in words; empty if all does.
    """

    layout: Layout
    room: Room
    alone: Point
    best: Point
    misses: str = ""


@dataclass(frozen=True, slots=True)
class Misfit:
    """A layout that does not fit, and why."""

    layout: Layout
    error: PlacementError


def estimate(pair: Pair, gpu: Gpu, layout: Layout, demand: Demand) -> Estimate | Misfit:
    try:
        room = find_room(pair, gpu, layout, demand)
    except PlacementError as error:
        return Misfit(layout, error)
    times = StepTimes(pair, gpu, layout)

    def point(batch: int) -> Point:
        return _point(times, pair, layout, batch, demand.context)

    alone, slo_s = point(1), demand.slo_tpot_s
    if demand.batch is not None:
        each = -(-demand.batch // layout.replicas)
        best = point(min(each, room.max_num_seqs))
        misses = (
            "" if each <= room.max_num_seqs else f"holds {room.max_num_seqs} of {each} requests per engine"
        )
    else:
        points = [point(batch) for batch in _batches(room.max_num_seqs)]
        held = [p for p in points if slo_s is None or p.tpot_s <= slo_s]
        best, misses = max(held or points[:1], key=lambda p: p.node_tokens_per_s), ""
    if slo_s is not None and best.tpot_s > slo_s:
        misses = f"{best.tpot_s * 1e3:.2f} ms per token"
    return Estimate(layout, room, alone, best, misses)


def _batches(most: int) -> list[int]:
    return sorted({most, *(base << n for base in (1, 3) for n in range(10) if base << n < most)})


def _point(times: StepTimes, pair: Pair, layout: Layout, batch: int, context: int) -> Point:
    """With the number of drafts that brings most, as the engine finds it by measuring."""
    most = pair.num_drafts if layout.placement else 0

    def at(rows: int) -> Point:
        spent, tokens = times.round(batch, rows, context), expected_acceptance_length(pair.survival, rows)
        node = layout.replicas * batch * tokens / spent.total_s
        return Point(batch, rows, tokens, spent.total_s, spent.bound, node)

    return max((at(1 + drafts) for drafts in draft_lengths(most)), key=lambda p: p.node_tokens_per_s)
