"""`manta bench`: speculation on against off, same target, same prompts, side by side in one run.

For every number of concurrent requests the two modes take turns (on, off, off, on, ...) so that what else the
machine does falls on both; each mode runs in its faster dtype, found by a short trial. Figures are medians
over rounds. Outputs are compared token by token in every dtype. In this process, without Ray.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ..actors.llm import LLM
from ..actors.prompts import load_tokenizer
from ..cluster.config import EngineConfig
from ..cluster.errors import ConfigError
from ..cluster.request import SamplingParams
from .batch_rows import row_seed
from .bench_passes import (
    MODES,
    Figures,
    RunOptions,
    SteppedPass,
    encode_prompts,
    open_engines,
    read_prompts,
    record,
    run_engine,
    say,
    tried_dtypes,
)
from .report import print_table

TRIAL_PROMPTS = 4
_Prompt = tuple[str, list[int]]  # id, token ids


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchOptions(RunOptions):
    """What is measured.

    Attributes:
        temperature: of every request.
        plot: SVG or PNG file for the speed-up.
    """

    temperature: float = 0.0
    plot: Path | None = None


def run_bench(config: EngineConfig, options: BenchOptions) -> Figures:
    """Measure, print a table, and write what the options ask for. Returns the figures."""
    if config.speculative_config is None:
        raise ConfigError(
            "speculative_config is missing: bench compares it with plain decoding. Give --spec-model.",
            param="speculative_config",
        )
    rows = read_prompts(options.prompts, options.num_prompts)
    names = [name for name, _ in rows]
    prompts = list(zip(names, encode_prompts(rows, load_tokenizer(config)), strict=True))
    points = [_measure(config, options, prompts, requests) for requests in options.concurrency]
    print_points(points)
    figures = record(config, options, points)
    if options.plot is not None:
        from .plot import plot_speedup  # matplotlib is not needed to measure

        plot_speedup(figures, options.plot)
    return figures


def _measure(
    config: EngineConfig,
    options: BenchOptions,
    prompts: Sequence[_Prompt],
    requests: int,
) -> Figures:
    """Both modes at one concurrency."""
    dtypes = tried_dtypes(config)
    with open_engines(config, requests, dtypes) as engines:
        jobs = {key: _Job(llm, prompts, options) for key, llm in engines.items()}
        for job in jobs.values():
            job.run(1)  # what happens once does not count
        trial = {key: job.run(TRIAL_PROMPTS) for key, job in jobs.items()}
        fastest = {
            mode: max(dtypes, key=lambda dtype, mode=mode: trial[mode, dtype].tokens_per_s) for mode in MODES
        }
        identical: dict[str, bool] = {}
        rounds: dict[str, list[SteppedPass]] = {mode: [] for mode in MODES}
        for number in range(options.rounds):
            for mode in MODES if number % 2 == 0 else MODES[::-1]:
                say(f"{requests} request(s), round {number + 1}/{options.rounds}, speculation {mode}")
                rounds[mode].append(jobs[mode, fastest[mode]].run())
        for dtype in dtypes:
            answers = [
                rounds[mode][0] if fastest[mode] == dtype else jobs[mode, dtype].run() for mode in MODES
            ]
            identical[dtype] = answers[0].token_ids == answers[1].token_ids
    sides = {mode: _side(rounds[mode], fastest[mode]) for mode in MODES}
    return {
        "requests": requests,
        **sides,
        "speedup": round(sides["on"]["tokens_per_s"] / sides["off"]["tokens_per_s"], 3),
        "identical": identical,
        "trial_tokens_per_s": {f"{m} {d}": round(r.tokens_per_s, 1) for (m, d), r in trial.items()},
    }


class _Job:
    """All prompts through one engine."""

    def __init__(self, llm: LLM, prompts: Sequence[_Prompt], options: BenchOptions) -> None:
        self._llm = llm
        self._prompts = [token_ids for _, token_ids in prompts]
        self._params = [
            SamplingParams(
                temperature=options.temperature,
                max_tokens=options.max_tokens,
                ignore_eos=True,
                seed=row_seed(0, name),
            )
            for name, _ in prompts
        ]

    def run(self, count: int | None = None) -> SteppedPass:
        return run_engine(self._llm, self._prompts[:count], self._params[:count])


def _side(rounds: Sequence[SteppedPass], dtype: str) -> Figures:
    middle = sorted(rounds, key=lambda r: r.seconds)[len(rounds) // 2]
    return {
        "dtype": dtype,
        "tokens_per_s": round(statistics.median(r.tokens_per_s for r in rounds), 2),
        "rounds_tokens_per_s": [round(r.tokens_per_s, 2) for r in rounds],
        "tokens_per_step": round(middle.tokens_per_step, 4),
        "step_seconds": {part: round(spent, 4) for part, spent in middle.step_seconds.items()},
        "seconds": round(middle.seconds, 3),
        "tokens": middle.tokens,
    }


def print_points(points: Sequence[Figures]) -> None:
    """The table: a line per concurrency."""
    columns = ["requests", "plain tok/s", "DFlash tok/s", "tokens per step", "speed-up", "identical output"]
    rows = [
        [
            str(point["requests"]),
            f"{point['off']['tokens_per_s']:.1f} ({point['off']['dtype']})",
            f"{point['on']['tokens_per_s']:.1f} ({point['on']['dtype']})",
            f"{point['on']['tokens_per_step']:.2f}",
            f"{point['speedup']:.2f}x",
            ", ".join(f"{dtype}: {'yes' if same else 'no'}" for dtype, same in point["identical"].items()),
        ]
        for point in points
    ]
    print_table("speculation on against off", columns, rows)
