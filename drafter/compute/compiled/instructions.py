"""Products in AMX's tiles or by AVX-512: two kinds of functions by the same names.

Which kind is settled when a caller is compiled, on the machine that will run it. Importing this asks nothing,
and a pass asks nothing either: its code has one kind in it, and is kept on the disk by what was chosen
(`loops/elements.py`). Called by `products.py` and `attention.py`.

Legend: K inputs, D head dim.
"""

# Numba's functions are typed when they are compiled, not by annotations.
# pyright: reportCallIssue=false, reportArgumentType=false, reportPrivateImportUsage=false

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numba import carray
from numba.extending import overload

from ..loops.elements import pointer
from ..loops.llvm import stack_memory
from ..loops.machine import Instructions, bf16_instructions
from .tiles import (
    TILE_BYTES,
    amx_combination,
    amx_product,
    amx_scores,
    avx512_combination,
    avx512_product,
    configure_tiles,
    release_tiles,
)

COLUMNS = 32  # of a panel: what a product computes at once
ROWS = 32
SUMS_STRIDE = COLUMNS * 4  # bytes from a row of sums to the next
QUERIES = 16  # of a tile of attention
_UINT8, _INT64 = np.uint8(0), np.int64(0)
_tiles_memory = stack_memory(64)
_amx_2x2, _amx_1x2 = amx_product(2, 2), amx_product(1, 2)
_avx512_8x2, _avx512_1x2, _avx512_8x1 = avx512_product(8, 2), avx512_product(1, 2), avx512_product(8, 1)
_amx_scores, _amx_combination_4, _amx_combination_2 = amx_scores(), amx_combination(4), amx_combination(2)
_avx512_combination = avx512_combination(8, 2)


def begin_products(rows):
    """Before this thread's first product, of blocks of at least so many rows (at most 16)."""


def end_products():
    """After its last one."""


def multiply(a, a_stride, w, w_stride, sums, blocks, rows):
    """Sums [rows, 32] of 32, 16 or the configured number of rows of A with two columns of tiles."""


def begin_attention():
    """Before this thread's first `score` or `combine`; products must begin anew behind the last one."""


def score(blocks, count, offset, stride, queries, scores, steps):
    """S^T [16 count, 16] = K Q^T.

    Args:
        blocks, count: addresses of blocks of 16 keys, a multiple of 4 of them; `offset` is added to each.
        stride: bytes from key to key.
        queries: Q^T as packed for a product. `steps`: D / 32.
    """


def combine(blocks, count, offset, weights, stride, result, head_dim):
    """O [16, D] = P V; blocks of values as those of keys, rows of P are `stride` bytes apart."""


def _amx_begin_products(rows):
    memory = _tiles_memory()
    tiles = carray(pointer(memory, _UINT8), (64,))
    tiles[:] = 0
    tiles[0] = 1  # the palette: eight tiles of up to 16 rows of 64 bytes
    for i in range(8):
        tiles[16 + 2 * i] = 64
        tiles[48 + i] = rows if i < 3 else 16  # C and A of `_amx_1x2` may be lower
    configure_tiles(memory)


def _amx_end_products():
    release_tiles()


def _amx_multiply(a, a_stride, w, w_stride, sums, blocks, rows):
    if rows == ROWS:
        _amx_2x2(a, a_stride, w, w_stride, sums, np.int64(SUMS_STRIDE), blocks)
    else:
        _amx_1x2(a, a_stride, w, w_stride, sums, np.int64(SUMS_STRIDE), blocks)


def _amx_begin_attention():
    """Shape the tiles: sums 0 to 3, keys and queries 4 and 5, weights and values of 16 keys 6 and 7."""
    memory = _tiles_memory()
    tiles = carray(pointer(memory, _UINT8), (64,))
    tiles[:] = 0
    tiles[0] = 1
    for i in range(8):
        tiles[16 + 2 * i] = 32 if i == 6 else 64
        tiles[48 + i] = 8 if i == 7 else 16
    configure_tiles(memory)


def _amx_score(blocks, count, offset, stride, queries, scores, steps):
    _amx_scores(blocks, count, offset, stride, queries, scores, steps)


def _amx_combine(blocks, count, offset, weights, stride, result, head_dim):
    column = 0
    while column < head_dim:
        at, target = offset + column * 32, result + 4 * column
        if head_dim - column >= 64:
            _amx_combination_4(blocks, count, at, weights, stride, target, 4 * head_dim)
            column += 64
        else:
            _amx_combination_2(blocks, count, at, weights, stride, target, 4 * head_dim)
            column += 32


def _avx512_begin_products(rows):
    pass


def _avx512_end_products():
    pass


def _avx512_multiply(a, a_stride, w, w_stride, sums, blocks, rows):
    stride, done = np.int64(SUMS_STRIDE), 0
    while done + 8 <= rows:
        _avx512_8x2(a + done * a_stride, a_stride, w, w_stride, sums + done * stride, stride, blocks)
        done += 8
    while done < rows:
        _avx512_1x2(a + done * a_stride, a_stride, w, w_stride, sums + done * stride, stride, blocks)
        done += 1


def _avx512_begin_attention():
    pass


def _avx512_score(blocks, count, offset, stride, queries, scores, steps):
    blocks_B = carray(pointer(blocks, _INT64), (count,))
    for b in range(count):
        keys, target = blocks_B[b] + offset, scores + b * TILE_BYTES
        _avx512_8x1(keys, stride, queries, np.int64(0), target, np.int64(64), steps)
        keys, target = keys + 8 * stride, target + 8 * 64
        _avx512_8x1(keys, stride, queries, np.int64(0), target, np.int64(64), steps)


def _avx512_combine(blocks, count, offset, weights, stride, result, head_dim):
    for column in range(0, head_dim, 32):
        for row in range(0, QUERIES, 8):
            _avx512_combination(
                blocks, count, offset + column * 32, weights + row * stride, stride,
                result + 4 * (column + row * head_dim), 4 * head_dim,
            )  # fmt: skip


def _of_two_kinds(name: Callable[..., Any], amx: Callable[..., Any], avx512: Callable[..., Any]) -> None:
    """What Numba puts in the place of a name: it asks when it compiles a call of it."""

    def choose(*types_of_args: Any) -> Callable[..., Any]:
        return amx if bf16_instructions() is Instructions.AMX else avx512

    overload(name, strict=False)(choose)  # not strict: both have the name's parameters, `choose` takes any


_of_two_kinds(begin_products, _amx_begin_products, _avx512_begin_products)
_of_two_kinds(end_products, _amx_end_products, _avx512_end_products)
_of_two_kinds(multiply, _amx_multiply, _avx512_multiply)
_of_two_kinds(begin_attention, _amx_begin_attention, _avx512_begin_attention)
_of_two_kinds(score, _amx_score, _avx512_score)
_of_two_kinds(combine, _amx_combine, _avx512_combine)
