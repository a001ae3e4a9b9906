"""`benchmarks batch`: the overhead of a batch job over the engine, and other systems on the same rows.

A job, `manta.LLM`, HTTP to our server, and Ray Data with Hugging Face `generate` alternate: in each round
every side runs alone over the same rows, in rotating order. Greedy, with a fixed number of tokens per row and
without prefix cache. A job with two engines shows how busy they are kept. Medians over rounds are reported.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from manta.actors.system.atomic_files import rounded
from manta.actors.tokenization.checkpoint_paths import with_absolute_paths
from manta.actors.tokenization.prompts import load_tokenizer
from manta.cluster.config import EngineConfig
from manta.jobs.bench.common.engine_passes import (
    Figures,
    Pass,
    Prompt,
    encode_prompts,
    ratios,
    read_prompts,
    record,
    rotated,
    say,
)
from manta.jobs.bench.common.idle_check import print_warning
from manta.jobs.common.tables import NO_FIGURE, decimals, print_table

from ..options import BatchBenchOptions
from ..processes.process_tree import TreeWatch
from .batch_sides import GenerateSide, HttpSide, JobPass, JobSide, LlmSide, Work

GENERATE_SHARE = 0.05  # of the rows: `generate` is slow, and its speed does not depend on the number of rows
MIN_GENERATED = 16
LOOK_EVERY_S = 1.0  # to count the processes of a side's Ray, which end with it


class Side(Protocol):
    @property
    def name(self) -> str: ...

    def run(self, work: Work) -> Pass: ...


def run_batch_bench(config: EngineConfig, options: BatchBenchOptions) -> Figures:
    """Measure, print a table, write the figures if requested, and return them."""
    config = replace(with_absolute_paths(config), enable_prefix_caching=False)
    prompts = _prompts(config, options)
    sides = _sides(config, options)
    passes: dict[str, list[Pass]] = {name: [] for name in sides}
    watch = TreeWatch(look_every_s=LOOK_EVERY_S)
    with tempfile.TemporaryDirectory(prefix="manta-bench-") as scratch:
        for number in range(options.rounds):
            for name in rotated(list(sides), number):
                say(f"round {number + 1}/{options.rounds}: {sides[name].name}")
                work = Work(_share(prompts, name), options.max_tokens, Path(scratch))
                with watch.open():
                    passes[name].append(sides[name].run(work))
    point = _figures(sides, passes, prompts, watch)
    print_point(point)
    return record(config, options, [point])


def print_point(point: Figures) -> None:
    """Print the table, and a warning if the machine was not idle."""
    columns = ["side", "rows", "tok/s", "the job is", "identical", "first row after s", "engines busy"]
    table = [
        [
            side["name"],
            str(side["rows"]),
            f"{side['tokens_per_s']:.1f}",
            NO_FIGURE if side["ratio"] is None else f"{side['ratio']:.2f}x",
            {None: NO_FIGURE, True: "yes", False: "no"}[side["identical"]],
            decimals(side["first_row_s"]),
            NO_FIGURE if side["busy_share"] is None else f"{100 * side['busy_share']:.1f} %",
        ]
        for side in point["sides"]
    ]
    print_table(f"{point['rows']} rows", columns, table)
    print_warning([point["idleness"]])


def _sides(config: EngineConfig, options: BatchBenchOptions) -> Mapping[str, Side]:
    made: dict[str, Side] = {
        "job": JobSide(config),
        "llm": LlmSide(config),
        "http": HttpSide(config),
        "generate": GenerateSide(config),
        "engines": JobSide(config, options.engines),
    }
    return {name: side for name, side in made.items() if name in options.sides}


def _prompts(config: EngineConfig, options: BatchBenchOptions) -> list[Prompt]:
    """Return the file's prompts, repeated as needed, with unique ids."""
    distinct = encode_prompts(read_prompts(options.prompts, options.rows), load_tokenizer(config))
    return [(f"{i:07d}", distinct[i % len(distinct)][1]) for i in range(options.rows)]


def _share(prompts: Sequence[Prompt], name: str) -> Sequence[Prompt]:
    """Return the rows of a side: all, or an evenly spaced sample for `generate`."""
    if name != "generate":
        return prompts
    count = min(len(prompts), max(MIN_GENERATED, round(GENERATE_SHARE * len(prompts))))
    return [prompts[i * len(prompts) // count] for i in range(count)]


def _figures(
    sides: Mapping[str, Side],
    passes: Mapping[str, list[Pass]],
    prompts: Sequence[Prompt],
    watch: TreeWatch,
) -> Figures:
    return {
        "rows": len(prompts),
        "sides": [
            _figures_of_side(name, sides[name], found, passes, len(_share(prompts, name)))
            for name, found in passes.items()
        ],
        "idleness": watch.found.as_json(),
    }


def _figures_of_side(
    name: str, side: Side, found: Sequence[Pass], passes: Mapping[str, list[Pass]], rows: int
) -> Figures:
    jobs = [one for one in found if isinstance(one, JobPass)]
    busy = [one.busy_share for one in jobs if one.busy_share is not None]
    return {
        "side": name,
        "name": side.name,
        "rows": rows,
        "tokens": found[-1].tokens,
        "tokens_per_s": round(statistics.median(one.tokens_per_s for one in found), 2),
        "rounds_tokens_per_s": [round(one.tokens_per_s, 2) for one in found],
        "ratio": round(statistics.median(ratios(passes["job"], found)), 3) if "job" in passes else None,
        "identical": _same(found[-1], passes.get("llm")) if name != "generate" else None,
        "first_row_s": rounded(statistics.median(one.first_row_s for one in jobs) if jobs else None),
        "busy_share": rounded(statistics.median(busy) if busy else None),
    }


def _same(found: Pass, reference: Sequence[Pass] | None) -> bool | None:
    """Return whether the answers equal those of `manta.LLM`; None if unknown."""
    if reference is None or found.token_ids is None:
        return None
    return found.token_ids == reference[-1].token_ids
