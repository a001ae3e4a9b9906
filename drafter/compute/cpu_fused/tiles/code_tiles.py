"""Products of rows with weights of 8 and 4 bits, decoded in vector registers.

Without AMX a decoded value is the code itself, which is exact in bf16; e4m3's and e2m1's are too small by a
power of two (FACTORS). Scales and offsets are applied to the sums of groups (`simd_tiles.py`), so a product
has no rounded weight. With AMX, whose sums are in tiles, it is the matrix's value in bf16
(`checkpoint/quantized_matrix.py`): code times scale, plus offset if any, in fp32, rounded.

    codes, per 16 columns:    8 bits: [K, 16]         4 bits: [K / 2, 16], the earlier input in the low nibble
                              5 and 6 bits: [K / 2, 20 or 24], four bits as above, then of each input 16 bits
                              of its columns for the fifth bit, and 16 for the sixth
    scales and offsets (with AMX, or zeros), expanded:    fp32 [tiles of 16 columns, G, 16]

Each kind of code is compiled on its own when a model first needs it (`packed_weight.py`). Two operations:
multiplying a few rows, and expanding tiles to bf16 for many rows or for AMX.

Legend: K inputs, G groups of inputs with a scale.
"""

# The signatures of intrinsics are Numba's, not Python's.
# pyright: reportReturnType=false, reportArgumentType=false

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from llvmlite import ir
from numba.core import cgutils

from ...checkpoint.quantized_matrix import BITS, GRID, WITH_OFFSETS, ZERO, Code
from ...cpu_numba.cpu_features import Instructions, bf16_instructions
from ...cpu_numba.llvm_intrinsics import (
    BYTE,
    FLOATS,
    HALVES,
    INT16,
    INT32,
    PAIRS,
    Value,
    at,
    call,
    integer,
    lanes,
    load,
    prefetch,
    procedure,
    store,
)
from .simd_tiles import WeightKind, argument_values, emit_products, exact_pairs
from .simd_vectors import rounded_pairs

MULTIPLY, EXPAND = 0, 1
# Factors by which decoded codes are too small; scales are multiplied by them when they are expanded.
FACTORS: Mapping[Code, float] = {"e4m3": 2.0**8, "e2m1": 2.0**14}
Emit = Callable[[Any, Sequence[Value]], None]  # of a builder and its arguments
_BYTES = ir.VectorType(BYTE, 16)
_FP16 = ir.VectorType(ir.HalfType(), 16)
_MASK = ir.VectorType(ir.IntType(1), 16)
_BOTH = ir.VectorType(INT16, 32)  # inputs of 16 columns


def code_product(code: Code, *, has_zeros: bool = False) -> Any:
    """Return an intrinsic of (address of `simd_tiles.ARGUMENTS`, MULTIPLY or EXPAND)."""
    return procedure(2, emit_product(code, has_zeros=has_zeros))


def emit_product(code: Code, *, has_zeros: bool = False) -> Emit:
    def emit(builder: Any, args: Sequence[Value]) -> None:
        if bf16_instructions() is Instructions.AMX:  # products take expanded panels alone
            _expand(builder, args[0], code, partial(_read_values, code, has_zeros))
            return
        with builder.if_else(builder.icmp_signed("==", args[1], integer(MULTIPLY))) as (multiply, expand):
            with multiply:
                emit_products(builder, args[0], WeightKind(code, _line_bytes(code), partial(_Codes, code)))
            with expand:
                _expand(builder, args[0], code, partial(_read_codes, code))

    return emit


def _line_bytes(code: Code) -> int:
    """Return the bytes of a pair of inputs of 16 columns."""
    return 4 * BITS[code]


class _Codes:
    """`simd_tiles.PairWeights` of codes as they are."""

    def __init__(self, code: Code, builder: Any, lines: Sequence[Value]) -> None:
        self._code, self._builder, self.lines = code, builder, lines

    def floats(self, half: int) -> Sequence[Value]:
        return [_DECODED[self._code](self._builder, line, half) for line in self.lines]

    def pairs(self) -> Sequence[Value]:
        return [_pairs(self._builder, self._code, line) for line in self.lines]


def _pairs(builder: Any, code: Code, line: Value) -> Value:
    """Return the codes of a line as pairs of bf16."""
    if code in _TABLES and _has_avx512():
        return _looked_up_pairs(builder, line, _TABLES[code])
    return exact_pairs(builder, *(_DECODED[code](builder, line, half) for half in (0, 1)))


