"""The sublayer after attention: dense, routed (MoE), or both in parallel; chosen at load.

    dense     down(act(gate u) * up u)
    routed    sum of the chosen experts(u) + [sigmoid(w u)] shared(u), summed over ranks
    parallel  norm(dense(u)) + norm'(routed(norm'' x))                                      u = mlp_norm x

The result is added to the residual, after `mlp_out_norm` if the block has one. Made by
`transformer_block.py`.

Legend: N rows, H hidden, I inner size, k experts per row.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from ..backend import Backend, BlockWeights, DenseMLP, Normed, ParallelMLP, RoutedExperts
from ..layers.linear import RMSNorm


class Mlp(Protocol):
    def __call__(self, normed_NH: Normed, x_NH: Tensor, next_norm: RMSNorm) -> tuple[Tensor, Normed]:
        """Return the residual after the block, and its norm.

        Args:
            normed_NH: `mlp_norm` of the residual.
            x_NH: the residual; not changed.
        """
        ...


def make_mlp(operators: Backend, weights: BlockWeights) -> Mlp:
    ends = weights.mlp_out_norm, weights.scalar
    match weights.mlp:
        case DenseMLP():
            return _Dense(operators, weights.mlp, *ends)
        case RoutedExperts():
            return _Routed(operators, weights.mlp, *ends)
        case ParallelMLP():
            return _Beside(operators, weights.mlp, *ends)


class _Dense:
    __slots__ = ("_operators", "_out_norm", "_scalar", "_weights")

    def __init__(
        self, operators: Backend, weights: DenseMLP, out_norm: RMSNorm | None, scalar: float | None
    ) -> None:
        self._operators, self._weights = operators, weights
        self._out_norm, self._scalar = out_norm, scalar

    def __call__(self, normed_NH: Normed, x_NH: Tensor, next_norm: RMSNorm) -> tuple[Tensor, Normed]:
        weights, operators = self._weights, self._operators
        inner_NI = operators.gated(weights.gate_up, normed_NH, weights.activation)
        return operators.residual_norm(weights.down, inner_NI, x_NH, next_norm, self._out_norm, self._scalar)


class _Routed:
    __slots__ = ("_operators", "_out_norm", "_scalar", "_sum")

    def __init__(
        self, operators: Backend, weights: RoutedExperts, out_norm: RMSNorm | None, scalar: float | None
    ) -> None:
        self._operators, self._sum = operators, _RoutedSum(operators, weights)
        self._out_norm, self._scalar = out_norm, scalar

    def __call__(self, normed_NH: Normed, x_NH: Tensor, next_norm: RMSNorm) -> tuple[Tensor, Normed]:
        y_NH = self._sum(self._operators.as_tensor(normed_NH), x_NH)
        return self._operators.residual_norm(_as_it_is, y_NH, x_NH, next_norm, self._out_norm, self._scalar)


class _Beside:
    __slots__ = ("_operators", "_out_norm", "_routed", "_scalar", "_weights")

    def __init__(
        self, operators: Backend, weights: ParallelMLP, out_norm: RMSNorm | None, scalar: float | None
    ) -> None:
        self._operators, self._weights = operators, weights
        self._out_norm, self._scalar = out_norm, scalar
        self._routed = _RoutedSum(operators, weights.routed)

    def __call__(self, normed_NH: Normed, x_NH: Tensor, next_norm: RMSNorm) -> tuple[Tensor, Normed]:
        weights, operators = self._weights, self._operators
        dense_NH = operators.norm(weights.dense_out_norm, _dense(operators, weights.dense, normed_NH))
        routed_NH = self._routed(operators.norm(weights.routed_norm, x_NH), x_NH)
        y_NH = operators.norm(weights.routed_out_norm, routed_NH).add_(dense_NH)
        return operators.residual_norm(_as_it_is, y_NH, x_NH, next_norm, self._out_norm, self._scalar)


class _RoutedSum:
    __slots__ = ("_operators", "_weights")

    def __init__(self, operators: Backend, weights: RoutedExperts) -> None:
        self._operators, self._weights = operators, weights

    def __call__(self, u_NH: Tensor, x_NH: Tensor) -> Tensor:
        weights = self._weights
        expert_ids_Nk, weights_Nk = weights.route(u_NH, x_NH)
        y_NH = weights.experts(u_NH, expert_ids_Nk, weights_Nk)
        if weights.shared is not None:
            shared_NH = _dense(self._operators, weights.shared, u_NH)
            if weights.shared_gate is not None:
                shared_NH = shared_NH * torch.sigmoid(weights.shared_gate(u_NH))
            y_NH = y_NH + shared_NH
        return y_NH if weights.all_reduce is None else weights.all_reduce(y_NH)


def _dense(operators: Backend, weights: DenseMLP, normed_NH: Normed) -> Tensor:
    return weights.down(operators.gated(weights.gate_up, normed_NH, weights.activation))


def _as_it_is(y_NH: Tensor, residual_NH: Tensor | None = None) -> Tensor:
    """An identity projection, for outputs that are computed already."""
    return y_NH if residual_NH is None else y_NH + residual_NH
