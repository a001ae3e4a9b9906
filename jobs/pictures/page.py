"""A page of a report: one file, no script, nothing from a network, light or dark as its reader.

It lays itself out for a phone, too. What its sections say is told by `jobs/batch/report_html.py` and
`jobs/bench/load_page.py`. All that comes from data is escaped (`markup.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from .markup import Markup, element

COLOURS = """
:root{color-scheme:light dark;--back:#f6f7f5;--card:#fff;--ink:#17212b;--soft:#65727f;--line:#e2e6e4;
--mark:#0d8273;--fill:#0d827322;--good:#0b6b5f}
@media(prefers-color-scheme:dark){:root{--back:#0f1519;--card:#172026;--ink:#e7edf0;--soft:#93a3ad;
--line:#2a363e;--mark:#35c9b3;--fill:#35c9b322;--good:#5fdcc9}}
"""
STYLE = """
*{box-sizing:border-box}
body{margin:0 auto;max-width:1240px;padding:32px 20px 48px;background:var(--back);color:var(--ink);
font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,"DejaVu Sans",sans-serif}
h1{margin:0;font-size:26px;letter-spacing:-.01em}h2{margin:0 0 2px;font-size:16px}
p{margin:0 0 14px;color:var(--soft);font-size:13px}header p{margin:4px 0 22px;overflow-wrap:anywhere}
.tiles,.cards{display:grid;gap:14px}.tiles{grid-template-columns:repeat(auto-fit,minmax(150px,1fr))}
.cards{grid-template-columns:repeat(auto-fit,minmax(min(460px,100%),1fr))}
.of3{grid-template-columns:repeat(auto-fit,minmax(min(330px,100%),1fr))}.cards,body>section{margin-top:14px}
section,.tile{background:var(--card);border:1px solid var(--line);border-radius:12px;padding:18px 20px;
min-width:0}
.tile{padding:14px 18px}.tile b{display:block;font-size:25px;font-weight:650;letter-spacing:-.02em;
font-variant-numeric:tabular-nums}.tile span{display:block;color:var(--soft);font-size:13px}
.tile.good b{color:var(--good)}
svg{display:block;width:100%;height:auto;overflow:visible}
table{width:100%;border-collapse:collapse;font-size:14px;font-variant-numeric:tabular-nums}
td,th{padding:6px 10px 6px 0;border-top:1px solid var(--line);text-align:left;vertical-align:top;
overflow-wrap:anywhere}
th{font-weight:500;color:var(--soft);min-width:130px;overflow-wrap:normal}tr:first-child>*{border-top:0}
pre{margin:0;white-space:pre-wrap;font:12px/1.45 ui-monospace,"DejaVu Sans Mono",monospace}
td.number{text-align:right;white-space:nowrap}code{font:13px ui-monospace,"DejaVu Sans Mono",monospace}
footer{margin-top:18px;color:var(--soft);font-size:12px}
"""
CHART_STYLE = """
svg text{fill:var(--soft);font-size:12px}
.bar{fill:var(--mark)}g:hover>.bar{opacity:.75}.area{fill:var(--fill)}
.line{fill:none;stroke:var(--mark);stroke-width:2;stroke-linejoin:round}
.point{fill:transparent}g:hover>.point{fill:var(--fill)}
.grid,.base{stroke:var(--line)}.base{stroke:var(--soft)}.pause{stroke:var(--soft);stroke-dasharray:3 4}
"""
POLICY = "default-src 'none'; style-src 'unsafe-inline'"


@dataclass(frozen=True, slots=True)
class Tile:
    """A figure shown large."""

    figure: str
    words: str
    good: bool = False


def html_page(title: str, *content: Markup, style: str = "") -> str:
    """A whole document.

    Args:
        style: CSS of its pictures, beside that of the page and of plain charts.
    """
    head = element(
        "head",
        Markup('<meta charset="utf-8"><meta name="viewport" content="width=device-width,initial-scale=1">'),
        Markup(f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'),
        element("title", title),
        element("style", Markup(COLOURS + STYLE + CHART_STYLE + style)),
    )
    return f"<!doctype html>\n{element('html', head, element('body', *content), lang='en')}\n"


def header(title: str, words: str) -> Markup:
    """What stands above all."""
    return element("header", element("h1", title), element("p", words))


def tile_row(figures: Iterable[Tile]) -> Markup:
    """Large figures beside each other."""
    return element("div", *map(_tile, figures), class_="tiles")


def card(title: str, words: str, *content: Markup) -> Markup:
    """A section with a heading; `words` say what is seen."""
    said = element("p", words) if words else Markup()
    return element("section", element("h2", title), said, *content)


def two_columns(lines: Iterable[tuple[str, str]]) -> Markup:
    """A table of names and values."""
    return element(
        "table", *(element("tr", element("th", name), element("td", value)) for name, value in lines)
    )


def flat(about: Mapping[str, Any], under: str = "") -> Iterator[tuple[str, str]]:  # Any: JSON
    """Lines for `two_columns`; what is nested gets names with dots, what is empty is left out."""
    for name, value in about.items():
        if isinstance(value, Mapping):
            yield from flat(value, f"{under}{name}.")
        elif isinstance(value, list | tuple):
            yield f"{under}{name}", ", ".join(map(str, value))
        elif value is not None and value != "":
            yield f"{under}{name}", str(value)


def _tile(tile: Tile) -> Markup:
    return element(
        "div",
        element("b", tile.figure),
        element("span", tile.words),
        class_="tile good" if tile.good else "tile",
    )
