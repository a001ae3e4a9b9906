"""Which backend computes: what was asked for if it runs here, else the fastest. Called by `plan.py`.

Numba, and so compiled loops, are imported only when a CPU asks.
"""

from __future__ import annotations

import os
from importlib.util import find_spec
from typing import Literal

import torch

from ....cluster.config import EngineConfig
from ....cluster.errors import ConfigError
from ....drafter.compute.invariance import rows_are_invariant
from ....drafter.dflash.config import DrafterConfig
from ..model.config import TargetConfig

BackendName = Literal["torch", "compiled", "triton", "flash_attn"]


def choose_backend(
    config: EngineConfig,
    target: TargetConfig,
    drafter: DrafterConfig | None,
    dtype: torch.dtype,
    device: torch.device,
) -> BackendName:
    """What was asked for, if it can run here."""
    wanted = config.attention_backend
    has_triton = find_spec("triton") is not None
    if wanted == "auto":
        if device.type == "cuda" and has_triton:
            return "triton"
        return "torch" if why_not_compiled(config, target, drafter, dtype, device) else "compiled"
    if wanted == "torch":
        return wanted
    if wanted == "compiled":
        reason = why_not_compiled(config, target, drafter, dtype, device)
        if reason is not None:
            raise _no_backend(wanted, reason, "Leave it out")
        return wanted
    if not has_triton:
        raise _no_backend(wanted, "needs the package triton", "Install manta[gpu]")
    if device.type == "cpu" and not os.environ.get("TRITON_INTERPRET"):
        raise _no_backend(wanted, "runs on GPUs", "Leave it out on a CPU")
    for name, dim in (("target", target.head_dim), ("drafter", drafter.head_dim if drafter else None)):
        if dim is not None and dim & (dim - 1):
            raise _no_backend(wanted, f"needs a head_dim that is a power of two, the {name}'s is {dim}")
    return wanted


def why_not_compiled(
    config: EngineConfig,
    target: TargetConfig,
    drafter: DrafterConfig | None,
    dtype: torch.dtype,
    device: torch.device,
) -> str | None:
    """What a pass in one call on the CPU lacks."""
    if device.type != "cpu" or dtype is not torch.bfloat16:
        return "computes bfloat16 on CPUs"
    if config.tensor_parallel_size > 1:
        return "needs tensor_parallel_size=1"
    try:
        from ....drafter.compute.compiled.backend import why_not
    except ModuleNotFoundError:  # nothing else needs that folder
        return "is not part of this installation"
    for name, model in (("target", target), ("drafter", drafter)):
        if model is not None:
            sizes = (model.hidden_size, model.head_dim, model.intermediate_size)
            if reason := why_not(sizes, config.page_size):
                return reason.format(model=name)
    return None


def has_exact_bf16(device: torch.device) -> bool:
    """Whether this CPU multiplies bf16 natively, and a row's bits do not depend on its batch."""
    if not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return False
    from ....drafter.compute.loops.backend import CpuBackend

    return rows_are_invariant(CpuBackend(), torch.bfloat16, device)


def _no_backend(wanted: str, reason: str, remedy: str = "Set attention_backend to torch") -> ConfigError:
    return ConfigError(f"attention_backend={wanted!r} {reason}. {remedy}.", param="attention_backend")
