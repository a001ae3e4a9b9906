"""Pages and files of a sweep's or a Pareto run's pictures.

A page is one file with nothing from a network (`jobs/pictures/page.py`): tiles, pictures with their tables,
and where the figures come from.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..pictures.drawing import write_svg
from ..pictures.lines import SERIES_STYLE
from ..pictures.markup import Markup, element
from ..pictures.page import (
    CHART_STYLE,
    COLOURS,
    Tile,
    card,
    flat,
    header,
    html_page,
    tile_row,
    two_columns,
)
from .load_pictures import Picture, sweep_pictures

Figures = Mapping[str, Any]  # Any: JSON
_NUMBER = re.compile(r"^[-\d.,]+( %|%|x)?$")
SVG_STYLE = COLOURS + CHART_STYLE + SERIES_STYLE + "svg{font-family:system-ui,sans-serif}"


def write_sweep_page(figures: Figures, path: Path) -> None:
    """The page of a sweep."""
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
    more = [card("Bars", "What was asked, what was measured.", _scroll(_grid(_verdict_rows(verdicts))))]
    if figures["refused"]:
        more.append(
            card("Refused", "Sides that this engine does not run.", two_columns(figures["refused"].items()))
        )
    _write(path, "Speculation by load", figures, tiles, sweep_pictures(figures), more)


def write_pareto_page(figures: Figures, picture: Picture, path: Path) -> None:
    """The page of a Pareto run."""
    _write(path, picture.title, figures, [], [picture], [])


def write_svgs(pictures: Iterable[Picture], folder: Path, prefix: str = "") -> list[Path]:
    """A file of each picture, named after it, behind a prefix."""
    paths: list[Path] = []
    for picture in pictures:
        paths.append(folder / f"{prefix}{picture.name}.svg")
        write_svg(picture.drawn, paths[-1], SVG_STYLE)
    return paths


def _write(
    path: Path,
    title: str,
    figures: Figures,
    tiles: Sequence[Tile],
    pictures: Iterable[Picture],
    more: Sequence[Markup],
) -> None:
    provenance = figures["provenance"]
    where = f"{provenance['gpu'] or provenance['cpu']}, {provenance['cores']} cores, {provenance['date']}"
    about = {"options": figures["options"], **provenance}
    content = html_page(
        title,
        header(title, where),
        tile_row(tiles),
        element("div", *map(_picture_card, pictures), class_="cards"),
        element("div", *more, card("Where it comes from", "", two_columns(flat(about))), class_="cards"),
        style=SERIES_STYLE,
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content, encoding="utf-8")


def _picture_card(picture: Picture) -> Markup:
    told = element("details", element("summary", "As a table"), _scroll(_grid(picture.table)))
    return card(picture.title, picture.words, _scroll(picture.drawn), told)


def _scroll(content: Markup) -> Markup:
    """What is wider than a phone is moved by a finger, or by keys."""
    return element("div", content, class_="scroll", tabindex=0)


def _grid(rows: Sequence[Sequence[str]]) -> Markup:
    head, *others = rows
    heads = element("tr", *(element("th", cell, scope="col") for cell in head))
    return element("table", heads, *(element("tr", *_cells(row)) for row in others))


def _cells(row: Sequence[str]) -> Iterator[Markup]:
    for i, cell in enumerate(row):
        yield element("td", cell, class_="number" if i and _NUMBER.match(cell) else None)


def _verdict_rows(verdicts: Sequence[Figures]) -> list[list[str]]:
    rows = [["bar", "where", "measured", "rounds", "at least", "met"]]
    for one in verdicts:
        met = "yes" if one["met"] else "no"
        low, high = one["range"]
        rounds = f"{low:.2f} to {high:.2f}"
        rows.append([one["bar"], one["where"], f"{one['measured']:.3f}", rounds, f"{one['least']:.2f}", met])
    return rows
