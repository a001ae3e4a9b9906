"""Measures the first seconds of fresh engines at one load, and then at another: adaptive against plain.

    python tests/benchmarks starts -o starts.json

In these seconds an adaptive engine has few measurements, and its trials cost something that a steady point of
`manta bench sweep` does not show. Each load is the first load of one pair of engines; the second load is far
from it.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace

from manta.actors.engine.uniproc_executor import make_executor
from manta.actors.tokenization.prompts import load_tokenizer
from manta.cluster.config import EngineConfig
from manta.cluster.errors import ConfigError
from manta.jobs.bench.common.engine_passes import Figures, read_rows, record, rotated, say
from manta.jobs.bench.common.idle_check import Watch, print_warning
from manta.jobs.bench.common.request_source import RequestSource, encode_rows
from manta.jobs.bench.sweep.engines import ADAPTIVE, PLAIN, Driver, LoadRun
from manta.jobs.bench.sweep.load_records import AnswerRecord, LoadPass
from manta.jobs.common.tables import print_table

from ..options import StartsOptions

WHEN = ("start", "change")


def run_starts(config: EngineConfig, options: StartsOptions) -> Figures:
    """Measure, print a table, write the requested file, and return the figures."""
    if config.speculative_config is None or len(options.concurrency) < 2:
        raise ConfigError("Give --spec-model and at least two loads.", param="speculative_config")
    maximum = max(options.concurrency)
    config = replace(config, enable_prefix_caching=False, max_num_seqs=maximum)
    rows = encode_rows(read_rows(options.prompts, options.num_prompts), load_tokenizer(config))
    source = RequestSource(rows, options.max_tokens, 0.0)
    loads = options.concurrency
    points = [_measure(config, loads, i, source, options) for i in range(len(loads))]
    cells = [
        [str(point["requests"]), *_cells(point["start"]), str(point["then"]), *_cells(point["change"])]
        for point in points
    ]
    columns = ["first load", "plain tok/s", "adaptive", "ratio", "then", "plain tok/s", "adaptive", "ratio"]
    print_table("the first seconds after a start and after a change of load", columns, cells)
    print_warning([point["idleness"] for point in points])
    return record(config, options, points)


def _measure(
    config: EngineConfig, loads: Sequence[int], i: int, source: RequestSource, options: StartsOptions
) -> Figures:
    first, second = loads[i], loads[(i + (len(loads) + 1) // 2) % len(loads)]
    watch = Watch()
    passes: dict[str, list[list[LoadPass]]] = {PLAIN: [], ADAPTIVE: []}
    for number in range(options.rounds):
        say(f"a start with {first} request(s), then {second}, round {number + 1}/{options.rounds}")
        for name in rotated(list(passes), number + i):
            spec = config.speculative_config if name == ADAPTIVE else None
            of_side = replace(config, speculative_config=spec and replace(spec, adaptive=True))
            driver = Driver(of_side, make_executor(of_side))
            try:
                with watch.open():
                    passes[name].append(hold(driver, source, (first, second), options.window_s))
            finally:
                driver.close()
    return {"requests": first, "then": second, **_figures(passes), "idleness": watch.found.as_json()}


def hold(driver: Driver, source: RequestSource, loads: tuple[int, ...], seconds: float) -> list[LoadPass]:
    """Run a closed loop for `seconds` at each load; return a pass per load.

    If the next load is smaller, surplus requests are aborted.
    """
    run, number = LoadRun(driver), 0
    passes: list[LoadPass] = []
    for at_once in loads:
        begin_s = driver.clock()
        for name in list(run.open)[at_once:]:
            driver.engine.abort(name)
            run.open.pop(name).ended_s = begin_s
        while True:
            while len(run.open) < at_once:
                run.submit(source, number, driver.clock())
                number += 1
            run.step()
            if driver.clock() - begin_s >= seconds:
                break
        passes.append(_between(run, begin_s, driver.clock()))
    run.end()
    return passes


def _between(run: LoadRun, begin_s: float, end_s: float) -> LoadPass:
    """Return the result for a part of the time; answers are cut to it."""
    parts: list[AnswerRecord] = []
    for answer in run.answers.values():
        if (answer.ended_s or end_s) <= begin_s:
            continue
        blocks = [block for block in answer.blocks if begin_s <= block.at_s <= end_s]
        requested_s = max(answer.requested_s, begin_s)
        parts.append(
            AnswerRecord(answer.number, answer.category, requested_s, blocks, ended_s=answer.ended_s)
        )
    return LoadPass(begin_s, end_s, parts, {}, 0, 0)


def _figures(passes: Mapping[str, list[list[LoadPass]]]) -> Figures:
    figures: Figures = {}
    for place, when in enumerate(WHEN):
        speeds = {name: [done[place].tokens_per_s for done in found] for name, found in passes.items()}
        pairs = zip(speeds[ADAPTIVE], speeds[PLAIN], strict=True)
        ratios = [adaptive / max(plain, 1e-9) for adaptive, plain in pairs]
        figures[when] = {
            **{name: round(statistics.median(found), 2) for name, found in speeds.items()},
            "ratio": round(statistics.median(ratios), 4),
            "rounds_ratio": [round(ratio, 4) for ratio in ratios],
        }
    return figures


def _cells(window: Figures) -> list[str]:
    return [f"{window['plain']:.1f}", f"{window['adaptive']:.1f}", f"{window['ratio']:.3f}"]
