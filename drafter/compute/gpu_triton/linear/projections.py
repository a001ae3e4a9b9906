"""Projections with norm, gate and residual, fused in Manta's kernel or computed around PyTorch's GEMM.

    TorchProjection    PyTorch's GEMM, then a kernel for the gate, or for residual and norm
    OwnProjection      `skinny_gemm.py`: all of it in one launch; weights are read once for up to 128 rows
    ChosenProjection   one of the two, by rows and use: the faster one on this device (`gemm_choice.py`)

Manta's kernels defer the norm after a residual to the GEMMs that read it: `PendingNorm` represents its
result. Made and called by `drafter/compute/gpu_triton/backend.py`.

Legend: N rows, H hidden, K inputs, O outputs, I inner size, P parts, L layers, R rows of a block of a weight.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

from ...block_weights import Projection
from ...checkpoint.packed_codes import PackedCodes
from ...layers.linear import Activation, RMSNorm
from ..common.element_ops import add_rms_norm, gate, rms_norm
from .gemm_tiles import (
    INVARIANT_TILE,
    MAX_OWN_ROWS,
    MAX_PACKED_ROWS,
    ROW_TILES,
    ProductTiling,
    ProductWorkspace,
    choose_tiling,
    tile_columns,
)
from .packed_codes import DequantizingLinear
from .skinny_gemm import Normed, multiply

Use = Literal["plain", "normed", "gated", "added"]


@dataclass(frozen=True, slots=True)
class PendingNorm:
    """A norm of `x_NH` that is not computed yet; `squares_NT` are fp32 partial sums of its squares."""

    x_NH: Tensor
    squares_NT: Tensor
    norm: RMSNorm

    def __len__(self) -> int:
        return len(self.x_NH)

    @property
    def dtype(self) -> torch.dtype:
        return self.x_NH.dtype

    def tensor(self) -> Tensor:
        return rms_norm(self.x_NH, self.norm.weight_H, self.norm.eps)


def as_tensor(x: Tensor | PendingNorm) -> Tensor:
    return x.tensor() if isinstance(x, PendingNorm) else x


class LayerProjection(ABC):
    """A projection that accepts a pending norm, with fused gate or residual and norm."""

    __slots__ = ()

    @abstractmethod
    def __call__(self, x_NK: Tensor | PendingNorm, residual_NO: Tensor | None = None) -> Tensor:
        """Project; see `block_weights.Projection`."""

    @abstractmethod
    def gated(self, x_NK: Tensor | PendingNorm, activation: Activation) -> Tensor:
        """Return activation(first half) * second half of the product, [N, I]."""

    @abstractmethod
    def added(self, x_NK: Tensor, residual_NH: Tensor, norm: RMSNorm) -> tuple[Tensor, Tensor | PendingNorm]:
        """Return the product plus the residual, and its norm."""


class TorchProjection(LayerProjection):
    """PyTorch's GEMM, with separate kernels for gate, residual and norm."""

    __slots__ = ("_linear",)

    def __init__(self, linear: Projection) -> None:
        self._linear = linear

    def __call__(self, x_NK: Tensor | PendingNorm, residual_NO: Tensor | None = None) -> Tensor:
        return self._linear(as_tensor(x_NK), residual_NO)

    def gated(self, x_NK: Tensor | PendingNorm, activation: Activation) -> Tensor:
        return gate(self._linear(as_tensor(x_NK), None), activation)

    def added(self, x_NK: Tensor, residual_NH: Tensor, norm: RMSNorm) -> tuple[Tensor, Tensor]:
        return add_rms_norm(self._linear(x_NK, None), residual_NH, norm.weight_H, norm.eps)


