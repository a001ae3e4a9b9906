"""Instructions that Numba has no words for: products of bf16 tiles, transposed tiles, atomics, calls by address.

A *tile product* adds up C [16 m, 16 n] fp32 = A [16 m, K] B [K, 16 n] over blocks of 32 of K: on AMX in its
tile registers, on AVX-512 by dot products of bf16 pairs. Each row of C has one order of sums, whatever rows
stand beside it. B is packed as both instructions want it: per 16 columns and 32 of K a tile of 1 KiB,
[16 pairs of K, 16 columns, 2].

All addresses and strides are int64, strides in bytes. Used by the other files of this folder.
"""

# The signatures of intrinsics are Numba's, not Python's.
# pyright: reportReturnType=false, reportArgumentType=false

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

TILE_BYTES = 1024  # of A or B: 16 x 32 bf16; of C: 16 x 16 fp32
_BYTE, _INT16, _INT32, _INT64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
_FLOATS, _PAIRS = ir.VectorType(ir.FloatType(), 16), ir.VectorType(_INT32, 16)
_POINTER = _BYTE.as_pointer()
_VOID = ir.VoidType()
_Value = Any  # llvmlite's values carry no useful types


def _call(builder: Any, name: str, result: ir.Type, args: Sequence[_Value]) -> _Value:
    kind = ir.FunctionType(result, [arg.type for arg in args])
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), args)


def _at(builder: Any, address: _Value, *terms: tuple[_Value | int, int]) -> _Value:
    """address + the sum of value * factor."""
    for value, factor in terms:
        scaled = builder.mul(_int(value), _int(factor)) if isinstance(value, int) else value
        if not isinstance(value, int) and factor != 1:
            scaled = builder.mul(value, _int(factor))
        address = builder.add(address, scaled)
    return address


def _int(value: int) -> ir.Constant:
    return ir.Constant(_INT64, value)


def _load(builder: Any, address: _Value, kind: ir.Type) -> _Value:
    return builder.load(builder.inttoptr(address, kind.as_pointer()), align=1)


def _store(builder: Any, value: _Value, address: _Value) -> None:
    builder.store(value, builder.inttoptr(address, value.type.as_pointer()), align=1)


def _procedure(num_args: int, emit: Callable[[Any, Sequence[_Value]], None]) -> Any:
    """An intrinsic over int64 that returns nothing; `emit(builder, args)` writes its body."""

    def generate(context, builder, signature, args):
        emit(builder, args)
        return context.get_dummy_value()

    def typed(*_):
        return types.void(*[types.int64] * num_args), generate

    names = ["typing", *(f"arg{i}" for i in range(num_args))]  # Numba counts them
    parameters = [inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in names]
    typed.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return intrinsic(typed)


def amx_product(rows: int, columns: int) -> Any:
    """C [16 `rows`, 16 `columns`] in AMX tiles: at most 8 tiles for C, A and B together.

    The intrinsic takes (a, a_stride, b, b_stride, c, c_stride, blocks): B's stride is that from 16 columns
    to the next; blocks are K / 32. Wants `configure_tiles` before it in this thread.
    """
    tiles = [ir.Constant(_BYTE, i) for i in range(8)]
    c_tiles = tiles[: rows * columns]
    a_tiles, b_tile = tiles[rows * columns : rows * columns + rows], tiles[rows * columns + rows]

    def emit(builder, args):
        a, a_stride, b, b_stride, c, c_stride, blocks = args

        def move(name, tile, address, stride):
            _call(builder, name, _VOID, [tile, builder.inttoptr(address, _POINTER), stride])

        for tile in c_tiles:
            _call(builder, "llvm.x86.tilezero", _VOID, [tile])
        with cgutils.for_range(builder, blocks) as loop:
            for i, tile in enumerate(a_tiles):
                address = _at(builder, a, (loop.index, 64), (a_stride, 16 * i))
                move("llvm.x86.tileloadd64", tile, address, a_stride)
            for j in range(columns):
                address = _at(builder, b, (loop.index, TILE_BYTES), (b_stride, j))
                move("llvm.x86.tileloadd64", b_tile, address, _int(64))
                for i, tile in enumerate(a_tiles):
                    _call(builder, "llvm.x86.tdpbf16ps", _VOID, [c_tiles[i * columns + j], tile, b_tile])
        for i in range(rows):
            for j in range(columns):
                address = _at(builder, c, (c_stride, 16 * i), (j, 64))
                move("llvm.x86.tilestored64", c_tiles[i * columns + j], address, c_stride)

    return _procedure(7, emit)


def avx512_product(rows: int, columns: int) -> Any:
    """The same for `rows` single rows (not sixteens), by AVX512_BF16's dot products."""
    kind = "llvm.x86.avx512bf16.dpbf16ps.512"
    halves = ir.VectorType(_BFloat(), 32)

    def emit(builder, args):
        a, a_stride, b, b_stride, c, c_stride, blocks = args
        sums = [cgutils.alloca_once_value(builder, ir.Constant(_FLOATS, None)) for _ in range(rows * columns)]
        for one in sums:
            builder.store(ir.Constant(_FLOATS, None), one)
        pairs = builder.mul(blocks, _int(16))
        with cgutils.for_range(builder, pairs) as loop:
            b_vectors = [
                builder.bitcast(_load(builder, _at(builder, b, (loop.index, 64), (b_stride, j)), _PAIRS), halves)
                for j in range(columns)
            ]
            for i in range(rows):
                pair = _load(builder, _at(builder, a, (loop.index, 4), (a_stride, i)), _INT32)
                spread = builder.bitcast(_spread(builder, pair), halves)
                for j, vector in enumerate(b_vectors):
                    one = sums[i * columns + j]
                    builder.store(_call(builder, kind, _FLOATS, [builder.load(one), spread, vector]), one)
        for i in range(rows):
            for j in range(columns):
                _store(builder, builder.load(sums[i * columns + j]), _at(builder, c, (c_stride, i), (j, 64)))

    return _procedure(7, emit)


