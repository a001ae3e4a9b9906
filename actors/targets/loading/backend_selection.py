"""Chooses the compute backend: the one that the settings name if it runs here, else the fastest.

Only this module chooses, by the `why_not(spec, machine)` of each backend's module. Backends of another kind
of device are not imported: a GPU process needs neither Numba nor LLVM, a CPU process no Triton. "torch" means
PyTorch's operators, with compiled loops between them where `operator_factory.py` finds them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Literal

import torch

from ....cluster.config import EngineConfig
from ....cluster.errors import ConfigError
from ....drafter.compute.backend import Backend, DeviceCapabilities, ModelStackSpec
from ....drafter.compute.batch_invariance import rows_are_invariant

logger = logging.getLogger(__name__)

_FIRST_WITH_E4M3 = (8, 9)
INTEGERS = ("int8", "int4")
COMPILES = "this first start compiles loops for this CPU, about a minute; later starts find them on disk"
BackendName = Literal["torch", "compiled", "triton", "flash_attn"]


def choose_backend(
    config: EngineConfig, models: Sequence[ModelStackSpec], machine: DeviceCapabilities
) -> BackendName:
    """Return the backend to use. Raises ConfigError if a setting cannot be met here."""
    wanted = config.attention_backend
    if wanted == "auto":
        best = "triton" if machine.device.type == "cuda" else "compiled"
        reason = why_not(best, models, machine)
        chosen = "torch" if reason else best
        if chosen == "triton" and not config.batch_invariant:
            obstacle = why_not("flash_attn", models, machine)
            if obstacle is None:
                chosen = "flash_attn"  # prompts by the package, other rows as before
            else:
                logger.info("Triton's kernels attend prompts as well: flash_attn %s.", obstacle)
        if reason is not None and machine.device.type == "cuda":
            logger.warning(
                "triton %s. PyTorch's operators compute instead, without graphs, which is many times slower.",
                reason,
            )
    else:
        chosen, reason = wanted, why_not(wanted, models, machine)
        if reason is not None:
            raise ConfigError(
                f"attention_backend={wanted!r} {reason}. Leave it out, or set it to torch.",
                param="attention_backend",
            )
    if config.batch_invariant:
        _check_can_be_invariant(chosen, reason, machine)
    _check_quantization(config, chosen, machine)
    if machine.kv_dtype is not None and not _has_e4m3(machine.device):
        raise ConfigError(
            f"kv_cache_dtype={config.kv_cache_dtype!r} needs a GPU that supports e4m3 (capability 8.9, as "
            "Ada or Hopper). Leave it out.",
            param="kv_cache_dtype",
        )
    return chosen


def _check_can_be_invariant(chosen: BackendName, reason: str | None, machine: DeviceCapabilities) -> None:
    """Raise ConfigError if rows cannot be batch-invariant; `reason`: why the best backend is not used."""
    obstacle = None
    if machine.num_ranks > 2:  # a sum of two terms has a single order
        obstacle = (
            f"tensor_parallel_size={machine.num_ranks}: sums over more than two ranks are added in an order "
            "that depends on their place. Set it to 1 or 2"
        )
    elif chosen == "flash_attn" or (machine.device.type == "cuda" and chosen != "triton"):
        obstacle = f"attention_backend={chosen!r} on this device" + (
            f": triton {reason}" if reason else ". Leave it out, or set it to triton"
        )
    if obstacle is not None:
        raise ConfigError(f"batch_invariant does not hold with {obstacle}.", param="batch_invariant")


def _check_quantization(config: EngineConfig, chosen: BackendName, machine: DeviceCapabilities) -> None:
    spec = config.speculative_config
    settings = {
        "quantization": config.quantization,
        "speculative_config.quantization": spec.quantization if spec is not None else None,
    }
    for field, value in settings.items():
        if value is None:
            continue
        problem = _why_not_fp8(chosen, machine) if value == "fp8" else _why_not_integers(chosen, machine)
        if problem is not None:
            raise ConfigError(f"{field}={value!r} {problem}, or leave it out.", param=field)


def _why_not_fp8(chosen: BackendName, machine: DeviceCapabilities) -> str | None:
    """Return why weights cannot be FP8, and a remedy; or None."""
    kind = machine.device.type
    if chosen not in ("triton", "flash_attn"):
        remedy = "Use int8 or int4" if kind == "cpu" else "Leave attention_backend out"
        return f"needs Triton's kernels, which run on GPUs; this engine runs {chosen} on {kind}. {remedy}"
    if not _has_e4m3(machine.device):
        return "needs a GPU that supports e4m3 (capability 8.9, as Ada or Hopper). Use such a GPU"
    return None


def _why_not_integers(chosen: BackendName, machine: DeviceCapabilities) -> str | None:
    """Return why weights cannot be integers, and a remedy; or None."""
    if chosen in ("triton", "flash_attn"):
        return None
    if machine.device.type == "cuda":
        return f"needs Triton's kernels; this engine runs {chosen}. Leave attention_backend out"
    try:
        from ....drafter.compute.cpu_fused.backend import why_not_packed
    except ModuleNotFoundError:
        return "needs the package numba. Install it"
    problem = why_not_packed(machine)
    remedy = "Set dtype to auto or bfloat16" if machine.dtype is not torch.bfloat16 else "Use such a CPU"
    return None if problem is None else f"{problem}. {remedy}"


def quantizes_to_integers(config: EngineConfig) -> bool:
    spec = config.speculative_config
    return config.quantization in INTEGERS or (spec is not None and spec.quantization in INTEGERS)


def _has_e4m3(device: torch.device) -> bool:
    """Return whether kernels on this device convert e4m3; the CPU's operators do."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= _FIRST_WITH_E4M3


