"""Tiling of a weight among the programs of a skinny GEMM: host arithmetic, no Triton.

It depends only on the weight's shape and the device's number of multiprocessors.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

ROW_TILES = (16, 32, 64)
H100_PROCESSORS = 132  # and an H200's; a B200 has 148
_ENOUGH_PROGRAMS = 1.9  # per multiprocessor: a single one would wait for its copies
_MAX_PROGRAMS = 8  # per multiprocessor, of split products: bounds the workspace
_MAX_SPLITS, _MIN_SPLIT_TILES = 16, 4
_MIN_SPLIT_TILES_OF_FEW = 2  # of a weight with fewer tiles than multiprocessors
COLUMNS = 64  # rows of a weight per program: the size of a matrix instruction
_STEPS = {1: 128, 2: 128, 4: 32}  # inputs per iteration, by bytes of a value
_TALL = 64  # rows from which on x takes as much memory as the weights: steps are half as long


@dataclass(frozen=True, slots=True)
class ProductTiling:
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


def choose_tiling(
    outputs: int,
    inputs: int,
    dtype: torch.dtype,
    *,
    gated: bool = False,
    processors: int = H100_PROCESSORS,
) -> ProductTiling:
    """Return the split that minimizes the busiest multiprocessor's work, with enough copies in flight.

    `outputs` are the product's; a gate's weight has twice as many rows.
    """
    width, step = COLUMNS // 2 if gated else COLUMNS, _STEPS[dtype.itemsize]
    tiles, steps = -(-outputs // width), -(-inputs // step)
    least = _MIN_SPLIT_TILES_OF_FEW if tiles < processors else _MIN_SPLIT_TILES
    cuts = [1]
    for splits in range(2, _MAX_SPLITS + 1):
        each = -(-steps // splits)
        fits = tiles * splits <= _MAX_PROGRAMS * processors
        if each >= least and -(-steps // each) == splits and fits:
            cuts.append(splits)
    cuts = [splits for splits in cuts if tiles * splits >= int(_ENOUGH_PROGRAMS * processors)] or cuts

    def load(splits: int) -> int:
        """Return the busiest multiprocessor's steps; adding up splits costs about one step."""
        return -(-tiles * splits // processors) * (-(-steps // splits) + (splits > 1))

    best = min(cuts, key=load)
    return ProductTiling(tiles, step, best, -(-steps // best))


class ProductWorkspace:
    """Memory for the sums of split products; shared by all products that run one after another.

    Attributes:
        processors: the device's multiprocessors, an H100's for the interpreter.
    """

    __slots__ = ("arrived_E", "processors", "sums_E")

    def __init__(self, device: torch.device | str) -> None:
        device = torch.device(device)
        self.processors = H100_PROCESSORS
        if device.type == "cuda":
            self.processors = torch.cuda.get_device_properties(device).multi_processor_count
        programs = _MAX_PROGRAMS * self.processors
        self.sums_E = torch.empty(programs * COLUMNS * ROW_TILES[-1], dtype=torch.float32, device=device)
        # also zero between launches
        self.arrived_E = torch.zeros(programs, dtype=torch.int32, device=device)


def row_tile(num_rows: int) -> int:
    """Return the smallest tile that holds the rows, or the largest tile."""
    return next((tile for tile in ROW_TILES if num_rows <= tile), ROW_TILES[-1])
