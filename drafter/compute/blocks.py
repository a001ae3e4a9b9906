"""Blocks of layers over paged K/V, driven from Python, for target and drafter.

A block takes the residual and its norm, and returns both for the next one, so that a backend may fuse the
norm with what comes before or after.

    (x, norm x) --q,k,v--> attention --o--> (x', norm x') --MLP--> (x'', norm x'')

The MLP, the sublayer after attention, is dense, routed (MoE), or both in parallel:

    dense     down(act(gate u) * up u)
    routed    sum of the chosen experts(u) + [sigmoid(w u)] shared(u), summed over ranks
    parallel  norm(dense(u)) + norm'(routed(norm'' x))                                      u = mlp_norm x

DFlash2's blocks have attention and MLP each between two convolutions (source: `dflash/model.py` of
z-lab/dflash). A convolution sees the rows before its own in the request's block only: the context in the
pages is never convolved.

    u = norm x;  kernels of both sides = W u;  x' = x + conv_out( o( attention( conv_in u ) ) )
    and the same around the MLP, with weights of its own

Legend: N rows, H hidden, I inner size, k experts per row, m taps.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .backend import Attention, Backend, PlacedRows, Stack
from .block_weights import (
    AttentionShape,
    BlockWeights,
    Convolution,
    ConvolvedBlock,
    DenseMLP,
    MixerShape,
    Normed,
    ParallelMLP,
    Projection,
    RoutedExperts,
)
from .layers.linear import RMSNorm, in_fp32
from .memory.kv_cache import PagedKVCache


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


class Mlp:
    """A block's MLP of any of the three kinds, with the residual addition and the norm after it."""

    __slots__ = ("_operators", "_weights")

    def __init__(self, operators: Backend, weights: BlockWeights) -> None:
        self._operators, self._weights = operators, weights

    def __call__(
        self, normed_NH: Normed, x_NH: Tensor, next_norm: RMSNorm, owners_N: Tensor | None = None
    ) -> tuple[Tensor, Normed]:
        """Return the residual after the block, and its norm; `normed_NH` is that of `x_NH`, which stays.

        `owners_N`: see `backend.PlacedRows.padding_owners`.
        """
        block, operators, mlp = self._weights, self._operators, self._weights.mlp
        project: Projection = _identity
        match mlp:
            case DenseMLP():
                project, y = mlp.down, operators.gated(mlp.gate_up, normed_NH, mlp.activation)
            case RoutedExperts():
                y = self._routed(mlp, operators.as_tensor(normed_NH), x_NH, owners_N)
                project = mlp.rank_sum or _identity
            case ParallelMLP():
                dense_NH = operators.norm(mlp.dense_out_norm, self._dense(mlp.dense, normed_NH))
                u_NH = operators.norm(mlp.routed_norm, x_NH)
                routed_NH = self._routed(mlp.routed, u_NH, x_NH, owners_N)
                if mlp.routed.rank_sum is not None:
                    routed_NH = mlp.routed.rank_sum(routed_NH)
                y = operators.norm(mlp.routed_out_norm, routed_NH).add_(dense_NH)
        return operators.residual_norm(project, y, x_NH, next_norm, block.mlp_out_norm, block.scalar)

    def _dense(self, mlp: DenseMLP, normed_NH: Normed) -> Tensor:
        return mlp.down(self._operators.gated(mlp.gate_up, normed_NH, mlp.activation))

    def _routed(self, mlp: RoutedExperts, u_NH: Tensor, x_NH: Tensor, owners_N: Tensor | None) -> Tensor:
        """Return the sum of a row's experts: on several ranks this rank's part."""
        expert_ids_Nk, weights_Nk = mlp.route(u_NH, x_NH, owners_N)
        y_NH = mlp.experts(u_NH, expert_ids_Nk, weights_Nk)
        if mlp.shared is not None:
            shared_NH = self._dense(mlp.shared, u_NH)
            if mlp.shared_gate is not None:
                shared_NH = shared_NH * torch.sigmoid(mlp.shared_gate(u_NH))
            y_NH = y_NH + shared_NH
        return y_NH


def _identity(y_NH: Tensor, residual_NH: Tensor | None = None) -> Tensor:
    return y_NH if residual_NH is None else y_NH + residual_NH


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
