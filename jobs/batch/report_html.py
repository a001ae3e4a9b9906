"""The page of a batch job's report: one file, no script, nothing from a network, light or dark as its reader.

All that comes from the job's data is escaped (`markup.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...actors.batch.figures import RowFigures
from ...actors.batch.tallies import Stretches, Timeline, length_range
from ...cluster.acceptance import acceptance_by_position
from ..tables import decimals
from .charts import Mark, Span, bars, columns, curve
from .markup import Markup, element

MAX_POINTS = 80
STYLE = """
:root{color-scheme:light dark;--back:#f6f7f5;--card:#fff;--ink:#17212b;--soft:#65727f;--line:#e2e6e4;
--mark:#0d8273;--fill:#0d827322;--good:#0b6b5f}
@media(prefers-color-scheme:dark){:root{--back:#0f1519;--card:#172026;--ink:#e7edf0;--soft:#93a3ad;
--line:#2a363e;--mark:#35c9b3;--fill:#35c9b322;--good:#5fdcc9}}
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
svg{display:block;width:100%;height:auto;overflow:visible}svg text{fill:var(--soft);font-size:12px}
.bar{fill:var(--mark)}g:hover>.bar{opacity:.75}.area{fill:var(--fill)}
.line{fill:none;stroke:var(--mark);stroke-width:2;stroke-linejoin:round}
.point{fill:transparent}g:hover>.point{fill:var(--fill)}
.grid,.base{stroke:var(--line)}.base{stroke:var(--soft)}.pause{stroke:var(--soft);stroke-dasharray:3 4}
table{width:100%;border-collapse:collapse;font-size:14px;font-variant-numeric:tabular-nums}
td,th{padding:6px 10px 6px 0;border-top:1px solid var(--line);text-align:left;vertical-align:top;
overflow-wrap:anywhere}
th{font-weight:500;color:var(--soft);min-width:130px;overflow-wrap:normal}tr:first-child>*{border-top:0}
td.number{text-align:right;white-space:nowrap}code{font:13px ui-monospace,"DejaVu Sans Mono",monospace}
footer{margin-top:18px;color:var(--soft);font-size:12px}
"""
POLICY = "default-src 'none'; style-src 'unsafe-inline'"


@dataclass(frozen=True, slots=True)
class Tile:
    """A figure shown large."""

    figure: str
    words: str
    good: bool = False


def page(
    tiles: Sequence[Tile], lines: Sequence[tuple[str, str]], figures: RowFigures, about: Mapping[str, Any]
) -> str:
    """The page.

    Args:
        tiles: the figures that come first.
        lines: all figures, by name.
        figures: what the pictures are made of.
        about: the job; what is nested is shown with dots.
    """
    head = element(
        "head",
        Markup('<meta charset="utf-8"><meta name="viewport" content="width=device-width,initial-scale=1">'),
        Markup(f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'),
        element("title", "Batch job"),
        element("style", Markup(STYLE)),
    )
    pictures = list(_pictures(figures))
    body = element(
        "body",
        element("header", element("h1", "Batch job"), element("p", str(about.get("output", "")))),
        element("div", *map(_tile, tiles), class_="tiles"),
        *([_throughput(figures.timeline, figures.stretches)] if figures.stretches.seconds else []),
        element("div", *pictures, class_=f"cards of{len(pictures)}"),
        *([_errors(figures)] if figures.errors else []),
        element(
            "div",
            _card("Figures", "", _table(lines)),
            _card("The job", "", _table(_flat(about))),
            class_="cards",
        ),
    )
    return f"<!doctype html>\n{element('html', head, body, lang='en')}\n"


def _pictures(figures: RowFigures) -> Iterator[Markup]:
    """Those that stand beside each other."""
    if shares := acceptance_by_position(figures.acceptance):
        yield _by_position(shares)
    if figures.categories.ranked():
        yield _by_category(figures)
    if figures.prompt_lengths:
        yield _lengths("Prompt lengths", "prompts", figures.prompt_lengths)
        yield _lengths("Output lengths", "answers", figures.output_lengths)


def _throughput(timeline: Timeline, stretches: Stretches) -> Markup:
    unit, name = next(
        (unit, name)
        for unit, name in ((3600.0, "hours"), (60.0, "minutes"), (1.0, "seconds"))
        if stretches.seconds >= 3 * unit or unit == 1.0
    )
    drawn = [
        [
            Span(
                b / unit,
                e / unit,
                rate,
                f"{rate:,.0f} tokens/s, from {b / unit:.1f} to {e / unit:.1f} {name}",
            )
            for b, e, rate in stretch
        ]
        for stretch in rates(timeline, stretches)
    ]
    pauses = "; pauses between runs are left out" if len(drawn) > 1 else ""
    return _card(
        "Throughput over time",
        f"Tokens out per second, counted when a row ends{pauses}.",
        curve(drawn, f"{name} of work", _short, lambda x: f"{x:g}"),
    )


def rates(timeline: Timeline, stretches: Stretches) -> list[list[tuple[float, float, float]]]:
    """Tokens per second over time: begin, end (s of work, without pauses) and rate, by stretch.

    Points are about MAX_POINTS at most and of equal width; a stretch's last one ends with it.
    """
    width_s = timeline.width_s * max(1, round(stretches.seconds / MAX_POINTS / timeline.width_s))
    times = stretches.times
    tokens = [[0] * max(1, round((end_s - begin_s) / width_s)) for begin_s, end_s in times]
    for bucket, count in timeline.tokens.items():
        middle_s = (bucket + 0.5) * timeline.width_s
        away_s = [max(begin_s - middle_s, middle_s - end_s, 0.0) for begin_s, end_s in times]
        nearest = away_s.index(min(away_s))
        place = int((middle_s - times[nearest][0]) // width_s)
        tokens[nearest][min(max(place, 0), len(tokens[nearest]) - 1)] += count
    found, worked_s = [], 0.0
    for (begin_s, end_s), counts in zip(times, tokens, strict=True):
        edges = [worked_s + i * width_s for i in range(len(counts))]
        worked_s += end_s - begin_s
        ends = [*edges[1:], worked_s]
        points = zip(edges, ends, counts, strict=True)
        found.append([(left, right, count / (right - left)) for left, right, count in points if right > left])
    return found


def _by_position(shares: Sequence[float]) -> Markup:
    marks = [
        Mark(str(i), share, f"draft {i} was accepted in {100 * share:.1f} % of the blocks")
        for i, share in enumerate(shares, 1)
    ]
    return _card(
        "Acceptance by position",
        "Share of the verified blocks in which a draft, and all before it, was accepted.",
        columns(marks, "draft", lambda share: f"{100 * share:.0f} %", 1.0),
    )


def _by_category(figures: RowFigures) -> Markup:
    marks = [
        Mark(
            name,
            sums.mean_acceptance_length or 0.0,
            f"{name}: {decimals(sums.mean_acceptance_length)} tokens per step, {sums.rows:,} rows, "
            f"{sums.failed:,} failed, {sums.completion_tokens:,} tokens out",
        )
        for name, sums in figures.categories.ranked()
    ]
    return _card("Acceptance by category", "Tokens per step, on average.", bars(marks, lambda x: f"{x:.2f}"))


def _lengths(title: str, what: str, histogram: Sequence[int]) -> Markup:
    first = next(i for i, rows in enumerate(histogram) if rows)
    marks: list[Mark] = []
    for place, rows in list(enumerate(histogram))[first:]:
        low, high = length_range(place)
        span = str(low) if low == high else f"{low}-{high}"
        marks.append(
            Mark(str(low) if low < 1024 else f"{low >> 10}k", rows, f"{rows:,} {what} of {span} tokens")
        )
    top = float(max(histogram))
    return _card(
        title,
        f"How many {what} have so many tokens, or up to twice as many.",
        columns(marks, "tokens", _short, top),
    )


def _errors(figures: RowFigures) -> Markup:
    rows = [
        element(
            "tr",
            element("th", kind),
            element("td", f"{count.rows:,}", class_="number"),
            element("td", count.example),
        )
        for kind, count in figures.ranked_errors()
    ]
    again = sum(count.rows for count in figures.errors.values()) - figures.failed
    later = f"; {again:,} of them were answered later" if again > 0 else ""
    words = f"Rows that failed, by kind, with an example{later}."
    return _card("Errors", words, element("table", *rows))


def _flat(about: Mapping[str, Any], under: str = "") -> Iterator[tuple[str, str]]:
    for name, value in about.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{under}{name}.")
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


def _card(title: str, words: str, content: Markup) -> Markup:
    said = element("p", words) if words else Markup()
    return element("section", element("h2", title), said, content)


def _table(lines: Iterable[tuple[str, str]]) -> Markup:
    return element(
        "table", *(element("tr", element("th", name), element("td", value)) for name, value in lines)
    )


def _short(value: float) -> str:
    """A round number in few characters."""
    for unit, name in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= unit:
            return f"{value / unit:.3g}{name}"
    return f"{value:g}"