def has_experts(models: Sequence[ModelStackSpec]) -> bool:
    return any("routed experts" in model.features for model in models)


def choose_dtype(
    config: EngineConfig,
    models: Sequence[ModelStackSpec],
    checkpoint: str,
    machine: DeviceCapabilities,
    *,
    has_codes: bool,
) -> torch.dtype:
    """Return the dtype to compute in: the setting, or one chosen for the device.

    By default a GPU uses the `checkpoint`'s (the target's), and a CPU bf16 where rows are exact in it, as in
    products of codes, else fp32. `machine` has the dtype that a CPU prefers.
    """
    if config.dtype != "auto":
        return getattr(torch, config.dtype)
    if machine.device.type == "cuda":
        return getattr(torch, checkpoint)
    wanted = config.attention_backend
    if wanted in ("auto", "compiled") and why_not("compiled", models, machine) is None:
        return torch.bfloat16
    if has_codes and _why_not_integers("torch", machine) is None:
        return torch.bfloat16
    if not torch.ops.mkldnn._is_mkldnn_bf16_supported() or why_not("loops", models, machine):
        return torch.float32
    from ....drafter.compute.cpu_numba.backend import NumbaBackend

    exact = rows_are_invariant(NumbaBackend(), torch.bfloat16, machine.device, routed=has_experts(models))
    return torch.bfloat16 if exact else torch.float32


def why_not(name: str, models: Sequence[ModelStackSpec], machine: DeviceCapabilities) -> str | None:
    """Return why a backend cannot run one of the models, in words that follow its name, or None."""
    try:
        why_not_model = _why_not_of(name)
    except ModuleNotFoundError as error:  # the backend's folder or a package that it needs is missing
        return (
            f"needs the package {error.name}"
            if error.name in _PACKAGES
            else "is not part of this installation"
        )
    return next((reason for model in models if (reason := why_not_model(model, machine))), None)


_PACKAGES = ("triton", "numba")


def take_cpu(
    name: BackendName, *, packs: bool = False, quantization: Literal["int8", "int4"] | None = None
) -> Backend:
    """Return a CPU backend on PyTorch's number of threads.

    "compiled", and loops with packed products (`packs`), take them over: PyTorch keeps one.
    """
    if name == "compiled" or packs:
        from ....drafter.compute.cpu_fused.backend import FusedCpuBackend, PackedCpuBackend

        kind = FusedCpuBackend if name == "compiled" else PackedCpuBackend
        backend = kind(torch.get_num_threads(), quantization)
        torch.set_num_threads(1)  # idle spinning threads of one pool would take cores from the other
        return backend
    from ....drafter.compute.cpu_numba.backend import NumbaBackend

    return NumbaBackend()


def can_pack(machine: DeviceCapabilities) -> bool:
    """Return whether CPU backends can compute with packed weights."""
    return machine.device.type == "cpu" and _why_not_integers("torch", machine) is None


def compiles_loops(config: EngineConfig) -> bool:
    """Return whether this start compiles the CPU's loops, which later starts find on disk."""
    on_gpu = config.device == "cuda" or torch.cuda.is_available()
    if on_gpu or config.attention_backend == "triton":  # or Triton's interpreter
        return False
    try:
        from ....drafter.step.cpu_numba.step_ops import gumbel_argmax
    except ModuleNotFoundError:  # Numba is not installed
        return False
    stored = getattr(gumbel_argmax.noisy_argmax_margin._cache, "_cache_file", None)
    return stored is None or not stored._load_index()  # None: no folder is writable


def instructions_of_passes() -> str | None:
    """Return this CPU's instructions for compiled passes, as in MANTA_CPU_INSTRUCTIONS; None without any."""
    try:
        from ....drafter.compute.cpu_numba.cpu_features import bf16_instructions
    except ModuleNotFoundError:  # Numba is not installed
        return None
    kind = bf16_instructions()
    return kind.value if kind else None


def compiler_of_triton() -> tuple[str | None, str | None]:
    """Return the C compiler that builds Triton's launchers, and why they cannot be built, if they cannot."""
    from ....drafter.compute.gpu_triton.common.c_compiler import find_compiler, why_not_launch

    return find_compiler(), why_not_launch()


def _why_not_of(name: str) -> Callable[[ModelStackSpec, DeviceCapabilities], str | None]:
    match name:
        case "triton":
            from ....drafter.compute.gpu_triton import backend as module
        case "flash_attn":
            from ....drafter.compute.gpu_triton import flash_attention as module
        case "compiled":
            from ....drafter.compute.cpu_fused import backend as module
        case "loops":
            from ....drafter.compute.cpu_numba import backend as module
        case _:
            from ....drafter.compute.eager import backend as module
    return module.why_not
