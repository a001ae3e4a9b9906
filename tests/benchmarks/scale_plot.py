"""The picture of `benchmarks scale`: replicas and clients above, the first token's p95 below, over time."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot as plt

SERVE, CLIENTS, FIRST = "#0b7285", "#9aa5b1", "#c2410c"


def plot_scale(figures: Mapping[str, Any], path: Path) -> None:  # Any: JSON of `scale.run_scale`
    """Write the picture to `path` (SVG or PNG by suffix)."""
    moments, windows, end_s = figures["moments"], figures["windows"], figures["seconds"]
    at_s = [*(moment["at_s"] for moment in moments), end_s]
    with plt.rc_context({"svg.hashsalt": "manta", "font.size": 9}):
        figure, (above, below) = plt.subplots(2, sharex=True, figsize=(7.2, 4.2), layout="constrained")
        for name, color, label in (
            ("clients", CLIENTS, "clients"),
            ("serving", SERVE, "replicas that serve"),
        ):
            values = [moment[name] for moment in moments]
            axes = above if name == "serving" else above.twinx()
            axes.step(at_s, [*values, values[-1]], where="post", color=color, label=label)
            axes.set_ylabel(label, color=color)
            axes.set_ylim(bottom=0)
        window_s = windows[1]["at_s"] - windows[0]["at_s"] if len(windows) > 1 else 0.0
        below.plot(
            [window["at_s"] + window_s / 2 for window in windows],
            [window["first_token_s"]["p95"] * 1e3 for window in windows],
            color=FIRST,
            marker=".",
        )
        below.set_yscale("log")
        below.set_ylabel("first token, p95 (ms)")
        below.set_xlabel("seconds")
        failed, asked = figures["failed"], figures["requests"]
        above.set_title(f"{asked} requests, {failed} failed", fontsize=9, loc="left")
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
        plt.close(figure)
