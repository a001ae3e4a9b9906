"""`manta bench pareto`: throughput of a GPU (or machine) against the speed of one user, a curve per method.

The figures come from files of `manta bench sweep` or from a new sweep. More tokens/s for one user cost
throughput; a method is better where its curve lies further up and to the right.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ....actors.system.atomic_files import write_json
from ....cluster.errors import ConfigError
from ...charts.plots import can_plot, write_svgs
from ...common.tables import print_table
from ..common.provenance import provenance
from .report_charts import Operating, pareto_picture, sweep_curves
from .report_page import write_pareto_page

Figures = dict[str, Any]  # Any: JSON
Curves = dict[str, list[Operating]]


def run_pareto(
    sources: Sequence[Mapping[str, Any]], output: Path | None, html: Path | None, svg: Path | None
) -> Figures:
    """Draw the curves of all sources into one chart; print, write and return the figures.

    Args:
        sources: figures of sweeps. If two curves have the same name, the later one gets a number.
        svg: folder for the SVG file.

    Raises:
        ConfigError: the sources come from different kinds of device.
    """
    devices = {source["provenance"]["gpu"] for source in sources}
    if len(devices) > 1:
        named = ", ".join(sorted(str(device or "CPU") for device in devices))
        raise ConfigError(
            f"files={named}: figures of different devices cannot be compared in one chart.", param="files"
        )
    curves: Curves = {}
    for source in sources:
        for name, points in sweep_curves(source).items():
            curves[_new_name(name, curves)] = list(points)
    picture = pareto_picture(curves, "GPU" if devices.pop() else "machine")
    head, *rows = picture.table
    print_table(picture.title, list(head), [list(row) for row in rows])
    figures: Figures = {
        "provenance": provenance(),
        "options": {"of": [source["provenance"]["command"] for source in sources]},
        "curves": {
            name: [
                {
                    "requests": point.requests,
                    "user_tokens_per_s": point.user_tokens_per_s,
                    "tokens_per_s": point.tokens_per_s,
                }
                for point in points
            ]
            for name, points in curves.items()
        },
    }
    if output is not None:
        output.parent.mkdir(parents=True, exist_ok=True)
        write_json(output, figures)
    if html is not None:
        write_pareto_page(figures, picture, html)
    if svg is not None and can_plot():
        write_svgs([picture], svg)
    return figures


def read_figures(path: Path) -> Figures:
    """Return the figures in a file that a sweep wrote.

    Raises:
        ConfigError: the file is missing or was not written by a sweep.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        if {"provenance", "points", "options", "verdicts"} <= found.keys():
            return found
    except (OSError, ValueError, AttributeError):
        pass
    raise ConfigError(
        f"files={str(path)!r} was not written by `manta bench sweep -o`.",
        param="files",
    )


def _new_name(name: str, known: Mapping[str, object]) -> str:
    number, found = 1, name
    while found in known:
        number += 1
        found = f"{name} ({number})"
    return found
