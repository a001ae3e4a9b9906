"""`simulate-validate`: compares the simulation with a real engine under the same load.

1. The engine's step times are measured (`measured_cost.py`), and its acceptance rate by draft position.
2. A simulated engine is made of these, with the same scheduler, policy, pages and limits.
3. The same clients (`cluster/simulation/load_driver.py`) drive both with requests of the same lengths.

The result is the error of throughput, TTFT and TPOT. Neither side includes HTTP and Ray. Called by `cli.py`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

from manta.actors.engine.uniproc_executor import make_executor
from manta.actors.system.atomic_files import write_json
from manta.actors.tokenization.prompts import load_tokenizer
from manta.cluster.config import EngineConfig
from manta.cluster.engine.engine_core import EngineCore
from manta.cluster.request.request import Request, SamplingParams
from manta.cluster.simulation.acceptance_mix import AcceptanceMix
from manta.cluster.simulation.load_driver import LoadDriver, LoadMeasurement, closed_loop
from manta.cluster.simulation.simulated_executor import SimulatedExecutor, VirtualClock
from manta.cluster.step.executor import Executor
from manta.jobs.bench.common.engine_passes import encode_prompts, read_prompts
from manta.jobs.bench.common.provenance import provenance
from manta.jobs.common.tables import decimals, print_table

from ..options import ValidateOptions
from .measured_cost import MeasuredCost, measure_costs

Figures = dict[str, Any]  # Any: JSON
COMPARED = ("tokens_per_s", "ttft_p50_s", "ttft_p95_s", "tpot_p50_s", "tpot_p95_s")


def run_validate(config: EngineConfig, options: ValidateOptions) -> Figures:
    """Measure, simulate, run, compare; print a table, write the figures if requested, and return them."""
    config = replace(config, max_num_seqs=max(options.concurrency), enable_prefix_caching=False)
    rows = encode_prompts(read_prompts(options.prompts, options.num_prompts), load_tokenizer(config))
    make = _requests([token_ids for _, token_ids in rows], options)
    executor = make_executor(config)
    try:
        cost = measure_costs(executor, config.max_num_seqs)
        survival, host_s = _calibrate(config, executor, make, options)
        cost = replace(cost, host_s=cost.host_s + host_s)
        texts = AcceptanceMix(survival, options.spread)
        points = [
            _point(
                clients,
                _drive(EngineCore(config, executor), time.monotonic, make, clients, options),
                _simulate(config, executor, cost, texts, make, clients, options),
            )
            for clients in options.concurrency
        ]
    finally:
        executor.close()
    figures: Figures = {
        "provenance": provenance(),
        "options": {**asdict(options), "prompts": str(options.prompts), "output": None},
        "engine": asdict(config),
        "survival": survival,
        "cost": {name: _plain(value) for name, value in asdict(cost).items()},
        "points": points,
        "worst_error": {
            name: max((abs(point["error"][name]) for point in points), default=None) for name in COMPARED
        },
    }
    _show(points)
    if options.output is not None:
        write_json(options.output, figures)
    return figures


def _requests(prompts: list[list[int]], options: ValidateOptions) -> Callable[[int, float], Request]:
    def make(number: int, share: float) -> Request:
        params = SamplingParams(
            temperature=options.temperature,
            max_tokens=max(round(share * options.max_tokens), 1),
            ignore_eos=True,
            seed=number,
        )
        prompt = tuple(prompts[number % len(prompts)])
        return Request(request_id=str(number), prompt_token_ids=prompt, params=params)

    return make


def _calibrate(
    config: EngineConfig, executor: Executor, make: Callable[[int, float], Request], options: ValidateOptions
) -> tuple[tuple[float, ...], float]:
    """Return the acceptance rate by position with full drafts, and the scheduler's seconds per step."""
    spec = config.speculative_config
    whole = config if spec is None else replace(config, speculative_config=replace(spec, adaptive=False))
    driven = LoadDriver(EngineCore(whole, executor), time.monotonic)
    observed = closed_loop(driven, make, min(4, config.max_num_seqs), options.requests, 0)
    driven.abort_all()
    stats = driven.engine.stats()
    survival = tuple(count / max(stats.num_drafts, 1) for count in stats.accepted_per_pos)
    planned_s = stats.step_seconds["schedule"] + stats.step_seconds["commit"]
    return survival if observed.num_drafts else (), planned_s / max(stats.steps, 1)


def _drive(
    engine: EngineCore,
    clock: Callable[[], float],
    make: Callable[[int, float], Request],
    clients: int,
    options: ValidateOptions,
) -> LoadMeasurement:
    driven = LoadDriver(engine, clock)
    observed = closed_loop(driven, make, clients, max(options.requests, clients))
    driven.abort_all()
    return observed


def _simulate(
    config: EngineConfig,
    executor: Executor,
    cost: MeasuredCost,
    texts: AcceptanceMix,
    make: Callable[[int, float], Request],
    clients: int,
    options: ValidateOptions,
) -> LoadMeasurement:
    clock = VirtualClock()

    def spend(seconds: float) -> None:
        clock.advance(seconds + cost.host_s)

    simulated = SimulatedExecutor(executor.info, texts.survival, cost, spend, texts.hardness)
    return _drive(EngineCore(config, simulated, clock), clock, make, clients, options)


def _point(clients: int, real: LoadMeasurement, simulated: LoadMeasurement) -> Figures:
    measured, found = _figures(real), _figures(simulated)
    errors = {name: found[name] / measured[name] - 1.0 for name in COMPARED}
    return {"concurrency": clients, "measured": measured, "simulated": found, "error": errors}


def _figures(observed: LoadMeasurement) -> dict[str, Any]:
    ttft, tpot = observed.ttft_s(), observed.tpot_s()
    return {
        "tokens_per_s": observed.tokens_per_s,
        "ttft_p50_s": ttft["p50"],
        "ttft_p95_s": ttft["p95"],
        "tpot_p50_s": tpot["p50"],
        "tpot_p95_s": tpot["p95"],
        "mean_acceptance_length": observed.mean_acceptance_length,
        "drafts_per_block": observed.drafts_per_block,
        "steps": observed.steps,
        "requests": len(observed.served),
    }


def _show(points: list[Figures]) -> None:
    columns = [
        "concurrency",
        "tok/s",
        "TTFT p50 ms",
        "TTFT p95 ms",
        "TPOT p50 ms",
        "TPOT p95 ms",
        "length",
    ]
    rows = [
        [
            f"{point['concurrency']} {side}",
            f"{point[side]['tokens_per_s']:,.0f}",
            *(f"{point[side][name] * 1e3:.2f}" for name in COMPARED[1:]),
            decimals(point[side]["mean_acceptance_length"]),
        ]
        for point in points
        for side in ("measured", "simulated")
    ]
    print_table("the engine and its simulation", columns, rows)
    for point in points:
        errors = ", ".join(f"{name} {point['error'][name]:+.0%}" for name in COMPARED)
        print(f"{point['concurrency']} requests: {errors}")


def _plain(value: Any) -> Any:  # Any: JSON
    return value.tolist() if hasattr(value, "tolist") else value
