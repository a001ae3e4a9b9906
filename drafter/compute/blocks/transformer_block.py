"""Pre-norm transformer blocks over paged K/V, driven from Python, for target and drafter.

A block takes the residual and its norm, and returns both for the next one, so that a backend may fuse the
norm with what comes before or after.

    (x, norm x) --q,k,v--> attention --o--> (x', norm x') --MLP (`mlp.py`)--> (x'', norm x'')

Legend: N rows, H hidden, m taps.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..backend import Attention, AttentionShape, Backend, BlockWeights, MixerShape, Normed, PlacedRows, Stack
from ..layers.linear import RMSNorm
from ..memory.kv_cache import PagedKVCache
from .dflash2_block import ConvolvedBlock, ConvolvedStack
from .mlp import Mlp


class OperatorBackend(Backend):
    """Base class of backends with passes driven from Python."""

    def stack(
        self,
        blocks: Sequence[tuple[MixerShape, BlockWeights]],
        final_norm: RMSNorm,
        tap_ids: Sequence[int] = (),
    ) -> Stack:
        return BlockStack(self, blocks, final_norm, tap_ids)

    def convolved_stack(self, blocks: Sequence[ConvolvedBlock], final_norm: RMSNorm) -> ConvolvedStack:
        return ConvolvedStack(self, blocks, final_norm)


class BlockStack:
    """A `backend.Stack` made of a backend's operators; keeps no request state."""

    def __init__(
        self,
        operators: Backend,
        blocks: Sequence[tuple[MixerShape, BlockWeights]],
        final_norm: RMSNorm,
        tap_ids: Sequence[int],
    ) -> None:
        self._operators = operators
        self._tap_ids = tuple(tap_ids)
        self._blocks = [TransformerBlock(operators, shape, weights) for shape, weights in blocks]
        self._cache_layers = _cache_layers([shape for shape, _ in blocks])
        self._first_norm = blocks[0][1].attention_norm
        self._next_norms = [*(weights.attention_norm for _, weights in blocks[1:]), final_norm]

    def __call__(self, x_NH: Tensor, rows: PlacedRows, cache: PagedKVCache) -> tuple[Tensor, Tensor | None]:
        normed_NH: Normed = self._operators.norm(self._first_norm, x_NH)
        step, owners_N = self._operators.begin(rows), rows.padding_owners()
        tapped: dict[int, Tensor] = {}
        layers = zip(self._blocks, self._cache_layers, self._next_norms, strict=True)
        for i, (block, layer, next_norm) in enumerate(layers):
            x_NH, normed_NH = block(x_NH, normed_NH, step, cache, layer, next_norm, owners_N)
            if i in self._tap_ids:
                tapped[i] = x_NH
        hidden_NH = self._operators.as_tensor(normed_NH)
        return hidden_NH, stack_taps([tapped[i] for i in self._tap_ids]) if tapped else None


class TransformerBlock:
    """One block; used directly by models that are not a stack."""

    __slots__ = ("_attention", "_mlp", "_operators", "_weights")

    def __init__(self, operators: Backend, shape: MixerShape, weights: BlockWeights) -> None:
        self._operators = operators
        self._attention = _mixer(operators, shape)
        self._mlp = Mlp(operators, weights)
        self._weights = weights

    def __call__(
        self,
        x_NH: Tensor,
        normed_NH: Normed,
        step: Any,
        cache: PagedKVCache,
        layer: int,
        next_norm: RMSNorm,
        owners_N: Tensor | None = None,
    ) -> tuple[Tensor, Normed]:
        """Return the residual after this block and its norm.

        Args:
            x_NH: the residual; not changed.
            normed_NH: this block's first norm of it.
            step: result of `Backend.begin` for this pass.
            next_norm: the next block's first norm, or the model's final norm.
            owners_N: see `backend.PlacedRows.padding_owners`.
        """
        weights, operators = self._weights, self._operators
        qkv_NO = weights.qkv(normed_NH)
        if weights.qkv_norm is not None:
            qkv_NO = weights.qkv_norm(qkv_NO)
        attended = self._attention(qkv_NO, step, cache, layer)
        if weights.attention_gate is not None:
            attended = attended * weights.attention_gate(normed_NH).sigmoid_()
        x_NH, normed_NH = operators.residual_norm(
            weights.o, attended, x_NH, weights.mlp_norm, weights.attention_out_norm
        )
        return self._mlp(normed_NH, x_NH, next_norm, owners_N)


def _mixer(operators: Backend, shape: MixerShape) -> Attention:
    if isinstance(shape, AttentionShape):
        return operators.attention(shape)
    return operators.delta_net(shape)


def _cache_layers(shapes: Sequence[MixerShape]) -> list[int]:
    """Return the index of each layer among those of its kind."""
    kinds = [isinstance(shape, AttentionShape) for shape in shapes]
    return [kinds[:i].count(kind) for i, kind in enumerate(kinds)]


def stack_taps(taps: list[Tensor]) -> Tensor:
    """Stack the hidden states [N, H] of the tapped blocks in order: [N, m, H]."""
    return torch.stack(taps, dim=1)
