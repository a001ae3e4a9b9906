"""Charts of a sweep's or a Pareto run's figures, drawn by `jobs/charts/plots.py`.

`report_page.py` puts them into a report; `write_svgs` of `plots.py` writes them to files.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from ...charts.plots import COLORS, Picture, draw_lines, draw_shares, name_rows, rows_size, show_legend
from .latencies import CURVE_PERCENTILES

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Figures = Mapping[str, Any]  # Any: JSON
PARTS = ("schedule", "draft", "verify", "sample", "inject", "commit")


@dataclass(frozen=True, slots=True)
class Operating:
    """Operating point of a method at one load: tokens/s of one request, and of one GPU (or machine)."""

    requests: int | None
    user_tokens_per_s: float
    tokens_per_s: float


def pareto_picture(curves: Mapping[str, Sequence[Operating]], per: str) -> Picture:
    """Return the chart of throughput against interactivity, one curve per method.

    Args:
        per: "GPU" or "machine".
    """
    series: dict[str, list[tuple[float, float]]] = {}
    table = [["method", "requests at once", "tokens/s per user", f"tokens/s per {per}"]]
    for name, points in curves.items():
        ordered = sorted(points, key=lambda point: (point.requests or 0, -point.user_tokens_per_s))
        series[name] = [(point.user_tokens_per_s, point.tokens_per_s) for point in ordered]
        table += [
            [name, _load(p.requests), f"{p.user_tokens_per_s:.1f}", f"{p.tokens_per_s:.1f}"] for p in ordered
        ]
    words = f"Tokens per second of one {per} against those of one user; up and to the right is better."

    def draw(axes: Axes) -> None:
        draw_lines(axes, series, "tokens/s per user", f"tokens/s per {per}")
        axes.set_xlim(left=0)

    return Picture("pareto", "Throughput against speed for one user", words, draw, table)


def sweep_pictures(figures: Figures) -> Iterator[Picture]:
    """Yield the charts of a sweep. Acceptance is shown for the longest fixed length, which always drafts."""
    points = [p for p in figures["points"] if p["traffic"] == "prompts" and p["requests"] is not None]
    if points:
        yield pareto_picture(sweep_curves(figures), _per(figures))
        yield _speedup(points)
    if shares := _acceptance(figures["points"]):
        yield _shares(*shares)
    if points:
        yield _parts(points[len(points) // 2])
        yield from _distributions(points[len(points) // 2])


def sweep_curves(figures: Figures) -> dict[str, list[Operating]]:
    """Return a curve per method from the closed loops: plain, the adaptive engine, and other methods."""
    own = figures["engine"]["speculative_config"]["method"]
    names = {"plain": "plain", "adaptive": own, **{m: m for m in figures["options"]["methods"]}}
    points = [p for p in figures["points"] if p["traffic"] == "prompts" and p["requests"] is not None]
    found = {
        shown: [operating(point["sides"][side] | {"requests": point["requests"]}) for point in points]
        for side, shown in names.items()
        if points and side in points[0]["sides"]
    }
    return found


def operating(figures: Figures) -> Operating:
    return Operating(figures["requests"], figures["user_tokens_per_s"], figures["tokens_per_s"])


def _speedup(points: Sequence[Figures]) -> Picture:
    """Return the chart of speed-ups over plain decoding; fixed lengths are drawn faint."""
    sides = [name for name in points[0]["sides"] if name != "plain"]
    sides.sort(key=lambda name: "-" in name)  # main sides first: the first colors differ most
    series = {side: _ratios(points, side) for side in sides}
    loads = [point["requests"] for point in points]
    table = [["side", *map(str, loads)]]
    table += [[side, *(f"{ratio:.3f}" for _, ratio in ratios)] for side, ratios in series.items()]
    words = "Tokens per second by those of plain decoding; at the broken line both are equal."

    fixed = [side for side in sides if "-" in side]

    def draw(axes: Axes) -> None:
        draw_lines(axes, series, "requests at once", "speed-up", faint=fixed)
        axes.axhline(1.0, color="black", linestyle="--", linewidth=1)
        axes.set_xscale("log", base=2)
        axes.set_xticks(loads, [str(load) for load in loads])

    return Picture("speedup-by-load", "Speed-up by load", words, draw, table, (6.4, 4.4))


def _ratios(points: Sequence[Figures], side: str) -> list[tuple[float, float]]:
    return [(p["requests"], p["sides"][side]["ratio_to_plain"]) for p in points if side in p["sides"]]


def _acceptance(points: Sequence[Figures]) -> tuple[str, dict[str, list[float]]] | None:
    """Return the longest fixed-length side and, by category, the accepted share per draft over all points."""
    sides = points[0]["sides"] if points else {}
    fixed = [name for name in sides if "-" in name and sides[name]["acceptance"]]
    if not fixed:
        return None
    longest = max(fixed, key=lambda name: int(name.rpartition("-")[2]))
    tries: dict[str, list[float]] = {}
    hits: dict[str, list[float]] = {}
    for acceptance in (point["sides"][longest]["acceptance"] for point in points):
        for name, shares in acceptance.items():
            missing = len(shares["drafted"]) - len(tries.setdefault(name, []))
            tries[name] += [0.0] * missing
            hits[name] = hits.get(name, []) + [0.0] * missing
            for i, (count, share) in enumerate(zip(shares["drafted"], shares["accepted"], strict=True)):
                tries[name][i] += count
                hits[name][i] += count * share
    return longest, {
        name: [hit / max(count, 1.0) for hit, count in zip(hits[name], tries[name], strict=True)]
        for name in tries
    }


def _shares(side: str, shares: Mapping[str, Sequence[float]]) -> Picture:
    words = (
        f"Share of verified blocks in which a draft, and all before it, was accepted, in per cent ({side})."
    )
    most = max(map(len, shares.values()))
    table = [["category", *(str(i + 1) for i in range(most))]]
    table += [[name, *(f"{100 * share:.1f} %" for share in row)] for name, row in shares.items()]
    draw = partial(draw_shares, rows=shares, x_title="draft")
    title, size = "Acceptance by draft and category", rows_size(len(shares))
    return Picture("acceptance", title, words, draw, table, size)


def _parts(point: Figures) -> Picture:
    """Return the chart of step time by part at one load, per token, so that sides are comparable."""
    rows = {
        name: [1e3 * side["step_seconds"].get(part, 0.0) / max(side["tokens"], 1) for part in PARTS]
        for name, side in point["sides"].items()
    }
    words = (
        f"Milliseconds per token by part of the engine's steps, with {point['requests']} request(s) at once."
    )
    table = [["side", *PARTS]]
    table += [[name, *(f"{value:.4f}" for value in values)] for name, values in rows.items()]

    def draw(axes: Axes) -> None:
        left = [0.0] * len(rows)
        for i, part in enumerate(PARTS):
            widths = [values[i] for values in rows.values()]
            axes.barh(range(len(rows)), widths, left=left, color=COLORS[i], label=part)
            left = [begin + width for begin, width in zip(left, widths, strict=True)]
        name_rows(axes, list(rows))
        axes.set_xlabel("ms per token")
        show_legend(axes)

    return Picture("step-parts", "Where a step's time goes", words, draw, table, rows_size(len(rows)))


def _distributions(point: Figures) -> Iterator[Picture]:
    """Yield the latency distributions at one load for all sides without a fixed length."""
    curves = {name: side["curves"] for name, side in point["sides"].items() if "-" not in name}
    where = f"with {point['requests']} request(s) at once"
    yield _cdf("ttft", "Time to the first token", f"from arrival to the first token, {where}", curves)
    yield _cdf("itl", "Between tokens", f"between one block of tokens and the next, {where}", curves)


def _cdf(kind: str, title: str, what: str, curves: Mapping[str, Figures]) -> Picture:
    """Return a chart of percentiles up to 99: the slowest 1 % would determine the axis."""
    last = CURVE_PERCENTILES.index(99) + 1
    shown = {name: curve[f"{kind}_ms"] for name, curve in curves.items() if curve[f"{kind}_ms"]}
    series = {
        name: [(ms, q) for q, ms in zip(CURVE_PERCENTILES, row, strict=True)][:last]
        for name, row in shown.items()
    }
    words = f"Share of the times {what}, in per cent, that were no longer; up to 99 %."
    listed = (50, 90, 95, 99)
    table = [["side", *(f"p{q} ms" for q in listed)]]
    table += [
        [name, *(f"{row[CURVE_PERCENTILES.index(q)]:.1f}" for q in listed)] for name, row in shown.items()
    ]
    draw = partial(draw_lines, series=series, x_title="milliseconds", y_title="per cent")
    return Picture(kind, title, words, draw, table)


def _load(requests: int | None) -> str:
    return "-" if requests is None else str(requests)


def _per(figures: Figures) -> str:
    return "GPU" if figures["provenance"]["gpu"] else "machine"
