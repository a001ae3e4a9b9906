"""The HTML page of a batch job's report and its pictures. `jobs/charts/report_page.py` renders it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from ...actors.batch.row_stats import RowStats, length_range
from ...actors.batch.run_times import RunIntervals, Timeline
from ...cluster.speculation.acceptance_length import acceptance_by_position
from ..charts.plots import TEAL, Picture, name_rows, rows_size
from ..charts.report_page import Card, Tile, flat, picture_card, render_page
from ..common.progress import format_duration
from ..common.tables import decimals
from .report import Report

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MAX_POINTS = 80
_MAX_LABELS = 14  # below columns


def report_page(report: Report) -> str:
    stats, about = report.stats, report.about
    cards: list[Card] = []
    if report.samples:
        rows = [("id", "prompt", "answer"), *((each.id, each.prompt, each.answer) for each in report.samples)]
        cards.append(
            Card(title="The first rows", words="Long texts are cut.", rows=rows, has_head=True, is_wide=True)
        )
    cards += [picture_card(each, is_wide=each.name == "throughput") for each in pictures(stats)]
    if stats.errors:
        cards.append(_errors(stats))
    cards += [Card(title="Figures", rows=report.lines()), Card(title="The job", rows=list(flat(about)))]
    return render_page("Batch job", str(about.get("output", "")), _tiles(report), cards)


def _tiles(report: Report) -> list[Tile]:
    stats, found, saved_s = report.stats, report.comparison, report.saved_s
    mean = stats.mean_acceptance_length
    tiles = [
        Tile(f"{stats.rows - stats.failed:,}", f"of {stats.rows:,} rows answered"),
        Tile(f"{stats.completion_tokens:,}", f"tokens out, of {stats.prompt_tokens:,} in"),
        Tile(f"{stats.tokens_per_s:,.0f}", f"tokens/s, for {format_duration(stats.wall_s)}"),
    ]
    if mean is not None:
        tiles.append(Tile(decimals(mean), "tokens per step, on average"))
    if found is not None and saved_s is not None:
        tiles.append(Tile(f"{found.speedup:.2f} x", "plain decoding, measured", found.speedup > 1))
        words = f"{report.device}-seconds saved, of {report.device_s:,.0f} spent"
        tiles.append(Tile(f"{saved_s:,.0f}", words, saved_s > 0))
    elif report.device_s:
        tiles.append(Tile(f"{report.device_s:,.0f}", f"{report.device}-seconds"))
    if (price := report.price(report.device_s + report.loading_s)) is not None:
        words = f"price, at {report.price_per_gpu_hour:g} per {report.device}-hour"
        tiles.append(Tile(f"{price:,.2f}", words))
    return tiles


def pictures(stats: RowStats) -> Iterator[Picture]:
    if stats.stretches.seconds:
        yield _throughput(stats.timeline, stats.stretches)
    if shares := acceptance_by_position(stats.acceptance):
        yield _by_position(shares)
    if stats.categories.ranked():
        yield _by_category(stats)
    if stats.prompt_lengths:
        yield _lengths("Prompt lengths", "prompts", stats.prompt_lengths)
        yield _lengths("Output lengths", "answers", stats.output_lengths)


def _throughput(timeline: Timeline, stretches: RunIntervals) -> Picture:
    unit_s, unit = next(
        (unit_s, unit)
        for unit_s, unit in ((3600.0, "hours"), (60.0, "minutes"), (1.0, "seconds"))
        if stretches.seconds >= 3 * unit_s or unit_s == 1.0
    )
    found = [stretch for stretch in rates(timeline, stretches) if stretch]

    def draw(axes: Axes) -> None:
        for i, stretch in enumerate(found):
            edges = [begin / unit_s for begin, _, _ in stretch] + [stretch[-1][1] / unit_s]
            values = [rate for _, _, rate in stretch]
            axes.stairs(values, edges, fill=True, color=TEAL, alpha=0.2)
            axes.stairs(values, edges, baseline=None, color=TEAL, linewidth=1.5)
            if i:
                axes.axvline(edges[0], color="gray", linestyle=":")
        axes.set_xlabel(f"{unit} of work")
        axes.set_xlim(left=0)
        axes.set_ylim(bottom=0)
        axes.yaxis.set_major_formatter("{x:,g}")

    pauses = "; pauses between runs are left out" if len(found) > 1 else ""
    words = f"Tokens out per second, counted when a row ends{pauses}."
    table = [(f"from ({unit})", f"to ({unit})", "tokens/s")]
    table += [
        (f"{begin / unit_s:.2f}", f"{end / unit_s:.2f}", f"{rate:,.1f}")
        for stretch in found
        for begin, end, rate in stretch
    ]
    return Picture("throughput", "Throughput over time", words, draw, table, (12.0, 3.0))


def rates(timeline: Timeline, stretches: RunIntervals) -> list[list[tuple[float, float, float]]]:
    """Return (begin, end, tokens/s) by stretch, in seconds of work; at most about MAX_POINTS in all."""
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


def _by_position(shares: Sequence[float]) -> Picture:
    def draw(axes: Axes) -> None:
        axes.bar(range(1, len(shares) + 1), shares, color=TEAL)
        axes.set_xlabel("draft")
        axes.set_ylim(0, 1)
        axes.yaxis.set_major_formatter("{x:.0%}")

    words = "Share of the verified blocks in which a draft, and all before it, was accepted."
    table = [("draft", "accepted"), *((str(i), f"{share:.1%}") for i, share in enumerate(shares, 1))]
    return Picture("acceptance", "Acceptance by position", words, draw, table)


def _by_category(stats: RowStats) -> Picture:
    ranked = stats.categories.ranked()

    def draw(axes: Axes) -> None:
        lengths = [sums.mean_acceptance_length or 0.0 for _, sums in ranked]
        axes.bar_label(axes.barh(range(len(ranked)), lengths, color=TEAL), fmt="%.2f", padding=3)
        name_rows(axes, [name for name, _ in ranked])
        axes.set_xlabel("tokens per step")

    table = [("category", "tokens per step", "rows", "failed", "tokens out")]
    table += [
        (
            name,
            decimals(sums.mean_acceptance_length),
            f"{sums.rows:,}",
            f"{sums.failed:,}",
            f"{sums.completion_tokens:,}",
        )
        for name, sums in ranked
    ]
    title, words = "Acceptance by category", "Tokens per step, on average."
    return Picture("categories", title, words, draw, table, rows_size(len(ranked)))


def _lengths(title: str, what: str, histogram: Sequence[int]) -> Picture:
    first = next(i for i, rows in enumerate(histogram) if rows)
    counted = list(enumerate(histogram))[first:]
    spans = [length_range(place) for place, _ in counted]

    def draw(axes: Axes) -> None:
        axes.bar(range(len(counted)), [rows for _, rows in counted], color=TEAL)
        names = [str(low) if low < 1024 else f"{low >> 10}k" for low, _ in spans]
        every = -(-len(names) // _MAX_LABELS)
        axes.set_xticks(range(0, len(names), every), names[::every])
        axes.set_xlabel("tokens")
        axes.yaxis.set_major_formatter("{x:,g}")

    table = [("tokens", what)]
    table += [
        (str(low) if low == high else f"{low}-{high}", f"{rows:,}")
        for (low, high), (_, rows) in zip(spans, counted, strict=True)
    ]
    words = f"The number of {what} by tokens, in steps of powers of two."
    return Picture(title.lower().replace(" ", "-"), title, words, draw, table)


def _errors(stats: RowStats) -> Card:
    rows = [(kind, f"{count.rows:,}", count.example) for kind, count in stats.ranked_errors()]
    num_repeated = sum(count.rows for count in stats.errors.values()) - stats.failed
    later = f"; {num_repeated:,} of them were answered later" if num_repeated > 0 else ""
    words = f"Rows that failed, by kind, with an example{later}."
    return Card(title="Errors", words=words, rows=rows, is_wide=True)
