"""The candidates of a plan as tables and as JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from ...cluster.hardware.gpu_specs import GIB
from ...cluster.hardware.parallel_layouts import ParallelLayout
from ...cluster.planner.estimates import LayoutEstimate, LayoutMisfit, OperatingPoint
from ...cluster.simulation.simulated_engine import ReplayResult
from ..common.tables import NO_FIGURE, print_table

Figures = dict[str, Any]  # Any: JSON
_MEMORY = ["layout", "GPUs", "weights, GiB each", "K/V tokens an engine", "most requests an engine"]
_SPEED = [
    "layout",
    "user tok/s at 1",
    "batch",
    "drafts",
    "TPOT ms",
    "user tok/s",
    "tok/s a GPU",
    "node tok/s",
]
_SPEED += ["bound"]


def print_candidates(found: Sequence[LayoutEstimate | LayoutMisfit], num_gpus: int, context: int) -> None:
    fitting = [each for each in found if isinstance(each, LayoutEstimate)]
    if fitting:
        print_table(
            f"memory of {num_gpus} GPUs, with {context} tokens per sequence",
            _MEMORY,
            [*map(_memory_cells, fitting)],
        )
        print_table("speed at the best batch of each engine", _SPEED, [_speed(e, num_gpus) for e in fitting])
    for each in found:
        if isinstance(each, LayoutMisfit):
            print(f"does not fit: {each.error.message}")
        elif each.misses:
            print(f"misses the SLO: {each.layout}: {each.misses}")


def print_replays(played: Mapping[ParallelLayout, ReplayResult]) -> None:
    columns = ["layout", "goodput tok/s", "within the SLO", "p95 TTFT ms", "p95 TPOT ms"]
    rows = [
        [
            str(layout),
            f"{outcome.goodput:,.0f}",
            f"{outcome.kept:.1%}",
            f"{outcome.ttft_s * 1e3:,.1f}",
            f"{outcome.tpot_s * 1e3:.2f}",
        ]
        for layout, outcome in played.items()
    ]
    print_table("simulated trace", columns, rows)


def as_json(
    found: Sequence[LayoutEstimate | LayoutMisfit],
    played: Mapping[ParallelLayout, ReplayResult],
    num_gpus: int,
) -> list[Figures]:
    return [_figures(each, played, num_gpus) for each in found]


def _memory_cells(each: LayoutEstimate) -> list[str]:
    layout, memory = each.layout, each.memory
    weights = f"{memory.weights_bytes / GIB:.1f}"
    return [str(layout), str(layout.num_gpus), weights, f"{memory.kv_tokens:,}", f"{memory.largest_batch:,}"]


def _speed(each: LayoutEstimate, num_gpus: int) -> list[str]:
    best = each.best
    return [
        str(each.layout),
        f"{each.alone.user_tokens_per_s:,.0f}",
        str(best.batch),
        str(best.rows - 1) if each.layout.placement else NO_FIGURE,
        f"{best.tpot_s * 1e3:.2f}",
        f"{best.user_tokens_per_s:,.0f}",
        f"{best.node_tokens_per_s / num_gpus:,.0f}",
        f"{best.node_tokens_per_s:,.0f}",
        best.bound,
    ]


def _figures(
    each: LayoutEstimate | LayoutMisfit, played: Mapping[ParallelLayout, ReplayResult], num_gpus: int
) -> Figures:
    figures: Figures = {"layout": asdict(each.layout) | {"num_gpus": each.layout.num_gpus}}
    if isinstance(each, LayoutMisfit):
        return figures | {"does_not_fit": each.error.message}
    outcome = played.get(each.layout)
    return figures | {
        "room": asdict(each.memory),
        "alone": _point(each.alone, num_gpus),
        "best": _point(each.best, num_gpus),
        "misses": each.misses or None,
        "trace": None if outcome is None else asdict(outcome),
    }


def _point(point: OperatingPoint, num_gpus: int) -> Figures:
    return asdict(point) | {
        "tpot_ms": point.tpot_s * 1e3,
        "user_tokens_per_s": point.user_tokens_per_s,
        "tokens_per_s_per_gpu": point.node_tokens_per_s / num_gpus,
    }
