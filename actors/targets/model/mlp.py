"""Builds a layer's MLP from its tensors: a backend's projections, split between ranks, one all-reduce."""

from __future__ import annotations

import torch

from ....drafter.compute.backend import Backend
from ....drafter.compute.block_weights import DenseMLP, ParallelMLP, RoutedExperts
from ....drafter.compute.layers.linear import RMSNorm
from .mlp_spec import GatedMLP, ParallelMlpSpec, RoutedMLP
from .mlp_weights import DenseTensors, MlpTensors, ParallelMlpTensors, RoutedTensors
from .model_spec import LayerSpec
from .tensor_parallel import Communicator, rank_sum, row_linear


def make_mlp(
    layer: LayerSpec,
    tensors: MlpTensors,
    communicator: Communicator,
    backend: Backend,
    eps: float,
    dtype: torch.dtype,
) -> DenseMLP | RoutedExperts | ParallelMLP:
    """Build a layer's MLP for computing in `dtype`; `eps` is of the norms of `ParallelMlpSpec`."""
    match layer.mlp, tensors:
        case GatedMLP(), DenseTensors():
            return _dense(layer.mlp, tensors, communicator, backend)
        case RoutedMLP(), RoutedTensors():
            return _routed(layer.mlp, tensors, communicator, backend, dtype)
        case ParallelMlpSpec(), ParallelMlpTensors():
            return ParallelMLP(
                dense=_dense(layer.mlp.dense, tensors.dense, communicator, backend),
                dense_out_norm=RMSNorm(tensors.dense_out_norm_H, eps),
                routed_norm=RMSNorm(tensors.routed_norm_H, eps),
                routed=_routed(layer.mlp.routed, tensors.routed, communicator, backend, dtype),
                routed_out_norm=RMSNorm(tensors.routed_out_norm_H, eps),
            )
        case _:
            raise AssertionError("tensors do not match the layer's specification")


def _dense(mlp: GatedMLP, tensors: DenseTensors, communicator: Communicator, backend: Backend) -> DenseMLP:
    return DenseMLP(
        gate_up=backend.linear_of_either(tensors.gate_up_IH, tensors.gate_up_bias_I),
        activation=mlp.activation,
        down=row_linear(tensors.down_HI, tensors.down_bias_H, communicator, backend),
    )


def _routed(
    mlp: RoutedMLP, tensors: RoutedTensors, communicator: Communicator, backend: Backend, dtype: torch.dtype
) -> RoutedExperts:
    shared = tensors.shared
    assert (mlp.shared is None) == (shared is None), "tensors do not match the layer's specification"
    weight_1H = tensors.shared_weight_1H
    experts = tensors.experts if backend.keeps_codes else tensors.experts.dequantized(dtype)
    return RoutedExperts(
        route=backend.route(tensors.router),
        experts=backend.experts(experts),
        shared=None
        if mlp.shared is None or shared is None
        else DenseMLP(
            gate_up=backend.linear_of_either(shared.gate_up_IH, shared.gate_up_bias_I),
            activation=mlp.shared.activation,
            # summed over ranks together with the experts
            down=backend.linear_of_either(shared.down_HI, shared.down_bias_H),
        ),
        shared_gate=None if weight_1H is None else backend.linear(weight_1H),
        rank_sum=None if communicator.world_size == 1 else rank_sum(communicator),
    )
