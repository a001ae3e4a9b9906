"""`benchmarks busy`: the share of its speed that the engine keeps with busy processes or a CPU quota.

For each mode, turns on an idle machine alternate with turns with *pressure*: busy processes, started for the
turn, or a quota. Idle and busy speeds are thus for the same prompts at nearly the same time. The kept share
is compared with the fair share, which a scheduler that treats all threads equally gives to the engine's
threads. Runs in this process, without Ray.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass

from manta.actors.system.atomic_files import rounded
from manta.actors.system.host_resources import owned_cores
from manta.actors.tokenization.prompts import load_tokenizer
from manta.cluster.config import EngineConfig
from manta.cluster.errors import ConfigError
from manta.jobs.bench.common.engine_passes import (
    MIN_GROUPS,
    MODES,
    EnginePass,
    Figures,
    Prompt,
    SteppedPass,
    encode_prompts,
    joined,
    open_engines,
    prompts_per_turn,
    ratios,
    read_prompts,
    record,
    rotated,
    say,
    split_evenly,
)
from manta.jobs.bench.common.idle_check import print_warning
from manta.jobs.common.tables import print_table

from ..options import BusyOptions
from ..processes.busy_processes import busy_processes
from ..processes.cpu_quota import QuotaGroup, quota_group
from ..processes.process_tree import TreeWatch

NAMES = {"on": "DFlash", "off": "plain"}
STATES = ("idle", "busy")


@dataclass(frozen=True, slots=True)
class CpuPressure:
    """The disturbance in busy turns: processes, or a quota."""

    processes: int = 0
    quota: float | None = None
    group: QuotaGroup | None = None

    def __str__(self) -> str:
        if self.quota is not None:
            return f"quota of {self.quota:g} cores"
        return f"{self.processes} busy process{'es' if self.processes > 1 else ''}"

    def applied(self) -> AbstractContextManager[object]:
        return busy_processes(self.processes) if self.group is None else self.group.entered()

    def fair_share(self, threads: int, cores: int) -> float:
        """Return the share of its idle speed that the engine has if all runnable threads get equal time."""
        alone = min(1.0, cores / threads)  # share of a core of each of its threads
        if self.quota is not None:
            return min(1.0, self.quota / (threads * alone))
        return min(1.0, cores / (threads + self.processes)) / alone


def run_busy(config: EngineConfig, options: BusyOptions) -> Figures:
    """Measure, print a table, write the figures if requested, and return them."""
    if config.speculative_config is None:
        raise ConfigError(
            "speculative_config is missing: bench busy runs with a drafter and without. Give --spec-model.",
            param="speculative_config",
        )
    rows = read_prompts(options.prompts, options.num_prompts)
    points: list[Figures] = []
    with ExitStack() as stack:
        quotas = [CpuPressure(quota=q, group=stack.enter_context(quota_group(q))) for q in options.cpu_quotas]
        pressures = [*(CpuPressure(processes=count) for count in options.busy), *quotas]
        prompts = encode_prompts(rows, load_tokenizer(config))
        for requests in options.concurrency:
            points += _measure(config, options, prompts, requests, pressures)
    print_points(points)
    return record(config, options, points)


def _measure(
    config: EngineConfig,
    options: BusyOptions,
    prompts: Sequence[Prompt],
    requests: int,
    pressures: Sequence[CpuPressure],
) -> list[Figures]:
    """Measure both modes at one concurrency with every pressure."""
    points: list[Figures] = []
    with open_engines(config, requests, [config.dtype]) as engines:
        runs = {mode: EnginePass(llm, prompts, options.max_tokens) for (mode, _), llm in engines.items()}
        dtypes = {mode: llm.info.dtype for (mode, _), llm in engines.items()}
        turns = _turns(runs, len(prompts), requests, options.max_tokens)
        for pressure in pressures:
            say(f"{requests} request(s), {pressure}")
            watch = TreeWatch()
            with watch.open():
                passes = _take_turns(runs, turns, pressure, options.rounds)
            facts = {"requests": requests, "prompts_per_turn": turns[0].stop}
            points.append({**facts, **_figures(config, pressure, passes, dtypes, watch.found.as_json())})
    return points


def _turns(runs: Mapping[str, EnginePass], count: int, requests: int, max_tokens: int) -> list[slice]:
    """Return turns whose length is determined by the slower mode's idle speed."""
    minimum = slice(requests * MIN_GROUPS)
    for run in runs.values():
        run(minimum)  # warm-up
    slowest = min(run(minimum).tokens_per_s for run in runs.values())
    return split_evenly(count, prompts_per_turn(requests, slowest, max_tokens), requests)


