"""DFlash2's blocks over paged K/V, driven from Python: attention and MLP, each between two convolutions.

    u = norm x;  kernels of both sides = W u;  x' = x + conv_out( o( attention( conv_in u ) ) )
    and the same around the MLP, with weights of its own

Source: `dflash/model.py` of z-lab/dflash. A convolution sees the rows before its own in the request's block,
and nothing before the block: the context in the pages is never convolved. Made by `transformer_block.py`,
whose own stack is the plain one.

Legend: N rows, H hidden.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from ..backend import Backend, ConvolvedBlock, DenseMLP, PlacedRows
from ..layers.linear import RMSNorm
from ..memory.kv_cache import PagedKVCache


class ConvolvedStack:
    """A `backend.Stack` of these blocks, without taps; keeps no request state."""

    def __init__(self, operators: Backend, blocks: Sequence[ConvolvedBlock], final_norm: RMSNorm) -> None:
        self._operators, self._blocks, self._final_norm = operators, tuple(blocks), final_norm
        self._attentions = [operators.attention(block.shape) for block in blocks]

    def __call__(self, x_NH: Tensor, rows: PlacedRows, cache: PagedKVCache) -> tuple[Tensor, None]:
        step, owners_N = self._operators.begin(rows), rows.owners()
        for layer, block in enumerate(self._blocks):
            x_NH = self._attend(x_NH, block, step, cache, layer, owners_N)
            x_NH = self._feed(x_NH, block, owners_N)
        return self._operators.norm(self._final_norm, x_NH), None

    def _attend(
        self,
        x_NH: Tensor,
        block: ConvolvedBlock,
        step: Any,
        cache: PagedKVCache,
        layer: int,
        owners_N: Tensor,
    ) -> Tensor:
        ops, weights, convolution = self._operators, block.weights, block.around_attention
        u_NH = ops.norm(weights.attention_norm, x_NH)
        before, after = convolution.dynamic(u_NH)
        u_NH = ops.convolve(u_NH, before, convolution.base_STH[0], owners_N)
        attended = weights.o(self._attentions[layer](weights.qkv(u_NH), step, cache, layer))
        return ops.convolve(attended, after, convolution.base_STH[1], owners_N, x_NH)

    def _feed(self, x_NH: Tensor, block: ConvolvedBlock, owners_N: Tensor) -> Tensor:
        ops, weights, convolution = self._operators, block.weights, block.around_mlp
        u_NH = ops.norm(weights.mlp_norm, x_NH)
        before, after = convolution.dynamic(u_NH)
        u_NH = ops.convolve(u_NH, before, convolution.base_STH[0], owners_N)
        mlp = weights.mlp
        assert isinstance(mlp, DenseMLP), "drafters have no experts"
        fed_NH = mlp.down(ops.gated(mlp.gate_up, u_NH, mlp.activation))
        return ops.convolve(fed_NH, after, convolution.base_STH[1], owners_N, x_NH)
