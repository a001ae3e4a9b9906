"""Backends with packed weights in bf16 on CPUs with wide vectors.

`FusedCpuBackend` runs a plain model's pass in one call (`fused_forward.py`), in one process.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..backend import ContextWriter, DeviceCapabilities, Feature, ModelStackSpec, Stack
from ..block_weights import AttentionShape, BlockWeights, MixerShape, Projection
from ..checkpoint.quantized_matrix import (
    CODES,
    JoinedRows,
    Matrix,
    QuantizedAtLoad,
    QuantizedMatrix,
    quantize,
)
from ..cpu_numba.backend import NumbaBackend
from ..cpu_numba.cpu_features import bf16_instructions
from ..eager.moe_routing import LayerRouter
from ..layers.linear import Linear, RMSNorm
from ..layers.moe import Route, RouterWeights
from ..memory.kv_cache import PagedKVCache
from .fused_forward import FusedForward, can_compile, fits_pages
from .operators import BlockedContextWriter, PackedLinear, PagedContexts
from .packed_gemm import can_pack
from .packed_weight import can_pack_rows
from .qkv_heads import compact_blocks

# Beyond a plain block, those of Gemma 3.
_FEATURES: frozenset[Feature] = frozenset(
    ("norms after attention and MLP", "GELU", "norm weights in fp32", "layers that rotate differently")
)
_NEEDS_INSTRUCTIONS = "needs Linux on a CPU with AVX2 and FMA, AVX-512, AMX or NEON"


def why_not(spec: ModelStackSpec, machine: DeviceCapabilities) -> str | None:
    if machine.device.type != "cpu" or machine.dtype is not torch.bfloat16:
        return "computes bfloat16 on CPUs"
    if machine.kv_dtype is not None:
        return "keeps K/V in bfloat16, not in the eight bits of kv_cache_dtype"
    if machine.num_ranks > 1:
        return "needs tensor_parallel_size=1"
    if bf16_instructions() is None:
        return _NEEDS_INSTRUCTIONS
    if not fits_pages(machine.page_size):
        return "needs a page_size that is a multiple of 16"
    if not can_compile(*spec.sizes, *spec.head_dims):
        return f"needs sizes that are multiples of 32, not all of the {spec.name}'s are"
    return spec.why_unsupported(_FEATURES)


def why_not_packed(machine: DeviceCapabilities) -> str | None:
    """Return why products with packed weights cannot be computed, or None."""
    if machine.device.type != "cpu":
        return "is computed on CPUs alone"
    if machine.dtype is not torch.bfloat16:
        return "is computed in bfloat16 alone"
    return None if bf16_instructions() is not None else _NEEDS_INSTRUCTIONS


class PackedCpuBackend(NumbaBackend):
    """Compiled loops between products with packed weights, for bf16 models of any kind and for ranks.

    It has its own threads: PyTorch should use one, because idle threads of both pools spin and take each
    other's cores.

    Attributes:
        quantization: form in which weights are kept that are given in 16 bits; None: as they are.
    """

    packs_vocabulary = True
    kept_codes = CODES

    def __init__(self, num_threads: int, quantization: QuantizedAtLoad | None = None) -> None:
        self._num_threads = num_threads
        self.quantization: QuantizedAtLoad | None = quantization
        self.weight_bytes = 0

    def quantizing(self, quantization: QuantizedAtLoad | None) -> PackedCpuBackend:
        """Return a backend on the same threads that quantizes otherwise."""
        return type(self)(self._num_threads, quantization)

    def linear(self, weight_OH: Tensor, bias_O: Tensor | None = None) -> Projection:
        return self._linear(weight_OH, bias_O, self.quantization)

    def linear_of_codes(self, weight_OH: QuantizedMatrix, bias_O: Tensor | None = None) -> Projection:
        return self._packed(weight_OH, bias_O)

    def _linear_of_rows(self, weight_OH: JoinedRows, bias_O: Tensor | None) -> Projection:
        if not can_pack_rows(weight_OH):
            return super()._linear_of_rows(weight_OH, bias_O)
        self.num_codes += 1
        return self._packed(weight_OH, bias_O)

    def route(self, weights: RouterWeights) -> Route:
        return LayerRouter(weights, self._linear(weights.weight_EH, weights.bias_E, None))

    def head(self, weight_VH: Matrix) -> Projection:
        """Return the projection to logits, with eight bits where other weights have fewer."""
        if isinstance(weight_VH, QuantizedMatrix):
            return self._packed(weight_VH, None)
        return self._linear(weight_VH, None, None if self.quantization is None else "int8")

    def embedding(self, weight_VH: Matrix, tied: Projection | None = None) -> Callable[[Tensor], Tensor]:
        if isinstance(weight_VH, Tensor):
            return super().embedding(weight_VH)
        return (tied if isinstance(tied, PackedLinear) else self._packed(weight_VH, None)).weight.rows

    def linear_of_blocks(self, weight_PLRH: Tensor, bias_O: Tensor | None = None) -> Projection:
        return self.linear(weight_PLRH.flatten(0, 2), bias_O)  # repacked anyway

    def _linear(
        self, weight_OH: Tensor, bias_O: Tensor | None, quantization: QuantizedAtLoad | None
    ) -> Projection:
        if weight_OH.dtype is not torch.bfloat16 or not can_pack(weight_OH.shape[1]):
            return Linear(weight_OH, bias_O)
        if quantization is None:
            return self._packed(weight_OH, bias_O)
        # CPUs can add offsets, GPUs' kernels cannot
        return self._packed(quantize(weight_OH, "uint4" if quantization == "int4" else "int8"), bias_O)

    def _packed(self, weight_OH: Matrix | JoinedRows, bias_O: Tensor | None) -> PackedLinear:
        linear = PackedLinear(weight_OH, bias_O, self._num_threads)
        self.weight_bytes = (self.weight_bytes or 0) + linear.weight.num_bytes
        return linear


class FusedCpuBackend(PackedCpuBackend):
    """Runs a pass in one call (`fused_forward.py`)."""

    attention_batch = staticmethod(PagedContexts.build)

    def stack(
        self,
        blocks: Sequence[tuple[MixerShape, BlockWeights]],
        final_norm: RMSNorm,
        tap_ids: Sequence[int] = (),
    ) -> Stack:
        attending = [(shape, weights) for shape, weights in blocks if isinstance(shape, AttentionShape)]
        assert len(attending) == len(blocks), "layers with states are another backend's"
        return FusedForward(attending, final_norm, tap_ids, self._num_threads)

    def compact_rows(self, cache: PagedKVCache, source_slots: Tensor, target_slots: Tensor) -> None:
        compact_blocks(cache, source_slots, target_slots)

    def context_writer(self, k_norm_LD: Tensor, eps: float, num_kv_heads: int) -> ContextWriter:
        return BlockedContextWriter(k_norm_LD, eps, num_kv_heads)
