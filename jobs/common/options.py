"""Options of serve, doctor, audit, plan, compile, simulate; flags are made from them. No torch, no Ray.

`check_least` is for all commands.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from ...cluster.config import KVCacheDType, Quantization
from ...cluster.errors import ConfigError
from ...cluster.flag import NO_FLAG, Flag, Size
from ...cluster.hardware.gpu_specs import GPUS
from .config_file import check_new_file

SHIPPED_PAIR = ("models/target", "models/drafter")
# Files of the package, which `shipped` and `read_rows` find from any working directory: prompts that the pair
# completes, and chats that no drafter of `models/recipe/published` is trained on.
SHIPPED_PROMPTS = Path("models/prompts.jsonl")
SHIPPED_CHATS = Path("models/chats.jsonl")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions:
    """Options of `manta serve`.

    Attributes:
        host: address to listen on; 0.0.0.0 for all interfaces; by default the file's, or 127.0.0.1.
        port: TCP port, which must be free; by default the file's, or 8000.
        plain_proxy: use Serve's own proxy instead of HAProxy, at several times the cost per token.
        probe_port: separate TCP port for probes and /metrics, which works when clients use all connections.
        verbose: also show Ray's own log lines.
        name: name of the Serve application.
        num_cpus: CPUs of a Ray that is started here; None uses all of the machine.
        ready_timeout_s: timeout of loading in seconds.
    """

    host: str = "127.0.0.1"
    port: Annotated[int, Flag(least=0, most=65535)] = 8000
    plain_proxy: Annotated[bool, Flag("--plain-proxy")] = False
    probe_port: Annotated[int | None, Flag(least=1, most=65535)] = None
    verbose: Annotated[bool, Flag("--verbose -v")] = False
    name: Annotated[str, NO_FLAG] = "manta"
    num_cpus: Annotated[int | None, NO_FLAG] = None
    ready_timeout_s: Annotated[float, NO_FLAG] = 1800.0

    @property
    def url(self) -> str:
        return f"http://{'127.0.0.1' if self.host in ('0.0.0.0', '::') else self.host}:{self.port}"


@dataclass(frozen=True, slots=True, kw_only=True)
class DoctorOptions:
    """Options of `manta doctor`.

    Attributes:
        model: target checkpoint: folder, GGUF file or hub id.
        spec_model: drafter checkpoint: folder, GGUF file or hub id.
        quick: use fewer dtypes, prompts and tokens, to finish within a minute.
        output: JSON file for the report.
    """

    model: Annotated[str, Flag("-m")] = SHIPPED_PAIR[0]
    spec_model: str = SHIPPED_PAIR[1]
    quick: bool = False
    output: Annotated[Path | None, Flag("-o")] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditOptions:
    """Options of `manta audit`.

    Attributes:
        prompts: JSONL with `prompt` or `messages`.
        num_prompts: number of prompts, taken evenly from the file; by default all.
        max_tokens: tokens of every answer.
        temperatures: sampling temperature; 0 is greedy; may be repeated. Each prompt is answered at each of
            them, with its index as the seed.
        output: JSON file for the certificate.
    """

    prompts: Annotated[Path, Flag("--prompts -i")] = SHIPPED_PROMPTS
    num_prompts: Annotated[int | None, Flag(least=1)] = None
    max_tokens: Annotated[int, Flag(least=1)] = 128
    temperatures: Annotated[tuple[float, ...], Flag("--temperature -t", least=0.0)] = (0.0, 0.7, 1.0)
    output: Annotated[Path | None, Flag("-o")] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOptions:
    """Options of `manta plan`.

    Attributes:
        model: target: folder, GGUF file or Hugging Face id.
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
        check_least(self, 1, "num_gpus", "context", "batch")
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


@dataclass(frozen=True, slots=True, kw_only=True)
class CompileOptions:
    """Options of `manta compile`.

    Attributes:
        gpu: kind of the GPUs that will run the kernels.
        output: Triton's cache, which must have this path where it is used; by default TRITON_CACHE_DIR, or
            ~/.triton/cache.
        jobs: processes that compile; by default one per core.
    """

    gpu: Annotated[str, Flag(metavar="|".join(GPUS))]
    output: Annotated[Path | None, Flag("-o")] = None
    jobs: Annotated[int | None, Flag("-j", least=1)] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeOptions:
    """Options of `manta simulate node`.

    Attributes:
        model: target: folder, GGUF file or Hugging Face id; its configuration is enough.
        drafter: DFlash drafter: folder, GGUF file or Hugging Face id.
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
        check_least(self, 1, "num_gpus", "eagle3_drafts", "num_requests")


def check_least(options: object, least: int, *names: str) -> None:
    """Raise ConfigError if a named field, or a value of its tuple, is below `least`; None is allowed."""
    for name in names:
        value = getattr(options, name)
        if isinstance(value, tuple) and not (value and min(value) >= least):
            raise ConfigError(f"{name}={value} must be numbers of at least {least}.", param=name)
        if isinstance(value, int | float) and not value >= least:
            raise ConfigError(f"{name}={value} must be at least {least}.", param=name)
