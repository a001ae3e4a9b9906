"""Products in AMX tiles: shapes, and the tile configuration.

Tile configuration layout (palette 1): Intel Architecture Instruction Set Extensions Programming Reference,
LDTILECFG. CPUs without AMX need no configuration: `begin_*` and `end_products` are empty there.

Legend: K inputs, D head dim.
"""

# Numba's functions are typed when they are compiled, not by annotations.
# pyright: reportCallIssue=false, reportArgumentType=false, reportPrivateImportUsage=false

from __future__ import annotations

import numpy as np
from numba import carray

from ...cpu_numba.element_ops import elements, pointer
from ...cpu_numba.llvm_intrinsics import stack_memory
from .amx_intrinsics import amx_combination, amx_product, amx_scores, configure_tiles, release_tiles
from .isa_dispatch import of_two_kinds

COLUMNS = 32  # per panel, the columns that one product computes
ROWS = 32
SUMS_STRIDE = COLUMNS * 4  # bytes per row of sums
_UINT8 = np.uint8(0)
_tiles_memory = stack_memory(64)
_amx_2x2, _amx_1x2 = amx_product(2, 2), amx_product(1, 2)
_amx_scores, _amx_combination_4, _amx_combination_2 = amx_scores(), amx_combination(4), amx_combination(2)


def begin_products(rows):
    """Configure this thread's tiles for products of blocks of at least `rows` (at most 16) rows."""


def end_products():
    """Release this thread's tiles after its last product."""


def begin_attention():
    """Configure this thread's tiles before its first `score` or `combine`.

    Products need `begin_products` again afterwards.
    """


def _begin_tiles(rows):
    memory = _tiles_memory()
    tiles = carray(pointer(memory, _UINT8), (64,))
    tiles[:] = 0
    tiles[0] = 1  # palette 1: eight tiles of up to 16 rows of 64 bytes
    for i in range(8):
        tiles[16 + 2 * i] = 64
        tiles[48 + i] = rows if i < 3 else 16  # C and A of `_amx_1x2` may have fewer rows
    configure_tiles(memory)


def _end_tiles():
    release_tiles()


@elements
def multiply(a, a_stride, w, w_stride, sums, blocks, rows):
    """Compute sums [rows, 32]: 32, 16 or the configured number of rows of A times two columns of tiles."""
    if rows == ROWS:
        _amx_2x2(a, a_stride, w, w_stride, sums, np.int64(SUMS_STRIDE), blocks)
    else:
        _amx_1x2(a, a_stride, w, w_stride, sums, np.int64(SUMS_STRIDE), blocks)


def _begin_tiles_of_attention():
    """Configure tiles: sums 0 to 3, keys and queries 4 and 5, weights and values of 16 keys 6 and 7."""
    memory = _tiles_memory()
    tiles = carray(pointer(memory, _UINT8), (64,))
    tiles[:] = 0
    tiles[0] = 1
    for i in range(8):
        tiles[16 + 2 * i] = 32 if i == 6 else 64
        tiles[48 + i] = 8 if i == 7 else 16
    configure_tiles(memory)


@elements
def score(blocks, count, offset, stride, queries, scores, steps):
    """Compute S^T [16 count, 16] = K Q^T; arguments: see `amx_intrinsics.amx_scores`."""
    _amx_scores(blocks, count, offset, stride, queries, scores, steps)


@elements
def combine(blocks, count, offset, weights, stride, result, head_dim):
    """Compute O [16, D] = P V; blocks as in `score`, rows of P are `stride` bytes apart."""
    column = 0
    while column < head_dim:
        at, target = offset + column * 32, result + 4 * column
        if head_dim - column >= 64:
            _amx_combination_4(blocks, count, at, weights, stride, target, 4 * head_dim)
            column += 64
        else:
            _amx_combination_2(blocks, count, at, weights, stride, target, 4 * head_dim)
            column += 32


def _nothing():
    pass


def _nothing_of(rows):
    pass


of_two_kinds(begin_products, _begin_tiles, _nothing_of)
of_two_kinds(end_products, _end_tiles, _nothing)
of_two_kinds(begin_attention, _begin_tiles_of_attention, _nothing)
