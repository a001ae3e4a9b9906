"""HTML page of a report: one file without scripts and network access, in light or dark mode.

The layout adapts to phones. The content comes from `jobs/batch/report_html.py` and
`jobs/training/loop/training_curves.py`. The template (`page.html`) escapes all data.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .plots import NO_MATPLOTLIB, Picture, has_matplotlib, svg_element


@dataclass(frozen=True, slots=True)
class Tile:
    figure: str
    words: str
    good: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """A section of a page; with a picture, the table below it is collapsed."""

    title: str
    words: str = ""
    rows: Sequence[Sequence[str]] = ()
    has_head: bool = False
    picture: Picture | None = None
    is_wide: bool = False


def picture_card(picture: Picture, *, is_wide: bool = False) -> Card:
    return Card(
        title=picture.title,
        words=picture.words,
        rows=picture.table,
        has_head=True,
        picture=picture,
        is_wide=is_wide,
    )


def render_page(title: str, words: str, tiles: Sequence[Tile], cards: Sequence[Card]) -> str:
    """Return the HTML document. Without matplotlib it has a note and tables instead of charts."""
    from minijinja import Environment

    draws = has_matplotlib()
    drawn = [svg_element(card.picture) if card.picture and draws else "" for card in cards]
    lacks = not draws and any(card.picture for card in cards)
    template = Path(__file__).with_name("page.html").read_text(encoding="utf-8")
    environment = Environment(templates={"page.html": template}, trim_blocks=True, lstrip_blocks=True)
    return environment.render_template(
        "page.html",
        title=title,
        words=words,
        note=NO_MATPLOTLIB if lacks else "",
        tiles=tiles,
        cards=list(zip(cards, drawn, strict=True)),
    )


def flat(about: Mapping[str, Any], under: str = "") -> Iterator[tuple[str, str]]:  # Any: JSON
    """Yield nested values as rows with dotted names; empty values are left out."""
    for name, value in about.items():
        if isinstance(value, Mapping):
            yield from flat(value, f"{under}{name}.")
        elif isinstance(value, list | tuple):
            yield f"{under}{name}", ", ".join(map(str, value))
        elif value is not None and value != "":
            yield f"{under}{name}", str(value)
