"""Projections with norm, gate and residual, fused in Manta's kernel or computed around PyTorch's GEMM.

    TorchProjection    PyTorch's GEMM, then a kernel for the gate, or for residual and norm
    OwnProjection      `skinny_gemm.py`: all of it in one launch; weights are read once for up to 64 rows
    ChosenProjection   the faster of the two on this device, by rows and use (`gemm_choice.py`)
    PackedProjection   weights that stay codes (`packed_codes.py`): Manta's up to 128 rows

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
from .gemm_tiles import ROW_TILES, ProductWorkspace, choose_tiling, row_tile
from .packed_codes import MAX_OWN_ROWS, DequantizingLinear
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
    """

    __slots__ = (
        "_bias_O",
        "_gated_tiling",
        "_packed",
        "_scale_O",
        "_tile",
        "_tiling",
        "_weight_PLRK",
        "_workspace",
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
        self._weight_PLRK, self._bias_O, self._workspace = weight_PLRK, bias_O, workspace
        self._scale_O, self._packed = scale_O, packed
        dtype, processors = weight_PLRK.dtype, workspace.processors
        self._tiling = choose_tiling(outputs, inputs, dtype, processors=processors)
        self._gated_tiling = choose_tiling(outputs // 2, inputs, dtype, gated=True, processors=processors)
        self._tile = ROW_TILES[-1] if one_tile else None

    @property
    def weight(self) -> Tensor:
        return self._weight_PLRK

    def __call__(self, x_NK: Tensor | PendingNorm, residual_NO: Tensor | None = None) -> Tensor:
        return self._multiply(x_NK, residual_NO=residual_NO)

    def gated(self, x_NK: Tensor | PendingNorm, activation: Activation) -> Tensor:
        return self._multiply(x_NK, activation=activation)

    def added(self, x_NK: Tensor, residual_NH: Tensor, norm: RMSNorm) -> tuple[Tensor, PendingNorm]:
        squares_NT = x_NK.new_empty((len(x_NK), self._tiling.tiles), dtype=torch.float32)
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
        x_NK, norm, weight_PLRK, tiling = x, None, self._weight_PLRK, self._tiling
        if isinstance(x_NK, PendingNorm):
            norm = Normed(x_NK.squares_NT, x_NK.norm.weight_H, x_NK.norm.eps)
            x_NK = x_NK.x_NH
        if activation is not None:
            weight_PLRK, tiling = weight_PLRK.view(2, 1, -1, weight_PLRK.shape[3]), self._gated_tiling
        return multiply(
            x_NK,
            weight_PLRK,
            tiling,
            self._workspace,
            self._tile or row_tile(len(x_NK)),
            packed=self._packed,
            scale_O=self._scale_O,
            bias_O=self._bias_O,
            norm=norm,
            activation=activation,
            residual_NO=residual_NO,
            squares_NT=squares_NT,
        )


class GemmChoice(Protocol):
    def __call__(self, use: Use, own: OwnProjection, other: TorchProjection, num_rows: int, /) -> bool: ...


class SwitchedProjection(LayerProjection):
    """One of two projections for each call, by use and number of rows."""

    __slots__ = ("_other", "_own")

    def __init__(self, own: OwnProjection, other: TorchProjection) -> None:
        self._own, self._other = own, other

    def __call__(self, x_NK: Tensor | PendingNorm, residual_NO: Tensor | None = None) -> Tensor:
        use = "normed" if isinstance(x_NK, PendingNorm) else "plain"
        return self._for(use, len(x_NK))(x_NK, residual_NO)

    def gated(self, x_NK: Tensor | PendingNorm, activation: Activation) -> Tensor:
        return self._for("gated", len(x_NK)).gated(x_NK, activation)

    def added(self, x_NK: Tensor, residual_NH: Tensor, norm: RMSNorm) -> tuple[Tensor, Tensor | PendingNorm]:
        return self._for("added", len(x_NK)).added(x_NK, residual_NH, norm)

    def _for(self, use: Use, num_rows: int) -> OwnProjection | TorchProjection:
        return self._own if self._is_own(use, num_rows) else self._other

    @abstractmethod
    def _is_own(self, use: Use, num_rows: int) -> bool: ...


class ChosenProjection(SwitchedProjection):
    __slots__ = ("_choice",)

    def __init__(self, own: OwnProjection, other: TorchProjection, choice: GemmChoice) -> None:
        super().__init__(own, other)
        self._choice = choice

    def _is_own(self, use: Use, num_rows: int) -> bool:
        return self._choice(use, self._own, self._other, num_rows)


class PackedProjection(SwitchedProjection):
    """A projection with a weight of codes; with `one_tile` any number of rows uses Manta's kernel."""

    __slots__ = ("_one_tile",)

    def __init__(
        self,
        codes: PackedCodes,
        bias_O: Tensor | None,
        workspace: ProductWorkspace,
        *,
        one_tile: bool = False,
    ) -> None:
        weight_PLRK = codes.codes[None, None]
        own = OwnProjection(weight_PLRK, bias_O, workspace, packed=codes, one_tile=one_tile)
        super().__init__(own, TorchProjection(DequantizingLinear(codes, bias_O)))
        self._one_tile = one_tile

    def _is_own(self, use: Use, num_rows: int) -> bool:
        return self._one_tile or num_rows <= MAX_OWN_ROWS
