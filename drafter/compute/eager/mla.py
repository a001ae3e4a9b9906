"""MLA (DeepSeek-V2, arXiv 2405.04434) in its absorbed form, in PyTorch (`drafter/compute/layers/mla.py`).

Absorbed for any number of rows, so a row's bits depend neither on its batch nor on how a prompt was divided.

Legend: N rows, J heads, E unrotated head dim, R rotated, F of values, C values of a latent, W = C + R, O
outputs of the block's first projection, H inputs of a head's product.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..block_weights import AttentionShape
from ..layers.linear import Linear
from ..layers.mla import MLALayer
from ..layers.rope import Rotation
from ..memory.kv_cache import PagedKVCache
from .attention import paged_attention
from .attention_metadata import EagerPass


class LatentAttention:
    __slots__ = ("_absorb", "_parts", "_rope", "_rope_dim", "_shape", "_values")

    def __init__(self, shape: AttentionShape) -> None:
        assert shape.latent is not None and shape.rope is not None, "latents have keys that are rotated"
        self._shape, self._parts, self._rope = shape, shape.latent, shape.rope
        self._rope_dim = shape.head_dim - shape.latent.rank
        self._absorb = HeadProducts(shape.latent.k_up().transpose(1, 2))
        self._values = HeadProducts(shape.latent.v_up())

    def __call__(self, qkv_NO: Tensor, step: EagerPass, cache: PagedKVCache, layer: int) -> Tensor:
        """Return [N, J * F] from the first projection: queries or their low-rank form, latent, key."""
        shape, rows, group = self._shape, step.rows, cache.group(layer)
        rotation = step.rotation(self._rope)
        q_NJO, latent_NW = split_queries(qkv_NO, self._parts, self._rope_dim)
        cache.write(layer, rows.kv_slots[group], self._latents(latent_NW, rotation))
        attended_NO = paged_attention(
            self._queries(q_NJO, rotation),
            cache,
            layer,
            rows.batches[group],
            shape.scale,
            causal=shape.causal,
            window=shape.window,
            first_key=shape.first_key,
        )
        return self._values(attended_NO.unflatten(-1, (shape.num_heads, -1))).flatten(1)

    def _latents(self, latent_NW: Tensor, rotation: Rotation) -> Tensor:
        """Return each token's cache entry: normed latent and rotated key."""
        rank = self._parts.rank
        kv_NW = torch.empty_like(latent_NW)
        kv_NW[:, :rank] = self._parts.kv_norm(latent_NW[:, :rank].contiguous())
        rotation.rotate(latent_NW[:, None, rank:], out_NJD=kv_NW[:, None, rank:])
        return kv_NW

    def _queries(self, q_NJO: Tensor, rotation: Rotation) -> Tensor:
        """Return queries in the latent space, [N, J, W]."""
        nope, rank = self._parts.nope_dim, self._parts.rank
        q_NJW = q_NJO.new_empty((*q_NJO.shape[:2], self._shape.head_dim))
        q_NJW[..., :rank] = self._absorb(q_NJO[..., :nope])
        rotation.rotate(q_NJO[..., nope:], out_NJD=q_NJW[..., rank:])
        return q_NJW


def split_queries(qkv_NO: Tensor, parts: MLALayer, rope_dim: int) -> tuple[Tensor, Tensor]:
    """Return queries [N, J, E + R], and latents with their keys [N, W], neither rotated yet."""
    width = parts.rank + rope_dim
    q_NO, latent_NW = qkv_NO[:, :-width], qkv_NO[:, -width:]
    if parts.q_norm is not None and parts.q_up is not None:
        q_NO = parts.q_up(parts.q_norm(q_NO.contiguous()))
    return q_NO.unflatten(-1, (parts.num_heads, -1)), latent_NW


class HeadProducts:
    """Computes y_j = W_j x_j for the heads j of a row, W [J, O, H].

    On a CPU each head is a packed product, so that a row's bits do not depend on the number of rows;
    elsewhere all heads are one batched product.
    """

    __slots__ = ("_linears", "_weight_JOH")

    def __init__(self, weight_JOH: Tensor) -> None:
        self._weight_JOH = weight_JOH
        on_cpu = weight_JOH.device.type == "cpu"
        self._linears = [Linear(weight_OH.contiguous()) for weight_OH in weight_JOH] if on_cpu else []

    def __call__(self, x_NJH: Tensor) -> Tensor:
        if not self._linears:
            return torch.bmm(x_NJH.transpose(0, 1), self._weight_JOH.transpose(1, 2)).transpose(0, 1)
        products = zip(self._linears, x_NJH.unbind(1), strict=True)
        return torch.stack([linear(x_NH.contiguous()) for linear, x_NH in products], dim=1)
