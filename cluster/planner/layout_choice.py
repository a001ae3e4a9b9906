"""Chooses a layout: the highest throughput that meets the demand, or the highest goodput on a trace."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ..errors import ConfigError, PlacementError
from ..hardware.model_pair import LayoutDemand
from ..hardware.parallel_layouts import ParallelLayout
from ..simulation.trace_replay import ReplayResult
from .estimates import LayoutEstimate, LayoutMisfit

# Relative difference below which the simpler layout wins; the estimates are no more accurate than this.
LEVEL = 0.02
_SIMPLEST = ("colocated", None, "split", "shared")


def check_fitting(found: Sequence[LayoutEstimate | LayoutMisfit]) -> list[LayoutEstimate]:
    """Return the layouts that fit."""
    fitting = [each for each in found if isinstance(each, LayoutEstimate)]
    if fitting:
        return fitting
    misfits = [each for each in found if isinstance(each, LayoutMisfit)]
    if not misfits:
        raise PlacementError("gpus: no layout has a place on so few GPUs. Give at least 1.", param="gpus")
    raise max(misfits, key=lambda misfit: misfit.layout.tp).error


def choose(
    fitting: Sequence[LayoutEstimate], demand: LayoutDemand, num_gpus: int
) -> tuple[LayoutEstimate, str]:
    """Return the layout with the most tokens per second that meets the demand, and a sentence that says why."""
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
    """Return the simplest layout within `LEVEL` of the best: fewest processes, then the lowest tp."""
    most = max(value[each.layout] for each in candidates)
    near_best = [each for each in candidates if value[each.layout] >= (1 - LEVEL) * most]
    return min(near_best, key=lambda each: (_SIMPLEST.index(each.layout.placement), each.layout.tp))


def _tie_note(chosen: LayoutEstimate, holding: Sequence[LayoutEstimate]) -> str:
    most = max(each.best.node_tokens_per_s for each in holding)
    if chosen.best.node_tokens_per_s >= most:
        return ""
    return f" (others within {LEVEL:.0%} are less simple)"


def _none_holds(fitting: Sequence[LayoutEstimate], demand: LayoutDemand) -> ConfigError:
    nearest = min(fitting, key=lambda each: each.best.tpot_s)
    at = f"{nearest.best.batch} requests per engine"
    if demand.slo_tpot_s is None or nearest.best.tpot_s <= demand.slo_tpot_s:
        largest = max(each.layout.replicas * each.room.max_num_seqs for each in fitting)
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
