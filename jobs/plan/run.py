"""The plan itself: read, lay out, estimate, play the trace, choose, print and write. Without Ray or a GPU."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ...cluster.config import EngineConfig, Quantization, SpeculativeConfig
from ...cluster.errors import ConfigError
from ...cluster.planner.choice import check_fitting, choose, choose_by_trace
from ...cluster.planner.estimates import Estimate, Misfit, estimate
from ...cluster.planner.gpus import Gpu, find_gpu
from ...cluster.planner.layouts import Layout, layouts
from ...cluster.planner.pair import Demand
from ...cluster.planner.playing import Arrival, Played, Slo, play
from ...cluster.planner.step_time import StepTimes
from ..yaml_file import check_new_file
from .config_file import Quantized, serve_config, write_config
from .models import ReadPair, read_pair
from .tables import as_json, print_candidates, print_played
from .trace import read_trace

DEFAULT_CONTEXT = 4096  # tokens of a sequence, where neither a flag nor a trace says more


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOptions:
    """What is planned.

    Attributes:
        num_gpus: of one node.
        gpu: its kind, by name.
        drafter: checkpoint; None plans plain decoding alone.
        quantization, drafter_quantization: of weights, as the engine's settings.
        acceptance: see `read_pair`.
        slo_tpot_ms, slo_ttft_ms: most per output token, and (of a trace) until the first.
        trace: JSONL file of arrivals.
        context: tokens of a sequence on average; the trace's own, or 4096.
        batch: requests at once on the node; each layout's best if None.
        as_json: the report as JSON in place of tables.
        output: file for the Serve config.
        force: replace it if it is there.
    """

    num_gpus: int
    gpu: str
    model: str
    drafter: str | None = None
    dtype: Literal["auto", "bfloat16", "float16"] = "auto"
    quantization: Quantization | None = None
    drafter_quantization: Quantization | None = None
    acceptance: str | None = None
    slo_tpot_ms: float | None = None
    slo_ttft_ms: float | None = None
    trace: Path | None = None
    max_model_len: int | None = None
    context: int | None = None
    batch: int | None = None
    as_json: bool = False
    output: Path | None = None
    force: bool = False

    def __post_init__(self) -> None:
        for name in ("num_gpus", "context", "batch"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name}={value} must be at least 1.", param=name)
        for name in ("slo_tpot_ms", "slo_ttft_ms"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ConfigError(f"{name}={value:g} must be milliseconds above 0.", param=name)
        if self.drafter_quantization is not None and self.drafter is None:
            raise ConfigError(
                "drafter_quantization is a drafter's: give --drafter, too.", param="drafter_quantization"
            )
        if self.slo_ttft_ms is not None and self.trace is None:
            raise ConfigError("slo_ttft_ms needs arrivals: give --trace, too.", param="slo_ttft_ms")
        if self.output is not None:
            check_new_file(self.output, force=self.force)


def make_plan(options: PlanOptions) -> dict[str, Any]:  # Any: JSON
    """Print the plan, write its config where asked, and return the report.

    Raises:
        PlacementError: nothing fits; says what lacks.
        ConfigError: a setting is wrong, or nothing holds what is asked; the candidates are printed before.
    """
    gpu = find_gpu(options.gpu)
    read = read_pair(_engine_config(options), options.acceptance)
    trace = read_trace(options.trace, read.max_model_len) if options.trace is not None else []
    demand = _demand(options, read, trace)
    places = layouts(options.num_gpus, read.pair.tp_sizes, drafter=options.drafter is not None)
    found = [estimate(read.pair, gpu, layout, demand) for layout in places]
    if not options.as_json:
        print(_facts(options, read, gpu))
        print_candidates(found, options.num_gpus, demand.context)
    fitting = check_fitting(found)
    played: dict[Layout, Played] = {}
    if trace:
        played = _play_all(trace, fitting, read, gpu, demand, options)
        chosen, why = choose_by_trace(fitting, played)
    else:
        chosen, why = choose(fitting, demand, options.num_gpus)
    quantized = Quantized(options.quantization, options.drafter_quantization)
    num_seqs = _max_num_seqs(chosen, options)
    config = serve_config(options.model, options.drafter, read, chosen, num_seqs, quantized)
    report = _report(options, read, found, played, chosen, why, config)
    if options.as_json:
        print(json.dumps(report, indent=2, ensure_ascii=False))
    else:
        print_played(played) if played else None
        print(f"-> {why}")
    if options.output is not None:
        write_config(options.output, config, why)
        if not options.as_json:
            print(f"written: {options.output}")
    return report


def _engine_config(options: PlanOptions) -> EngineConfig:
    spec = None
    if options.drafter is not None:
        spec = SpeculativeConfig(model=options.drafter, quantization=options.drafter_quantization)
    return EngineConfig(
        model=options.model,
        speculative_config=spec,
        dtype=options.dtype,
        quantization=options.quantization,
        max_model_len=options.max_model_len,
    )


def _demand(options: PlanOptions, read: ReadPair, trace: list[Arrival]) -> Demand:
    context = options.context or DEFAULT_CONTEXT
    if trace and options.context is None:
        context = round(sum(a.prompt_tokens + a.output_tokens for a in trace) / len(trace))
    return Demand(
        max_model_len=read.max_model_len,
        context=min(context, read.max_model_len),
        slo_tpot_s=None if options.slo_tpot_ms is None else options.slo_tpot_ms / 1e3,
        batch=options.batch,
    )


def _play_all(
    trace: list[Arrival],
    fitting: list[Estimate],
    read: ReadPair,
    gpu: Gpu,
    demand: Demand,
    options: PlanOptions,
) -> dict[Layout, Played]:
    ttft_s = None if options.slo_ttft_ms is None else options.slo_ttft_ms / 1e3
    slo, pair = Slo(demand.slo_tpot_s, ttft_s), read.pair
    return {
        each.layout: play(trace, StepTimes(pair, gpu, each.layout), pair, each.layout, each.room, demand, slo)
        for each in fitting
    }


def _max_num_seqs(chosen: Estimate, options: PlanOptions) -> int:
    """As many as keep the SLO; without one, or where a trace was played with all of them, as many as fit."""
    bounded = options.slo_tpot_ms is not None and options.trace is None
    return chosen.best.batch if bounded else chosen.room.max_num_seqs


def _facts(options: PlanOptions, read: ReadPair, gpu: Gpu) -> str:
    device, length = gpu.device, 1.0 + sum(read.pair.survival)
    rates = f"{device.bytes_per_s / 1e9:,.0f} GB/s, {device.flops / 1e12:,.0f} TFLOP/s"
    drafts = f"; {length:.2f} tokens a block ({read.acceptance})" if read.pair.drafter else ""
    kept = f"{read.dtype}, weights in {options.quantization}" if options.quantization else read.dtype
    return (
        f"{options.model} in {kept}, up to {read.max_model_len} tokens, on {gpu.name} ({rates}, link "
        f"{gpu.link.bytes_per_s / 1e9:,.0f} GB/s and {gpu.link.latency_s * 1e6:.0f} µs){drafts}.\n"
        "Estimates from shapes and rates (cluster/planner/): nothing was measured."
    )


def _report(
    options: PlanOptions,
    read: ReadPair,
    found: list[Estimate | Misfit],
    played: dict[Layout, Played],
    chosen: Estimate,
    why: str,
    config: dict[str, Any],
) -> dict[str, Any]:
    return {
        "gpus": options.num_gpus,
        "gpu": options.gpu,
        "model": options.model,
        "drafter": options.drafter,
        "dtype": read.dtype,
        "quantization": options.quantization,
        "drafter_quantization": options.drafter_quantization,
        "max_model_len": read.max_model_len,
        "acceptance": {"survival": read.pair.survival, "source": read.acceptance},
        "candidates": as_json(found, played, options.num_gpus),
        "chosen": str(chosen.layout),
        "why": why,
        "ray_config": config,
    }
