"""A page of a report: one file, no script, nothing from a network, light or dark as its reader.

It lays itself out for a phone, too. What its cards say is told by `jobs/batch/report_html.py`,
`jobs/bench/load_page.py` and `jobs/training/curves.py`. The template (`page.html`) escapes all that comes
from data.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .plots import NO_MATPLOTLIB, Picture, has_matplotlib, svg_element


@dataclass(frozen=True, slots=True)
class Tile:
    """A figure shown large."""

    figure: str
    words: str
    good: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """A section of a page.

    Attributes:
        words: what is seen.
        rows: a table's cells; the first column, and with `has_head` the first row, are names.
        picture: stands above the table, which is then unfolded by a click.
        is_wide: takes the page's whole width.
    """

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
    """Return the document. Without matplotlib it has no pictures, and says so; their tables are there."""
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
    """Yield rows of a card: names of nested values have dots, empty values are left out."""
    for name, value in about.items():
        if isinstance(value, Mapping):
            yield from flat(value, f"{under}{name}.")
        elif isinstance(value, list | tuple):
            yield f"{under}{name}", ", ".join(map(str, value))
        elif value is not None and value != "":
            yield f"{under}{name}", str(value)