def _take_turns(
    runs: Mapping[str, EnginePass], turns: Sequence[slice], pressure: CpuPressure, rounds: int
) -> dict[tuple[str, str], list[SteppedPass]]:
    """Return by mode and state one turn per round, after a warm-up turn over the same prompts."""
    passes: dict[tuple[str, str], list[SteppedPass]] = {(m, state): [] for m in MODES for state in STATES}
    for number in range(rounds):
        for mode in rotated(MODES, number):
            for state in rotated(STATES, number // len(MODES)):
                run, turn = runs[mode], turns[number % len(turns)]
                with pressure.applied() if state == "busy" else nullcontext():
                    run(turn)  # the engine adapts its number of threads
                    passes[mode, state].append(run(turn))
    return passes


def _figures(
    config: EngineConfig,
    pressure: CpuPressure,
    passes: Mapping[tuple[str, str], list[SteppedPass]],
    dtypes: Mapping[str, str],
    idleness: Figures,
) -> Figures:
    cores = owned_cores()
    threads = config.num_threads or cores
    fair_share = pressure.fair_share(threads, cores)
    expected = [done.token_ids for done in passes["on", "idle"]]
    return {
        "busy_processes": pressure.processes,
        "cpu_quota": pressure.quota,
        "threads": threads,
        "cores": cores,
        "fair_share": round(fair_share, 4),
        **{
            mode: {"dtype": dtypes[mode]}
            | _mode_figures(passes[mode, "idle"], passes[mode, "busy"], fair_share)
            for mode in MODES
        },
        "idle_speedup": round(statistics.median(ratios(passes["on", "idle"], passes["off", "idle"])), 3),
        "busy_speedup": round(statistics.median(ratios(passes["on", "busy"], passes["off", "busy"])), 3),
        "identical": all([done.token_ids for done in side] == expected for side in passes.values()),
        "idleness": idleness,
    }


def _mode_figures(idle: Sequence[SteppedPass], busy: Sequence[SteppedPass], fair_share: float) -> Figures:
    kept = ratios(busy, idle)
    share = statistics.median(kept)
    return {
        "idle_tokens_per_s": round(statistics.median(done.tokens_per_s for done in idle), 2),
        "busy_tokens_per_s": round(statistics.median(done.tokens_per_s for done in busy), 2),
        "rounds_idle_tokens_per_s": [round(done.tokens_per_s, 2) for done in idle],
        "rounds_busy_tokens_per_s": [round(done.tokens_per_s, 2) for done in busy],
        "rounds_share_of_idle": [round(of_round, 4) for of_round in kept],
        "share_of_idle": round(share, 4),
        "share_of_fair": round(share / fair_share, 4),
        "idle_mean_acceptance_length": rounded(joined(idle).mean_acceptance_length),
        "busy_mean_acceptance_length": rounded(joined(busy).mean_acceptance_length),
    }


def print_points(points: Sequence[Figures]) -> None:
    """Print a line per mode and pressure with the kept and the fair share."""
    columns = [
        "requests",
        "beside",
        "mode",
        "idle tok/s",
        "busy tok/s",
        "of idle",
        "fair share",
        "of fair",
        "identical",
    ]
    rows = [
        [
            str(point["requests"]),
            str(CpuPressure(point["busy_processes"], point["cpu_quota"])),
            NAMES[mode],
            f"{point[mode]['idle_tokens_per_s']:.1f}",
            f"{point[mode]['busy_tokens_per_s']:.1f}",
            f"{point[mode]['share_of_idle']:.0%}",
            f"{point['fair_share']:.0%}",
            f"{point[mode]['share_of_fair']:.0%}",
            "yes" if point["identical"] else "no",
        ]
        for point in points
        for mode in MODES
    ]
    print_table("speed on a busy machine", columns, rows)
    print_warning([point["idleness"] for point in points])
