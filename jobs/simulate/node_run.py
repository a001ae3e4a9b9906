"""Simulates one node under load: the real scheduler and policies with the roofline's step times.

Runs every method in every layout at every load. Reports throughput per GPU against speed per user, the
frontier of each method, and its gain over plain decoding at equal speed per user and at equal load. The
assumptions are written with the figures. Called by `jobs/cli.py`.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from ...actors.system.atomic_files import write_json
from ...cluster.errors import ConfigError
from ...cluster.hardware.gpu_specs import Gpu, find_gpu
from ...cluster.hardware.kernel_loops import ISSUE_SHARE
from ...cluster.hardware.memory_estimate import GPU_MEMORY_UTILIZATION, MAX_ROWS
from ...cluster.hardware.model_pair import ModelPair
from ...cluster.hardware.step_time import (
    FUSED_SUM_BYTES,
    FUSED_SUM_ROWS,
    LAUNCH_S,
    LAUNCHES_AROUND,
    LAUNCHES_OF_DRAFT,
    LAUNCHES_OF_EXPERTS,
    LAUNCHES_OF_SUMS,
    LAUNCHES_OVER_RANKS,
    LAUNCHES_PER_LAYER,
)
from ...cluster.records.percentiles import Percentiles
from ...cluster.request.request import Request
from ...cluster.simulation.load_driver import LoadMeasurement, closed_loop, open_loop
from ...cluster.simulation.simulated_engine import TraceArrival
from ..bench.common.provenance import provenance
from ..common.options import NodeOptions
from ..common.plots import COLORS, GRAY, can_plot, new_figure, save_figure
from ..common.progress import TimeLeft
from ..common.tables import NO_FIGURE, decimals, print_table
from ..plan.pair_reader import read_trace
from .methods import EAGLE3_INTER, EAGLE3_TAPS, EAGLE3_VOCAB, Figures, Method, matched_speed, of_method
from .node_engines import DraftAssumptions, NodeEngine, Workload, node_engines, read_shapes

MIN_REQUESTS = 16  # minimum number of measured requests at a load
ROW_WORK = 0.01  # cost of simulating a request in a step, relative to the step's own; for progress
MARKERS: Mapping[int, str] = {1: "o", 2: "s", 4: "^", 8: "D"}  # by ranks of an engine


def run_node(options: NodeOptions) -> Figures:
    """Simulate all methods and layouts at each load, print the points, and return them with what was assumed.

    A load is a number of clients that send again at once, a rate, or a trace of arrivals.
    """
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
            bound = None if trace or options.rate_per_s else _bound(node_engine, load, seen)
            points.append({**_figures(node_engine, load, seen, options.num_gpus), "bound": bound})
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
        draw_node(figures, options.plot)
    return figures


def _name(model: str) -> str:
    path = Path(model)
    return path.parent.name if path.name == "target" else path.name


def _loads(node_engine: NodeEngine, options: NodeOptions) -> list[int]:
    return [clients for clients in options.concurrency if clients <= node_engine.memory.max_num_seqs]


def _num_measured(clients: int) -> int:
    return max(2 * clients, MIN_REQUESTS)


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
) -> Iterator[tuple[float, LoadMeasurement]]:
    """Yield each load and what was measured at it: of the trace, of rates, or of numbers of clients."""

    def make(number: int, share: float, clients: int = 0) -> Request:
        work = _request_work(clients) if clients else 1.0
        progress.update(work if number >= clients else 0.0)
        return workload.request(number, share)

    def run_open_loop(arrival_s: Sequence[float]) -> LoadMeasurement:
        return open_loop([node_engine.engine() for _ in range(node_engine.layout.replicas)], make, arrival_s)

    if trace_s:
        yield len(trace_s) / max(trace_s[-1] - trace_s[0], 1.0), run_open_loop(trace_s)
        return
    for rate in options.rate_per_s:
        dice = np.random.default_rng([workload.seed, 1])
        yield rate, run_open_loop(np.cumsum(dice.exponential(1.0 / rate, options.num_requests)).tolist())
    for clients in () if options.rate_per_s else _loads(node_engine, options):
        follow = partial(make, clients=clients)
        yield clients, closed_loop(node_engine.engine(), follow, clients, _num_measured(clients))


def _figures(node_engine: NodeEngine, load: float, seen: LoadMeasurement, num_gpus: int) -> Figures:
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


def _bound(node_engine: NodeEngine, clients: float, seen: LoadMeasurement) -> str:
    """Return which part takes most of a round in which all clients decode; see `DeviceTime`."""
    rows = 1 + (seen.drafts_per_block or 0.0)
    return node_engine.times.round(int(clients), rows, node_engine.demand.context).bound


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


def assumptions(gpu: Gpu, pair: ModelPair, spread: float) -> list[str]:
    device, link, target = gpu.device, gpu.link, pair.target
    packed = ", ".join(f"{experts.weight_bytes:g} bytes" for experts, _ in target.routed)
    return [
        "Acceptance is given, not derived; each draft has the same conditional acceptance probability. A "
        "shortened DFlash block is assumed to equal the beginning of the whole block, which it does not.",
        f"Requests differ in hardness with a standard deviation of {spread:g} "
        "(cluster/simulation/acceptance_mix.py). A draft's margin gives its acceptance probability exactly "
        "(cluster/simulation/simulated_drafts.py), which is the most that a policy can know.",
        f"{device.name} moves {device.bytes_per_s / 1e9:,.0f} GB/s and computes {device.flops / 1e12:,.0f} "
        "TFLOP/s in every product, however few rows it has; published engines reach 40 to 75 % of such "
        "rooflines.",
        f"A kernel launch costs {LAUNCH_S * 1e6:g} µs: {LAUNCHES_PER_LAYER} a layer, {LAUNCHES_OF_EXPERTS} "
        f"more with experts, {LAUNCHES_OF_SUMS} more without over ranks, {LAUNCHES_OF_SUMS} less over ranks "
        f"up to {FUSED_SUM_ROWS} rows of {FUSED_SUM_BYTES >> 10} KiB together, {LAUNCHES_AROUND} per step, "
        f"{LAUNCHES_OVER_RANKS} more over ranks, {LAUNCHES_OF_DRAFT} per pass for one draft.",
        f"An all-reduce takes {link.latency_s * 1e6:g} µs plus its bytes at "
        f"{link.bytes_per_s / 1e9:,.0f} GB/s; two per layer. No data-parallel attention; experts whose "
        "inner size ranks cannot divide are divided whole, and ranks wait for the busiest.",
        f"Weights and K/V take {target.itemsize} bytes, routed experts {packed or 'the same'}. Products are "
        "in bf16, whatever the format of the weights.",
        "Loops over weights and K/V take at least the time in which their instructions are issued, as "
        f"counted in machine code (cluster/hardware/kernel_loops.py), in {ISSUE_SHARE:.0%} of the cycles.",
        "Routing is uniform and independent: E (1 - (1 - k/E)^n) of a layer's E experts are read for n rows.",
        f"EAGLE-3 drafts a chain: a pass of one layer for each draft ({EAGLE3_TAPS} taps, a head of "
        f"{EAGLE3_VOCAB:,} tokens, an MLP like the target's dense ones, or {EAGLE3_INTER} times the hidden "
        "size), replicated on every rank.",
        "A DFlash drafter, too, is replicated on every rank, except for the target's head. "
        f"{GPU_MEMORY_UTILIZATION:.0%} of a GPU's memory is used. A step has up to {MAX_ROWS} rows; prefill "
        "and decoding share steps. There is no prefix cache.",
        "The host takes no time: a step is scheduled while the previous one is computed.",
    ]


def draw_node(figures: Mapping[str, Any], path: Path) -> None:  # Any: JSON of `node.run_node`
    points = figures["points"]
    names = list(dict.fromkeys(point["method"] for point in points))
    figure = new_figure(7.2, 4.2)
    axes = figure.subplots()
    for i, name in enumerate(names):
        color = GRAY if name == "plain" else COLORS[i % len(COLORS)]
        front = of_method(points, name)
        axes.plot([x for x, _ in front], [y for _, y in front], color=color, label=name, linewidth=1.8)
        for point in points:
            if point["method"] == name:
                where = point["user_tokens_per_s"], point["tokens_per_s_per_gpu"]
                marker = MARKERS.get(point["tp"], "o")
                axes.plot(*where, marker, color=color, markersize=5, alpha=1.0 if where in front else 0.25)
    axes.set_yscale("log")
    axes.set_xlabel("tokens/s per user (median)")
    axes.set_ylabel("tokens/s per GPU")
    axes.set_xlim(left=0)
    axes.grid(alpha=0.25, which="both", linewidth=0.5)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="upper right")
    axes.set_title(_title(figures), fontsize=9, loc="left")
    save_figure(figure, path)


def _title(figures: Mapping[str, Any]) -> str:
    options = figures["options"]
    work = options["workload"]
    return (
        f"{options['name']} on {options['num_gpus']} x {options['gpu'].upper()}, simulated; "
        f"{work['prompt_tokens']:g} tokens in, {work['output_tokens']:g} out\n"
        "ranks of an engine: 1 circle, 2 square, 4 triangle, 8 diamond; faint: off the frontier"
    )
