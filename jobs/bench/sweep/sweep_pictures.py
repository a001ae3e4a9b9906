"""Charts of a sweep: throughput against the speed of one user, and the speed-up by load."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ...common.plots import Picture, draw_lines

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Figures = Mapping[str, Any]  # Any: JSON
_KEPT = ("requests", "user_tokens_per_s", "tokens_per_s")  # of an operating point


def sweep_curves(figures: Figures) -> dict[str, list[Figures]]:
    own = figures["engine"]["speculative_config"]["method"]
    names = {"plain": "plain", "adaptive": own, **{m: m for m in figures["options"]["methods"]}}
    by_temperature = _closed(figures)
    return {
        shown + (f", T = {temperature:g}" if len(by_temperature) > 1 else ""): [
            {key: (point["sides"][side] | {"requests": point["requests"]})[key] for key in _KEPT}
            for point in points
        ]
        for temperature, points in by_temperature.items()
        for side, shown in names.items()
        if side in points[0]["sides"]
    }


def pareto_picture(curves: Mapping[str, Sequence[Figures]], per: str) -> Picture:
    """Return the chart of throughput against interactivity, a curve per method; `per`: "GPU" or "machine"."""
    series: dict[str, list[tuple[float, float]]] = {}
    for name, points in curves.items():
        ordered = sorted(points, key=lambda point: (point["requests"], -point["user_tokens_per_s"]))
        series[name] = [(point["user_tokens_per_s"], point["tokens_per_s"]) for point in ordered]

    def draw(axes: Axes) -> None:
        draw_lines(axes, series, "tokens/s per user", f"tokens/s per {per}")
        axes.set_xlim(left=0)

    return Picture("pareto", draw)


def sweep_pictures(figures: Figures) -> list[Picture]:
    per = "GPU" if figures["provenance"]["gpu"] else "machine"
    by_temperature = _closed(figures)
    speedups = [_speedup(points, temperature) for temperature, points in by_temperature.items()]
    return [pareto_picture(sweep_curves(figures), per), *speedups] if speedups else []


def _closed(figures: Figures) -> dict[float, list[Figures]]:
    """Return the points by temperature; older files have mixed traffic, too, and a single temperature."""
    found: dict[float, list[Figures]] = {}
    only = figures["options"].get("temperature", 0.0)
    for point in figures["points"]:
        if point.get("traffic") != "mixed":
            found.setdefault(point.get("temperature", only), []).append(point)
    return found


def _speedup(points: Sequence[Figures], temperature: float) -> Picture:
    """Plot speed-ups over plain decoding; fixed lengths are drawn faint."""
    sides = [name for name in points[0]["sides"] if name != "plain"]
    sides.sort(key=lambda name: "-" in name)  # main sides first: the first colors differ most
    series = {
        side: [(p["requests"], p["sides"][side]["ratio_to_plain"]) for p in points if side in p["sides"]]
        for side in sides
    }
    loads = [point["requests"] for point in points]

    def draw(axes: Axes) -> None:
        faint = [side for side in sides if "-" in side]
        draw_lines(axes, series, "requests at once", "speed-up", faint=faint)
        axes.axhline(1.0, color="black", linestyle="--", linewidth=1)
        axes.set_xscale("log", base=2)
        axes.set_xticks(loads, [str(load) for load in loads])

    name = "speedup-by-load" + (f"-t{temperature:g}" if temperature else "")
    return Picture(name, draw, (6.4, 4.4))
