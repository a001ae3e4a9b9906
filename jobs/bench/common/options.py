"""Options of `manta bench`; its flags are made from them. Imports neither torch nor Ray."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from ....cluster.config import AttentionBackend, DeviceKind, DType
from ....cluster.errors import ConfigError
from ....cluster.flag import NO_FLAG, Flag, Size
from ...common.options import SHIPPED_PROMPTS, check_least

CONCURRENCY = (1, 2, 4, 8, 16, 32, 64)
Loads = Annotated[tuple[int, ...], Flag("--max-concurrency")]
Temperature = Annotated[float, Flag("-t")]
Temperatures = Annotated[tuple[float, ...], Flag("--temperature -t")]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """Options that several benchmarks share.

    Attributes:
        prompts: JSONL with `prompt` or `messages`.
        num_prompts: number of prompts, taken evenly from the file.
        concurrency: requests at once; may be repeated.
        rounds: repetitions of each side; the median is reported.
        max_tokens: tokens of every request. Generation continues after an end-of-sequence token.
        output: JSON file for the figures.
    """

    prompts: Path = SHIPPED_PROMPTS
    num_prompts: int = 20
    concurrency: Loads = (1, 8)
    rounds: int = 3
    max_tokens: int = 128
    output: Annotated[Path | None, Flag("-o")] = None

    def __post_init__(self) -> None:
        check_least(self, 1, "num_prompts", "rounds", "max_tokens", "concurrency")


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchOptions(RunOptions):
    """Options of `manta bench speculation`.

    Attributes:
        temperature: 0 is greedy.
        trial: measure each dtype first and use the fastest per mode; otherwise the engine chooses.
        plot: SVG or PNG file for a chart of the speed-up.
    """

    rounds: int = 5
    temperature: Temperature = 0.0
    trial: bool = True
    plot: Path | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepOptions(RunOptions):
    """Options of `manta bench sweep`.

    Attributes:
        num_prompts: number of prompts, taken evenly from the file.
        concurrency: requests at once in closed loops; may be repeated.
        rounds: maximum number of rounds of each side at a point.
        max_tokens: mean output tokens of a request; requests vary from 0.5 to 1.5 times this.
        temperatures: sampling temperature; 0 is greedy; may be repeated. Every load is measured at each.
        methods: additional speculative configs, by name.
        minutes: approximate duration.
        methods_only: skip fixed numbers of drafts.
    """

    num_prompts: Annotated[int, NO_FLAG] = 240
    concurrency: Loads = CONCURRENCY
    rounds: Annotated[int, NO_FLAG] = 5
    temperatures: Temperatures = (0.0, 0.7, 1.0)
    methods: Annotated[Mapping[str, Mapping[str, Any]], NO_FLAG] = field(default_factory=dict)  # Any: JSON
    minutes: float = 30.0
    methods_only: Annotated[bool, Flag("--methods-only")] = False

    def __post_init__(self) -> None:
        RunOptions.__post_init__(self)
        check_least(self, 0, "temperatures")
        if not self.minutes > 0:
            raise ConfigError(f"minutes={self.minutes} must be above 0.", param="minutes")


def parse_rates(text: str) -> tuple[float, ...]:
    """Read acceptance rates from comma-separated numbers."""
    try:
        return tuple(float(rate) for rate in text.split(","))
    except ValueError:
        raise ConfigError(
            f"synthetic_acceptance_rates={text!r} must be comma-separated numbers, like 0.9,0.8,0.7.",
            param="synthetic_acceptance_rates",
        ) from None


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOptions:
    """Options of `manta bench step`. Every combination of batch and context is measured.

    Attributes:
        model: folder or config.json; on a GPU Qwen3-8B by default.
        spec_model: folder or config.json of the drafter; by default z-lab's b16 at the target's width.
        num_drafts: drafts per request; by default the drafter's maximum.
        batches: requests in a step; may be repeated.
        contexts: tokens before a step; may be repeated.
        steps: steps measured at each point, after warm-up; the median is reported.
        acceptance_rates: probability that a draft and all before it are accepted, as 0.9,0.8,... (vLLM's
            meaning); by default 0.86, 0.86^2, ...
        dtype: data type of weights and K/V.
        device: device of the models.
        attention_backend: kernels of a step; auto is triton on a GPU, compiled on a CPU that supports it.
        page_size: tokens per K/V page; by default 64 on a GPU, 16 on a CPU.
        device_rates: sustained memory bandwidth and FLOP/s; by default known for some GPUs, else measured.
        output: JSON file for the figures.
    """

    model: Annotated[str | None, Flag("-m")] = None
    spec_model: str | None = None
    num_drafts: Annotated[int | None, Flag("--spec-tokens")] = None
    batches: Annotated[tuple[int, ...], Flag("--batch")] = (1, 8, 32, 64, 128)
    contexts: Annotated[tuple[Size, ...], Flag("--context")] = (1024, 8192)
    steps: int = 20
    acceptance_rates: Annotated[
        tuple[float, ...] | None,
        Flag("--synthetic-acceptance-rates", metavar="RATES", parser=parse_rates),
    ] = None
    dtype: DType = "auto"
    device: DeviceKind = "auto"
    attention_backend: AttentionBackend = "auto"
    page_size: Annotated[int | None, Flag("--block-size --page-size")] = None
    device_rates: Annotated[str | None, Flag(metavar="GB/s,TFLOP/s")] = None
    output: Annotated[Path | None, Flag("-o")] = None

    def __post_init__(self) -> None:
        check_least(self, 1, "batches", "contexts", "steps")