class OwnProjection(LayerProjection):
    """Manta's fused GEMM over `skinny_gemm.multiply`'s weight and scale; a matrix is one block.

    With `one_tile` tiles have one height for any number of rows, so that a row's bits depend on no other row.

    Attributes:
        shape: outputs and inputs.
        form: what the product's speed depends on but for rows, their dtype, and device.
        most_rows: rows up to which it may be faster than PyTorch's product.
    """

    __slots__ = (
        "_bias_O",
        "_packed",
        "_scale_O",
        "_tile",
        "_tilings",
        "_weight_PLRK",
        "_workspace",
        "form",
        "most_rows",
        "shape",
    )

    def __init__(
        self,
        weight_PLRK: Tensor,
        bias_O: Tensor | None,
        workspace: ProductWorkspace,
        *,
        scale_O: Tensor | None = None,
        packed: PackedCodes | None = None,
        one_tile: bool = False,
    ) -> None:
        outputs, inputs = weight_PLRK.shape[:3].numel(), weight_PLRK.shape[3]
        inputs = inputs if packed is None else packed.in_features
        self.shape = outputs, inputs
        self.form = f"{tuple(weight_PLRK.shape)} {weight_PLRK.stride()} {weight_PLRK.dtype}"
        if packed is not None:
            self.form += f" {packed.code} {packed.group} {packed.scales.dtype} {packed.zeros is not None}"
        self.most_rows = MAX_OWN_ROWS if scale_O is None and packed is None else MAX_PACKED_ROWS
        self._weight_PLRK, self._bias_O, self._workspace = weight_PLRK, bias_O, workspace
        self._scale_O, self._packed = scale_O, packed
        self._tile = INVARIANT_TILE if one_tile else None
        # By columns of a tile, without and with a gate.
        self._tilings: dict[int, tuple[ProductTiling, ProductTiling]] = {}
        for columns in {tile_columns(tile) for tile in ROW_TILES}:
            how = {"processors": workspace.processors, "columns": columns}
            self._tilings[columns] = (
                choose_tiling(outputs, inputs, weight_PLRK.dtype, **how),
                choose_tiling(outputs // 2, inputs, weight_PLRK.dtype, gated=True, **how),
            )

    @property
    def device(self) -> torch.device:
        return self._weight_PLRK.device

    def __call__(self, x_NK: Tensor | PendingNorm, residual_NO: Tensor | None = None) -> Tensor:
        return self._multiply(x_NK, residual_NO=residual_NO)

    def gated(self, x_NK: Tensor | PendingNorm, activation: Activation) -> Tensor:
        return self._multiply(x_NK, activation=activation)

    def added(self, x_NK: Tensor, residual_NH: Tensor, norm: RMSNorm) -> tuple[Tensor, PendingNorm]:
        tiles = self._tiling(self.row_tile(len(x_NK), x_NK.dtype)).tiles
        squares_NT = x_NK.new_empty((len(x_NK), tiles), dtype=torch.float32)
        sum_NH = self._multiply(x_NK, residual_NO=residual_NH, squares_NT=squares_NT)
        return sum_NH, PendingNorm(sum_NH, squares_NT, norm)

    def _multiply(
        self,
        x: Tensor | PendingNorm,
        *,
        activation: Activation | None = None,
        residual_NO: Tensor | None = None,
        squares_NT: Tensor | None = None,
    ) -> Tensor:
        x_NK, norm, weight_PLRK, tile = x, None, self._weight_PLRK, self.row_tile(len(x), x.dtype)
        if isinstance(x_NK, PendingNorm):
            norm = Normed(x_NK.squares_NT, x_NK.norm.weight_H, x_NK.norm.eps)
            x_NK = x_NK.x_NH
        if activation is not None:
            weight_PLRK = weight_PLRK.view(2, 1, -1, weight_PLRK.shape[3])
        return multiply(
            x_NK,
            weight_PLRK,
            self._tiling(tile, gated=activation is not None),
            self._workspace,
            tile,
            packed=self._packed,
            scale_O=self._scale_O,
            bias_O=self._bias_O,
            norm=norm,
            activation=activation,
            residual_NO=residual_NO,
            squares_NT=squares_NT,
        )

    def row_tile(self, num_rows: int, dtype: torch.dtype) -> int:
        return self._tile or self._workspace.row_tile(num_rows, dtype)

    def _tiling(self, tile: int, *, gated: bool = False) -> ProductTiling:
        return self._tilings[tile_columns(tile)][gated]


class GemmChoice(Protocol):
    def __call__(
        self, use: Use, own: OwnProjection, other: TorchProjection, num_rows: int, dtype: torch.dtype, /
    ) -> bool:
        """Return whether Manta's product is used for so many rows of a dtype."""
        ...


class ChosenProjection(LayerProjection):
    """One of two projections for each call, by use and number of rows."""

    __slots__ = ("_choice", "_other", "_own")

    def __init__(self, own: OwnProjection, other: TorchProjection, choice: GemmChoice) -> None:
        self._own, self._other, self._choice = own, other, choice

    def __call__(self, x_NK: Tensor | PendingNorm, residual_NO: Tensor | None = None) -> Tensor:
        use = "normed" if isinstance(x_NK, PendingNorm) else "plain"
        return self._for(use, x_NK)(x_NK, residual_NO)

    def gated(self, x_NK: Tensor | PendingNorm, activation: Activation) -> Tensor:
        return self._for("gated", x_NK).gated(x_NK, activation)

    def added(self, x_NK: Tensor, residual_NH: Tensor, norm: RMSNorm) -> tuple[Tensor, Tensor | PendingNorm]:
        return self._for("added", x_NK).added(x_NK, residual_NH, norm)

    def _for(self, use: Use, x: Tensor | PendingNorm) -> OwnProjection | TorchProjection:
        return self._own if self._choice(use, self._own, self._other, len(x), x.dtype) else self._other


def packed_projection(
    codes: PackedCodes,
    bias_O: Tensor | None,
    workspace: ProductWorkspace,
    choice: GemmChoice,
    *,
    one_tile: bool = False,
) -> LayerProjection:
    """Return a projection with a weight of codes; with `one_tile` always Manta's kernel."""
    own = OwnProjection(codes.codes[None, None], bias_O, workspace, packed=codes, one_tile=one_tile)
    return own if one_tile else own_or_dequantized(own, codes, bias_O, choice)


def own_or_dequantized(
    own: OwnProjection, codes: PackedCodes, bias_O: Tensor | None, choice: GemmChoice
) -> ChosenProjection:
    """Return Manta's product of a weight, or PyTorch's of the weight that its codes are dequantized to."""
    return ChosenProjection(own, TorchProjection(DequantizingLinear(codes, bias_O)), choice)
