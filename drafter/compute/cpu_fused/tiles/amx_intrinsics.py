"""Products of bf16 tiles in AMX registers, as LLVM intrinsics that Numba lacks.

Instructions TDPBF16PS, TILELOADD, TILESTORED, LDTILECFG: Intel 64 and IA-32 Software Developer's Manual,
volume 2, and Intel Architecture Instruction Set Extensions Programming Reference, chapter "AMX".

A *tile product* accumulates C [16 m, 16 n] fp32 = A [16 m, K] B [K, 16 n] over blocks of 32 of K. Each row of
C has a fixed order of sums, regardless of the other rows. B is packed as TDPBF16PS (and `simd_tiles.py`)
requires: per 16 columns and 32 of K a tile of 1 KiB, [16 pairs of K, 16 columns, 2]. Used by `amx_tiles.py`.
"""

# The signatures of intrinsics are Numba's, not Python's.
# pyright: reportReturnType=false, reportArgumentType=false

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.core import cgutils

from ...cpu_numba.llvm_intrinsics import BYTE, INT64, POINTER, VOID, Value, at, call, integer, load, procedure

TILE_BYTES = 1024  # A or B: 16 x 32 bf16; C: 16 x 16 fp32

# (address of the 64-byte tile configuration)
configure_tiles = procedure(
    1, lambda b, args: call(b, "llvm.x86.ldtilecfg", VOID, [b.inttoptr(args[0], POINTER)])
)
release_tiles = procedure(0, lambda b, args: call(b, "llvm.x86.tilerelease", VOID, []))


def amx_product(rows: int, columns: int) -> Any:
    """Return an intrinsic that computes C [16 `rows`, 16 `columns`]; C, A and B take at most 8 tiles.

    Its arguments are (a, a_stride, b, b_stride, c, c_stride, blocks): B's stride is from 16 columns to the
    next; blocks = K / 32. Requires `configure_tiles` before it in this thread.
    """
    tiles = [ir.Constant(BYTE, i) for i in range(8)]
    c_tiles = tiles[: rows * columns]
    a_tiles, b_tile = tiles[rows * columns : rows * columns + rows], tiles[rows * columns + rows]

    def emit(builder, args):
        a, a_stride, b, b_stride, c, c_stride, blocks = args

        for tile in c_tiles:
            call(builder, "llvm.x86.tilezero", VOID, [tile])
        with cgutils.for_range(builder, blocks) as loop:
            for i, tile in enumerate(a_tiles):
                address = at(builder, a, (loop.index, 64), (a_stride, 16 * i))
                _move_tile(builder, "load", tile, address, a_stride)
            for j in range(columns):
                address = at(builder, b, (loop.index, TILE_BYTES), (b_stride, j))
                _move_tile(builder, "load", b_tile, address, integer(64))
                for i, tile in enumerate(a_tiles):
                    call(builder, "llvm.x86.tdpbf16ps", VOID, [c_tiles[i * columns + j], tile, b_tile])
        for i in range(rows):
            for j in range(columns):
                address = at(builder, c, (c_stride, 16 * i), (j, 64))
                _move_tile(builder, "store", c_tiles[i * columns + j], address, c_stride)

    return procedure(7, emit)


def amx_scores() -> Any:
    """Return an intrinsic for S^T [64 keys, 16 queries] fp32 = K Q^T, by four blocks of 16 keys.

    Its arguments are (blocks, count, offset, stride, queries, scores, steps): addresses of blocks of keys (a
    multiple of 4 of them), an offset added to each, bytes from key to key, Q^T packed as B, K / 32.
    """

    def emit(builder, args):
        blocks, count, offset, stride, queries, scores, steps = args
        tiles = [ir.Constant(BYTE, i) for i in range(6)]
        with cgutils.for_range(builder, builder.udiv(count, integer(4))) as quad:
            keys = [
                builder.add(offset, load(builder, at(builder, blocks, (quad.index, 32), (i, 8)), INT64))
                for i in range(4)
            ]
            for i in range(4):
                call(builder, "llvm.x86.tilezero", VOID, [tiles[i]])
            with cgutils.for_range(builder, steps) as loop:
                _move_tile(
                    builder, "load", tiles[5], at(builder, queries, (loop.index, TILE_BYTES)), integer(64)
                )
                for i in range(4):
                    _move_tile(builder, "load", tiles[4], at(builder, keys[i], (loop.index, 64)), stride)
                    call(builder, "llvm.x86.tdpbf16ps", VOID, [tiles[i], tiles[4], tiles[5]])
            for i in range(4):
                address = at(builder, scores, (quad.index, 4 * TILE_BYTES), (i, TILE_BYTES))
                _move_tile(builder, "store", tiles[i], address, integer(64))

    return procedure(7, emit)


def amx_combination(columns: int) -> Any:
    """Return an intrinsic that computes O [16, 16 `columns`] fp32 = P V over blocks of 16 keys.

    Its arguments are (blocks, count, offset, weights, stride, result, result_stride): addresses of blocks of
    values, an offset added to each, P [16, 16 count] bf16 and bytes from row to row. A block holds, per 16
    columns, 8 pairs of keys, [8, 16, 2].
    """

    def emit(builder, args):
        blocks, count, offset, weights, stride, result, result_stride = args
        tiles = [ir.Constant(BYTE, i) for i in range(8)]
        for j in range(columns):
            call(builder, "llvm.x86.tilezero", VOID, [tiles[j]])
        with cgutils.for_range(builder, count) as loop:
            block = builder.add(offset, load(builder, at(builder, blocks, (loop.index, 8)), INT64))
            _move_tile(builder, "load", tiles[6], at(builder, weights, (loop.index, 32)), stride)
            for j in range(columns):
                _move_tile(builder, "load", tiles[7], at(builder, block, (j, TILE_BYTES // 2)), integer(64))
                call(builder, "llvm.x86.tdpbf16ps", VOID, [tiles[j], tiles[6], tiles[7]])
        for j in range(columns):
            _move_tile(builder, "store", tiles[j], at(builder, result, (j, 64)), result_stride)

    return procedure(7, emit)


def _move_tile(builder: Any, direction: str, tile: ir.Constant, address: Value, stride: Value) -> None:
    name = {"load": "llvm.x86.tileloadd64", "store": "llvm.x86.tilestored64"}[direction]
    call(builder, name, VOID, [tile, builder.inttoptr(address, POINTER), stride])
