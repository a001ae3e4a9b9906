"""Estimates a layout's tokens per second at a batch size, with the best draft length, and names the
bottleneck.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import PlacementError
from ..hardware.gpu_specs import Gpu
from ..hardware.memory_plan import MemoryPlan, find_room
from ..hardware.model_pair import LayoutDemand, ModelPair
from ..hardware.parallel_layouts import ParallelLayout
from ..hardware.step_time import StepTimes
from ..speculation.acceptance_length import expected_acceptance_length
from ..speculation.draft_lengths import draft_lengths


@dataclass(frozen=True, slots=True)
class OperatingPoint:
    """Estimated speed of one engine at one batch size.

    Attributes:
        batch: concurrent requests per engine.
        rows: rows per request and round; 1 means no drafts.
        tokens: expected output tokens per request and round.
        bound: the resource that takes most of the round.
        node_tokens_per_s: output tokens per second of all engines together.
    """

    batch: int
    rows: int
    tokens: float
    round_s: float
    bound: str
    node_tokens_per_s: float

    @property
    def tpot_s(self) -> float:
        """Seconds per output token, as a user sees it."""
        return self.round_s / self.tokens

    @property
    def user_tokens_per_s(self) -> float:
        return 1.0 / self.tpot_s


@dataclass(frozen=True, slots=True)
class LayoutEstimate:
    """The estimated speed of a layout that fits.

    Attributes:
        alone: speed with one request per engine.
        best: speed at the requested batch, or at the batch with the most tokens per second within the SLO.
        misses: the part of the demand that the layout misses, in words; empty if it meets all of it.
    """

    layout: ParallelLayout
    room: MemoryPlan
    alone: OperatingPoint
    best: OperatingPoint
    misses: str = ""


@dataclass(frozen=True, slots=True)
class LayoutMisfit:
    """A layout that does not fit, with the reason."""

    layout: ParallelLayout
    error: PlacementError


def estimate(
    pair: ModelPair, gpu: Gpu, layout: ParallelLayout, demand: LayoutDemand
) -> LayoutEstimate | LayoutMisfit:
    try:
        room = find_room(pair, gpu, layout, demand)
    except PlacementError as error:
        return LayoutMisfit(layout, error)
    times = StepTimes(pair, gpu, layout)

    def point(batch: int) -> OperatingPoint:
        return _point(times, pair, layout, batch, demand.context)

    alone, slo_s = point(1), demand.slo_tpot_s
    if demand.batch is not None:
        per_engine = -(-demand.batch // layout.replicas)
        best = point(min(per_engine, room.max_num_seqs))
        misses = (
            ""
            if per_engine <= room.max_num_seqs
            else f"holds {room.max_num_seqs} of {per_engine} requests per engine"
        )
    else:
        points = [point(batch) for batch in _batches(room.max_num_seqs)]
        within_slo = [p for p in points if slo_s is None or p.tpot_s <= slo_s]
        best, misses = max(within_slo or points[:1], key=lambda p: p.node_tokens_per_s), ""
    if slo_s is not None and best.tpot_s > slo_s:
        misses = f"{best.tpot_s * 1e3:.2f} ms per token"
    return LayoutEstimate(layout, room, alone, best, misses)


def _batches(most: int) -> list[int]:
    """Return 1, 2, 3, 4, 6, 8, 12, ... up to and including `most`."""
    return sorted({most, *(base << n for base in (1, 3) for n in range(10) if base << n < most)})


def _point(
    times: StepTimes, pair: ModelPair, layout: ParallelLayout, batch: int, context: int
) -> OperatingPoint:
    """Return the estimate at the draft length with the most throughput, which an engine would choose."""
    most = pair.num_drafts if layout.placement else 0

    def at(rows: int) -> OperatingPoint:
        time, tokens = times.round(batch, rows, context), expected_acceptance_length(pair.survival, rows)
        node = layout.replicas * batch * tokens / time.total_s
        return OperatingPoint(batch, rows, tokens, time.total_s, time.bound, node)

    return max((at(1 + drafts) for drafts in draft_lengths(most)), key=lambda p: p.node_tokens_per_s)
