"""`EagerBackend`: PyTorch's operators one by one; the definition, and the fallback on any device.

Legend: N rows, H hidden, O outputs, K kv heads, J = Q + K, D head dim, L layers, I inner size.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F

from ..backend import Attention, ContextWriter, DeviceCapabilities, ModelStackSpec, PlacedRows
from ..block_weights import AttentionShape, Projection
from ..blocks import OperatorBackend, convolve
from ..layers.gated_delta_net import DeltaNetShape
from ..layers.linear import Activation, HeadNorm, RMSNorm, gate
from ..layers.moe import Experts, ExpertWeights, Route, RouterWeights
from ..layers.rope import RotaryEmbedding
from ..memory.kv_cache import PagedKVCache
from .attention import paged_attention
from .attention_metadata import AttentionBatch, EagerPass
from .gated_delta_net import EagerDeltaNet
from .mla import LatentAttention
from .moe import EagerExperts
from .moe_routing import LayerRouter


def why_not(spec: ModelStackSpec, machine: DeviceCapabilities) -> str | None:
    """Return None: this backend supports every feature."""
    return None


class EagerBackend(OperatorBackend):
    """PyTorch's operators; projections add residuals themselves."""

    attention_batch = staticmethod(AttentionBatch.build)
    convolve = staticmethod(convolve)

    def begin(self, rows: PlacedRows) -> EagerPass:
        return EagerPass(rows)

    def attention(self, shape: AttentionShape) -> Attention:
        return EagerAttention(shape) if shape.latent is None else LatentAttention(shape)

    def delta_net(self, shape: DeltaNetShape) -> Attention:
        return EagerDeltaNet(shape)

    def context_writer(self, k_norm_LD: Tensor, eps: float, num_kv_heads: int) -> ContextWriter:
        return EagerContextWriter(k_norm_LD, eps, num_kv_heads)

    def route(self, weights: RouterWeights) -> Route:
        return LayerRouter(weights, self.linear(weights.weight_EH, weights.bias_E))

    def experts(self, weights: ExpertWeights) -> Experts:
        return EagerExperts(weights, self._count_experts(weights), self._linear_of)

    def norm(self, norm: RMSNorm, x_NH: Tensor) -> Tensor:
        return norm(x_NH)

    def residual_norm(
        self,
        project: Projection,
        x_NI: Tensor,
        residual_NH: Tensor,
        norm: RMSNorm,
        out_norm: RMSNorm | None,
        scalar: float | None = None,
    ) -> tuple[Tensor, Tensor]:
        if out_norm is None:
            x_NH = project(x_NI, residual_NH)
        else:
            x_NH = self.norm(out_norm, project(x_NI)).add_(residual_NH)
        if scalar is not None:
            x_NH.mul_(scalar)
        return x_NH, self.norm(norm, x_NH)

    def gated(self, gate_up: Projection, normed_NH: Tensor, activation: Activation) -> Tensor:
        return gate(gate_up(normed_NH), activation)


class EagerAttention:
    """Head norm, rotation, K/V write, and `paged_attention`; subclasses do what comes before it otherwise."""

    __slots__ = ("_head_norm", "_heads", "_norm_JD", "_shape")
    attend = staticmethod(paged_attention)

    def __init__(self, shape: AttentionShape) -> None:
        self._shape, self._norm_JD = shape, shape.head_norm()
        self._head_norm = None if self._norm_JD is None else HeadNorm(self._norm_JD, shape.eps)
        self._heads = (shape.num_heads + shape.num_kv_heads, shape.head_dim)

    def __call__(self, qkv_NO: Tensor, step: EagerPass, cache: PagedKVCache, layer: int) -> Tensor:
        shape = self._shape
        if shape.v_norm:
            v_NKF = qkv_NO[:, -shape.num_kv_heads * shape.v_head_dim :].unflatten(
                -1, (shape.num_kv_heads, -1)
            )
            v_NKF.copy_(F.rms_norm(v_NKF, v_NKF.shape[-1:], None, shape.eps))
        self._norm_rotate_write(qkv_NO, step, cache, layer)
        return self.attend(
            qkv_NO[:, : shape.num_heads * shape.head_dim].unflatten(-1, (shape.num_heads, -1)),
            cache,
            layer,
            step.rows.batches[cache.group(layer)],
            shape.scale,
            causal=shape.causal,
            window=shape.window,
            sinks_Q=shape.sinks_Q,
            first_key=shape.first_key,
        )

    def _norm_rotate_write(self, qkv_NO: Tensor, step: EagerPass, cache: PagedKVCache, layer: int) -> None:
        """Norm and rotate q and k in place; write k and v."""
        qk_NJD = qkv_NO[:, : self._heads[0] * self._heads[1]].unflatten(-1, self._heads)
        normed = qk_NJD if self._head_norm is None else self._head_norm(qk_NJD)
        if self._shape.rope is not None:
            step.rotation(self._shape.rope).rotate(normed, out_NJD=qk_NJD)
        elif normed is not qk_NJD:
            qk_NJD.copy_(normed)
        kv_Nw = qkv_NO[:, self._shape.num_heads * self._heads[1] :]
        cache.write(layer, step.rows.kv_slots[cache.group(layer)], kv_Nw)


class EagerContextWriter:
    __slots__ = ("_head_dim", "_k_norm", "_num_kv", "_num_layers")

    def __init__(self, k_norm_LD: Tensor, eps: float, num_kv_heads: int) -> None:
        self._num_layers, self._head_dim = k_norm_LD.shape
        self._num_kv = num_kv_heads
        self._k_norm = HeadNorm(k_norm_LD.repeat_interleave(num_kv_heads, dim=0), eps)

    def __call__(
        self, kv_NO: Tensor, rope: RotaryEmbedding, rows: PlacedRows, cache: PagedKVCache, first: int
    ) -> None:
        num_keys = self._num_layers * self._num_kv
        kv_NJD = kv_NO.unflatten(-1, (2 * num_keys, self._head_dim))
        keys = kv_NJD[:, :num_keys]
        rope.at(rows.positions_N).rotate(self._k_norm(keys), out_NJD=keys)
        kv_LN2KD = kv_NJD.unflatten(1, (2, self._num_layers, self._num_kv)).permute(2, 0, 1, 3, 4)
        cache.write_all(first, rows.kv_slots[cache.group(first)], kv_LN2KD)
