"""Records a run step by step as JSON lines, and draws them on a page.

The record also makes time-limited runs reproducible: a step that is repeated after an interruption uses the
time recorded here.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from ...charts.plots import Picture, Points, draw_lines
from ...charts.report_page import Tile, picture_card, render_page

_MAX_POINTS = 200
Row = dict[str, Any]  # Any: JSON values


class Curves:
    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._steps: dict[int, Row] = {}
        self._measured: set[int] = set()
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            _cut_torn_line(path)
        for row in read_rows(path):
            if "held_out" in row:
                self._measured.add(row["step"])
            else:
                self._steps[row["step"]] = row

    def taken(self, step: int) -> Row | None:
        return self._steps.get(step)

    def has_measured(self, step: int) -> bool:
        return step in self._measured

    @property
    def used_s(self) -> float:
        return self._steps[max(self._steps)]["used_s"] if self._steps else 0.0

    def add(self, row: Row) -> None:
        """Record a step, or a measurement if the row has "held_out"; repeated rows are ignored."""
        if row["step"] in (self._measured if "held_out" in row else self._steps):
            return
        if "held_out" in row:
            self._measured.add(row["step"])
        else:
            self._steps[row["step"]] = row
        if self._path is not None:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")

    def draw(self, title: str) -> None:
        """Draw the page beside the record, with the suffix .html."""
        if self._path is not None:
            page = self._path.with_suffix(".html")
            temporary = page.with_name(page.name + ".partial")
            temporary.write_text(curves_page(title, read_rows(self._path)), encoding="utf-8")
            temporary.replace(page)


def read_rows(path: Path | None) -> list[Row]:
    if path is None or not path.exists():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def _cut_torn_line(path: Path) -> None:
    """Remove an incomplete last line, left by a killed process."""
    if path.exists():
        content = path.read_bytes()
        if not content.endswith(b"\n"):
            path.write_bytes(content[: content.rfind(b"\n") + 1])


def curves_page(title: str, rows: Sequence[Row]) -> str:
    steps = [row for row in rows if "held_out" not in row]
    measured = [{"step": row["step"], **row["held_out"]} for row in rows if "held_out" in row]
    tiles = [Tile(f"{len(steps)}", "steps")]
    if measured:
        first, last = measured[0], measured[-1]
        words = f"tokens per step on held-out text, {first['tokens_per_step']:.2f} before"
        tiles.append(Tile(f"{last['tokens_per_step']:.2f}", words))
    charts = (
        ("Loss", "", {"training": _means(steps, "loss"), "held out": _means(measured, "loss")}),
        (
            "Tokens per step",
            "Training: expected from the acceptance probability at temperature 1. Held out: greedy "
            "drafts that match the target's answer.",
            {
                "training": _means(steps, "mean_acceptance_length"),
                "held out": _means(measured, "tokens_per_step"),
            },
        ),
        (
            "First draft",
            "Acceptance probability.",
            {"training": _means(steps, "slot1"), "held out": _means(measured, "accepted")},
        ),
        ("Learning rate", "Relative to its maximum.", {"learning rate": _means(steps, "lr_factor")}),
    )
    pictures = [
        Picture(name, name, words, partial(draw_lines, series=shown, x_title="step", y_title=name.lower()))
        for name, words, series in charts
        if (shown := {line: points for line, points in series.items() if points})
    ]
    return render_page(title, "", tiles, [picture_card(picture) for picture in pictures])


def _means(rows: Sequence[Row], key: str) -> Points:
    """Return steps and values; means of neighboring steps where there are many."""
    values = [(row["step"], row[key]) for row in rows if key in row]
    num_parts = max(1, min(len(values), _MAX_POINTS))
    parts = np.array_split(np.array(values, dtype=float).reshape(-1, 2), num_parts)
    return [(x, y) for part in parts if len(part) for x, y in [part.mean(axis=0).tolist()]]
