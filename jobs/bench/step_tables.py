"""The figures of `manta bench step` as tables: steps beside floors, and what an acceptance makes of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..tables import print_table
from .idleness import print_warning

Figures = dict[str, Any]  # Any: JSON
DRAFTING, PLAIN = ("draft", "verify", "sample", "inject"), ("verify", "sample")  # parts of a step


def print_figures(figures: Figures) -> None:
    """Three tables: steps with drafts, plain steps, and what follows from the acceptance curve."""
    points, device = figures["points"], figures["device"]
    tau = figures["acceptance"]["mean_acceptance_length"]
    rates = f"{device['bytes_per_s'] / 1e9:.4g} GB/s, {device['flops'] / 1e12:.4g} TFLOP/s"
    kernels = f"{figures['dtype']}, backend {figures['attention_backend']}"
    print(f"{figures['model']} in {kernels} on {device['name']}: {rates}")
    drafts = figures["num_drafts"]
    print_table(
        f"a step with {drafts} drafts, ms: measured (floor)", *_step_table(points, "drafting", DRAFTING)
    )
    print_table("a step of plain decoding, ms", *_step_table(points, "plain", PLAIN))
    columns = ["batch", "context", "tokens/s", "plain tokens/s", "speed-up", "floor's speed-up", "best rows"]
    names = ("tokens_per_s", "plain_tokens_per_s", "speedup", "floor_speedup", "floor_best_rows")
    rows = [[str(point[name]) for name in ("batch", "context", *names)] for point in points]
    print_table(f"what a mean acceptance length of {tau:.2f} makes of it", columns, rows)
    print(
        "Weights are random and no draft is accepted: the cost of a step is measured, the mean acceptance\n"
        "length comes from the curve that was set. Floors and best rows (per request) are the roofline's."
    )
    print_warning([point["idleness"] for point in points])
    for point in figures["does_not_fit"]:
        print(f"not measured, does not fit into memory: batch {point['batch']}, context {point['context']}")


def _step_table(
    points: Sequence[Figures], kind: str, parts: Sequence[str]
) -> tuple[list[str], list[list[str]]]:
    columns = ["batch", "context", *parts, "host gap", "step", "of the floor"]
    names = (*parts, "host_gap", "step")
    rows = [
        [
            str(point["batch"]),
            str(point["context"]),
            *(_cell(point[kind][name]) for name in names),
            f"{point[kind]['of_floor']:.0%}",
        ]
        for point in points
    ]
    return columns, rows


def _cell(figure: Figures) -> str:
    floor = f" ({figure['floor_ms']:.2f})" if "floor_ms" in figure else ""
    return f"{figure['ms']:.2f}{floor}"
