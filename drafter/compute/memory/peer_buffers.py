"""Memory of all ranks that each rank's kernels can read, for sums of few rows.

Made by `actors/workers/comm/custom_all_reduce.py`, read by `gpu_triton/linear/all_reduce_norm.py`.

Legend: N rows, H hidden, P ranks.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

MAX_SPINS = 2**31 - 1


@dataclass(frozen=True, slots=True)
class PeerBuffers:
    """A rank's view of the memory of all ranks.

    Attributes:
        dtype: of the parts.
        values_P, signals_P: int64 on the device, addresses of each rank's buffer ([max_rows, 2,
            `row_values`]) and counters (int32 [max_rows, P], zero before the first launch).
        launches: int32 [max_rows], how often each row was summed.
        row_values: the place of a row, however wide: a rank that writes a row waits for those that read the
            same row, so rows of several widths (target, drafter) must not share memory.
        most_values: of a launch.
        owners: what keeps the memory alive.
        spins: looks at the counters before a program gives up.
    """

    rank: int
    world_size: int
    dtype: torch.dtype
    values_P: Tensor
    signals_P: Tensor
    launches: Tensor
    row_values: int
    most_values: int
    owners: tuple[object, ...] = ()
    spins: int = MAX_SPINS

    def takes(self, part_NH: Tensor) -> bool:
        num_rows, width = part_NH.shape
        fits = num_rows <= len(self.launches) and width <= self.row_values
        return fits and part_NH.numel() <= self.most_values and part_NH.dtype is self.dtype

    def bounded(self, spins: int) -> PeerBuffers:
        return replace(self, spins=spins)


class FusedSum(Protocol):
    """A kernel for the sum over ranks, the residual and the norm: `all_reduce_norm.sum_add_rms_norm`."""

    def __call__(
        self,
        part_NH: Tensor,
        peers: PeerBuffers,
        x_NH: Tensor,
        weight_H: Tensor,
        eps: float,
        scalar: float | None = None,
        /,
    ) -> tuple[Tensor, Tensor]: ...
