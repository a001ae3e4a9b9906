"""`simulate-fleet`: plays one day under several scaling policies and compares their replica-hours.

The waiting time is the 95th percentile of the time to the first token; a refused request counts as infinite.
Ray's default policy is played with its own target of 2 ongoing requests per replica and with others. A user
who tunes it would choose the cheapest target whose waiting time is at most that of Manta's policy.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
from manta.actors.system.atomic_files import write_json
from manta.cluster.config import from_mapping
from manta.cluster.fleet.autoscaling import ReplicaCount, ScalingRules
from manta.cluster.hardware.gpu_specs import find_gpu
from manta.cluster.simulation.simulated_executor import LinearCost
from manta.cluster.speculation.acceptance_length import geometric_survival
from manta.jobs.bench.common.provenance import options_json, provenance
from manta.jobs.common.tables import print_table
from manta.jobs.simulate.methods import Method
from manta.jobs.simulate.node_engines import DraftAssumptions, Workload, node_engines, read_shapes

from ..options import FleetOptions
from .ray_scaling import OngoingRequests, RayScaling, RaySettings
from .replica import ReplicaModel, replica_table
from .replicas import Arrivals, Fleet, FleetPolicy, FleetReport, Floats
from .traffic import SIGMA, Day, make_day, read_arrivals

Figures = dict[str, Any]  # Any: JSON
OURS = "manta"
NUM_DRAFTS = 15  # maximum drafts per step
FIRST_S = 600.0  # the arrivals of this time determine the number of replicas at the start
SHOWN_EVERY_S = 600.0  # interval of the replica counts in the JSON
PERCENTILES = (50, 95, 99)


class OurPolicy:
    """Manta's policy (`cluster/autoscaling`), with the inputs that `actors/autoscaling` gives it."""

    def __init__(self, rules: ScalingRules, minimum: int, maximum: int) -> None:
        self._count = ReplicaCount(rules)
        self._bounds = minimum, maximum

    def wanted(self, fleet: Fleet, now_s: float) -> int:
        return self._count.target(fleet.load(), fleet.target, *self._bounds, now_s)


class RayPolicy:
    """Ray Serve's default policy (`ray_scaling.py`), with the inputs that Serve's replicas give it."""

    def __init__(self, settings: RaySettings, minimum: int, maximum: int) -> None:
        self._scaling = RayScaling(settings)
        self._requests = OngoingRequests(settings)
        self._bounds = minimum, maximum

    def wanted(self, fleet: Fleet, now_s: float) -> int:
        ongoing = fleet.ongoing()
        self._requests.observe(ongoing, now_s)
        total = self._requests.total(ongoing, now_s) + len(fleet.queue)
        return self._scaling.wanted(total, fleet.there, fleet.target, *self._bounds, now_s)


def run_fleet(options: FleetOptions) -> Figures:
    """Simulate every policy, print tables, write the figures if requested, and return them."""
    day = Day(
        peak_per_s=options.peak_per_s,
        bursts=options.bursts,
        prompt_tokens=options.prompt_tokens,
        output_tokens=options.output_tokens,
        hours=options.hours,
        seed=options.seed,
    )
    rules = from_mapping(ScalingRules, options.scaling, "scaling.")
    model = _replica_model(options)
    arrivals = make_day(day) if options.trace is None else read_arrivals(options.trace)
    minimum, maximum = options.replicas
    start = min(max(_first_replicas(model, arrivals, rules), minimum), maximum)
    policies: dict[str, FleetPolicy] = {OURS: OurPolicy(rules, minimum, maximum)}
    for target in options.target_ongoing_requests if options.ray else ():
        settings = RaySettings(target_ongoing_requests=target)
        policies[f"ray, target {target:g}"] = RayPolicy(settings, minimum, maximum)
    points = [_play(name, model, arrivals, policy, start) for name, policy in policies.items()]
    figures = {
        "provenance": provenance(),
        "options": options_json(options),
        "rules": asdict(rules),
        "replica": asdict(model),
        "gpus_per_replica": 1 if options.model is None else options.tp,
        "requests": len(arrivals.arrival_s),
        "policies": points,
        "saved": savings(points),
    }
    _show(figures)
    if options.output is not None:
        write_json(options.output, figures)
    return figures


def _replica_model(options: FleetOptions) -> ReplicaModel:
    """Return the table of a replica, made of the given times or of a simulated engine on GPUs."""
    if options.model is None:
        cost = LinearCost(options.step_ms / 1e3, options.row_ms / 1e3, options.draft_ms / 1e3)
        survival = geometric_survival(options.acceptance, NUM_DRAFTS)
        return ReplicaModel.of(cost, survival, options.max_num_seqs, options.kv_tokens, options.start_s)
    read = read_shapes(options.model, options.drafter, None)
    workload = Workload(
        prompt_tokens=options.prompt_tokens,
        output_tokens=options.output_tokens,
        sigma=SIGMA,
        max_tokens=read.max_model_len,
        seed=options.seed,
    )
    method = Method.parse(options.method or ("plain" if options.drafter is None else "dflash"))
    length = options.acceptance_length
    drafting = DraftAssumptions(dflash=length, eagle3=length, spread=options.spread)
    gpu, tp = find_gpu(options.gpu), options.tp
    (node_engine,) = node_engines(read.pair, gpu, tp, (tp,), [method], drafting, workload)
    return replica_table(node_engine, workload, options.max_num_seqs, options.start_s)