def _expand(
    builder: Any,
    arguments: Value,
    code: Code,
    read: Callable[[Any, dict[str, Value], int, Value], Callable[[Value], Value]],
) -> None:
    """Store a panel's weights as two tiles of bf16 at `target`.

    `read` takes a tile's number and a group, and returns what reads pairs of bf16 from a line. The thread's
    next panel is prefetched, because memory would be idle while expanded tiles are multiplied.
    """
    values = argument_values(builder, arguments)
    count = builder.udiv(values["pairs"], values["groups"])
    for tile in (0, 1):
        codes = at(builder, values["weight"], (values["tile_bytes"], tile))
        target = at(builder, values["target"], (values["pairs"], 64 * tile))
        with cgutils.for_range(builder, values["groups"]) as group:
            pairs_of = read(builder, values, tile, group.index)
            with cgutils.for_range(builder, count) as loop:
                pair = builder.add(builder.mul(group.index, count), loop.index)
                line = at(builder, codes, (pair, _line_bytes(code)))
                prefetch(builder, at(builder, line, (values["panel_bytes"], 1)))
                store(builder, pairs_of(line), at(builder, target, (pair, 64)))


def _read_codes(
    code: Code, builder: Any, values: dict[str, Value], tile: int, group: Value
) -> Callable[[Value], Value]:
    return partial(_pairs, builder, code)


def _read_values(
    code: Code, has_zeros: bool, builder: Any, values: dict[str, Value], tile: int, group: Value
) -> Callable[[Value], Value]:
    """Load what a group shares; return what reads the values of the dequantized matrix."""
    scale, shift = (
        load(builder, at(builder, values[name], (group, 64), (values["groups"], 64 * tile)), FLOATS)
        if has
        else None
        for name, has in (("scales", True), ("shifts", has_zeros or code in WITH_OFFSETS))
    )

    def value(line: Value, half: int) -> Value:
        decoded = _DECODED[code](builder, line, half)
        if has_zeros:
            decoded = builder.fsub(decoded, shift)
        decoded = builder.fmul(decoded, scale)
        return builder.fadd(decoded, shift) if code in WITH_OFFSETS else decoded

    return lambda line: rounded_pairs(builder, value(line, 0), value(line, 1))


def _emit_halves(builder: Any, args: Sequence[Value]) -> None:
    halves, target, count = args
    with cgutils.for_range(builder, count) as loop:
        floats = builder.fpext(load(builder, at(builder, halves, (loop.index, 32)), _FP16), FLOATS)
        store(builder, floats, at(builder, target, (loop.index, 64)))


def _emit_blocks(builder: Any, args: Sequence[Value], *, signed: bool) -> None:
    integers, halves, shift, groups, target = args
    with cgutils.for_range(builder, groups) as loop:
        value = load(builder, at(builder, integers, (loop.index, 16)), _BYTES)
        value = builder.sext(value, PAIRS) if signed else builder.zext(value, PAIRS)
        block = builder.lshr(loop.index, shift)
        scale = builder.fpext(load(builder, at(builder, halves, (block, 32)), _FP16), FLOATS)
        product = builder.fmul(builder.sitofp(value, FLOATS), scale)
        store(builder, product, at(builder, target, (loop.index, 64)))


# (halves, target, count): widen 16 `count` fp16 to fp32.
widen_halves = procedure(3, _emit_halves)
# (integers, halves, shift, groups, target): 16 integers of 8 bits of each group times the fp16 of its block
# of 2^shift groups, as fp32.
multiply_signed = procedure(5, lambda builder, args: _emit_blocks(builder, args, signed=True))
multiply_unsigned = procedure(5, lambda builder, args: _emit_blocks(builder, args, signed=False))


def _looked_up(builder: Any, index: Value, table: Sequence[float]) -> Value:
    """Return the entries at the low four bits of an index, with AVX-512."""
    values = ir.Constant(FLOATS, list(table))
    return call(builder, "llvm.x86.avx512.permvar.sf.512", FLOATS, [values, index])


def _looked_up_pairs(builder: Any, line: Value, table: Sequence[float]) -> Value:
    """Return the entries of both nibbles of 16 bytes as pairs of bf16, with AVX-512.

    An index has five bits, of which the fifth may be the other nibble's: the table is repeated.
    """
    both = builder.zext(load(builder, line, _BYTES), PAIRS)
    index = builder.bitcast(builder.or_(both, builder.shl(both, lanes(12, INT32))), _BOTH)
    halves = np.array(table, dtype=np.float32).view(np.uint32) >> 16
    values = ir.Constant(_BOTH, 2 * halves.tolist())
    found = call(builder, "llvm.x86.avx512.permvar.hi.512", _BOTH, [values, index])
    return builder.bitcast(found, PAIRS)


def _has_avx512() -> bool:
    kind = bf16_instructions()
    return kind in (Instructions.AMX, Instructions.AVX512_BF16, Instructions.AVX512)


