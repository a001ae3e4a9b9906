"""`manta bench`: compares speculation on with off, same target and prompts, alternating in one run.

At each concurrency the two modes take turns (`jobs/bench/common/engine_passes.py`), each in its faster dtype,
found by a short trial. Figures are medians over rounds. Outputs are compared token by token in every dtype.
Runs in this process, without Ray.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

from ...actors.system.atomic_files import rounded
from ...actors.system.wait_messages import counting
from ...actors.tokenization.prompts import load_tokenizer
from ...cluster.config import EngineConfig
from ...cluster.errors import ConfigError
from ..common.plots import GRAY, TEAL, can_plot, new_figure, save_figure
from ..common.tables import decimals, print_table
from .common.engine_passes import (
    MODES,
    EnginePass,
    Figures,
    Prompt,
    SteppedPass,
    encode_prompts,
    open_engines,
    prompts_per_turn,
    ratios,
    read_prompts,
    record,
    run_rounds,
    say,
    split_evenly,
    tried_dtypes,
)
from .common.idle_check import Watch, print_warning
from .common.options import BenchOptions

TRIAL_PROMPTS = 4
_Runs = Mapping[tuple[str, str], EnginePass]  # key: mode and dtype


def run_bench(config: EngineConfig, options: BenchOptions) -> Figures:
    if config.speculative_config is None:
        raise ConfigError(
            "speculative_config is missing: bench compares it with plain decoding. Give --spec-model.",
            param="speculative_config",
        )
    rows = read_prompts(options.prompts, options.num_prompts)
    prompts = encode_prompts(rows, load_tokenizer(config))
    say("loading the models")
    points = [_measure(config, options, prompts, requests) for requests in options.concurrency]
    print_points(points)
    figures = record(config, options, points)
    if options.plot is not None and can_plot():
        plot_speedup(figures, options.plot)
    return figures


def _measure(
    config: EngineConfig, options: BenchOptions, prompts: Sequence[Prompt], requests: int
) -> Figures:
    """Find each mode's faster dtype at one concurrency, alternate the modes, and return the figures."""
    dtypes = tried_dtypes(config) if options.trial else (config.dtype,)
    with open_engines(config, requests, dtypes) as engines:
        runs = {
            (mode, llm.info.dtype): EnginePass(llm, prompts, options.max_tokens, options.temperature)
            for (mode, _), llm in engines.items()
        }
        with counting(f"{requests} request(s), trying each dtype", say):
            trial = _trial(runs)
        fastest = dict(sorted(trial, key=trial.__getitem__))  # mode -> dtype; the last one counts
        chosen = {mode: fastest[mode] for mode in MODES}
        slowest = min(trial[key] for key in chosen.items())
        turns = split_evenly(len(prompts), prompts_per_turn(requests, slowest, options.max_tokens), requests)
        watch = Watch()
        with watch.open():
            sides = {mode: runs[mode, dtype] for mode, dtype in chosen.items()}
            rounds = run_rounds(sides, turns, options.rounds, f"{requests} request(s)")
        with counting(f"{requests} request(s), comparing the tokens", say):
            answers = {
                key: rounds[key[0]][0] if key in chosen.items() else run() for key, run in runs.items()
            }
    ratio = ratios(rounds["on"], rounds["off"])
    return {
        "requests": requests,
        **{mode: _mode_figures(rounds[mode], chosen[mode]) for mode in MODES},
        "speedup": round(statistics.median(ratio), 3),
        "rounds_speedup": [round(of_round, 3) for of_round in ratio],
        "turns": len(turns),
        "identical": _identical(answers),
        "trial_tokens_per_s": {f"{mode} {dtype}": round(speed, 1) for (mode, dtype), speed in trial.items()},
        "idleness": watch.found.as_json(),
    }


def _trial(runs: _Runs) -> dict[tuple[str, str], float]:
    for run in runs.values():
        run(slice(1))  # warm-up
    return {key: run(slice(TRIAL_PROMPTS)).tokens_per_s for key, run in runs.items()}


def _identical(answers: Mapping[tuple[str, str], SteppedPass]) -> dict[str, bool]:
    """Return whether both modes gave the same tokens, by dtype that both ran."""
    both = [dtype for mode, dtype in answers if mode == "on" and ("off", dtype) in answers]
    return {dtype: answers["on", dtype].token_ids == answers["off", dtype].token_ids for dtype in both}


def _mode_figures(rounds: Sequence[SteppedPass], dtype: str) -> Figures:
    middle = sorted(rounds, key=lambda r: r.seconds)[len(rounds) // 2]
    return {
        "dtype": dtype,
        "tokens_per_s": round(statistics.median(r.tokens_per_s for r in rounds), 2),
        "rounds_tokens_per_s": [round(r.tokens_per_s, 2) for r in rounds],
        "mean_acceptance_length": rounded(middle.mean_acceptance_length),
        "step_seconds": {part: round(spent, 4) for part, spent in middle.step_seconds.items()},
        "seconds": round(middle.seconds, 3),
        "tokens": middle.tokens,
    }


def print_points(points: Sequence[Figures]) -> None:
    columns = [
        "requests",
        "plain tok/s",
        "DFlash tok/s",
        "mean acceptance length",
        "speed-up",
        "identical output",
    ]
    rows = [
        [
            str(point["requests"]),
            f"{point['off']['tokens_per_s']:.1f} ({point['off']['dtype']})",
            f"{point['on']['tokens_per_s']:.1f} ({point['on']['dtype']})",
            decimals(point["on"]["mean_acceptance_length"]),
            f"{point['speedup']:.2f}x",
            ", ".join(f"{dtype}: {'yes' if same else 'no'}" for dtype, same in point["identical"].items()),
        ]
        for point in points
    ]
    print_table("speculation on against off", columns, rows)
    print_warning([point["idleness"] for point in points])


def plot_speedup(figures: Figures, path: Path) -> None:
    points = figures["points"]
    figure = new_figure(6.4, 3.2)
    axes = figure.subplots()
    for side, offset, color, label in (("off", -0.2, GRAY, "plain decoding"), ("on", 0.2, TEAL, "DFlash")):
        heights = [point[side]["tokens_per_s"] for point in points]
        bars = axes.bar([x + offset for x in range(len(points))], heights, 0.38, color=color, label=label)
        axes.bar_label(bars, fmt="%.0f", padding=2)
    for x, point in enumerate(points):
        axes.annotate(
            f"{point['speedup']:.2f}x",
            (x, max(point[side]["tokens_per_s"] for side in ("on", "off"))),
            xytext=(0, 16),
            textcoords="offset points",
            ha="center",
            weight="bold",
        )
    axes.set_xticks(range(len(points)), [f"concurrency {point['requests']}" for point in points])
    axes.set_ylabel("tokens/s")
    axes.margins(y=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="upper left")
    axes.set_title(_title(figures), fontsize=9, loc="left")
    save_figure(figure, path)


def _title(figures: Figures) -> str:
    machine = figures["provenance"]["gpu"] or figures["provenance"]["cpu"]
    return f"{Path(figures['engine']['model']).name}, {figures['provenance']['cores']} cores, {machine}"
