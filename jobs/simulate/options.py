"""Options of `manta simulate node`; its flags are made from them. Imports neither torch nor Ray."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from ...cluster.errors import ConfigError
from ...cluster.flag import Flag, Size
from ...cluster.hardware.gpu_specs import GPUS


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeOptions:
    """Options of `manta simulate node`.

    Attributes:
        model: target: folder or Hugging Face id; its configuration is enough.
        drafter: DFlash drafter: folder or Hugging Face id.
        gpu: kind of the GPUs.
        num_gpus: GPUs of the node.
        tp: tensor-parallel ranks of an engine; may be repeated; by default each number that fits.
        methods: plain, dflash, dflash-tree, eagle3, or a fixed number of drafts, such as dflash-7; with
            -split after it a DFlash drafter has a GPU of its own; may be repeated; by default plain, and with
            a drafter eagle3-3 and dflash. See `methods.py`.
        acceptance: mean acceptance length of the DFlash drafter's block, or by category: code=4.9,chat=2.9.
        eagle3_acceptance: mean acceptance length of EAGLE-3's drafts, or by category.
        eagle3_drafts: number of EAGLE-3's drafts that have this acceptance length.
        spread: standard deviation of requests' hardness; 0: equal. See cluster/simulation/acceptance_mix.py.
        concurrency: concurrent requests per engine; may be repeated, one load each (closed loop).
        rate_per_s: requests/s on the node (Poisson) instead of --concurrency; may be repeated.
        num_requests: number of requests at each rate.
        trace: JSONL of arrival_s, prompt_tokens, output_tokens, instead of rates and lengths.
        prompt_tokens: mean length of prompts.
        output_tokens: mean length of answers.
        sigma: standard deviation of the logarithm of lengths; 0: equal.
        seed: seed of lengths and texts.
        max_model_len: longest sequence; by default the checkpoints' limit.
        output: JSON file for the figures.
        plot: SVG or PNG of the frontiers.
    """

    model: Annotated[str, Flag("-m")]
    drafter: Annotated[str | None, Flag("--drafter --spec-model")] = None
    gpu: Annotated[str, Flag(metavar="|".join(GPUS))] = "b300"
    num_gpus: Annotated[int, Flag("--gpus")] = 8
    tp: tuple[int, ...] = ()
    methods: Annotated[tuple[str, ...], Flag("--method")] = ()
    acceptance: str = "4.0"
    eagle3_acceptance: str = "3.0"
    eagle3_drafts: int = 7
    spread: float = 0.5
    concurrency: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64, 128, 256)
    rate_per_s: Annotated[tuple[float, ...], Flag("--request-rate")] = ()
    num_requests: int = 200
    trace: Path | None = None
    prompt_tokens: float = 1024.0
    output_tokens: float = 512.0
    sigma: float = 0.4
    seed: int = 0
    max_model_len: Size | None = None
    output: Annotated[Path | None, Flag("-o")] = None
    plot: Path | None = None

    def __post_init__(self) -> None:
        if not self.methods:
            methods = ("plain",) if self.drafter is None else ("plain", "eagle3-3", "dflash")
            object.__setattr__(self, "methods", methods)
        for name in ("concurrency", "rate_per_s", "tp"):
            if any(not value > 0 for value in getattr(self, name)):
                raise ConfigError(f"{name}={list(getattr(self, name))} must be above 0.", param=name)
        for name in ("num_gpus", "eagle3_drafts", "num_requests"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)} must be at least 1.", param=name)
