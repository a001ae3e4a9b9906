"""`manta bench sweep`: checks that speculation is never slower than plain, and adapting as good as the best.

It measures all sides (`engines.py`) at every load (`point.py`) and fresh engines in their first seconds
(`cold_start.py`), and gives a verdict for each bar (`point_stats.py`). Runs in this process, without Ray, and
without the prefix cache, because prompts repeat. It prints and writes its file after every cell; the same
command continues an interrupted sweep (`resume.py`).
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import get_args

from ....actors.tokenization.prompts import load_tokenizer
from ....cluster.config import EngineConfig
from ....cluster.errors import ConfigError
from ...common.tables import decimals, print_table
from ..common.engine_passes import Figures, read_rows, record, say, subject
from ..common.idle_check import print_warning
from ..common.options import SweepOptions
from ..load.request_source import RequestSource, Traffic, encode_rows
from .cold_start import measure_starts
from .engines import open_sides
from .point import SweepPoint, measure
from .point_stats import point_figures, verdicts
from .resume import MeasuredCells, read_cells

STARTS_SHARE = 0.25  # of the total time, but at least one round


def run_sweep(config: EngineConfig, options: SweepOptions) -> Figures:
    """Measure, print tables, write the requested file, and return the figures."""
    if config.speculative_config is None:
        raise ConfigError(
            "speculative_config is missing: a sweep compares draft lengths. Give --spec-model.",
            param="speculative_config",
        )
    begin_s = time.monotonic()
    most = max((*options.concurrency, *options.mixed, *([config.max_num_seqs] if options.open_loops else [])))
    config = replace(config, enable_prefix_caching=False, max_num_seqs=most)
    rows = encode_rows(read_rows(options.prompts, options.num_prompts), load_tokenizer(config))
    kinds = {
        traffic: RequestSource(rows, options.max_tokens, options.temperature, traffic)
        for traffic in get_args(Traffic)
    }
    cells = read_cells(options.output, subject(config, options))
    if cells.seconds:
        count = len(cells.starts) + len(cells.points)
        say(f"{options.output} contains {count} cells of an interrupted sweep, which are not measured again")
    before_s = cells.seconds

    def keep(refused: dict[str, str], *, complete: bool = False) -> Figures:
        cells.seconds = before_s + time.monotonic() - begin_s
        return _record(config, options, cells, refused, complete=complete)

    for _ in _starts(config, options, kinds["prompts"], cells):
        keep({})
    with open_sides(config, options.methods, methods_only=options.methods_only) as sides:
        refused = sides.refused
        todo = [point for point in _points(options) if not cells.has_point(*point.load)]
        for number, point in enumerate(todo):
            left_s = 60.0 * options.minutes - before_s - (time.monotonic() - begin_s)
            budget_s = left_s / (len(todo) - number)
            measured = measure(point, sides.drivers, kinds[point.traffic], options.rounds, budget_s)
            cells.points.append(point_figures(measured, sides.fixed))
            print_point(cells.points[-1])
            keep(refused)
    figures = keep(refused, complete=True)
    print_verdicts(figures["verdicts"])
    for name, why in refused.items():
        print(f"{name} was refused: {why}")
    return figures


def _points(options: SweepOptions) -> list[SweepPoint]:
    """Return the points, mixed traffic directly after prompts at the same load, to be comparable."""
    loops: tuple[tuple[Traffic, tuple[int, ...]], ...]
    loops = (("prompts", options.concurrency), ("mixed", options.mixed))
    found = [
        SweepPoint(traffic, requests)
        for requests in sorted({*options.concurrency, *options.mixed})
        for traffic, loads in loops
        if requests in loads
    ]
    return [*found, *(SweepPoint("prompts", None, arrivals) for arrivals in options.open_loops)]


def _starts(
    config: EngineConfig, options: SweepOptions, source: RequestSource, cells: MeasuredCells
) -> Iterator[Figures]:
    """Measure starts in as many rounds as fit, at least one; skipped if there is only one load."""
    loads = options.concurrency
    if len(loads) < 2 or options.methods_only:
        return
    round_s = 4 * options.window_s * len(loads)
    rounds = max(1, int(STARTS_SHARE * 60.0 * options.minutes / round_s))
    left = [load for load in loads if not cells.has_start(load)]
    for start in measure_starts(config, loads, left, source, options.window_s, min(rounds, options.rounds)):
        cells.starts.append(start)
        yield start
    print_starts(cells.starts)


def _record(
    config: EngineConfig,
    options: SweepOptions,
    cells: MeasuredCells,
    refused: dict[str, str],
    *,
    complete: bool,
) -> Figures:
    more = {
        "complete": complete,
        "measured_in_s": round(cells.seconds, 1),
        "refused": refused,
        "starts": cells.starts,
        "verdicts": verdicts(cells.points, cells.starts),
    }
    return record(config, options, cells.points, more)


def print_point(point: Figures) -> None:
    columns = [
        "side",
        "tok/s",
        "to plain",
        "to best",
        "tok/step",
        "drafts/step",
        "accepted",
        "ttft p50",
        "itl p99",
        "identical",
    ]
    rows = [
        [
            name + (" *" if name == point["best"] else ""),
            f"{side['tokens_per_s']:.1f}",
            f"{side['ratio_to_plain']:.3f}",
            f"{side['ratio_to_best']:.3f}",
            decimals(side["tokens_per_step"]),
            decimals(side["drafts_per_step"]),
            decimals(side["mean_acceptance_length"]),
            _ms(side["ttft_ms"], "p50"),
            _ms(side["itl_ms"], "p99"),
            "yes" if side["identical"] else "no",
        ]
        for name, side in point["sides"].items()
    ]
    load = f"{point['requests']} request(s)" if point["requests"] else f"{point['request_rate']:g} requests/s"
    print_table(
        f"{load}, traffic: {point['traffic']}; * is the best of plain and fixed lengths", columns, rows
    )
    print_warning([point["idleness"]])


def print_starts(starts: Sequence[Figures]) -> None:
    columns = ["first load", "plain tok/s", "adaptive", "ratio", "then", "plain tok/s", "adaptive", "ratio"]
    rows = [
        [
            str(start["requests"]),
            *_start_cells(start["start"]),
            str(start["then"]),
            *_start_cells(start["change"]),
        ]
        for start in starts
    ]
    print_table("the first seconds after a start and after a change of load", columns, rows)


def print_verdicts(found: Sequence[Figures]) -> None:
    rows = [
        [
            one["bar"],
            one["where"],
            f"{one['measured']:.3f} ({one['range'][0]:.2f} to {one['range'][1]:.2f})",
            f"{one['least']:.2f}",
            "yes" if one["met"] else "NO",
        ]
        for one in found
    ]
    print_table("bars", ["bar", "where", "measured", "at least", "met"], rows, num_left=2)


def _start_cells(window: Figures) -> list[str]:
    return [f"{window['plain']:.1f}", f"{window['adaptive']:.1f}", f"{window['ratio']:.3f}"]


def _ms(described: Figures | None, name: str) -> str:
    return "-" if described is None else f"{described[name]:.1f}"
