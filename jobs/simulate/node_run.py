"""Simulates one node under load: the real scheduler and policies with the roofline's step times.

Runs every method in every layout at every load. Reports throughput per GPU against speed per user, the
frontier of each method, and its gain over plain decoding at equal speed per user and at equal load. The
assumptions are written with the figures. Called by `jobs/cli.py`; `node_plot.py` draws the chart.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import numpy as np

from ...actors.system.atomic_files import write_json
from ...cluster.errors import ConfigError
from ...cluster.hardware.gpu_specs import find_gpu
from ...cluster.request.request import Request
from ...cluster.simulation.load_generator import Observed, Percentiles, closed_loop, open_loop
from ...cluster.simulation.trace_replay import TraceArrival
from ..bench.common.provenance import provenance
from ..charts.plots import can_plot
from ..common.progress import TimeLeft
from ..common.tables import NO_FIGURE, decimals, print_table
from ..plan.arrival_trace import read_trace
from .assumptions import assumptions
from .methods import Figures, Method, matched_speed
from .node_engines import DraftAssumptions, NodeEngine, node_engines, read_shapes
from .options import NodeOptions
from .workload import Workload

LEAST_REQUESTS = 16  # minimum number of measured requests at a load
ROW_WORK = 0.01  # cost of simulating a request in a step, relative to the step's own; for progress


def run_node(options: NodeOptions) -> Figures:
    methods = [Method.parse(name) for name in options.methods]
    if options.drafter is None and any(method.kind == "dflash" for method in methods):
        raise ConfigError("methods: dflash needs a drafter's shape: give --drafter.", param="drafter")
    gpu, read = find_gpu(options.gpu), read_shapes(options.model, options.drafter, options.max_model_len)
    begin_s = time.monotonic()
    points: list[Figures] = []
    trace: list[TraceArrival] = []
    if options.trace is not None:
        trace = sorted(read_trace(options.trace, read.max_model_len), key=lambda a: a.arrival_s)
    workload = drawn = Workload(
        prompt_tokens=options.prompt_tokens,
        output_tokens=options.output_tokens,
        sigma=options.sigma,
        seed=options.seed,
        max_tokens=read.max_model_len,
    )
    if trace:
        workload = replace(drawn, trace=tuple((a.prompt_tokens, a.output_tokens) for a in trace))
    drafting = DraftAssumptions(
        options.acceptance, options.eagle3_acceptance, options.eagle3_drafts, options.spread, workload.seed
    )
    played = list(node_engines(read.pair, gpu, options.num_gpus, options.tp, methods, drafting, workload))
    arrivals_s = [arrival.arrival_s for arrival in trace]
    work = sum(_work(node_engine, options, trace) for node_engine in played)
    progress = TimeLeft(f"simulating {len(played)} methods and layouts", work)
    for node_engine in played:
        for load, seen in _observe(node_engine, options, workload, arrivals_s, progress):
            points.append(_figures(node_engine, load, seen, options.num_gpus))
    figures: Figures = {
        "provenance": provenance(),
        "options": {
            **asdict(options),
            "workload": asdict(drawn),
            "name": _name(options.model),
            "output": None,
            "plot": None,
            "trace": options.trace and str(options.trace),
        },
        "assumptions": assumptions(gpu, read.pair, options.spread),
        "points": points,
        "matched_speed": matched_speed(points),
        "computed_in_s": round(time.monotonic() - begin_s, 1),
    }
    _show(figures)
    if options.output is not None:
        write_json(options.output, figures)
    if options.plot is not None and can_plot():
        from .node_plot import draw_node

        draw_node(figures, options.plot)
    return figures


def _name(model: str) -> str:
    """Return the last part of a hub id or path; "gpt-oss-120b" for ".../gpt-oss-120b/target"."""
    path = Path(model)
    return path.parent.name if path.name == "target" else path.name


def _loads(node_engine: NodeEngine, options: NodeOptions) -> list[int]:
    return [clients for clients in options.concurrency if clients <= node_engine.room.max_num_seqs]


def _num_measured(clients: int) -> int:
    return max(2 * clients, LEAST_REQUESTS)


def _request_work(clients: int) -> float:
    """Return the relative work of simulating a request among `clients`: they share the work of steps."""
    return 1.0 / clients + ROW_WORK


def _work(node_engine: NodeEngine, options: NodeOptions, trace: Sequence[TraceArrival]) -> float:
    if trace:
        return len(trace)
    if options.rate_per_s:
        return len(options.rate_per_s) * options.num_requests
    return sum(_request_work(n) * (n + _num_measured(n)) for n in _loads(node_engine, options))


def _observe(
    node_engine: NodeEngine,
    options: NodeOptions,
    workload: Workload,
    trace_s: Sequence[float],
    progress: TimeLeft,
) -> Iterator[tuple[float, Observed]]:
    def make(number: int, share: float, clients: int = 0) -> Request:
        work = _request_work(clients) if clients else 1.0
        progress.update(work if number >= clients else 0.0)
        return workload.request(number, share)

    def arrive(arrival_s: Sequence[float]) -> Observed:
        return open_loop([node_engine.engine() for _ in range(node_engine.layout.replicas)], make, arrival_s)

    if trace_s:
        yield len(trace_s) / max(trace_s[-1] - trace_s[0], 1.0), arrive(trace_s)
        return
    for rate in options.rate_per_s:
        dice = np.random.default_rng([workload.seed, 1])
        yield rate, arrive(np.cumsum(dice.exponential(1.0 / rate, options.num_requests)).tolist())
    for clients in () if options.rate_per_s else _loads(node_engine, options):
        follow = partial(make, clients=clients)
        yield clients, closed_loop(node_engine.engine(), follow, clients, _num_measured(clients))


def _figures(node_engine: NodeEngine, load: float, seen: Observed, num_gpus: int) -> Figures:
    """Return the figures of a point. In a closed loop, one engine represents all engines of the node."""
    layout = node_engine.layout
    engines = layout.replicas // seen.num_engines
    return {
        "method": node_engine.method.name,
        "tp": layout.tp,
        "replicas": layout.replicas,
        "load": load,
        "tokens_per_s_per_gpu": seen.tokens_per_s * engines / num_gpus,
        "user_tokens_per_s": seen.user_tokens_per_s,
        "mean_acceptance_length": seen.mean_acceptance_length,
        "drafts_per_block": seen.drafts_per_block,
        "requests": len(seen.served),
        "steps": seen.steps,
        "ttft_s": seen.ttft_s(),
        "tpot_s": seen.tpot_s(),
        "e2e_s": seen.e2e_s(),
    }


def _show(figures: Figures) -> None:
    columns = ["method", "TP", "load", "tok/s a GPU", "tok/s a user", "length", "verified"]
    columns += ["TTFT p50, p95 ms", "TPOT p50, p95 ms", "E2E p50 s"]
    print_table("a node, simulated", columns, [_row(point) for point in figures["points"]])
    names = list(dict.fromkeys(point["method"] for point in figures["points"]))
    rows = [
        [f"{row['user_tokens_per_s']:,.0f}", *(_rate(row["tokens_per_s_per_gpu"][name]) for name in names)]
        for row in figures["matched_speed"]
    ]
    print_table("tok/s per GPU at equal tok/s per user", ["user", *names], rows)


def _rate(value: float | None) -> str:
    return NO_FIGURE if value is None else f"{value:,.0f}"


def _row(point: Figures) -> list[str]:
    return [
        point["method"],
        f"{point['replicas']} x {point['tp']}",
        f"{point['load']:g}",
        f"{point['tokens_per_s_per_gpu']:,.0f}",
        f"{point['user_tokens_per_s']:,.0f}",
        decimals(point["mean_acceptance_length"]),
        decimals(point["drafts_per_block"]),
        _milliseconds(point["ttft_s"]),
        _milliseconds(point["tpot_s"]),
        f"{point['e2e_s']['p50']:.2f}",
    ]


def _milliseconds(found: Percentiles) -> str:
    return f"{found['p50'] * 1e3:.1f}, {found['p95'] * 1e3:.1f}"
