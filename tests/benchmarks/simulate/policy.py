"""`simulate-policy`: compares adaptive speculation with the best fixed choice, by requests and context.

Runs the real scheduler and its policies with the roofline's step times, in closed loops. Only decoding is
compared: all requests have the same prompt, which is cached. Its pages exist once, so any number of requests
fits, and each step reads it for each request. The *best* of a cell is the fastest of plain decoding and the
fixed lengths. Called by `cli.py`.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from manta.actors.system.atomic_files import write_json
from manta.cluster.errors import PlacementError
from manta.cluster.hardware.gpu_specs import Gpu, find_gpu
from manta.cluster.hardware.model_pair import ModelPair
from manta.cluster.request.request import Request
from manta.cluster.simulation.load_driver import closed_loop
from manta.cluster.speculation.draft_length_policy import draft_lengths
from manta.jobs.bench.common.engine_passes import say
from manta.jobs.bench.common.provenance import options_json, provenance
from manta.jobs.common.tables import print_table
from manta.jobs.simulate.methods import Method
from manta.jobs.simulate.node_engines import DraftAssumptions, NodeEngine, Workload, node_engines, read_shapes
from manta.jobs.simulate.node_run import assumptions

from ..options import PolicyOptions

Figures = dict[str, Any]  # Any: JSON
BEST_LEAST, PLAIN_LEAST = 0.98, 1.0
# Requests that end before any is counted, and as many that are counted: WAVES times the concurrency, at least
# LEAST_REQUESTS.
MIN_REQUESTS, WAVES = 8, 2
ADAPTIVE, PLAIN = "dflash", "plain"


def run_policy(options: PolicyOptions) -> Figures:
    """Simulate every cell, print a table, write the figures if requested, and return them."""
    gpu, begin_s = find_gpu(options.gpu), time.monotonic()
    cells: list[Figures] = []
    words: dict[str, list[str]] = {}
    longest = max(options.contexts) + 2 * options.output_tokens
    figures: Figures = {}
    for target, drafter in zip(options.model, options.drafter, strict=True):
        pair = read_shapes(target, drafter, longest).pair
        words[target] = assumptions(gpu, pair, options.spread)
        for cell in _cells(options, pair, gpu):
            cells.append({"model": target, **cell})
            figures = _figures(options, cells, words, time.monotonic() - begin_s)
            if options.output is not None:
                write_json(options.output, figures)
    _show(cells)
    return figures


def _figures(
    options: PolicyOptions, cells: list[Figures], words: dict[str, list[str]], seconds: float
) -> Figures:
    return {
        "provenance": provenance(),
        "options": options_json(options),
        "assumptions": words,
        "cells": cells,
        "worst": {name: min(cell[name] for cell in cells) for name in ("to_best", "to_plain")},
        "below": {
            "to_best": sum(cell["to_best"] < BEST_LEAST for cell in cells),
            "to_plain": sum(cell["to_plain"] < PLAIN_LEAST for cell in cells),
        },
        "computed_in_s": round(seconds, 1),
    }


def _cells(options: PolicyOptions, pair: ModelPair, gpu: Gpu) -> Iterator[Figures]:
    lengths = [f"{ADAPTIVE}-{drafts}" for drafts in draft_lengths(pair.num_drafts)[1:]]
    methods = [Method.parse(name) for name in (PLAIN, *lengths, ADAPTIVE)]
    for tp in options.tp:
        for acceptance in options.acceptance:
            for context in options.contexts:
                drafting = DraftAssumptions(dflash=acceptance, spread=options.spread)
                work = Workload(
                    prompt_tokens=context,
                    output_tokens=options.output_tokens,
                    sigma=0.0,
                    max_tokens=context + 2 * options.output_tokens,
                )
                where = {"tp": tp, "acceptance": acceptance, "context": context}
                try:
                    yield from _at_loads(options, pair, gpu, methods, drafting, work, where)
                except PlacementError as error:
                    say(f"{where}: {error.message}")


def _at_loads(
    options: PolicyOptions,
    pair: ModelPair,
    gpu: Gpu,
    methods: list[Method],
    drafting: DraftAssumptions,
    work: Workload,
    where: Figures,
) -> Iterator[Figures]:
    tp = where["tp"]
    played = list(node_engines(pair, gpu, tp, (tp,), methods, drafting, work))
    for load in options.concurrency:
        say(f"{where}, {load} requests")
        rates = {node_engine.method.name: _rate(node_engine, work, load) for node_engine in played}
        adaptive = rates.pop(ADAPTIVE)
        best = max(rates, key=lambda name: rates[name])
        yield {
            **where,
            "requests": load,
            "tokens_per_s": {name: round(rate, 1) for name, rate in rates.items()},
            "adaptive_tokens_per_s": round(adaptive, 1),
            "best": best,
            "to_best": round(adaptive / rates[best], 4),
            "to_plain": round(adaptive / rates[PLAIN], 4),
        }


def _rate(node_engine: NodeEngine, work: Workload, load: int) -> float:
    """Return the throughput in tokens/s."""
    shared = work.request(0).prompt_token_ids
    room = replace(node_engine.memory, largest_batch=load)
    engine = replace(node_engine, memory=room).engine(free_prompts=True, prefix_caching=True)

    def make(number: int, share: float) -> Request:
        return replace(work.request(number, share), prompt_token_ids=shared)

    count = max(WAVES * load, MIN_REQUESTS)
    return closed_loop(engine, make, load, count, count).tokens_per_s


def _show(cells: list[Figures]) -> None:
    columns = ["model", "TP", "length", "context", "requests", "plain tok/s", "best", "adaptive tok/s"]
    columns += ["to best", "to plain"]
    rows = [
        [
            Path(cell["model"]).parent.name if Path(cell["model"]).name == "target" else cell["model"],
            str(cell["tp"]),
            cell["acceptance"],
            f"{cell['context']:,}",
            str(cell["requests"]),
            f"{cell['tokens_per_s'][PLAIN]:,.0f}",
            f"{cell['best']} {cell['tokens_per_s'][cell['best']]:,.0f}",
            f"{cell['adaptive_tokens_per_s']:,.0f}",
            f"{cell['to_best']:.3f}",
            f"{cell['to_plain']:.3f}",
        ]
        for cell in cells
    ]
    print_table("adaptive beside plain and fixed lengths, simulated", columns, rows)
