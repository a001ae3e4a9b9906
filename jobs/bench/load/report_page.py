"""HTML reports of a sweep or a Pareto run: tiles, charts with their tables, and provenance."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ...charts.plots import Picture
from ...charts.report_page import Card, Tile, flat, picture_card, render_page
from .report_charts import sweep_pictures

Figures = Mapping[str, Any]  # Any: JSON


def write_sweep_page(figures: Figures, path: Path) -> None:
    verdicts, points = figures["verdicts"], figures["points"]
    worst = min((one for one in verdicts), key=lambda one: one["measured"] / one["least"], default=None)
    tiles = [
        Tile(f"{sum(one['met'] for one in verdicts)} of {len(verdicts)}", "bars are met"),
        *(
            Tile(
                f"{p['sides']['adaptive']['ratio_to_plain']:.2f}x", f"of plain at {p['requests']} request(s)"
            )
            for p in points
            if p["traffic"] == "prompts" and p["requests"] is not None
        ),
    ]
    if worst is not None:
        tiles.append(Tile(f"{worst['measured']:.2f}", f"least: {worst['bar']}, {worst['where']}"))
    bars = Card(
        title="Bars",
        words="Each target with the measured value.",
        rows=_verdict_rows(verdicts),
        has_head=True,
    )
    refused = Card(
        title="Refused",
        words="Methods that the engine refused.",
        rows=list(figures["refused"].items()),
    )
    pictures = list(sweep_pictures(figures))
    more = [bars, refused] if refused.rows else [bars]
    _write(path, "Speculation by load", figures, tiles, pictures, more)


def write_pareto_page(figures: Figures, picture: Picture, path: Path) -> None:
    _write(path, picture.title, figures, [], [picture], [])


def _write(
    path: Path,
    title: str,
    figures: Figures,
    tiles: Sequence[Tile],
    pictures: Sequence[Picture],
    more: Sequence[Card],
) -> None:
    provenance = figures["provenance"]
    where = f"{provenance['gpu'] or provenance['cpu']}, {provenance['cores']} cores, {provenance['date']}"
    about = Card(title="Provenance", rows=list(flat({"options": figures["options"], **provenance})))
    path.parent.mkdir(parents=True, exist_ok=True)
    page = render_page(title, where, tiles, [*map(picture_card, pictures), *more, about])
    path.write_text(page, encoding="utf-8")


def _verdict_rows(verdicts: Sequence[Figures]) -> list[list[str]]:
    rows = [["bar", "where", "measured", "rounds", "at least", "met"]]
    for one in verdicts:
        met = "yes" if one["met"] else "no"
        low, high = one["range"]
        rounds = f"{low:.2f} to {high:.2f}"
        rows.append([one["bar"], one["where"], f"{one['measured']:.3f}", rounds, f"{one['least']:.2f}", met])
    return rows
