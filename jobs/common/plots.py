"""Plots with matplotlib (the extra `plots`), which is imported when the first one is drawn.

A `Picture` has a name and a function that draws it. Used by the
reports of benchmarks, evaluations and training runs.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

NO_MATPLOTLIB = "Pictures need the package matplotlib: pip install matplotlib."
GRAY, TEAL = "#9aa5b1", "#0b7285"
COLORS = (TEAL, "#c2571a", "#5b4fc4", "#b0307a", "#2f6fb0", "#8a6d00", "#4f7f1f", "#a33a3a", "#65727f")
_MARKERS = "osD^"
_MAX_MARKERS = 14  # lines with more points have no markers
_MAX_LABEL = 24  # characters
Points = Sequence[tuple[float, float]]


@dataclass(frozen=True, slots=True)
class Picture:
    """A plot, drawn onto empty axes; `size` is in inches."""

    name: str
    draw: Callable[[Axes], None]
    size: tuple[float, float] = (6.4, 3.4)


def has_matplotlib() -> bool:
    return find_spec("matplotlib") is not None


def can_plot() -> bool:
    if not has_matplotlib():
        print(NO_MATPLOTLIB, file=sys.stderr)
    return has_matplotlib()


def new_figure(width: float, height: float) -> Figure:
    """Return an empty figure (size in inches), which has no window and need not be closed."""
    from matplotlib.figure import Figure

    return Figure((width, height), layout="constrained")


def plotted(picture: Picture) -> Figure:
    figure = new_figure(*picture.size)
    axes = figure.subplots()
    axes.spines[["top", "right"]].set_visible(False)
    picture.draw(axes)
    return figure


def save_figure(figure: Figure, path: Path) -> None:
    """Write an SVG, or a PNG for a path ending in .png. Output is reproducible; text stays text in SVG."""
    from matplotlib import rc_context

    kind = "png" if path.suffix == ".png" else "svg"
    path.parent.mkdir(parents=True, exist_ok=True)
    with rc_context({"svg.hashsalt": "manta", "svg.fonttype": "none"}), warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # letters missing in matplotlib's font
        dates = dict.fromkeys(("Date", "Creator", "Format", "Type")) if kind == "svg" else None
        figure.savefig(path, format=kind, metadata=dates)


def write_svgs(pictures: Sequence[Picture], folder: Path, prefix: str = "") -> list[Path]:
    paths = [folder / f"{prefix}{picture.name}.svg" for picture in pictures]
    for picture, path in zip(pictures, paths, strict=True):
        save_figure(plotted(picture), path)
    return paths


def label(text: str) -> str:
    """Return a name from data as a label: one short line with `$` escaped, which would start mathematics."""
    line = " ".join("".join(letter if letter.isprintable() else " " for letter in text).split())
    short = line if len(line) <= _MAX_LABEL else line[: _MAX_LABEL - 1] + "…"
    return short.replace("$", r"\$")


def draw_lines(
    axes: Axes, series: Mapping[str, Points], x_title: str, y_title: str, *, faint: Collection[str] = ()
) -> None:
    """Draw a line for each series, in legend order; those in `faint` are thin references without markers."""
    for i, (name, points) in enumerate(series.items()):
        marked = name not in faint and len(points) <= _MAX_MARKERS
        axes.plot(
            [x for x, _ in points],
            [y for _, y in points],
            color=COLORS[i % len(COLORS)],
            marker=_MARKERS[i % len(_MARKERS)] if marked else None,
            markersize=5,
            linewidth=1 if name in faint else 1.8,
            alpha=0.6 if name in faint else 1,
            label=label(name),
        )
    axes.set_xlabel(x_title)
    axes.set_ylabel(y_title)
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.25)
    show_legend(axes)


def show_legend(axes: Axes) -> None:
    axes.legend(frameon=False, fontsize=8, ncols=4, loc="lower left", bbox_to_anchor=(0, 1))


def draw_shares(axes: Axes, rows: Mapping[str, Sequence[float]], x_title: str) -> None:
    """Draw shares (0 to 1) as a grid of per cents, a row for each name, columns numbered from 1."""
    maximum = max(map(len, rows.values()))
    cells = [[*shares, *[float("nan")] * (maximum - len(shares))] for shares in rows.values()]
    axes.pcolormesh(cells, cmap="Greens", vmin=0, vmax=1.5, edgecolors="white")
    for row, shares in enumerate(rows.values()):
        for column, share in enumerate(shares):
            axes.text(column + 0.5, row + 0.5, f"{100 * share:.0f}", ha="center", va="center", fontsize=8)
    axes.set_xticks(
        [column + 0.5 for column in range(maximum)], [str(column + 1) for column in range(maximum)]
    )
    name_rows(axes, list(rows), first=0.5)
    axes.set_xlabel(x_title)


def name_rows(axes: Axes, names: Sequence[str], first: float = 0) -> None:
    axes.set_yticks([first + row for row in range(len(names))], [label(name) for name in names])
    axes.invert_yaxis()


def rows_size(num_rows: int) -> tuple[float, float]:
    return 6.4, 1.0 + 0.3 * num_rows