def _byte_of_columns(builder: Any, line: Value, half: int) -> Value:
    return load(builder, at(builder, line, (half, 16)), _BYTES)


def _nibble(builder: Any, line: Value, half: int, kind: ir.Type, element: ir.Type) -> Value:
    """Return the nibbles of an input in 16 bytes; the first has the second above its four bits."""
    both = builder.zext(load(builder, line, _BYTES), kind)
    return builder.lshr(both, lanes(4, element)) if half else both


def _int8(builder: Any, line: Value, half: int) -> Value:
    return builder.sitofp(builder.sext(_byte_of_columns(builder, line, half), PAIRS), FLOATS)


def _int4(builder: Any, line: Value, half: int) -> Value:
    code = _nibble(builder, line, half, PAIRS, INT32)
    if _has_avx512():
        return _looked_up(builder, code, _TABLES["int4"])
    return builder.sitofp(builder.sub(builder.and_(code, lanes(15, INT32)), lanes(ZERO, INT32)), FLOATS)


def _uint8(builder: Any, line: Value, half: int) -> Value:
    return builder.sitofp(builder.zext(_byte_of_columns(builder, line, half), PAIRS), FLOATS)


def _uint4(builder: Any, line: Value, half: int) -> Value:
    code = _nibble(builder, line, half, PAIRS, INT32)
    if _has_avx512():
        return _looked_up(builder, code, _TABLES["uint4"])
    return builder.sitofp(builder.and_(code, lanes(15, INT32)), FLOATS)


def _with_high_bits(builder: Any, line: Value, half: int, planes: int, zero: int) -> Value:
    """Return an input's codes of 4 + `planes` bits, less `zero`."""
    nibble = _nibble(builder, line, half, PAIRS, INT32)
    if _has_avx512():  # adding fp32 where a bit is set takes one instruction, and integers stay exact
        value = _looked_up(builder, nibble, [float(low - zero) for low in range(16)])
    else:
        value = builder.sub(builder.and_(nibble, lanes(15, INT32)), lanes(zero, INT32))
    for plane in range(planes):
        bits = load(builder, at(builder, line, (1, 16 + 2 * (half * planes + plane))), INT16)
        is_set = builder.bitcast(bits, _MASK)
        if _has_avx512():
            value = builder.select(is_set, builder.fadd(value, lanes(float(16 << plane))), value)
        else:
            value = builder.add(value, builder.shl(builder.zext(is_set, PAIRS), lanes(4 + plane, INT32)))
    return value if _has_avx512() else builder.sitofp(value, FLOATS)


def _int5(builder: Any, line: Value, half: int) -> Value:
    return _with_high_bits(builder, line, half, 1, 16)


def _int6(builder: Any, line: Value, half: int) -> Value:
    return _with_high_bits(builder, line, half, 2, 32)


def _uint5(builder: Any, line: Value, half: int) -> Value:
    return _with_high_bits(builder, line, half, 1, 0)


def _e4m3(builder: Any, line: Value, half: int) -> Value:
    """Move sign, exponent and mantissa to their places in fp16, which has an exponent bias larger by 8."""
    moved = builder.shl(builder.sext(_byte_of_columns(builder, line, half), HALVES), lanes(7, INT16))
    bits = builder.and_(moved, lanes(-0x4080, INT16))
    return builder.fpext(builder.bitcast(bits, _FP16), FLOATS)


def _e2m1(builder: Any, line: Value, half: int) -> Value:
    """Move the parts as `_e4m3` does; the exponent bias of fp16 is larger by 14."""
    if _has_avx512():
        code = _nibble(builder, line, half, PAIRS, INT32)
        return _looked_up(builder, code, _TABLES["e2m1"])
    code = _nibble(builder, line, half, HALVES, INT16)
    size = builder.shl(builder.and_(code, lanes(7, INT16)), lanes(9, INT16))
    sign = builder.shl(builder.and_(code, lanes(8, INT16)), lanes(12, INT16))
    return builder.fpext(builder.bitcast(builder.or_(size, sign), _FP16), FLOATS)


# What 4 bits stand for.
_TABLES: dict[Code, list[float]] = {
    "int4": [float(value - ZERO) for value in range(16)],
    "uint4": [float(value) for value in range(16)],
    "e2m1": [value / FACTORS["e2m1"] for value in GRID],
}
_DECODED: dict[Code, Callable[[Any, Value, int], Value]] = {
    "int8": _int8,
    "int4": _int4,
    "e4m3": _e4m3,
    "e2m1": _e2m1,
    "int5": _int5,
    "int6": _int6,
    "uint4": _uint4,
    "uint5": _uint5,
    "uint8": _uint8,
}
