"""Plot of `benchmarks scale`: replicas and clients over time, and the p95 time to first token."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from manta.jobs.common.plots import COLORS, GRAY, TEAL, new_figure, save_figure


def plot_scale(figures: Mapping[str, Any], path: Path) -> None:  # Any: JSON of `scale.run_scale`
    moments, windows, end_s = figures["moments"], figures["windows"], figures["seconds"]
    at_s = [*(moment["at_s"] for moment in moments), end_s]
    window_s = windows[1]["at_s"] - windows[0]["at_s"] if len(windows) > 1 else 0.0
    figure = new_figure(7.2, 4.2)
    above, below = figure.subplots(2, sharex=True)
    for axes, name, color, label in (
        (above.twinx(), "clients", GRAY, "clients"),
        (above, "serving", TEAL, "serving replicas"),
    ):
        values = [moment[name] for moment in moments]
        axes.step(at_s, [*values, values[-1]], where="post", color=color)
        axes.set_ylabel(label, color=color)
        axes.set_ylim(bottom=0)
    below.plot(
        [window["at_s"] + window_s / 2 for window in windows],
        [window["first_token_s"]["p95"] * 1e3 for window in windows],
        color=COLORS[1],
        marker=".",
    )
    below.set_yscale("log")
    below.set_ylabel("first token, p95 (ms)")
    below.set_xlabel("seconds")
    above.set_title(f"{figures['requests']} requests, {figures['failed']} failed", fontsize=9, loc="left")
    save_figure(figure, path)
