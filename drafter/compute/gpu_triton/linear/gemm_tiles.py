"""Tiling of a skinny GEMM's rows and of its weight among programs: host arithmetic, no Triton.

Rows are in tiles of the smallest height that holds them. A weight's tiling depends only on its shape, on the
device's number of multiprocessors, and on whether tiles of rows are of the largest height.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

ROW_TILES = (16, 32, 64, 128)
INVARIANT_TILE = 64  # of any number of rows if a row's bits must depend on no other row
MAX_OWN_ROWS = 128  # of products with plain weights; for more, PyTorch's are used
MAX_PACKED_ROWS = 256  # of products with codes
H100_PROCESSORS = 132  # and an H200's; a B200 has 148
_ENOUGH_PROGRAMS = 1.9  # per multiprocessor: a single one would wait for its copies
_ENOUGH_WIDE_PROGRAMS = 0.95  # of wide tiles, of which one has as many copies in flight
_MAX_PROGRAMS = 8  # per multiprocessor, of split products: bounds the workspace
_MAX_WIDE_PROGRAMS = 4  # of wide tiles, whose sums are four times as large
_MAX_SPLITS, _MIN_SPLIT_TILES = 16, 4
_MIN_SPLIT_TILES_OF_FEW = 2  # of a weight with fewer tiles than multiprocessors
COLUMNS = 64  # rows of a weight per program: the size of a matrix instruction
# With the largest tile of rows: each byte of a weight is read with one of x, and codes are unpacked once.
_WIDE_COLUMNS = 128
_COLUMNS_PER_WARP = 16
_STEPS = {1: 128, 2: 128, 4: 32}  # inputs per iteration, by bytes of a value
_TALL = 64  # rows from which on x takes as much memory as the weights: steps are half as long
# Rows of the largest tile in fp32: of 128 rows with codes Triton 3.7 makes a trap for Blackwell.
_FP32_TILE = 64
# With tiles of 128 rows a program takes 128 KiB of shared memory, more than an L40S has (8.9).
_FIRST_WITH_LARGEST_TILE = (9, 0)


@dataclass(frozen=True, slots=True)
class ProductTiling:
    """Tiling of a weight: tiles of outputs, and inputs per iteration.

    Sums of `splits` of the inputs (split K), each of `split_tiles` steps, are added in order.

    Attributes:
        columns: rows of the weight per tile; a gate's tile has half as many outputs.
    """

    columns: int
    tiles: int
    step: int
    splits: int
    split_tiles: int

    def stepping(self, tile: int) -> tuple[int, int, int]:
        """Return (inputs per iteration, iterations of a split, pipeline stages) for a tile of this many rows.

        A multiprocessor has room for three programs, each with 32 or 24 KiB of weights in flight, or for one
        with wide tiles and 48 KiB.
        """
        if tile < _TALL:
            return self.step, self.split_tiles, 3
        return self.step // 2, 2 * self.split_tiles, 4

    @property
    def num_warps(self) -> int:
        return self.columns // _COLUMNS_PER_WARP


def choose_tiling(
    outputs: int,
    inputs: int,
    dtype: torch.dtype,
    *,
    gated: bool = False,
    processors: int = H100_PROCESSORS,
    columns: int = COLUMNS,
) -> ProductTiling:
    """Return the split that minimizes the busiest multiprocessor's work, with enough copies in flight.

    Args:
        outputs: the product's; a gate's weight has twice as many rows.
        dtype: the weight's.
        columns: `tile_columns` of the rows' tile.
    """
    width, step = columns // 2 if gated else columns, _STEPS[dtype.itemsize]
    is_wide = columns > COLUMNS
    enough = int(processors * (_ENOUGH_WIDE_PROGRAMS if is_wide else _ENOUGH_PROGRAMS))
    most = processors * (_MAX_WIDE_PROGRAMS if is_wide else _MAX_PROGRAMS)
    tiles, steps = -(-outputs // width), -(-inputs // step)
    least = _MIN_SPLIT_TILES_OF_FEW if tiles < processors else _MIN_SPLIT_TILES
    cuts = [1]
    for splits in range(2, _MAX_SPLITS + 1):
        each = -(-steps // splits)
        if each >= least and -(-steps // each) == splits and tiles * splits <= most:
            cuts.append(splits)
    cuts = [splits for splits in cuts if tiles * splits >= enough] or cuts

    def load(splits: int) -> int:
        """Return the busiest multiprocessor's steps; adding up splits costs about one step."""
        return -(-tiles * splits // processors) * (-(-steps // splits) + (splits > 1))

    best = min(cuts, key=load)
    return ProductTiling(columns, tiles, step, best, -(-steps // best))


class ProductWorkspace:
    """Memory for the sums of split products; shared by all products that run one after another.

    Attributes:
        processors: the device's multiprocessors, an H100's for the interpreter.
        largest_tile: rows of the device's largest tile.
    """

    __slots__ = ("arrived_E", "largest_tile", "processors", "sums_E")

    def __init__(self, device: torch.device | str) -> None:
        device = torch.device(device)
        self.processors, self.largest_tile = H100_PROCESSORS, _largest_tile(device)
        if device.type == "cuda":
            self.processors = torch.cuda.get_device_properties(device).multi_processor_count
        num_sums = _MAX_WIDE_PROGRAMS * self.processors * _WIDE_COLUMNS * ROW_TILES[-1]
        self.sums_E = torch.empty(num_sums, dtype=torch.float32, device=device)
        # also zero between launches
        self.arrived_E = torch.zeros(_MAX_PROGRAMS * self.processors, dtype=torch.int32, device=device)

    def has_room(self, programs: int, columns: int, tile: int) -> bool:
        """Return whether the sums of so many programs fit."""
        return programs <= len(self.arrived_E) and programs * columns * tile <= len(self.sums_E)

    def row_tile(self, num_rows: int, dtype: torch.dtype) -> int:
        """Return the smallest tile that holds rows of x's dtype, or the largest tile."""
        largest = _FP32_TILE if dtype is torch.float32 else self.largest_tile
        return next((tile for tile in ROW_TILES if num_rows <= tile < largest), largest)


def _largest_tile(device: torch.device) -> int:
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < _FIRST_WITH_LARGEST_TILE:
        return ROW_TILES[-2]
    return ROW_TILES[-1]


def tile_columns(tile: int) -> int:
    """Return the rows of a weight per program, by the rows of its tile."""
    return _WIDE_COLUMNS if tile == ROW_TILES[-1] else COLUMNS
