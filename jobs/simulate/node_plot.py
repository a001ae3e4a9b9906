"""Chart of a simulated node: throughput per GPU against speed per user, one curve per method."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..charts.plots import COLORS, GRAY, new_figure, save_figure
from .methods import of_method

MARKERS: Mapping[int, str] = {1: "o", 2: "s", 4: "^", 8: "D"}  # by ranks of an engine


def draw_node(figures: Mapping[str, Any], path: Path) -> None:  # Any: JSON of `node.run_node`
    points = figures["points"]
    names = list(dict.fromkeys(point["method"] for point in points))
    figure = new_figure(7.2, 4.2)
    axes = figure.subplots()
    for i, name in enumerate(names):
        color = GRAY if name == "plain" else COLORS[i % len(COLORS)]
        front = of_method(points, name)
        axes.plot([x for x, _ in front], [y for _, y in front], color=color, label=name, linewidth=1.8)
        for point in points:
            if point["method"] == name:
                where = point["user_tokens_per_s"], point["tokens_per_s_per_gpu"]
                marker = MARKERS.get(point["tp"], "o")
                axes.plot(*where, marker, color=color, markersize=5, alpha=1.0 if where in front else 0.25)
    axes.set_yscale("log")
    axes.set_xlabel("tokens/s per user (median)")
    axes.set_ylabel("tokens/s per GPU")
    axes.set_xlim(left=0)
    axes.grid(alpha=0.25, which="both", linewidth=0.5)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="upper right")
    axes.set_title(_title(figures), fontsize=9, loc="left")
    save_figure(figure, path)


def _title(figures: Mapping[str, Any]) -> str:
    options = figures["options"]
    work = options["workload"]
    return (
        f"{options['name']} on {options['num_gpus']} x {options['gpu'].upper()}, simulated; "
        f"{work['prompt_tokens']:g} tokens in, {work['output_tokens']:g} out\n"
        "ranks of an engine: 1 circle, 2 square, 4 triangle, 8 diamond; faint: off the frontier"
    )
