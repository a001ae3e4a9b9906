"""Backend that runs a bf16 pass in one call (`fused_forward.py`): one process, a CPU with wide vectors."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..backend import (
    AttentionShape,
    BlockWeights,
    ContextWriter,
    DeviceCapabilities,
    MixerShape,
    ModelStackSpec,
    Projection,
    Stack,
)
from ..cpu_numba.backend import NumbaBackend
from ..cpu_numba.cpu_features import bf16_instructions
from ..layers.linear import Linear, RMSNorm
from .fused_forward import FusedForward, can_compile, fits_pages
from .operators import BlockedContextWriter, PackedLinear, PagedContexts
from .packed_gemm import can_pack


def why_not(spec: ModelStackSpec, machine: DeviceCapabilities) -> str | None:
    if machine.device.type != "cpu" or machine.dtype is not torch.bfloat16:
        return "computes bfloat16 on CPUs"
    if machine.kv_dtype is not None:
        return "keeps K/V in bfloat16, not in the eight bits of kv_cache_dtype"
    if machine.num_ranks > 1:
        return "needs tensor_parallel_size=1"
    if bf16_instructions() is None:
        return "needs Linux on a CPU with AVX2 and FMA, AVX-512, AMX or NEON"
    if not fits_pages(machine.page_size):
        return "needs a page_size that is a multiple of 16"
    if not can_compile(*spec.sizes, *spec.head_dims):
        return f"needs sizes that are multiples of 32, not all of the {spec.name}'s are"
    return spec.why_unsupported(frozenset())


class FusedCpuBackend(NumbaBackend):
    """Runs a pass in one call (`fused_forward.py`).

    It has its own threads: PyTorch should use one, because idle threads of both pools spin and take each
    other's cores.
    """

    attention_batch = staticmethod(PagedContexts.build)

    def __init__(self, num_threads: int) -> None:
        self._num_threads = num_threads

    def linear(self, weight_OH: Tensor, bias_O: Tensor | None = None) -> Projection:
        if not can_pack(weight_OH.shape[1]):
            return Linear(weight_OH, bias_O)
        return PackedLinear(weight_OH, bias_O, self._num_threads)

    def linear_of_blocks(self, weight_PLRH: Tensor, bias_O: Tensor | None = None) -> Projection:
        return self.linear(weight_PLRH.flatten(0, 2), bias_O)  # repacked anyway

    def stack(
        self,
        blocks: Sequence[tuple[MixerShape, BlockWeights]],
        final_norm: RMSNorm,
        tap_ids: Sequence[int] = (),
    ) -> Stack:
        attending = [(shape, weights) for shape, weights in blocks if isinstance(shape, AttentionShape)]
        assert len(attending) == len(blocks), "layers with states are another backend's"
        return FusedForward(attending, final_norm, tap_ids, self._num_threads)

    def context_writer(self, k_norm_LD: Tensor, eps: float, num_kv_heads: int) -> ContextWriter:
        return BlockedContextWriter(k_norm_LD, eps, num_kv_heads)
