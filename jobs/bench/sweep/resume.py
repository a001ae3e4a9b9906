"""Resumes an interrupted sweep from its file.

Every cell (a point, or the starts at one load) is written to the file once it is measured. A sweep that finds
its file without `complete` measures only the missing cells, if everything the figures depend on is unchanged:
options, engine, machine, versions, commit. Otherwise it starts over. Used by `sweep_run.py` alone.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

from ..common.engine_passes import Figures

_SAME = ("cpu", "cores", "gpu", "versions", "git_sha")  # fields of the provenance


@dataclass(slots=True)
class MeasuredCells:
    """Cells measured so far.

    Attributes:
        points, starts: their figures.
        seconds: time they took.
    """

    points: list[Figures] = field(default_factory=list)
    starts: list[Figures] = field(default_factory=list)
    seconds: float = 0.0

    def has_point(self, traffic: str, requests: int | None, rate: float | None) -> bool:
        load = traffic, requests, rate
        return any((p["traffic"], p["requests"], p["request_rate"]) == load for p in self.points)

    def has_start(self, requests: int) -> bool:
        return any(start["requests"] == requests for start in self.starts)


def read_cells(path: Path | None, now: Figures) -> MeasuredCells:
    """Return the cells in the file if it belongs to an unfinished sweep like `now`, else none."""
    try:
        found = json.loads("{}" if path is None else path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return MeasuredCells()
    if not isinstance(found, dict) or found.get("complete") is not False or _subject(found) != _subject(now):
        return MeasuredCells()
    return MeasuredCells(found["points"], found["starts"], found["measured_in_s"])


def _subject(figures: Figures) -> str:
    """Return everything that the figures depend on, as JSON text."""
    parts = [figures.get("engine"), figures.get("options")]
    parts += [figures.get("provenance", {}).get(name) for name in _SAME]
    return json.dumps(parts, sort_keys=True)
