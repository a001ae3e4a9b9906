"""`manta bench sweep`: checks that speculation is never slower than plain, and adapting as good as the best.

It measures all sides (`engines.py`) at every load and gives a verdict for each bar (`point.py`). Runs in this
process, without Ray, and without the prefix cache, because prompts repeat. It writes its file after every
point. `tests/benchmarks starts` measures the first seconds of engines.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import get_args

from ....actors.tokenization.prompts import load_tokenizer
from ....cluster.config import EngineConfig
from ....cluster.errors import ConfigError
from ...common.tables import decimals, print_table
from ..common.engine_passes import Figures, read_rows, record
from ..common.idle_check import print_warning
from ..common.options import SweepOptions
from ..load.request_source import RequestSource, Traffic, encode_rows
from .engines import open_sides
from .point import SweepPoint, measure, point_figures, verdicts


def run_sweep(config: EngineConfig, options: SweepOptions) -> Figures:
    """Measure, print tables, write the requested file, and return the figures."""
    if config.speculative_config is None:
        raise ConfigError(
            "speculative_config is missing: a sweep compares draft lengths. Give --spec-model.",
            param="speculative_config",
        )
    begin_s = time.monotonic()
    most = max(*options.concurrency, *options.mixed, 1)
    config = replace(config, enable_prefix_caching=False, max_num_seqs=most)
    rows = encode_rows(read_rows(options.prompts, options.num_prompts), load_tokenizer(config))
    kinds = {
        traffic: RequestSource(rows, options.max_tokens, options.temperature, traffic)
        for traffic in get_args(Traffic)
    }
    points: list[Figures] = []
    with open_sides(config, options.methods, methods_only=options.methods_only) as sides:
        todo = _points(options)
        for number, point in enumerate(todo):
            budget_s = (60.0 * options.minutes - (time.monotonic() - begin_s)) / (len(todo) - number)
            measured = measure(point, sides.drivers, kinds[point.traffic], options.rounds, budget_s)
            points.append(point_figures(measured, sides.fixed))
            print_point(points[-1])
            more = {
                "complete": len(points) == len(todo),
                "measured_in_s": round(time.monotonic() - begin_s, 1),
                "refused": sides.refused,
                "verdicts": verdicts(points),
            }
            figures = record(config, options, points, more)
    print_verdicts(figures["verdicts"])
    for name, why in figures["refused"].items():
        print(f"{name} was refused: {why}")
    return figures


def _points(options: SweepOptions) -> list[SweepPoint]:
    """Return the points, mixed traffic directly after prompts at the same load, to be comparable."""
    loops: tuple[tuple[Traffic, tuple[int, ...]], ...]
    loops = (("prompts", options.concurrency), ("mixed", options.mixed))
    return [
        SweepPoint(traffic, requests)
        for requests in sorted({*options.concurrency, *options.mixed})
        for traffic, loads in loops
        if requests in loads
    ]


def print_point(point: Figures) -> None:
    columns = ["side", "tok/s", "to plain", "to best", "tok/step", "drafts/step", "accepted"]
    columns += ["ttft p50", "itl p99", "identical"]
    rows = [
        [
            name + (" *" if name == point["best"] else ""),
            f"{side['tokens_per_s']:.1f}",
            f"{side['ratio_to_plain']:.3f}",
            f"{side['ratio_to_best']:.3f}",
            *(
                decimals(side[key])
                for key in ("tokens_per_step", "drafts_per_step", "mean_acceptance_length")
            ),
            _ms(side["ttft_ms"], "p50"),
            _ms(side["itl_ms"], "p99"),
            "yes" if side["identical"] else "no",
        ]
        for name, side in point["sides"].items()
    ]
    load = f"{point['requests']} request(s), traffic: {point['traffic']}"
    print_table(f"{load}; * is the best of plain and fixed lengths", columns, rows)
    print_warning([point["idleness"]])


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


def _ms(described: Figures | None, name: str) -> str:
    return "-" if described is None else f"{described[name]:.1f}"
