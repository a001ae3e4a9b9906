"""`benchmarks shared-drafter`: engines that share one drafter against engines with their own.

One, two and three engines on this machine, all under the same closed load at the same time, with

    shared      one drafter process for all of them
    split       a drafter process each
    colocated   a drafter each, in the target's process

All engines are started first, in their own processes (`engine_hosts.py`), and are idle outside their turn. At
each number of engines the sides alternate; the first turn is a warm-up, in which step costs and acceptance
are learned. Medians over rounds are reported.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace

import ray
from manta.actors.tokenization.checkpoint_paths import with_absolute_paths
from manta.actors.tokenization.prompts import load_tokenizer
from manta.cluster.config import EngineConfig, SpeculativeConfig
from manta.cluster.errors import ConfigError
from manta.cluster.fleet.placement import Topology, total
from manta.jobs.bench.common.engine_passes import Figures, read_rows, record, rotated, say
from manta.jobs.bench.common.idle_check import print_warning
from manta.jobs.bench.common.request_source import RequestSource, encode_rows
from manta.jobs.common.ray_session import join_or_start_ray
from manta.jobs.common.tables import NO_FIGURE, decimals, print_table

from ..options import SharedDrafterOptions
from ..options import SharedDrafterSide as Side
from ..processes.process_tree import TreeWatch
from .engine_hosts import Turn, open_hosts

LOOK_EVERY_S = 1.0
Runs = Callable[[int, int, float], list[Turn]]  # arguments: engines, requests per engine, seconds


def run_shared_drafter(config: EngineConfig, options: SharedDrafterOptions) -> Figures:
    """Measure, print a table per point, write the figures if requested, and return them.

    Raises:
        ConfigError: there is no drafter.
        PlacementError: the engines do not fit on this machine.
    """
    config = replace(with_absolute_paths(config), enable_prefix_caching=False)
    config = replace(config, max_num_seqs=max(config.max_num_seqs, *options.concurrency))
    configs: dict[Side, EngineConfig] = {side: _with_drafter(config, side) for side in options.sides}
    rows = encode_rows(read_rows(options.prompts, options.num_prompts), load_tokenizer(config))
    source = RequestSource(rows, options.max_tokens, options.temperature)
    started_here = join_or_start_ray(num_cpus=_num_cpus(configs, options), log_to_driver=False)
    try:
        with ExitStack() as opened:
            runs: dict[Side, Runs] = {}
            for side, of_side in configs.items():
                say(f"{side}: {max(options.engines)} engine(s) load")
                runs[side] = opened.enter_context(open_hosts(of_side, source, max(options.engines))).run
            points = measure(runs, options)
    finally:
        if started_here:
            ray.shutdown()
    for point in points:
        print_point(point)
    print_warning([point["idleness"] for point in points])
    return record(config, options, points)


def measure(runs: Mapping[Side, Runs], options: SharedDrafterOptions) -> list[Figures]:
    """Measure every point.

    Args:
        runs: function that runs a turn, by side.
    """
    return [_measure(runs, engines, requests, options) for engines, requests in options.points]


def _measure(
    runs: Mapping[Side, Runs], engines: int, requests: int, options: SharedDrafterOptions
) -> Figures:
    done: dict[Side, list[list[Turn]]] = {side: [] for side in runs}
    for run in runs.values():
        run(engines, requests, options.seconds)
    watch = TreeWatch(look_every_s=LOOK_EVERY_S)
    with watch.open():
        for number in range(options.rounds):
            say(f"{engines} engine(s), {requests} request(s) at each: round {number + 1}/{options.rounds}")
            for side in rotated(list(runs), number):
                done[side].append(runs[side](engines, requests, options.seconds))
    return {
        "engines": engines,
        "requests": requests,
        "sides": [_figures_of_side(side, rounds, done.get("colocated")) for side, rounds in done.items()],
        "idleness": watch.found.as_json(),
    }


def _figures_of_side(
    side: Side, rounds: Sequence[Sequence[Turn]], own: Sequence[Sequence[Turn]] | None
) -> Figures:
    speeds = [_tokens_per_s(turns) for turns in rounds]
    ratios = [mine / _tokens_per_s(theirs) for mine, theirs in zip(speeds, own or (), strict=False)]
    turns = [turn for each in rounds for turn in each]
    steps, apart = sum(turn.steps for turn in turns), any(turn.drafter.served_s for turn in turns)
    blocks = sum(turn.blocks for turn in turns)
    fairness = [min(turn.tokens for turn in each) / max(turn.tokens for turn in each) for each in rounds]
    return {
        "side": side,
        "tokens_per_s": round(statistics.median(speeds), 2),
        "rounds_tokens_per_s": [round(speed, 2) for speed in speeds],
        "ratio": round(statistics.median(ratios), 4) if ratios else None,
        "tokens_per_step": round(sum(turn.tokens for turn in turns) / blocks, 4),
        "draft_ms": round(1e3 * sum(turn.draft_s for turn in turns) / steps, 4),
        "drafter": _drafter_figures(rounds, steps) if apart else None,
        "fairness": round(statistics.median(fairness), 4),
    }


def _tokens_per_s(turns: Sequence[Turn]) -> float:
    return statistics.fmean(turn.tokens / turn.seconds for turn in turns)


def _drafter_figures(rounds: Sequence[Sequence[Turn]], steps: int) -> Figures:
    """Return figures of drafters in other processes.

    Share of steps with drafts, queueing and work time per step, and the share of time in which they worked,
    which exceeds 1 for several drafters.
    """
    uses = [turn.drafter for each in rounds for turn in each]
    served_s = sum(use.served_s for use in uses)
    seconds = sum(max(turn.seconds for turn in each) for each in rounds)
    return {
        "drafted": round(sum(use.steps for use in uses) / steps, 4),
        "queue_ms": round(1e3 * sum(use.queue_s for use in uses) / steps, 4),
        "served_ms": round(1e3 * served_s / steps, 4),
        "busy": round(served_s / seconds, 4),
    }


def print_point(point: Figures) -> None:
    """Print the table of one point; times are per step."""
    columns = ["drafter", "tok/s each", "of colocated", "tok/step", "draft ms", "drafted", "queue ms"]
    columns += ["work ms", "busy", "fairness"]
    rows = [
        [
            side["side"],
            f"{side['tokens_per_s']:.1f}",
            NO_FIGURE if side["ratio"] is None else f"{side['ratio']:.3f}",
            decimals(side["tokens_per_step"]),
            decimals(side["draft_ms"]),
            *_drafter_cells(side["drafter"]),
            decimals(side["fairness"]),
        ]
        for side in point["sides"]
    ]
    print_table(f"{point['engines']} engine(s), {point['requests']} request(s) at each", columns, rows)


def _drafter_cells(drafter: Figures | None) -> list[str]:
    names = ("drafted", "queue_ms", "served_ms", "busy")
    return [decimals(None if drafter is None else drafter[name]) for name in names]


def _with_drafter(config: EngineConfig, side: Side) -> EngineConfig:
    spec = config.speculative_config
    if spec is None or spec.model is None:
        raise ConfigError(
            "speculative_config is missing: this compares placements of a drafter. Set --spec-model.",
            param="speculative_config",
        )
    changed: SpeculativeConfig = replace(spec, placement=side)
    return replace(config, speculative_config=changed)


def _num_cpus(configs: Mapping[Side, EngineConfig], options: SharedDrafterOptions) -> int:
    """Return the CPU resources of a Ray that is started here, enough for all engines (not cores)."""
    topologies = [Topology.of(config, {}) for config in configs.values()]
    shared = [topology.worker_resources for topology in topologies if topology.shared_drafter]
    bundles = [*shared, *(b for each in topologies for b in each.worker_bundles() * max(options.engines))]
    return math.ceil(total(bundles).get("CPU", 0.0)) or 1
