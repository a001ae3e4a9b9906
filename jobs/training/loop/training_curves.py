"""Records a run step by step as JSON lines, and draws them.

The record also makes time-limited runs reproducible: a step that is repeated after an interruption uses the
time recorded here.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ...common.plots import Points, draw_lines, has_matplotlib, new_figure, save_figure

_MAX_POINTS = 200
# Title, and the values' names in training and on held-out text. Tokens per step are those expected from the
# acceptance probability at temperature 1 in training, and those of greedy drafts on held-out text.
_CHARTS = (
    ("loss", "loss", "loss"),
    ("tokens per step", "mean_acceptance_length", "tokens_per_step"),
    ("acceptance of the first draft", "slot1", "accepted"),
    ("learning rate, relative to its maximum", "lr_factor", ""),
)
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

    def draw(self) -> None:
        """Draw the record beside it, with the suffix .svg, if matplotlib is installed."""
        if self._path is None or not has_matplotlib():
            return
        rows = read_rows(self._path)
        steps = [row for row in rows if "held_out" not in row]
        measured = [{"step": row["step"], **row["held_out"]} for row in rows if "held_out" in row]
        figure = new_figure(11.0, 7.0)
        for axes, (title, key, held_out) in zip(figure.subplots(2, 2).flat, _CHARTS, strict=True):
            series = {"training": _means(steps, key), "held out": _means(measured, held_out)}
            draw_lines(axes, {name: points for name, points in series.items() if points}, "step", title)
        save_figure(figure, self._path.with_suffix(".svg"))


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


def _means(rows: Sequence[Row], key: str) -> Points:
    """Return steps and values; means of neighboring steps where there are many."""
    values = [(row["step"], row[key]) for row in rows if key in row]
    num_parts = max(1, min(len(values), _MAX_POINTS))
    parts = np.array_split(np.array(values, dtype=float).reshape(-1, 2), num_parts)
    return [(x, y) for part in parts if len(part) for x, y in [part.mean(axis=0).tolist()]]