def _first_replicas(model: ReplicaModel, arrivals: Arrivals, rules: ScalingRules) -> int:
    """Return the number of replicas for the first arrivals, by Little's law."""
    first = arrivals.arrival_s < FIRST_S
    seconds = min(FIRST_S, float(arrivals.arrival_s[-1]) or FIRST_S)
    token_s = model.step_s[-1] / model.step_tokens[-1]
    running = float(arrivals.output_tokens[first].sum()) * token_s / seconds
    return math.ceil(running / model.max_num_seqs / rules.load_high)


def _play(name: str, model: ReplicaModel, arrivals: Arrivals, policy: FleetPolicy, start: int) -> Figures:
    begin_s = time.monotonic()
    report = Fleet(model, arrivals, policy, start).run()
    return {
        "policy": name,
        "replica_hours": round(report.replica_s / 3600.0, 4),
        "tokens_per_s_per_replica": _tokens_per_s(report, arrivals),
        "most_replicas": max(serving for _, serving, _ in report.moments),
        "changes": len(report.moments) - 1,
        "failed": report.failed,
        "ttft_s": percentiles(report.ttft_s),
        "tpot_ms": percentiles(1e3 * report.tpot_s),
        "serving": _over_time(report, float(arrivals.arrival_s[-1])),
        "computed_in_s": round(time.monotonic() - begin_s, 1),
    }


def _tokens_per_s(report: FleetReport, arrivals: Arrivals) -> float:
    """Return the output tokens of served requests per second that a replica was held."""
    served = ~np.isnan(report.ttft_s)
    return round(float(arrivals.output_tokens[served].sum()) / max(report.replica_s, 1.0), 1)


def percentiles(values: Floats) -> dict[str, float | None]:
    """Return the percentiles by name ("p95"). One that falls on a refused request (NaN) is None."""
    waits = np.sort(np.where(np.isnan(values), np.inf, values))
    found = {p: float(waits[min(len(waits) - 1, math.ceil(p / 100 * len(waits)) - 1)]) for p in PERCENTILES}
    return {f"p{p}": round(value, 4) if math.isfinite(value) else None for p, value in found.items()}


def _over_time(report: FleetReport, end_s: float) -> list[int]:
    """Return the number of serving replicas every SHOWN_EVERY_S."""
    at_s = np.array([moment[0] for moment in report.moments])
    indices = np.searchsorted(at_s, np.arange(0.0, end_s, SHOWN_EVERY_S), side="right") - 1
    return [report.moments[max(index, 0)][1] for index in indices.tolist()]


def savings(points: Sequence[Mapping[str, Any]]) -> Figures:
    """Return the share of replica-hours that Manta's policy saves.

    The first point is Manta's, the second Ray's default. `than_the_default` compares with the default,
    `at_an_equal_p95` with the cheapest of Ray's whose p95 of the time to the first token is no longer.
    """
    ours, rays = points[0], points[1:]

    def less_than(other: Mapping[str, Any]) -> Figures:
        share = 1.0 - ours["replica_hours"] / other["replica_hours"]
        return {"policy": other["policy"], "replica_hours": round(share, 3)}

    wait_s = ours["ttft_s"]["p95"]
    no_slower = [
        ray for ray in rays
        if wait_s is not None and ray["ttft_s"]["p95"] is not None and ray["ttft_s"]["p95"] <= wait_s
    ]  # fmt: skip
    return {
        "than_the_default": less_than(rays[0]) if rays else None,
        "at_an_equal_p95": less_than(min(no_slower, key=lambda ray: ray["replica_hours"]))
        if no_slower
        else None,
    }


def _show(figures: Figures) -> None:
    columns = ["policy", "replica hours", "tok/s each", "most", "changes", "failed"]
    columns += [f"TTFT p{p} (s)" for p in PERCENTILES] + [f"TPOT p{p} (ms)" for p in PERCENTILES]
    rows = [
        [
            point["policy"],
            f"{point['replica_hours']:.1f}",
            f"{point['tokens_per_s_per_replica']:,.0f}",
            *(str(point[name]) for name in ("most_replicas", "changes", "failed")),
            *(_cell(point["ttft_s"][f"p{p}"], 3) for p in PERCENTILES),
            *(_cell(point["tpot_ms"][f"p{p}"], 1) for p in PERCENTILES),
        ]
        for point in figures["policies"]
    ]
    print_table(f"{figures['requests']} requests", columns, rows)
    for name, saved in figures["saved"].items():
        if saved is not None:
            share = saved["replica_hours"] * 100
            print(f"{share:.0f} % fewer replica-hours {name.replace('_', ' ')} ({saved['policy']})")


def _cell(value: float | None, digits: int) -> str:
    return "never" if value is None else f"{value:.{digits}f}"
