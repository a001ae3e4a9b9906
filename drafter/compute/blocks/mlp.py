"""The sublayer after attention: dense, routed (MoE), or both in parallel; made by `transformer_block.py`.

    dense     down(act(gate u) * up u)
    routed    sum of the chosen experts(u) + [sigmoid(w u)] shared(u), summed over ranks
    parallel  norm(dense(u)) + norm'(routed(norm'' x))                                      u = mlp_norm x

The result is added to the residual, after `mlp_out_norm` if the block has one.

Legend: N rows, H hidden, I inner size, k experts per row.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..backend import Backend, BlockWeights, DenseMLP, Normed, ParallelMLP, Projection, RoutedExperts
from ..layers.linear import RMSNorm


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
            case ParallelMLP():
                dense_NH = operators.norm(mlp.dense_out_norm, self._dense(mlp.dense, normed_NH))
                u_NH = operators.norm(mlp.routed_norm, x_NH)
                routed_NH = self._routed(mlp.routed, u_NH, x_NH, owners_N)
                y = operators.norm(mlp.routed_out_norm, routed_NH).add_(dense_NH)
        return operators.residual_norm(project, y, x_NH, next_norm, block.mlp_out_norm, block.scalar)

    def _dense(self, mlp: DenseMLP, normed_NH: Normed) -> Tensor:
        return mlp.down(self._operators.gated(mlp.gate_up, normed_NH, mlp.activation))

    def _routed(self, mlp: RoutedExperts, u_NH: Tensor, x_NH: Tensor, owners_N: Tensor | None) -> Tensor:
        expert_ids_Nk, weights_Nk = mlp.route(u_NH, x_NH, owners_N)
        y_NH = mlp.experts(u_NH, expert_ids_Nk, weights_Nk)
        if mlp.shared is not None:
            shared_NH = self._dense(mlp.shared, u_NH)
            if mlp.shared_gate is not None:
                shared_NH = shared_NH * torch.sigmoid(mlp.shared_gate(u_NH))
            y_NH = y_NH + shared_NH
        return y_NH if mlp.all_reduce is None else mlp.all_reduce(y_NH)


def _identity(y_NH: Tensor, residual_NH: Tensor | None = None) -> Tensor:
    return y_NH if residual_NH is None else y_NH + residual_NH
