"""A layer's routed experts on a GPU, in four launches with grids that depend only on the number of rows.

    expert ids ──▶ tiles of pairs by expert                              moe_align.py
    x ──▶ gate, up and activation of each pair ──▶ down of each pair     grouped_gemm.py
      ──▶ a row's pairs times their weights, added up                    grouped_gemm.py

There is no host synchronization, and each expert's weights are read once for as many rows as a tile holds.

Legend: N rows, k experts chosen per row, H hidden.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from ...checkpoint.packed_codes import PackedCodes
from ...layers.moe import ExpertWeights
from ..linear.packed_codes import for_kernels
from .grouped_gemm import add_up, multiply_tiles
from .grouped_gemm_tiles import INVARIANT_HEIGHT, tile_height
from .moe_align import list_tiles


class TritonExperts:
    """The routed experts of a layer; `one_height` tiles make a row's bits independent of other rows."""

    __slots__ = ("_one_height", "_reads_1", "_weights")

    def __init__(self, weights: ExpertWeights, reads_1: Tensor, *, one_height: bool = False) -> None:
        gate_up, down = (
            for_kernels(weight) if isinstance(weight, PackedCodes) else weight.contiguous()
            for weight in (weights.gate_up, weights.down)
        )
        self._weights = replace(weights, gate_up=gate_up, down=down)
        self._reads_1, self._one_height = reads_1, one_height

    def __call__(self, x_NH: Tensor, expert_ids_Nk: Tensor, weights_Nk: Tensor) -> Tensor:
        weights = self._weights
        if len(x_NH) == 0:
            return x_NH.new_empty(x_NH.shape)
        num_experts, first = weights.gate_up.shape[0], weights.first_expert
        height = self.tile_height(expert_ids_Nk.numel(), x_NH.dtype)
        tiles = list_tiles(expert_ids_Nk, num_experts, first, height, self._reads_1)
        inner_PI = multiply_tiles(
            x_NH,
            weights.gate_up,
            tiles,
            bias_EO=weights.gate_up_bias_EI,
            activation=weights.activation,
            limit=weights.limit,
        )
        outputs_PH = multiply_tiles(inner_PI, weights.down, tiles, bias_EO=weights.down_bias_EH)
        return add_up(outputs_PH, expert_ids_Nk, weights_Nk, num_experts, first)

    def tile_height(self, num_pairs: int, dtype: torch.dtype) -> int:
        """Return the pairs of a tile, for `num_pairs` of all ranks' experts."""
        if self._one_height:
            return INVARIANT_HEIGHT
        weights = self._weights
        packed = any(isinstance(weight, PackedCodes) for weight in (weights.gate_up, weights.down))
        return tile_height(num_pairs, weights.num_ranks * weights.gate_up.shape[0], dtype, packed=packed)
