"""`manta bench`: speculation on against off, same target, same prompts, side by side in one run.

For every number of concurrent requests the two modes take turns (on, off, off, on, ...) so that what else the
machine does falls on both; each mode runs in its faster dtype, found by a short trial. Figures are medians
over rounds. Outputs are compared token by token in every dtype. In this process, without Ray.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from ..actors.llm import LLM
from ..actors.outputs import RequestOutput
from ..actors.prompts import Prompt
from ..cluster.config import EngineConfig
from ..cluster.errors import ConfigError, DatasetError
from ..cluster.request import SamplingParams
from .batch_io import open_source, write_json
from .batch_rows import Layout, parse_line, row_id, row_seed
from .generate import open_llm
from .provenance import provenance
from .report import print_table

TRIAL_PROMPTS = 4
MODES = ("on", "off")
Figures = dict[str, Any]  # Any: JSON


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchOptions:
    """What is measured.

    Attributes:
        prompts: a JSONL file with `prompt` or `messages` per line.
        num_prompts: of them, spread over the file.
        concurrency: numbers of requests that run at once.
        rounds: repetitions of each mode; the median counts.
        max_tokens, temperature: of every request; generation goes on after an end of sequence.
        output: JSON file for the figures.
        plot: SVG or PNG file for the speed-up.
    """

    prompts: Path = Path("models/prompts.jsonl")
    num_prompts: int = 20
    concurrency: tuple[int, ...] = (1, 8)
    rounds: int = 3
    max_tokens: int = 128
    temperature: float = 0.0
    output: Path | None = None
    plot: Path | None = None

    def __post_init__(self) -> None:
        for name in ("num_prompts", "rounds", "max_tokens"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)} must be at least 1.", param=name)
        if not self.concurrency or min(self.concurrency) < 1:
            raise ConfigError(
                f"concurrency={self.concurrency} must be numbers of at least 1.", param="concurrency"
            )


@dataclass(slots=True)
class Round:
    """One pass over all prompts."""

    seconds: float
    tokens: int
    num_steps: int
    num_accepted: int
    step_seconds: dict[str, float]
    token_ids: list[list[int]] = field(repr=False)

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds

    @property
    def tokens_per_step(self) -> float:
        return 1.0 + self.num_accepted / self.num_steps if self.num_steps else 1.0


def run_bench(config: EngineConfig, options: BenchOptions) -> Figures:
    """Measure, print a table, and write what the options ask for. Returns the figures."""
    if config.speculative_config is None:
        raise ConfigError(
            "speculative_config is missing: bench compares it with plain decoding. Give --spec-model.",
            param="speculative_config",
        )
    prompts = read_prompts(options.prompts, options.num_prompts)
    points = [_measure(config, options, prompts, requests) for requests in options.concurrency]
    figures: Figures = {
        "provenance": provenance(),
        "engine": asdict(config),
        "options": {k: str(v) if isinstance(v, Path) else v for k, v in asdict(options).items()},
        "points": points,
    }
    print_points(points)
    if options.output is not None:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        write_json(options.output, figures)
    if options.plot is not None:
        from .plot import plot_speedup  # matplotlib is not needed to measure

        plot_speedup(figures, options.plot)
    return figures


def read_prompts(path: Path, count: int) -> list[tuple[str, Prompt | list[dict[str, str]]]]:
    """(id, prompt or messages) of `count` lines spread evenly over the file."""
    source = open_source(path)
    if not source.lines:
        raise DatasetError(f"prompts: {path} must be a JSONL file.", param="prompts")
    lines = [line for line in path.read_text(encoding="utf-8").split("\n") if line.strip()]
    records = [parse_line(lines[i * len(lines) // count]) for i in range(min(count, len(lines)))]
    return [(row_id(record, Layout()), record.get("messages") or record["prompt"]) for record in records]


def _measure(
    config: EngineConfig,
    options: BenchOptions,
    prompts: Sequence[tuple[str, Any]],  # Any: a prompt or messages
    requests: int,
) -> Figures:
    """Both modes at one concurrency."""
    dtypes = (config.dtype,) if config.dtype != "auto" else _dtypes(config)
    with _engines(config, requests, dtypes) as engines:
        jobs = {key: _Job(llm, prompts, options) for key, llm in engines.items()}
        for job in jobs.values():
            job.run(1)  # what happens once does not count
        trial = {key: job.run(TRIAL_PROMPTS) for key, job in jobs.items()}
        fastest = {
            mode: max(dtypes, key=lambda dtype, mode=mode: trial[mode, dtype].tokens_per_s) for mode in MODES
        }
        identical: dict[str, bool] = {}
        rounds: dict[str, list[Round]] = {mode: [] for mode in MODES}
        for number in range(options.rounds):
            for mode in MODES if number % 2 == 0 else MODES[::-1]:
                _say(f"{requests} request(s), round {number + 1}/{options.rounds}, speculation {mode}")
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

    def __init__(self, llm: LLM, prompts: Sequence[tuple[str, Any]], options: BenchOptions) -> None:
        self._llm = llm
        self._prompts: list[Prompt] = [
            llm.render_chat(prompt) if isinstance(prompt, list) else prompt for _, prompt in prompts
        ]
        self._params = [
            SamplingParams(
                temperature=options.temperature,
                max_tokens=options.max_tokens,
                ignore_eos=True,
                seed=row_seed(0, name),
            )
            for name, _ in prompts
        ]

    def run(self, count: int | None = None) -> Round:
        before = self._llm.stats()
        begin_s = time.perf_counter()
        outputs = self._llm.generate(self._prompts[:count], self._params[:count], use_tqdm=False)
        seconds = time.perf_counter() - begin_s
        after = self._llm.stats()
        return Round(
            seconds=seconds,
            tokens=sum(len(output.outputs[0].token_ids) for output in outputs),
            num_steps=sum(output.metrics.num_steps for output in outputs),
            num_accepted=sum(output.metrics.num_accepted_tokens for output in outputs),
            step_seconds={
                part: spent - before.step_seconds.get(part, 0.0) for part, spent in after.step_seconds.items()
            },
            token_ids=[_token_ids(output) for output in outputs],
        )


@contextmanager
def _engines(
    config: EngineConfig, requests: int, dtypes: Sequence[str]
) -> Iterator[dict[tuple[str, str], LLM]]:
    """One engine per mode and dtype. `max_num_seqs` makes `requests` run at once; no prefix is reused."""
    engines: dict[tuple[str, str], LLM] = {}
    try:
        for dtype in dtypes:
            on = replace(config, dtype=dtype, max_num_seqs=requests, enable_prefix_caching=False)  # type: ignore[arg-type]
            engines["on", dtype] = open_llm(on)
            engines["off", dtype] = open_llm(replace(on, speculative_config=None))
        yield engines
    finally:
        for llm in engines.values():
            llm.close()


def _dtypes(config: EngineConfig) -> tuple[str, ...]:
    """What is tried where the user leaves it open. On a GPU only bfloat16 makes sense."""
    import torch

    on_gpu = config.device == "cuda" or (config.device == "auto" and torch.cuda.is_available())
    return ("bfloat16",) if on_gpu else ("float32", "bfloat16")


def _side(rounds: Sequence[Round], dtype: str) -> Figures:
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


def _token_ids(output: RequestOutput) -> list[int]:
    return output.outputs[0].token_ids


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
