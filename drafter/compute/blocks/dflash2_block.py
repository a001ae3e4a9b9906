"""DFlash2's blocks over paged K/V, driven from Python: attention and MLP, each between two convolutions.

    u = norm x;  kernels of both sides = W u;  x' = x + conv_out( o( attention( conv_in u ) ) )
    and the same around the MLP, with weights of its own

Source: `dflash/model.py` of z-lab/dflash. A convolution sees the rows before its own in the request's block
only: the context in the pages is never convolved. Made by `transformer_block.py`.

Legend: N rows, H hidden.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..backend import Backend, BlockWeights, Convolution, ConvolvedBlock, DenseMLP, PlacedRows
from ..layers.linear import RMSNorm, in_fp32
from ..memory.kv_cache import PagedKVCache


class ConvolvedStack:
    """A `backend.Stack` of these blocks, without taps; keeps no request state."""

    def __init__(self, operators: Backend, blocks: Sequence[ConvolvedBlock], final_norm: RMSNorm) -> None:
        self._operators, self._blocks, self._final_norm = operators, tuple(blocks), final_norm
        self._attentions = [operators.attention(block.shape) for block in blocks]

    def __call__(self, x_NH: Tensor, rows: PlacedRows, cache: PagedKVCache) -> tuple[Tensor, None]:
        step, owners_N = self._operators.begin(rows), rows.owners()
        for layer, block in enumerate(self._blocks):
            weights, attention = block.weights, self._attentions[layer]
            u_NH, after = self._convolved(x_NH, weights.attention_norm, block.around_attention, owners_N)
            attended = weights.o(attention(weights.qkv(u_NH), step, cache, layer))
            x_NH = self._added(attended, after, block.around_attention, owners_N, x_NH)
            u_NH, after = self._convolved(x_NH, weights.mlp_norm, block.around_mlp, owners_N)
            x_NH = self._added(self._feed(u_NH, weights), after, block.around_mlp, owners_N, x_NH)
        return self._operators.norm(self._final_norm, x_NH), None

    def _convolved(
        self, x_NH: Tensor, norm: RMSNorm, convolution: Convolution, owners_N: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return a sublayer's input, and the rows' kernels of the convolution after it."""
        u_NH = self._operators.norm(norm, x_NH)
        before, after = convolution.dynamic(u_NH)
        return self._operators.convolve(u_NH, before, convolution.base_STH[0], owners_N), after

    def _feed(self, u_NH: Tensor, weights: BlockWeights) -> Tensor:
        mlp = weights.mlp
        assert isinstance(mlp, DenseMLP), "drafters have no experts"
        return mlp.down(self._operators.gated(mlp.gate_up, u_NH, mlp.activation))

    def _added(
        self, y_NH: Tensor, after: Tensor, convolution: Convolution, owners_N: Tensor, x_NH: Tensor
    ) -> Tensor:
        return self._operators.convolve(y_NH, after, convolution.base_STH[1], owners_N, x_NH)


def convolve(
    x_NH: Tensor, dynamic_NTC: Tensor, base_TH: Tensor, owners_N: Tensor, residual_NH: Tensor | None = None
) -> Tensor:
    """Return y_n = sum over taps t of (base_t + dynamic_nt of each channel's group) * x_(n-t), [N, H].

    Rows of other requests and before the first count as 0; adjacent rows with equal owners are of one. In
    fp32, rounded once, after the residual is added.
    """
    num_rows, num_groups = len(x_NH), dynamic_NTC.shape[-1]
    x_NCG = in_fp32(x_NH).unflatten(-1, (num_groups, -1))
    y_NCG = torch.zeros_like(x_NCG)
    for t in range(min(len(base_TH), num_rows)):
        kernel_NCG = in_fp32(base_TH[t]).view(num_groups, -1) + in_fp32(dynamic_NTC[:, t]).unsqueeze(-1)
        is_own_M11 = (owners_N[t:] == owners_N[: num_rows - t]).view(-1, 1, 1)
        y_NCG[t:] += kernel_NCG[t:] * x_NCG[: num_rows - t] * is_own_M11
    y_NH = y_NCG.flatten(1)
    return (y_NH if residual_NH is None else y_NH + in_fp32(residual_NH)).to(x_NH.dtype)
