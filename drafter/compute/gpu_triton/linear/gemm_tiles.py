"""Tiling of a weight among the programs of a skinny GEMM, by its shape: host arithmetic, no Triton."""

from __future__ import annotations

from dataclasses import dataclass

import torch

ROW_TILES = (16, 32, 64)
_MULTIPROCESSORS = 132  # of an H100 or H200
_ENOUGH_PROGRAMS = 250  # two for most multiprocessors: a single one would wait for its copies
_MAX_PROGRAMS = 8 * _MULTIPROCESSORS  # of split products: bounds the workspace
_MAX_SPLITS, _MIN_SPLIT_TILES = 16, 4
COLUMNS = 64  # rows of a weight per program: the size of a matrix instruction
_STEPS = {1: 128, 2: 128, 4: 32}  # inputs per iteration, by bytes of a value
_TALL = 64  # rows from which on x takes as much memory as the weights: steps are half as long


@dataclass(frozen=True, slots=True)
class ProductPlan:
    """Tiling of a weight, for any number of rows: tiles of outputs, and inputs per iteration.

    Sums of `splits` of the inputs (split K), each of `split_tiles` steps, are added in order.
    """

    tiles: int
    step: int
    splits: int
    split_tiles: int

    def stepping(self, tile: int) -> tuple[int, int, int]:
        """Return (inputs per iteration, iterations of a split, pipeline stages) for a tile of this many rows.

        A multiprocessor has room for three programs, each with 32 or 24 KiB of weights in flight.
        """
        if tile < _TALL:
            return self.step, self.split_tiles, 3
        return self.step // 2, 2 * self.split_tiles, 4


def plan_product(outputs: int, inputs: int, dtype: torch.dtype, *, gated: bool = False) -> ProductPlan:
    """Return the split that minimizes the busiest multiprocessor's work, with enough copies in flight.

    `outputs` are the product's; a gate's weight has twice as many rows.
    """
    width, step = COLUMNS // 2 if gated else COLUMNS, _STEPS[dtype.itemsize]
    tiles, steps = -(-outputs // width), -(-inputs // step)
    cuts = [1]
    for splits in range(2, _MAX_SPLITS + 1):
        each = -(-steps // splits)
        if each >= _MIN_SPLIT_TILES and -(-steps // each) == splits and tiles * splits <= _MAX_PROGRAMS:
            cuts.append(splits)
    cuts = [splits for splits in cuts if tiles * splits >= _ENOUGH_PROGRAMS] or cuts

    def load(splits: int) -> int:
        """Return the busiest multiprocessor's steps; adding up splits costs about one step."""
        return -(-tiles * splits // _MULTIPROCESSORS) * (-(-steps // splits) + (splits > 1))

    best = min(cuts, key=load)
    return ProductPlan(tiles, step, best, -(-steps // best))


class ProductWorkspace:
    """Memory for the sums of split products; shared by all products that run one after another."""

    __slots__ = ("arrived_E", "sums_E")

    def __init__(self, device: torch.device | str) -> None:
        size = _MAX_PROGRAMS * COLUMNS * ROW_TILES[-1]
        self.sums_E = torch.empty(size, dtype=torch.float32, device=device)
        # also zero between launches
        self.arrived_E = torch.zeros(_MAX_PROGRAMS, dtype=torch.int32, device=device)


def row_tile(num_rows: int) -> int:
    """Return the smallest tile that holds the rows, or the largest tile."""
    return next((tile for tile in ROW_TILES if num_rows <= tile), ROW_TILES[-1])
