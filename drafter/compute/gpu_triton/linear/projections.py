"""Projections with norm, gate and residual, fused in Manta's kernel or computed around PyTorch's GEMM.

    TorchProjection    PyTorch's GEMM, then a kernel for the gate, or for residual and norm
    OwnProjection      `skinny_gemm.py`: all of it in one launch; weights are read once for up to 64 rows
    ChosenProjection   the faster of the two on this device, by rows and use

Manta's kernels defer the norm after a residual to the GEMMs that read it: `PendingNorm` represents its
result. Made and called by `drafter/compute/gpu_triton/backend.py`.

`ChosenProjection` measures once per shape and process. cuBLAS is tuned for many rows; at 16 it may leave a
third of the memory bandwidth unused. The comparison includes what each fuses: Manta's kernel against
PyTorch's GEMM and the kernels after it, with the weights out of cache. Shapes are measured in warm-up passes,
before graphs are captured.

Legend: N rows, H hidden, K inputs, O outputs, I inner size, P parts, L layers, R rows of a block of a weight,
T tiles of a product's outputs.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

from ...backend import Projection
from ...layers.linear import Activation, RMSNorm
from .activations import gate
from .norms import add_rms_norm, rms_norm
from .skinny_gemm import COLUMNS, ROW_TILES, Normed, ProductWorkspace, multiply, plan_product, row_tile

Use = Literal["plain", "normed", "gated", "added"]


@dataclass(frozen=True, slots=True)
class PendingNorm:
    """A norm's result that is not computed yet.

    Attributes:
        x_NH: input of the norm.
        squares_NT: fp32, partial sums of its rows' squares.
    """

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
        """Project; see `backend.Projection`."""

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
    """Manta's fused GEMM.

    Args:
        weight_PLRK, scale_O: see `skinny_gemm.multiply`; a matrix is one block.
        one_tile: use tiles of one height for any number of rows, so that a row's bits depend on no other row.
    """

    __slots__ = ("_bias_O", "_gated_plan", "_plan", "_scale_O", "_tile", "_weight_PLRK", "_workspace")

    def __init__(
        self,
        weight_PLRK: Tensor,
        bias_O: Tensor | None,
        workspace: ProductWorkspace,
        *,
        scale_O: Tensor | None = None,
        one_tile: bool = False,
    ) -> None:
        outputs, inputs = weight_PLRK.shape[:3].numel(), weight_PLRK.shape[3]
        self._weight_PLRK, self._bias_O, self._workspace = weight_PLRK, bias_O, workspace
        self._scale_O = scale_O
        self._plan = plan_product(outputs, inputs, weight_PLRK.dtype)
        self._gated_plan = plan_product(outputs // 2, inputs, weight_PLRK.dtype, gated=True)
        self._tile = ROW_TILES[-1] if one_tile else None

    @property
    def weight(self) -> Tensor:
        return self._weight_PLRK

    def __call__(self, x_NK: Tensor | PendingNorm, residual_NO: Tensor | None = None) -> Tensor:
        return self._multiply(x_NK, residual_NO=residual_NO)

    def gated(self, x_NK: Tensor | PendingNorm, activation: Activation) -> Tensor:
        return self._multiply(x_NK, activation=activation)

    def added(self, x_NK: Tensor, residual_NH: Tensor, norm: RMSNorm) -> tuple[Tensor, PendingNorm]:
        squares_NT = x_NK.new_empty((len(x_NK), self._plan.tiles), dtype=torch.float32)
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
        x_NK, norm, weight_PLRK, plan = x, None, self._weight_PLRK, self._plan
        if isinstance(x_NK, PendingNorm):
            norm = Normed(x_NK.squares_NT, x_NK.norm.weight_H, x_NK.norm.eps)
            x_NK = x_NK.x_NH
        if activation is not None:
            weight_PLRK, plan = weight_PLRK.view(2, 1, -1, weight_PLRK.shape[3]), self._gated_plan
        return multiply(
            x_NK,
            weight_PLRK,
            plan,
            self._workspace,
            self._tile or row_tile(len(x_NK)),
            scale_O=self._scale_O,
            bias_O=self._bias_O,
            norm=norm,
            activation=activation,
            residual_NO=residual_NO,
            squares_NT=squares_NT,
        )


class GemmChoice(Protocol):
    """Chooses a projection for a call."""

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
    """The faster of two projections."""

    __slots__ = ("_choice",)

    def __init__(self, own: OwnProjection, other: TorchProjection, choice: GemmChoice) -> None:
        super().__init__(own, other)
        self._choice = choice

    def _is_own(self, use: Use, num_rows: int) -> bool:
        return self._choice(use, self._own, self._other, num_rows)


logger = logging.getLogger(__name__)

# Measures milliseconds of a call whose data are in memory, not in caches.
Clock = Callable[[Callable[[], object]], float]


class MeasuredChoice:
    """A `projections.GemmChoice` by measurement; more rows than a tile holds use PyTorch.

    Args:
        clock: by default Triton's, which flushes the cache before each call.
    """

    def __init__(self, clock: Clock | None = None) -> None:
        self._clock = clock or _milliseconds
        self._ours: dict[tuple[object, ...], bool] = {}

    def __call__(self, use: Use, own: OwnProjection, other: TorchProjection, num_rows: int) -> bool:
        if num_rows > ROW_TILES[-1] or num_rows == 0:
            return False
        weight = own.weight
        kind = (use, weight.shape, weight.stride(), weight.dtype)
        tile = row_tile(num_rows)
        if (*kind, tile) not in self._ours:
            for rows in ROW_TILES:
                self._ours[*kind, rows] = self._is_ours_sooner(use, own, other, rows)
        return self._ours[*kind, tile]

    def _is_ours_sooner(self, use: Use, own: OwnProjection, other: TorchProjection, num_rows: int) -> bool:
        ours, theirs = (self._clock(_call(use, projection, own, num_rows)) for projection in (own, other))
        shape = tuple(own.weight.shape)
        logger.info(
            "product %s %s, %d rows: ours %.1f us, PyTorch's %.1f us",
            shape,
            use,
            num_rows,
            1e3 * ours,
            1e3 * theirs,
        )
        return ours <= theirs


def _call(
    use: Use, projection: OwnProjection | TorchProjection, own: OwnProjection, num_rows: int
) -> Callable[[], object]:
    weight = own.weight
    outputs, inputs = weight.shape[:3].numel(), weight.shape[3]

    def ones(*shape: int, dtype: torch.dtype = weight.dtype) -> Tensor:
        return torch.ones(shape, dtype=dtype, device=weight.device)

    x_NK, norm = ones(num_rows, inputs), RMSNorm(ones(inputs), 1e-6)
    squares_NT = ones(num_rows, -(-inputs // COLUMNS), dtype=torch.float32)  # as `added` leaves them
    pending = PendingNorm(x_NK, squares_NT, norm)
    x = pending if projection is own else x_NK  # PyTorch's path norms right after the residual addition
    match use:
        case "plain":
            return lambda: projection(x_NK)
        case "normed":
            return lambda: projection(x)
        case "gated":
            return lambda: projection.gated(x, "silu")
        case "added":
            residual_NO, next_norm = ones(num_rows, outputs), RMSNorm(ones(outputs), 1e-6)
            return lambda: projection.added(x_NK, residual_NO, next_norm)


def _milliseconds(call: Callable[[], object]) -> float:
    from triton.testing import do_bench

    assert not torch.cuda.is_current_stream_capturing(), "every kind of step runs before it is captured"
    median = do_bench(call, warmup=2, rep=10, return_mode="median")
    assert isinstance(median, float), "one mode, one number"
    return median
