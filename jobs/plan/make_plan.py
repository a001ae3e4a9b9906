"""Makes a plan: reads the models, estimates every layout, simulates the trace, chooses, prints and writes.

The `ray_config.yaml` of the chosen layout is for `serve deploy`, `manta serve` and `manta render`. Needs
neither Ray nor a GPU.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml

from ...actors.checkpoints.checkpoint_paths import absolute_path
from ...actors.http.config.settings_mapping import split_settings
from ...cluster.config import EngineConfig, SpeculativeConfig
from ...cluster.hardware.gpu_specs import GIB, Gpu, find_gpu
from ...cluster.hardware.memory_estimate import GPU_MEMORY_UTILIZATION, MAX_ROWS
from ...cluster.hardware.model_pair import LayoutDemand
from ...cluster.hardware.model_shape import ModelShape
from ...cluster.hardware.parallel_layouts import ParallelLayout, layouts
from ...cluster.hardware.step_time import StepTimes
from ...cluster.planner.estimates import (
    LayoutEstimate,
    LayoutMisfit,
    OperatingPoint,
    check_fitting,
    choose,
    choose_by_trace,
    estimate,
)
from ...cluster.simulation.simulated_engine import ReplayResult, Slo, TraceArrival, replay_trace
from ..common.options import PlanOptions
from ..common.tables import NO_FIGURE, print_table
from .pair_reader import ReadPair, read_pair, read_trace

DEFAULT_CONTEXT = 4096  # mean tokens of a sequence, without a flag or a trace
_HEAD = """\
# Written by `manta plan`: {why}
# Serve it with `manta serve --config FILE` or `serve deploy FILE`; `manta render` makes files for KubeRay,
# `ray up` and systemd from it. All settings: cluster/config.py, actors/http/config/settings.py.
"""
# Limit of waiting requests, as a multiple of max_num_seqs; further ones get 503 with Retry-After.
_QUEUED_PER_RUNNING = 4


def make_plan(options: PlanOptions) -> dict[str, Any]:  # Any: JSON
    """Choose a layout for the options' GPUs, print it with the candidates, and write its Serve config.

    With a trace, candidates are chosen by how they serve it; otherwise by the estimates alone. Returns the
    report.
    """
    gpu = find_gpu(options.gpu)
    read = read_pair(_engine_config(options), options.acceptance)
    trace = read_trace(options.trace, read.max_model_len) if options.trace is not None else []
    demand = _demand(options, read, trace)
    pair = read.pair
    has_drafter, is_separable = pair.drafter is not None, pair.chain is None
    places = layouts(options.num_gpus, pair.tp_sizes, drafter=has_drafter, is_separable=is_separable)
    found = [estimate(pair, gpu, layout, demand) for layout in places]
    if not options.as_json:
        print(_facts(options, read, gpu))
        print_candidates(found, options.num_gpus, demand.context)
    fitting = check_fitting(found)
    played: dict[ParallelLayout, ReplayResult] = {}
    if trace:
        ttft_s = None if options.slo_ttft_ms is None else options.slo_ttft_ms / 1e3
        for each in fitting:
            times, slo = StepTimes(pair, gpu, each.layout), Slo(demand.slo_tpot_s, ttft_s)
            played[each.layout] = replay_trace(trace, times, pair, each.layout, each.memory, demand, slo)
        chosen, why = choose_by_trace(fitting, played)
    else:
        chosen, why = choose(fitting, demand, options.num_gpus)
    num_seqs = _max_num_seqs(chosen, options)
    config = serve_config(options, read, chosen, num_seqs)
    report = {
        "gpus": options.num_gpus,
        "gpu": options.gpu,
        "model": options.model,
        "drafter": options.drafter,
        "spec_method": options.spec_method if read.pair.drafter else None,
        "dtype": read.dtype,
        "kv_cache_dtype": options.kv_cache_dtype,
        "quantization": options.quantization,
        "checkpoint_quantization": read.checkpoint_quantization,
        "packed_bits": packed_bits(read.pair.target),
        "drafter_quantization": options.drafter_quantization,
        "max_model_len": read.max_model_len,
        "acceptance": {"survival": read.pair.survival, "source": read.acceptance},
        "candidates": as_json(found, played, options.num_gpus),
        "chosen": str(chosen.layout),
        "why": why,
        "ray_config": config,
    }
    if options.as_json:
        print(json.dumps(report, indent=2, ensure_ascii=False))
    else:
        print_replays(played) if played else None
        print(f"-> {why}")
    if options.output is not None:
        write_config(options.output, config, why)
        if not options.as_json:
            print(f"written: {options.output}")
    return report


def _engine_config(options: PlanOptions) -> EngineConfig:
    spec = SpeculativeConfig(method="mtp") if options.spec_method == "mtp" else None
    if options.drafter is not None:
        spec = SpeculativeConfig(
            model=options.drafter,
            method=options.spec_method,
            quantization=options.drafter_quantization,
        )
    return EngineConfig(
        model=options.model,
        speculative_config=spec,
        dtype=options.dtype,
        kv_cache_dtype=options.kv_cache_dtype,
        quantization=options.quantization,
        max_model_len=options.max_model_len,
    )


def _demand(options: PlanOptions, read: ReadPair, trace: list[TraceArrival]) -> LayoutDemand:
    context = options.context or DEFAULT_CONTEXT
    if trace and options.context is None:
        context = round(sum(a.prompt_tokens + a.output_tokens for a in trace) / len(trace))
    return LayoutDemand(
        max_model_len=read.max_model_len,
        context=min(context, read.max_model_len),
        slo_tpot_s=None if options.slo_tpot_ms is None else options.slo_tpot_ms / 1e3,
        batch=options.batch,
    )


def _max_num_seqs(chosen: LayoutEstimate, options: PlanOptions) -> int:
    """Return the batch that meets the TPOT SLO; without one, or with a trace, the number that fits."""
    bounded = options.slo_tpot_ms is not None and options.trace is None
    return chosen.best.batch if bounded else chosen.memory.max_num_seqs


def _facts(options: PlanOptions, read: ReadPair, gpu: Gpu) -> str:
    device, length = gpu.device, 1.0 + sum(read.pair.survival)
    rates = f"{device.bytes_per_s / 1e9:,.0f} GB/s, {device.flops / 1e12:,.0f} TFLOP/s"
    drafts = f"; {length:.2f} tokens a block ({read.acceptance})" if read.pair.drafter else ""
    kept = f"{read.dtype}, weights in {options.quantization}" if options.quantization else read.dtype
    if options.kv_cache_dtype != "auto":
        kept += f", K/V in {options.kv_cache_dtype}"
    if read.checkpoint_quantization is not None:
        sizes = packed_bits(read.pair.target).items()
        packed = ", ".join(f"{bits:.3g} bits per weight of {part}" for part, bits in sizes)
        kept += f" (the checkpoint is quantized, {read.checkpoint_quantization}: "
        kept += f"{packed or 'dequantized at load'})"
    return (
        f"{options.model} in {kept}, up to {read.max_model_len} tokens, on {gpu.name} ({rates}, link "
        f"{gpu.link.bytes_per_s / 1e9:,.0f} GB/s and {gpu.link.latency_s * 1e6:.0f} µs){drafts}.\n"
        "Estimates from shapes and rates (cluster/planner/), not measurements."
    )


def packed_bits(target: ModelShape) -> dict[str, float]:
    """Return the mean bits of a weight, with its share of scales, of parts that stay packed on GPUs."""
    experts = [shape.weight_bytes for shape, _ in target.routed]
    sizes = {"dense products": target.weight_bytes, "experts": max(experts, default=target.itemsize)}
    return {part: 8 * size for part, size in sizes.items() if size < target.itemsize}


def serve_config(
    options: PlanOptions, read: ReadPair, chosen: LayoutEstimate, max_num_seqs: int
) -> dict[str, Any]:  # Any: YAML
    """Return the config as plain data; its `args` are validated by `split_settings`."""
    layout = chosen.layout
    args: dict[str, Any] = {
        "model": absolute_path(options.model),
        "replicas": layout.replicas,
        "tensor_parallel_size": layout.tp,
        "device": "cuda",
        "dtype": read.dtype,
        **_given(quantization=options.quantization),
        **_given(kv_cache_dtype=None if options.kv_cache_dtype == "auto" else options.kv_cache_dtype),
        "max_model_len": read.max_model_len,
        "max_num_seqs": max_num_seqs,
        "max_num_batched_tokens": MAX_ROWS,
        "gpu_memory_utilization": GPU_MEMORY_UTILIZATION,
        "max_num_queued_reqs": _QUEUED_PER_RUNNING * max_num_seqs,
    }
    if layout.placement is not None:
        args["speculative_config"] = {"method": options.spec_method}
        if options.drafter is not None:
            args["speculative_config"] |= {
                "model": absolute_path(options.drafter),
                "placement": layout.placement,
                **_given(quantization=options.drafter_quantization),
            }
    split_settings(args)
    application = {
        "name": "manta",
        "route_prefix": "/",
        "import_path": "manta.actors.replica:build_app",
        "args": args,
    }
    return {
        "proxy_location": "HeadOnly",
        "http_options": {"host": "127.0.0.1", "port": 8000},
        "applications": [application],
    }


def write_config(path: Path, config: dict[str, Any], why: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    text = _HEAD.format(why=why) + yaml.safe_dump(config, sort_keys=False, width=100)
    path.write_text(text, encoding="utf-8")


def _given(**settings: str | None) -> dict[str, str]:
    return {name: value for name, value in settings.items() if value is not None}


Figures = dict[str, Any]  # Any: JSON
_MEMORY = ["layout", "GPUs", "weights, GiB each", "K/V tokens an engine", "most requests an engine"]
_SPEED = [
    "layout",
    "user tok/s at 1",
    "batch",
    "drafts",
    "TPOT ms",
    "user tok/s",
    "tok/s a GPU",
    "node tok/s",
]
_SPEED += ["bound"]


def print_candidates(found: Sequence[LayoutEstimate | LayoutMisfit], num_gpus: int, context: int) -> None:
    fitting = [each for each in found if isinstance(each, LayoutEstimate)]
    if fitting:
        print_table(
            f"memory of {num_gpus} GPUs, with {context} tokens per sequence",
            _MEMORY,
            [*map(_memory_cells, fitting)],
        )
        print_table("speed at the best batch of each engine", _SPEED, [_speed(e, num_gpus) for e in fitting])
    for each in found:
        if isinstance(each, LayoutMisfit):
            print(f"does not fit: {each.error.message}")
        elif each.misses:
            print(f"misses the SLO: {each.layout}: {each.misses}")


def print_replays(played: Mapping[ParallelLayout, ReplayResult]) -> None:
    columns = ["layout", "goodput tok/s", "within the SLO", "p95 TTFT ms", "p95 TPOT ms"]
    rows = [
        [
            str(layout),
            f"{outcome.goodput:,.0f}",
            f"{outcome.kept:.1%}",
            f"{outcome.ttft_s * 1e3:,.1f}",
            f"{outcome.tpot_s * 1e3:.2f}",
        ]
        for layout, outcome in played.items()
    ]
    print_table("simulated trace", columns, rows)


def as_json(
    found: Sequence[LayoutEstimate | LayoutMisfit],
    played: Mapping[ParallelLayout, ReplayResult],
    num_gpus: int,
) -> list[Figures]:
    return [_figures(each, played, num_gpus) for each in found]


def _memory_cells(each: LayoutEstimate) -> list[str]:
    layout, memory = each.layout, each.memory
    weights = f"{memory.weights_bytes / GIB:.1f}"
    return [str(layout), str(layout.num_gpus), weights, f"{memory.kv_tokens:,}", f"{memory.largest_batch:,}"]


def _speed(each: LayoutEstimate, num_gpus: int) -> list[str]:
    best = each.best
    return [
        str(each.layout),
        f"{each.alone.user_tokens_per_s:,.0f}",
        str(best.batch),
        str(best.rows - 1) if each.layout.placement else NO_FIGURE,
        f"{best.tpot_s * 1e3:.2f}",
        f"{best.user_tokens_per_s:,.0f}",
        f"{best.node_tokens_per_s / num_gpus:,.0f}",
        f"{best.node_tokens_per_s:,.0f}",
        best.bound,
    ]


def _figures(
    each: LayoutEstimate | LayoutMisfit, played: Mapping[ParallelLayout, ReplayResult], num_gpus: int
) -> Figures:
    figures: Figures = {"layout": asdict(each.layout) | {"num_gpus": each.layout.num_gpus}}
    if isinstance(each, LayoutMisfit):
        return figures | {"does_not_fit": each.error.message}
    outcome = played.get(each.layout)
    return figures | {
        "room": asdict(each.memory),
        "alone": _point(each.alone, num_gpus),
        "best": _point(each.best, num_gpus),
        "misses": each.misses or None,
        "trace": None if outcome is None else asdict(outcome),
    }


def _point(point: OperatingPoint, num_gpus: int) -> Figures:
    return asdict(point) | {
        "tpot_ms": point.tpot_s * 1e3,
        "user_tokens_per_s": point.user_tokens_per_s,
        "tokens_per_s_per_gpu": point.node_tokens_per_s / num_gpus,
    }
