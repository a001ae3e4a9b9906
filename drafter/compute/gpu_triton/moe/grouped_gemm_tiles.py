"""Tiling of (row, expert) pairs and of experts' weights among programs: host arithmetic, no Triton.

It depends only on the number of pairs, so that a launch grid does not depend on the choice of experts. Called
by `moe_align.py` and `grouped_gemm.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

HEIGHTS = (16, 32, 64, 128)  # pairs of a tile
INVARIANT_HEIGHT = 64  # of all tiles if a row's bits must depend on no other row
MOST_BLOCK_SCALED = 32  # pairs of a tile: of more, x takes too long to split
_TALL, _TALLEST = HEIGHTS[-2:]


def tile_height(
    num_pairs: int, num_experts: int, dtype: torch.dtype = torch.bfloat16, *, packed: bool = False
) -> int:
    """Return the smallest height that holds twice an expert's average pairs, or the largest height.

    The largest of fp32 and packed weights is 64: of higher ones Triton 3.7 makes a trap for Blackwell.
    """
    heights = HEIGHTS[:-1] if packed and dtype is torch.float32 else HEIGHTS
    return next((height for height in heights if 2 * num_pairs <= height * num_experts), heights[-1])


def max_tiles(num_pairs: int, num_experts: int, height: int) -> int:
    """Return the most tiles any choice needs: one per expert that has a pair, one more for each full one."""
    used = min(num_pairs, num_experts)
    return used + (num_pairs - used) // height


@dataclass(frozen=True, slots=True)
class ExpertCut:
    """Tiling of a program's reads of an expert's weight: rows, inputs per iteration, warps, stages."""

    columns: int
    step: int
    warps: int
    stages: int


def cut_weight(
    height: int, dtype: torch.dtype, *, packed: bool, is_scaled: bool = False, is_arranged: bool = False
) -> ExpertCut:
    """Return the cut for a tile height: a multiprocessor has room for three programs, or one of a prompt's.

    Block-scaled products (`is_scaled`) take 128 rows of a weight, and two programs have room.

    Each of three has at least 24 KiB of plain weights in flight, or 8 or 12 KiB of packed ones. Arranged ones
    take long steps, so that an iteration's other instructions serve more codes; of 64 rows two have room.
    """
    if is_scaled:
        return ExpertCut(128, 256, 4, 3)
    if is_arranged and height < _TALLEST and dtype.itemsize == 2:
        return ExpertCut(64, 256, 4, 2 if height == _TALL else 3)
    double = 4 // dtype.itemsize
    if height == _TALLEST:
        return ExpertCut(128, 32 * double, 8, 3)
    if packed:
        return ExpertCut(64, 64 * double, 4, 3 if height == _TALL else 4)
    if height == _TALL:  # x takes as much memory as the weights
        return ExpertCut(64, 32 * double, 4, 4 if dtype.itemsize == 2 else 3)
    return ExpertCut(64, 128 if dtype.itemsize == 2 else 32, 4, 3)
