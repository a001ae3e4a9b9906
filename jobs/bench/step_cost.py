"""`manta bench step`: the cost of a decoding step at any shape, by part, against its roofline.

A pair with random weights (`jobs/bench/common/random_weights.py`) runs the engine's steps over synthetic
contexts, so the cost is real, but the output is noise and no draft is accepted. The number of tokens per step
comes from a configured acceptance curve. There is no scheduler, and all steps have the same shape.

A context is not computed: requests are admitted as after a prefix-cache hit that covers all but the last
token, with pages full of noise, and again before every measured step, so that each step starts at the same
length and the workers know the positions, as when the scheduler runs ahead.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ...actors.system.atomic_files import write_json
from ...actors.system.host_resources import free_ram_bytes
from ...actors.system.wait_messages import say
from ...actors.targets.loading.memory_budget import page_bytes
from ...actors.targets.loading.rank_loader import start_runner
from ...actors.targets.loading.resolved_config import ResolvedConfig, resolve_models
from ...actors.targets.runners.runner_interface import Runner
from ...cluster.config import EngineConfig, SpeculativeConfig
from ...cluster.errors import ConfigError
from ...cluster.hardware.roofline import Roofline
from ...cluster.speculation.acceptance_length import (
    check_survival,
    expected_acceptance_length,
    geometric_survival,
)
from ...cluster.step.dummy_steps import dummy_step
from ...cluster.step.scheduler_output import SchedulerOutput
from ..common.tables import print_table
from ..plan.pair_reader import drafter_shape, target_shape
from .common.device_rates import find_device
from .common.idle_check import Idleness, Watch, print_warning
from .common.options import StepOptions
from .common.provenance import options_json, provenance
from .common.random_weights import PairShape, RandomModels

ACCEPTANCE = 0.86  # conditional acceptance rate of each draft; mean acceptance length 6.5 at 15 drafts
DRAFTING, PLAIN = ("draft", "verify", "sample", "inject"), ("verify", "sample")  # parts of a step
Figures = dict[str, Any]  # Any: JSON
WARM_UP_STEPS = 3
TURN_STEPS = 5  # steps per turn; the first one (cold caches) is not counted
MEMORY_SHARE = 0.9  # of free memory for weights and pages; the rest for activations
PARTS = ("draft", "verify", "sample", "inject")


def bench_step(options: StepOptions) -> Figures:
    """Measure steps of the batches and contexts that fit in memory, and compare them with a roofline."""
    shape = PairShape.read(options.model, options.spec_model)
    resolved = _resolve(options, shape)
    if options.model is None and resolved.device.type == "cpu":
        raise ConfigError(
            "model is missing: the default, Qwen3-8B, needs a GPU, and this runs on a CPU. Give --model: "
            "a folder or config.json of a shape that a CPU can run.",
            param="model",
        )
    survival = options.acceptance_rates or geometric_survival(ACCEPTANCE, resolved.num_speculative_tokens)
    check_survival(survival, resolved.num_speculative_tokens, param="synthetic_acceptance_rates")
    roofline = Roofline(
        find_device(resolved.device, resolved.dtype, options.device_rates),
        target_shape(shape.target, resolved.dtype.itemsize),
        drafter_shape(shape.drafter, resolved.dtype.itemsize),
    )
    memory = Memory(resolved, shape)
    points = [StepPoint(batch, context) for context in options.contexts for batch in options.batches]
    measured = measure_points(
        [point for point in points if memory.fits(point)], resolved, memory, options.steps
    )
    figures: Figures = {
        "provenance": provenance(),
        "options": options_json(options),
        "model": shape.name,
        "target": shape.target_json,
        "drafter": shape.drafter_json,
        "num_drafts": resolved.num_speculative_tokens,
        "attention_backend": resolved.attention_backend,
        "page_size": resolved.page_size,
        "dtype": str(resolved.dtype).removeprefix("torch."),
        "device": asdict(roofline.device),
        "acceptance": {
            "rates": survival,
            "mean_acceptance_length": expected_acceptance_length(survival, len(survival) + 1),
        },
        "points": [_figures(point, seen, roofline, survival) for point, seen in measured.items()],
        "does_not_fit": [asdict(point) for point in points if point not in measured],
    }
    print_figures(figures)
    if options.output is not None:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        write_json(options.output, figures)
    return figures


def _resolve(options: StepOptions, shape: PairShape) -> ResolvedConfig:
    batch = max(options.batches)
    config = EngineConfig(
        model=shape.name,
        skip_tokenizer_init=True,
        speculative_config=SpeculativeConfig(
            model=options.spec_model or "synthetic", num_speculative_tokens=options.num_drafts
        ),
        dtype=options.dtype,
        device=options.device,
        attention_backend=options.attention_backend,
        page_size=options.page_size,
        max_num_seqs=batch,
        max_num_batched_tokens=batch * shape.drafter.block_size,
    )
    room = max(options.contexts) + shape.drafter.block_size + 1
    return resolve_models(config, Path(shape.name), shape.target, Path(shape.name), shape.drafter, room)


def _figures(point: StepPoint, seen: PointSteps, roofline: Roofline, survival: Sequence[float]) -> Figures:
    """Return the figures of one point; a step without drafts is without its inject part (plain decoding)."""
    batch, context, rows = point.batch, point.context, len(survival) + 1
    floor = roofline.step(batch, rows, context)
    floor_s = {"draft": floor.draft_s, "verify": floor.verify_s, "inject": floor.inject_s}
    plain_floor_s = roofline.verify_s(batch, 1, context)
    drafting, parts_s = seen.drafting, seen.plain.parts_s
    plain_parts_s = {part: parts_s[part] for part in ("verify", "sample")}
    plain = StepMedians(plain_parts_s, seen.plain.host_s, seen.plain.step_s - parts_s["inject"])
    tau = expected_acceptance_length(survival, rows)
    return {
        "batch": batch,
        "context": context,
        "drafting": _with_floors(drafting, floor_s, floor.step_s),
        "plain": _with_floors(plain, {"verify": plain_floor_s}, plain_floor_s),
        "tokens_per_s": round(batch * tau / drafting.step_s, 2),
        "plain_tokens_per_s": round(batch / plain.step_s, 2),
        "speedup": round(tau * plain.step_s / drafting.step_s, 3),
        "floor_speedup": round(roofline.speedup(batch, rows, context, survival), 3),
        "floor_best_rows": roofline.best_rows(batch, context, survival),
        "idleness": seen.idleness.as_json(),
    }


def _with_floors(measured: StepMedians, floor_s: dict[str, float], step_floor_s: float) -> Figures:
    parts = {
        part: {"ms": _ms(seconds)} | ({"floor_ms": _ms(floor_s[part])} if part in floor_s else {})
        for part, seconds in measured.parts_s.items()
    }
    return {
        **parts,
        "host_gap": {"ms": _ms(measured.host_s)},
        "step": {"ms": _ms(measured.step_s), "floor_ms": _ms(step_floor_s)},
        "of_floor": round(step_floor_s / measured.step_s, 4),
    }


def _ms(seconds: float) -> float:
    return round(seconds * 1000, 4)


def print_figures(figures: Figures) -> None:
    points, device = figures["points"], figures["device"]
    tau = figures["acceptance"]["mean_acceptance_length"]
    rates = f"{device['bytes_per_s'] / 1e9:.4g} GB/s, {device['flops'] / 1e12:.4g} TFLOP/s"
    kernels = f"{figures['dtype']}, backend {figures['attention_backend']}"
    print(f"{figures['model']} in {kernels} on {device['name']}: {rates}")
    drafts = figures["num_drafts"]
    print_table(
        f"a step with {drafts} drafts, ms: measured (floor)", *_step_table(points, "drafting", DRAFTING)
    )
    print_table("a step of plain decoding, ms", *_step_table(points, "plain", PLAIN))
    columns = ["batch", "context", "tokens/s", "plain tokens/s", "speed-up", "floor's speed-up", "best rows"]
    names = ("tokens_per_s", "plain_tokens_per_s", "speedup", "floor_speedup", "floor_best_rows")
    rows = [[str(point[name]) for name in ("batch", "context", *names)] for point in points]
    print_table(f"with a mean acceptance length of {tau:.2f}", columns, rows)
    print(
        "Weights are random and no draft is accepted: the cost of a step is measured, the mean acceptance\n"
        "length comes from the configured curve. Floors and best rows (per request) are the roofline's."
    )
    print_warning([point["idleness"] for point in points])
    for point in figures["does_not_fit"]:
        print(f"not measured, does not fit into memory: batch {point['batch']}, context {point['context']}")


def _step_table(
    points: Sequence[Figures], kind: str, parts: Sequence[str]
) -> tuple[list[str], list[list[str]]]:
    columns = ["batch", "context", *parts, "host gap", "step", "of the floor"]
    names = (*parts, "host_gap", "step")
    rows = [
        [
            str(point["batch"]),
            str(point["context"]),
            *(_cell(point[kind][name]) for name in names),
            f"{point[kind]['of_floor']:.0%}",
        ]
        for point in points
    ]
    return columns, rows


def _cell(figure: Figures) -> str:
    floor = f" ({figure['floor_ms']:.2f})" if "floor_ms" in figure else ""
    return f"{figure['ms']:.2f}{floor}"


@dataclass(frozen=True, slots=True)
class StepPoint:
    batch: int
    context: int


@dataclass(frozen=True, slots=True)
class StepMedians:
    """Medians over equal steps, in seconds; `step_s` is wall time, `host_s` the rest that no part covers."""

    parts_s: dict[str, float]
    host_s: float
    step_s: float


@dataclass(frozen=True, slots=True)
class PointSteps:
    """Times at one point: steps with all drafts, steps with none, and whether the machine was idle."""

    drafting: StepMedians
    plain: StepMedians
    idleness: Idleness


class Memory:
    def __init__(self, resolved: ResolvedConfig, shape: PairShape) -> None:
        self._page_size, self._num_drafts = resolved.page_size, resolved.num_speculative_tokens
        on_gpu = resolved.device.type == "cuda"
        free = torch.cuda.mem_get_info(resolved.device)[0] if on_gpu else free_ram_bytes()
        left = int(free * MEMORY_SHARE) - shape.num_params() * resolved.dtype.itemsize
        # The synthetic requests hold every page of every group, and all pools have the same number of pages.
        pools = [group.pool for group in resolved.pages.groups]
        self._max_groups = max(pools.count(pool) for pool in pools)
        self._max_pages = left // sum(page_bytes(resolved))

    def pages_per_request(self, context: int) -> int:
        """Return the pages per group for the context, the last known token and its drafts."""
        return -(-(context + 1 + self._num_drafts) // self._page_size)

    def num_pages(self, point: StepPoint) -> int:
        return point.batch * self.pages_per_request(point.context) * self._max_groups

    def fits(self, point: StepPoint) -> bool:
        return self.num_pages(point) <= self._max_pages


def measure_points(
    points: Sequence[StepPoint], resolved: ResolvedConfig, memory: Memory, steps: int
) -> dict[StepPoint, PointSteps]:
    if not points:
        raise ConfigError(
            "model: its weights and the pages of a single point do not fit into memory. Reduce --model, "
            "--batch or --context.",
            param="model",
        )
    num_pages = max(memory.num_pages(point) for point in points)
    resolved = replace(resolved, config=replace(resolved.config, num_pages=num_pages))
    say(f"making weights of {resolved.config.model} on {resolved.device.type}")
    runner, _ = start_runner(resolved, RandomModels())
    with torch.inference_mode():
        runner.cache.kv.normal_()
    found: dict[StepPoint, PointSteps] = {}
    for point in points:
        say(f"batch {point.batch}, context {point.context}")
        admission = _admission(point, memory.pages_per_request(point.context), resolved)
        watch = Watch()
        with watch.open():
            drafting, plain = _alternate(runner, admission, resolved.num_speculative_tokens, steps)
        found[point] = PointSteps(drafting, plain, watch.found)
    return found


def _alternate(
    runner: Runner, admission: SchedulerOutput, num_drafts: int, steps: int
) -> tuple[StepMedians, StepMedians]:
    batch = len(admission.slots)
    plans = [dummy_step(*_decoding(batch, -1, drafts)) for drafts in (num_drafts, 0)]
    kinds = [_Steps(runner, admission, plan) for plan in plans]
    for kind in kinds:
        kind.run(WARM_UP_STEPS, counted=False)
    for begin in range(0, steps, TURN_STEPS):
        for kind in kinds if begin // TURN_STEPS % 2 == 0 else kinds[::-1]:
            kind.run(1, counted=False)
            kind.run(min(TURN_STEPS, steps - begin))
    drafting, plain = (kind.measured() for kind in kinds)
    return drafting, plain


class _Steps:
    def __init__(self, runner: Runner, admission: SchedulerOutput, step: SchedulerOutput) -> None:
        self._runner, self._admission, self._step = runner, admission, step
        self._parts: dict[str, list[float]] = {part: [] for part in PARTS}
        self._walls: list[float] = []

    def run(self, count: int, *, counted: bool = True) -> None:
        for _ in range(count):
            self._runner.execute(self._admission)
            begin_s = time.perf_counter()
            timings = self._runner.execute(self._step).timings
            wall_s = time.perf_counter() - begin_s
            if counted:
                self._walls.append(wall_s)
                for part, seconds in self._parts.items():
                    seconds.append(getattr(timings, f"{part}_s"))

    def measured(self) -> StepMedians:
        gaps = [wall - sum(parts) for wall, *parts in zip(self._walls, *self._parts.values(), strict=True)]
        medians = {part: statistics.median(seconds) for part, seconds in self._parts.items()}
        return StepMedians(medians, statistics.median(gaps), statistics.median(self._walls))


def _admission(point: StepPoint, pages_per_request: int, resolved: ResolvedConfig) -> SchedulerOutput:
    """Return requests with one token less than the context (the step adds it) and pages in random order."""
    random = np.random.default_rng(0)
    assert resolved.config.num_pages is not None, "pages were counted for the points"
    tokens = random.integers(0, resolved.target.vocab_size, (point.batch, point.context), dtype=np.int32)
    scattered = random.permutation(resolved.config.num_pages)
    return dummy_step(
        *_decoding(point.batch, point.context - 1, 0),
        prompts=list(tokens),
        num_pages=[pages_per_request] * point.batch,
        groups=resolved.pages.groups,
        page_order=scattered.astype(np.int32),
    )


def _decoding(batch: int, num_computed: int, num_drafts: int) -> tuple[list[int], list[int], list[int]]:
    """Return computed tokens (-1: the workers know), rows and drafts of `batch` equal requests."""
    return [num_computed] * batch, [num_drafts + 1] * batch, [num_drafts] * batch