class _BFloat(ir.Type):
    """A type that llvmlite has no name for."""

    def __str__(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _BFloat)

    def __hash__(self) -> int:
        return hash(_BFloat)


def _spread(builder: Any, value: _Value) -> _Value:
    """The int32 in all of 16 lanes."""
    one = builder.insert_element(ir.Constant(_PAIRS, ir.Undefined), value, ir.Constant(_INT32, 0))
    return builder.shuffle_vector(one, one, ir.Constant(ir.VectorType(_INT32, 16), [0] * 16))


def _transposed(builder: Any, source: _Value, stride: _Value) -> list[_Value]:
    """16 rows of 16 int32, transposed: rows trade halves, quarters, eighths, single elements."""
    rows = [_load(builder, _at(builder, source, (stride, i)), _PAIRS) for i in range(16)]
    for step in (8, 4, 2, 1):
        low = [e if e & step == 0 else 16 + (e ^ step) for e in range(16)]
        high = [e ^ step if e & step == 0 else 16 + e for e in range(16)]
        traded = list(rows)
        for i in range(16):
            if i & step == 0:
                pair = rows[i], rows[i | step]
                traded[i] = builder.shuffle_vector(*pair, ir.Constant(_PAIRS, low))
                traded[i | step] = builder.shuffle_vector(*pair, ir.Constant(_PAIRS, high))
        rows = traded
    return rows


def _emit_transpose(builder, args):
    source, stride, target = args
    for i, row in enumerate(_transposed(builder, source, stride)):
        _store(builder, row, _at(builder, target, (i, 64)))


def _emit_transpose_rounded(builder, args):
    source, target, stride = args
    for i, row in enumerate(_transposed(builder, source, _int(64))):
        lane = lambda bits: ir.Constant(_PAIRS, [bits] * 16)  # noqa: E731
        odd = builder.and_(builder.lshr(row, lane(16)), lane(1))
        nearest = builder.lshr(builder.add(builder.add(row, lane(0x7FFF)), odd), lane(16))
        _store(builder, builder.trunc(nearest, ir.VectorType(_INT16, 16)), _at(builder, target, (stride, i)))


def _emit_interleave(builder, args):
    first, second, target = args
    half = ir.VectorType(_INT16, 16)
    order = [e // 2 + 16 * (e % 2) for e in range(32)]
    pair = _load(builder, first, half), _load(builder, second, half)
    mixed = builder.shuffle_vector(*pair, ir.Constant(ir.VectorType(_INT32, 32), order))
    _store(builder, mixed, target)


def _emit_copy(builder, args):
    source, target, count = args
    with cgutils.for_range(builder, count) as loop:
        line = _load(builder, _at(builder, source, (loop.index, 64)), _PAIRS)
        _store(builder, line, _at(builder, target, (loop.index, 64)))


# (source, target, count): times 64 bytes.
copy_lines = _procedure(3, _emit_copy)
# (first, second, target): 16 + 16 bf16 -> 32, taking turns.
interleave = _procedure(3, _emit_interleave)
# (source, source_stride, target): 16 x 16 elements of 4 bytes, target rows of 64 bytes.
transpose = _procedure(3, _emit_transpose)
# (source, target, target_stride): 16 x 16 fp32 in rows of 64 bytes -> bf16, to nearest even; no NaNs.
transpose_rounded = _procedure(3, _emit_transpose_rounded)
# (address of 64 bytes that describe the tiles)
configure_tiles = _procedure(
    1, lambda b, args: _call(b, "llvm.x86.ldtilecfg", _VOID, [b.inttoptr(args[0], _POINTER)])
)
release_tiles = _procedure(0, lambda b, args: _call(b, "llvm.x86.tilerelease", _VOID, []))
# A breath in a loop that waits for another thread.
pause = _procedure(0, lambda b, args: _call(b, "llvm.x86.sse2.pause", _VOID, []))


@intrinsic
def fetch_add(context, address, value):
    """Add to the int64 at an address that threads share; what was there before."""

    def generate(context, builder, signature, args):
        pointer = builder.inttoptr(args[0], _INT64.as_pointer())
        return builder.atomic_rmw("add", pointer, args[1], "seq_cst")

    return types.int64(types.int64, types.int64), generate


@intrinsic
def read_shared(context, address):
    """The int64 at an address that other threads write."""

    def generate(context, builder, signature, args):
        pointer = builder.inttoptr(args[0], _INT64.as_pointer())
        return builder.load_atomic(pointer, "seq_cst", 8)

    return types.int64(types.int64), generate


@intrinsic
def write_shared(context, address, value):
    """Set the int64 at an address that other threads read."""

    def generate(context, builder, signature, args):
        pointer = builder.inttoptr(args[0], _INT64.as_pointer())
        builder.store_atomic(args[1], pointer, "seq_cst", 8)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


@intrinsic
def call_task(context, address, args, thread, num_threads):
    """Call the compiled task at an address: task(args, thread, num_threads)."""

    def generate(context, builder, signature, values):
        kind = ir.FunctionType(_VOID, [_INT64] * 3).as_pointer()
        builder.call(builder.inttoptr(values[0], kind), values[1:])
        return context.get_dummy_value()

    return types.void(*[types.int64] * 4), generate
