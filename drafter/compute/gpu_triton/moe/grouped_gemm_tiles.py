"""How pairs of a row and an expert, and experts' weights, are cut among programs: host arithmetic, no Triton.

All of it follows from the number of pairs, so that a grid of programs never waits for a choice of experts.
Called by `moe.py`; read by `moe_align.py` and `grouped_gemm.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

HEIGHTS = (16, 32, 64, 128)  # pairs of a tile
INVARIANT_HEIGHT = 64  # of all tiles where a row's bits depend on no other row
_TALL, _TALLEST = HEIGHTS[-2:]


def tile_height(num_pairs: int, num_experts: int) -> int:
    """The least that holds twice the pairs of an expert, were they spread evenly; or the greatest."""
    return next((height for height in HEIGHTS if 2 * num_pairs <= height * num_experts), HEIGHTS[-1])


def most_tiles(num_pairs: int, num_experts: int, height: int) -> int:
    """What any choice needs at most: one for each expert that has a pair, one more for each full one."""
    used = min(num_pairs, num_experts)
    return used + (num_pairs - used) // height


@dataclass(frozen=True, slots=True)
class ExpertCut:
    """How a program reads an expert's weight.

    Attributes:
        columns: rows of the weight.
        step: inputs at a time.
        stages: steps under way.
    """

    columns: int
    step: int
    warps: int
    stages: int


def cut_weight(height: int, dtype: torch.dtype, *, packed: bool) -> ExpertCut:
    """By the tile's height alone: a multiprocessor has room for three programs, or for one of a prompt's.

    Each of three has 24 KiB of plain weights under way or more, or of packed ones 8 or 12.
    """
    double = 4 // dtype.itemsize
    if height == _TALLEST:
        return ExpertCut(128, 32 * double, 8, 3)
    if packed:
        return ExpertCut(64, 64 * double, 4, 3 if height == _TALL else 4)
    if height == _TALL:  # x takes as much room as the weights
        return ExpertCut(64, 32 * double, 4, 4 if dtype.itemsize == 2 else 3)
    return ExpertCut(64, 128 if dtype.itemsize == 2 else 32, 4, 3)
