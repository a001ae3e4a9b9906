"""`manta bench sweep`: plain decoding, the adaptive engine, fixed draft lengths and other methods by load.

It measures all sides (`engines.py`) at every load and temperature (`point.py`). Runs in this process, without
Ray, and without the prefix cache, because prompts repeat. It writes its file after every point.
`tests/benchmarks` judges the policy with it (`sweep`), and measures the first seconds of engines (`starts`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product

from ....actors.tokenization.prompts import load_tokenizer
from ....cluster.config import EngineConfig
from ....cluster.errors import ConfigError
from ...common.tables import decimals, print_table
from ..common.engine_passes import Figures, PromptRow, read_rows, record
from ..common.idle_check import print_warning
from ..common.options import SweepOptions
from ..common.request_source import RequestSource, encode_rows
from .engines import open_sides
from .point import measure, point_figures


def run_sweep(
    config: EngineConfig,
    options: SweepOptions,
    make_source: Callable[[Sequence[PromptRow], int, float], RequestSource] = RequestSource,
) -> Figures:
    if config.speculative_config is None:
        raise ConfigError(
            "speculative_config is missing: a sweep compares draft lengths. Give --spec-model.",
            param="speculative_config",
        )
    begin_s = time.monotonic()
    config = replace(config, enable_prefix_caching=False, max_num_seqs=max(options.concurrency))
    rows = encode_rows(read_rows(options.prompts, options.num_prompts), load_tokenizer(config))
    points: list[Figures] = []
    figures: Figures = {}
    with open_sides(config, options.methods, methods_only=options.methods_only) as sides:
        todo = list(product(sorted(set(options.temperatures)), sorted(set(options.concurrency))))
        for number, (temperature, requests) in enumerate(todo):
            budget_s = (60.0 * options.minutes - (time.monotonic() - begin_s)) / (len(todo) - number)
            source = make_source(rows, options.max_tokens, temperature)
            measured = measure(requests, sides.drivers, source, options.rounds, budget_s)
            points.append({"temperature": temperature, **point_figures(measured, sides.fixed)})
            print_point(points[-1])
            more = {
                "complete": len(points) == len(todo),
                "measured_in_s": round(time.monotonic() - begin_s, 1),
                "refused": sides.refused,
            }
            figures = record(config, options, points, more)
    for name, why in figures["refused"].items():
        print(f"{name} was refused: {why}")
    return figures


def print_point(point: Figures) -> None:
    columns = ["side", "tok/s", "to plain", "to best", "tok/step", "drafts/step", "accepted"]
    columns += ["skipped", "ttft p50", "itl p99", "identical"]
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
            f"{side['skipped_passes']:.0%}" if side["skipped_passes"] else "-",
            _ms(side["ttft_ms"], "p50"),
            _ms(side["itl_ms"], "p99"),
            "yes" if side["identical"] else "no",
        ]
        for name, side in point["sides"].items()
    ]
    title = f"{point['requests']} request(s), T = {point['temperature']:g}"
    print_table(f"{title}; * is the best of plain and fixed lengths", columns, rows)
    print_warning([point["idleness"]])


def _ms(described: Figures | None, name: str) -> str:
    return "-" if described is None else f"{described[name]:.1f}"
