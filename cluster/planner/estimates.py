"""Estimates a layout's tokens/s at the best draft length; chooses by that, or by a trace's goodput."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..errors import ConfigError, PlacementError
from ..hardware.gpu_specs import Gpu
from ..hardware.memory_estimate import MemoryEstimate, estimate_memory
from ..hardware.model_pair import LayoutDemand, ModelPair
from ..hardware.parallel_layouts import ParallelLayout
from ..hardware.step_time import StepTimes
from ..simulation.simulated_engine import ReplayResult
from ..speculation.acceptance_length import expected_acceptance_length
from ..speculation.draft_length_policy import draft_lengths

# Relative difference below which the simpler layout wins; the estimates are no more accurate than this.
TIE_MARGIN = 0.02
_SIMPLEST = ("colocated", None, "split", "shared")


@dataclass(frozen=True, slots=True)
class OperatingPoint:
    """Estimated speed of an engine: `tokens` per request and round; `bound` takes most of its time."""

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
    """The estimated speed of a layout that fits; `misses` is the part of the demand that it misses."""

    layout: ParallelLayout
    memory: MemoryEstimate
    alone: OperatingPoint
    best: OperatingPoint
    misses: str = ""


@dataclass(frozen=True, slots=True)
class LayoutMisfit:
    layout: ParallelLayout
    error: PlacementError


def estimate(
    pair: ModelPair, gpu: Gpu, layout: ParallelLayout, demand: LayoutDemand
) -> LayoutEstimate | LayoutMisfit:
    """Return a layout's speed for one request and at its best batch, or why it does not fit.

    The best batch is the demand's, or else the one with the most tokens per second within the SLO.
    """
    try:
        memory = estimate_memory(pair, gpu, layout, demand)
    except PlacementError as error:
        return LayoutMisfit(layout, error)
    times = StepTimes(pair, gpu, layout)

    def point(batch: int) -> OperatingPoint:
        return _point(times, pair, layout, batch, demand.context)

    alone, slo_s = point(1), demand.slo_tpot_s
    if demand.batch is not None:
        per_engine = -(-demand.batch // layout.replicas)
        best = point(min(per_engine, memory.max_num_seqs))
        misses = (
            ""
            if per_engine <= memory.max_num_seqs
            else f"holds {memory.max_num_seqs} of {per_engine} requests per engine"
        )
    else:
        points = [point(batch) for batch in _batches(memory.max_num_seqs)]
        within_slo = [p for p in points if slo_s is None or p.tpot_s <= slo_s]
        best, misses = max(within_slo or points[:1], key=lambda p: p.node_tokens_per_s), ""
    if slo_s is not None and best.tpot_s > slo_s:
        misses = f"{best.tpot_s * 1e3:.2f} ms per token"
    return LayoutEstimate(layout, memory, alone, best, misses)


def _batches(maximum: int) -> list[int]:
    """Return 1, 2, 3, 4, 6, 8, 12, ... up to and including `maximum`."""
    return sorted({maximum, *(base << n for base in (1, 3) for n in range(10) if base << n < maximum)})


def _point(
    times: StepTimes, pair: ModelPair, layout: ParallelLayout, batch: int, context: int
) -> OperatingPoint:
    """Return the estimate at the draft length with the most throughput, which an engine would choose."""
    maximum = pair.num_drafts if layout.placement else 0

    def at(rows: int) -> OperatingPoint:
        time, tokens = times.round(batch, rows, context), expected_acceptance_length(pair.survival, rows)
        node = layout.replicas * batch * tokens / time.total_s
        return OperatingPoint(batch, rows, tokens, time.total_s, time.bound, node)

    return max((at(1 + drafts) for drafts in draft_lengths(maximum)), key=lambda p: p.node_tokens_per_s)


def check_fitting(found: Sequence[LayoutEstimate | LayoutMisfit]) -> list[LayoutEstimate]:
    fitting = [each for each in found if isinstance(each, LayoutEstimate)]
    if fitting:
        return fitting
    incompatibilities = [each for each in found if isinstance(each, LayoutMisfit)]
    if not incompatibilities:
        raise PlacementError("gpus: no layout has a place on so few GPUs. Give at least 1.", param="gpus")
    raise max(incompatibilities, key=lambda misfit: misfit.layout.tp).error


def choose(
    fitting: Sequence[LayoutEstimate], demand: LayoutDemand, num_gpus: int
) -> tuple[LayoutEstimate, str]:
    """Return the layout with the most tokens per second that meets the demand, and why, as a sentence."""
    holding = [each for each in fitting if not each.misses]
    if not holding:
        raise _none_holds(fitting, demand)
    chosen = _best(holding, {each.layout: each.best.node_tokens_per_s for each in holding})
    point, within = (
        chosen.best,
        "" if demand.slo_tpot_s is None else f" within {demand.slo_tpot_s * 1e3:g} ms each",
    )
    return chosen, (
        f"{chosen.layout}: the most tokens per second per GPU{within}, "
        f"{point.node_tokens_per_s / num_gpus:,.0f} at {point.batch} requests per engine, "
        f"{point.user_tokens_per_s:,.0f} for each user{_tie_note(chosen, holding)}."
    )


def choose_by_trace(
    fitting: Sequence[LayoutEstimate], played: Mapping[ParallelLayout, ReplayResult]
) -> tuple[LayoutEstimate, str]:
    """Return the layout with the most goodput, and a sentence that says why."""
    chosen = _best(fitting, {layout: outcome.goodput for layout, outcome in played.items()})
    outcome = played[chosen.layout]
    if not outcome.goodput:
        raise ConfigError(
            "No request of the trace keeps the SLO in any layout. Raise --slo-tpot-ms or --slo-ttft-ms, or "
            "take faster GPUs.",
            param="slo_tpot_ms",
        )
    return chosen, (
        f"{chosen.layout}: the most goodput on the trace, {outcome.goodput:,.0f} tokens/s, with "
        f"{outcome.kept:.1%} of the requests within the SLO (p95: {outcome.ttft_s * 1e3:,.0f} ms to the "
        f"first token, {outcome.tpot_s * 1e3:.2f} ms per token)."
    )


def _best(candidates: Sequence[LayoutEstimate], value: Mapping[ParallelLayout, float]) -> LayoutEstimate:
    """Return the simplest layout within `TIE_MARGIN` of the best: fewest processes, then the lowest tp."""
    maximum = max(value[each.layout] for each in candidates)
    near_best = [each for each in candidates if value[each.layout] >= (1 - TIE_MARGIN) * maximum]
    return min(near_best, key=lambda each: (_SIMPLEST.index(each.layout.placement), each.layout.tp))


def _tie_note(chosen: LayoutEstimate, holding: Sequence[LayoutEstimate]) -> str:
    maximum = max(each.best.node_tokens_per_s for each in holding)
    if chosen.best.node_tokens_per_s >= maximum:
        return ""
    return f" (others within {TIE_MARGIN:.0%} are less simple)"


def _none_holds(fitting: Sequence[LayoutEstimate], demand: LayoutDemand) -> ConfigError:
    nearest = min(fitting, key=lambda each: each.best.tpot_s)
    at = f"{nearest.best.batch} requests per engine"
    if demand.slo_tpot_s is None or nearest.best.tpot_s <= demand.slo_tpot_s:
        largest = max(each.layout.replicas * each.memory.max_num_seqs for each in fitting)
        return ConfigError(
            f"batch={demand.batch}: no layout holds more than {largest} requests of {demand.context} tokens "
            "at once. Lower --batch or --context, or use more GPUs.",
            param="batch",
        )
    return ConfigError(
        f"slo_tpot_ms={demand.slo_tpot_s * 1e3:g}: the fastest layout, {nearest.layout}, takes "
        f"{nearest.best.tpot_s * 1e3:.2f} ms per token at {at}. Raise --slo-tpot-ms, lower --batch, or take "
        "faster GPUs.",
        param="slo_tpot_ms",
    )
