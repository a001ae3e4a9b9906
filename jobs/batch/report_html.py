"""The page of a batch job's report: one file, no script, nothing from a network, light or dark as its reader.

How a page looks is `jobs/pictures/page.py`'s. All that comes from the job's data is escaped there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ...actors.batch.figures import RowFigures
from ...actors.batch.tallies import Stretches, Timeline, length_range
from ...cluster.acceptance import acceptance_by_position
from ..pictures.charts import Mark, Span, bars, columns, curve
from ..pictures.markup import Markup, element
from ..pictures.page import Tile, card, flat, header, html_page, tile_row, two_columns
from ..tables import decimals
from .samples import Sample

MAX_POINTS = 80


def page(
    tiles: Sequence[Tile],
    lines: Sequence[tuple[str, str]],
    figures: RowFigures,
    samples: Sequence[Sample],
    about: Mapping[str, Any],
) -> str:
    """The page.

    Args:
        tiles: the figures that come first.
        lines: all figures, by name.
        figures: what the pictures are made of.
        samples: rows to show.
        about: the job; what is nested is shown with dots.
    """
    pictures = list(_pictures(figures))
    return html_page(
        "Batch job",
        header("Batch job", str(about.get("output", ""))),
        tile_row(tiles),
        *([_samples(samples)] if samples else []),
        *([_throughput(figures.timeline, figures.stretches)] if figures.stretches.seconds else []),
        element("div", *pictures, class_=f"cards of{len(pictures)}"),
        *([_errors(figures)] if figures.errors else []),
        element(
            "div",
            card("Figures", "", two_columns(lines)),
            card("The job", "", two_columns(flat(about))),
            class_="cards",
        ),
    )


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
    return card(
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
    return card(
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
    return card("Acceptance by category", "Tokens per step, on average.", bars(marks, lambda x: f"{x:.2f}"))


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
    return card(
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
    return card("Errors", words, element("table", *rows))


def _samples(samples: Sequence[Sample]) -> Markup:
    rows = [
        element(
            "tr",
            element("th", sample.id),
            element("td", element("pre", sample.prompt)),
            element("td", element("pre", sample.answer)),
        )
        for sample in samples
    ]
    titles = element("tr", *(element("th", name) for name in ("id", "prompt", "answer")))
    return card("The first rows", "Long texts are cut.", element("table", titles, *rows))


def _short(value: float) -> str:
    """A round number in few characters."""
    for unit, name in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= unit:
            return f"{value / unit:.3g}{name}"
    return f"{value:g}"
