"""Chooses between Manta's and PyTorch's GEMMs by measurement, once per shape and process.

cuBLAS is tuned for many rows; at 16 it may leave a third of the memory bandwidth unused. The comparison
includes what each fuses: Manta's kernel against PyTorch's GEMM and the kernels after it, with the weights out
of cache. Shapes are measured in warm-up passes, before graphs are captured.

Legend: N rows, K inputs, O outputs, T tiles of a product's outputs.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch
from torch import Tensor

from ...layers.linear import RMSNorm
from .gemm_tiles import COLUMNS, ROW_TILES, row_tile
from .projections import OwnProjection, PendingNorm, TorchProjection, Use

logger = logging.getLogger(__name__)

# Measures milliseconds of a call whose data are in memory, not in caches.
Clock = Callable[[Callable[[], object]], float]


class MeasuredChoice:
    """A `projections.GemmChoice` by measurement, with caches flushed; more rows than a tile use PyTorch."""

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
