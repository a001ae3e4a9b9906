"""The speed-up picture of a benchmark file: bars of tokens/s, plain and DFlash, per number of requests."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot as plt

PLAIN, DFLASH = "#9aa5b1", "#0b7285"


def plot_speedup(figures: Mapping[str, Any], path: Path) -> None:  # Any: JSON of `bench.run_bench`
    """Write the picture of `figures` to `path` (SVG or PNG by suffix)."""
    points = figures["points"]
    where = range(len(points))
    with plt.rc_context({"svg.hashsalt": "manta", "font.size": 10}):
        figure, axes = plt.subplots(figsize=(6.4, 3.2), layout="constrained")
        for side, offset, color, label in (
            ("off", -0.2, PLAIN, "plain decoding"),
            ("on", 0.2, DFLASH, "DFlash"),
        ):
            heights = [point[side]["tokens_per_s"] for point in points]
            bars = axes.bar([x + offset for x in where], heights, 0.38, color=color, label=label)
            axes.bar_label(bars, labels=[f"{height:.0f}" for height in heights], padding=2)
        for x, point in zip(where, points, strict=True):
            top = max(point[side]["tokens_per_s"] for side in ("on", "off"))
            axes.annotate(
                f"{point['speedup']:.2f}x",
                (x, top),
                xytext=(0, 16),
                textcoords="offset points",
                ha="center",
                weight="bold",
            )
        axes.set_xticks(list(where), [_label(point["requests"]) for point in points])
        axes.set_ylabel("tokens/s")
        axes.margins(y=0.25)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, loc="upper left")
        axes.set_title(_title(figures), fontsize=9, loc="left")
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
        plt.close(figure)


def _label(requests: int) -> str:
    return "1 request" if requests == 1 else f"{requests} requests"


def _title(figures: Mapping[str, Any]) -> str:
    machine = figures["provenance"]["gpu"] or figures["provenance"]["cpu"]
    return f"{Path(figures['engine']['model']).name}, {figures['provenance']['cores']} cores, {machine}"
