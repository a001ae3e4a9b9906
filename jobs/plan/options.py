"""Options of `manta plan`; its flags are made from them. Imports neither torch nor Ray."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from ...cluster.config import KVCacheDType, Quantization
from ...cluster.errors import ConfigError
from ...cluster.flag import Flag, Size
from ...cluster.hardware.gpu_specs import GPUS
from ..common.config_file import check_new_file


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOptions:
    """Options of `manta plan`.

    Attributes:
        model: target: folder or Hugging Face id.
        num_gpus: GPUs of the node.
        gpu: kind of the GPUs.
        drafter: DFlash drafter, or with mtp an assistant of Gemma 4; by default plain decoding is planned.
        spec_method: drafting method: dflash, or mtp (the target's own layers for multi-token prediction, or
            an assistant).
        dtype: data type of weights and K/V; auto takes the checkpoint's, bfloat16 for float32. Rates
            are known for 16 bits only.
        kv_cache_dtype: data type of stored K/V; fp8 (e4m3) holds twice the tokens in the same memory.
        quantization: quantization of the target's weights at load: fp8 takes 8 bits per weight, int8 8.25,
            int4 4.5. A quantized checkpoint is planned in the form that a GPU keeps.
        drafter_quantization: the same of the drafter's weights.
        acceptance: mean acceptance length, such as 4.2, or the probability that each draft and all before it
            are accepted, such as 0.8,0.7,...; by default from the drafter's card, or 4.
        slo_tpot_ms: maximum milliseconds per output token.
        slo_ttft_ms: maximum milliseconds to the first token, with a trace.
        trace: JSONL of arrivals (arrival_s, prompt_tokens, output_tokens), simulated for every layout.
        max_model_len: longest sequence; by default the checkpoints' limit.
        context: mean tokens of a sequence; by default the trace's, or 4096.
        batch: concurrent requests on the node; by default the best of each layout.
        as_json: print the report as JSON instead of tables.
        output: file for the Serve config.
        force: replace an existing file.
    """

    model: Annotated[str, Flag("-m")]
    num_gpus: Annotated[int, Flag("--gpus")] = 8
    gpu: Annotated[str, Flag(metavar="|".join(GPUS))] = "h200"
    drafter: Annotated[str | None, Flag("--drafter --spec-model")] = None
    spec_method: Literal["dflash", "mtp"] = "dflash"
    dtype: Literal["auto", "bfloat16", "float16"] = "auto"
    kv_cache_dtype: KVCacheDType = "auto"
    quantization: Annotated[Quantization | None, Flag("-q")] = None
    drafter_quantization: Quantization | None = None
    acceptance: str | None = None
    slo_tpot_ms: float | None = None
    slo_ttft_ms: float | None = None
    trace: Path | None = None
    max_model_len: Size | None = None
    context: Size | None = None
    batch: int | None = None
    as_json: Annotated[bool, Flag("--json")] = False
    output: Annotated[Path | None, Flag("-o")] = None
    force: bool = False

    def __post_init__(self) -> None:
        for name in ("num_gpus", "context", "batch"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name}={value} must be at least 1.", param=name)
        for name in ("slo_tpot_ms", "slo_ttft_ms"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ConfigError(f"{name}={value:g} must be milliseconds above 0.", param=name)
        if self.drafter_quantization is not None and self.drafter is None:
            raise ConfigError(
                "drafter_quantization needs a drafter: give --drafter, too.", param="drafter_quantization"
            )
        if self.slo_ttft_ms is not None and self.trace is None:
            raise ConfigError("slo_ttft_ms needs arrivals: give --trace, too.", param="slo_ttft_ms")
        if self.output is not None:
            check_new_file(self.output, force=self.force)
