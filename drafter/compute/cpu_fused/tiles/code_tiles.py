"""Products of rows with weights of 8 and 4 bits, decoded in vector registers.

A decoded value is the matrix's in bf16 (`checkpoint/quantized_matrix.py`): code times scale, plus offset if
any, in fp32, rounded to bf16 where that product need not be exact. Sums are chains over the inputs in order,
as of bf16 weights (`simd_tiles.py`), so a product has the bits of one with the dequantized matrix.

    codes, per 16 columns:    8 bits: [K, 16]         4 bits: [K / 2, 16], the earlier input in the low nibble
                              5 and 6 bits: [K / 2, 20 or 24], four bits as above, then of each input 16 bits
                              of its columns for the fifth bit, and 16 for the sixth
    scales, and zeros or offsets, expanded:     fp32 [tiles of 16 columns, G, 16]

Each kind of code is compiled on its own when a model first needs it (`packed_weight.py`). Two operations:
multiplying a few rows, and expanding tiles to bf16 for many rows or for AMX.

Legend: K inputs, G groups of inputs with a scale.
"""

# The signatures of intrinsics are Numba's, not Python's.
# pyright: reportReturnType=false, reportArgumentType=false

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

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
    INT64,
    PAIRS,
    VOID,
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
from .simd_tiles import FloatTile, PairTile, prefetch_lines, switch_tiles, tiles_of
from .simd_vectors import rounded_lanes, rounded_pairs

# Arguments of both operations, as int64 in this order; `target` of expanded tiles alone.
CODE_ARGUMENTS = (
    "a chunk_bytes codes tile_bytes panel_bytes scales shifts pairs groups sums rows panels target"
)
MULTIPLY, EXPAND = 0, 1
# Factors by which decoded codes are too small; scales are multiplied by them when they are expanded.
FACTORS: Mapping[Code, float] = {"e4m3": 2.0**8, "e2m1": 2.0**14}
Emit = Callable[[Any, Sequence[Value]], None]  # of a builder and its arguments
_BYTES = ir.VectorType(BYTE, 16)
_FP16 = ir.VectorType(ir.HalfType(), 16)
_MASK = ir.VectorType(ir.IntType(1), 16)
_UPPER_HALF = -65536


def code_product(code: Code, *, has_zeros: bool = False, rounds: bool = True) -> Any:
    """Return an intrinsic of (address of CODE_ARGUMENTS, MULTIPLY or EXPAND)."""
    return procedure(2, emit_product(code, has_zeros=has_zeros, rounds=rounds))


def emit_product(code: Code, *, has_zeros: bool = False, rounds: bool = True) -> Emit:
    decoder = _Decoder(code, has_zeros=has_zeros, rounds=rounds)

    def emit(builder: Any, args: Sequence[Value]) -> None:
        with builder.if_else(builder.icmp_signed("==", args[1], integer(MULTIPLY))) as (multiply, expand):
            with multiply:
                _multiply(builder, args[0], decoder)
            with expand:
                _expand(builder, _values(builder, args[0]), decoder)

    return emit


def _values(builder: Any, arguments: Value) -> dict[str, Value]:
    names = CODE_ARGUMENTS.split()
    return {name: load(builder, at(builder, arguments, (i, 8)), INT64) for i, name in enumerate(names)}


class _Decoder:
    """Emits the values of pairs of inputs; those of a group share scales, and zeros or offsets."""

    def __init__(self, code: Code, *, has_zeros: bool, rounds: bool) -> None:
        self.code, self._has_zeros, self._rounds = code, has_zeros, rounds
        self._has_offsets = code in WITH_OFFSETS
        self.line_bytes = 4 * BITS[code]  # of a pair of inputs of 16 columns

    def shared(self, builder: Any, values: dict[str, Value], tile: int, group: Value) -> list[Value]:
        """Load what a group's values of a tile share, per column."""
        has_shifts = self._has_zeros or self._has_offsets
        addresses = [values["scales"], *([values["shifts"]] if has_shifts else [])]
        return [
            load(builder, at(builder, address, (group, 64), (values["groups"], 64 * tile)), FLOATS)
            for address in addresses
        ]

    def value(self, builder: Any, line: Value, half: int, shared: Sequence[Value], *, rounded: bool) -> Value:
        """Return the values of 16 columns, fp32, of the first (0) or second (1) of a pair of inputs.

        Unless `rounded`, the caller rounds them to bf16.
        """
        value = _DECODED[self.code](builder, line, half)
        if self._has_zeros:
            value = builder.fsub(value, shared[1])
        value = builder.fmul(value, shared[0])
        if self._has_offsets:
            value = builder.fadd(value, shared[1])
        return _as_bf16(builder, value) if rounded and self._rounds else value


def _multiply(builder: Any, arguments: Value, decoder: _Decoder) -> None:
    """Sum up to `most_rows` packed rows times panels, as `simd_tiles.multiply_rows`.

    Each shape of tiles is a function of its own: LLVM allocates registers badly in one that has all.
    """

    def emit(rows: int, panels: int) -> None:
        kind = ir.FunctionType(VOID, [INT64])
        name = builder.module.get_unique_name(f"multiply_{decoder.code}_{rows}_{panels}")
        function = ir.Function(builder.module, kind, name)
        function.linkage = "internal"
        function.attributes.add("noinline")
        function.attributes.add("nounwind")
        own_builder = ir.IRBuilder(function.append_basic_block())
        values = _values(own_builder, function.args[0])
        for tile, columns in tiles_of(own_builder, rows, panels):
            _sum_tile(own_builder, values, decoder, tile, columns)
        own_builder.ret_void()
        builder.call(function, [arguments])

    values = _values(builder, arguments)
    switch_tiles(builder, values["rows"], values["panels"], emit)


def _sum_tile(
    builder: Any,
    values: dict[str, Value],
    decoder: _Decoder,
    tile: FloatTile | PairTile,
    columns: Sequence[int],
) -> None:
    with _groups(builder, values) as (group, first, count):
        shared = [decoder.shared(builder, values, j, group) for j in columns]
        with cgutils.for_range(builder, count) as loop:
            pair = builder.add(first, loop.index)
            line = at(builder, values["codes"], (pair, decoder.line_bytes))
            lines = [
                at(builder, line, (values["panel_bytes"], j // 2), (values["tile_bytes"], j % 2))
                for j in columns
            ]
            prefetch_lines(builder, lines)
            tile.add(
                tile.input_address(values["a"], values["chunk_bytes"], pair),
                lambda half: [
                    decoder.value(builder, line, half, of_tile, rounded=not tile.rounds_weights)
                    for line, of_tile in zip(lines, shared, strict=True)
                ],
            )
    tile.store_sums(values["sums"], columns)


def _expand(builder: Any, values: dict[str, Value], decoder: _Decoder) -> None:
    """Store a panel's weights as two tiles of bf16 at `target`.

    The thread's next panel is prefetched, because memory would be idle while expanded tiles are multiplied.
    """
    for tile in (0, 1):
        codes = at(builder, values["codes"], (values["tile_bytes"], tile))
        target = at(builder, values["target"], (values["pairs"], 64 * tile))
        with _groups(builder, values) as (group, first, count):
            shared = decoder.shared(builder, values, tile, group)
            with cgutils.for_range(builder, count) as loop:
                pair = builder.add(first, loop.index)
                line = at(builder, codes, (pair, decoder.line_bytes))
                prefetch(builder, at(builder, line, (values["panel_bytes"], 1)))
                both = [decoder.value(builder, line, half, shared, rounded=False) for half in (0, 1)]
                store(builder, rounded_pairs(builder, *both), at(builder, target, (pair, 64)))


@contextmanager
def _groups(builder: Any, values: dict[str, Value]) -> Iterator[tuple[Value, Value, Value]]:
    """Emit a loop over groups: its number, first pair of inputs, and number of pairs."""
    count = builder.udiv(values["pairs"], values["groups"])
    with cgutils.for_range(builder, values["groups"]) as loop:
        yield loop.index, builder.mul(loop.index, count), count


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


def _as_bf16(builder: Any, value: Value) -> Value:
    """Round finite fp32 to bf16, to nearest even, and widen again."""
    if bf16_instructions() in (Instructions.AMX, Instructions.AVX512_BF16):
        bits = builder.zext(rounded_lanes(builder, value), PAIRS)
        return builder.bitcast(builder.shl(bits, lanes(16, INT32)), FLOATS)
    bits = builder.bitcast(value, PAIRS)
    odd = builder.and_(builder.lshr(bits, lanes(16, INT32)), lanes(1, INT32))
    nearest = builder.add(builder.add(bits, odd), lanes(0x7FFF, INT32))
    return builder.bitcast(builder.and_(nearest, lanes(_UPPER_HALF, INT32)), FLOATS)


def _looked_up(builder: Any, index: Value, table: Sequence[float]) -> Value:
    """Return the entries at the low four bits of an index, with AVX-512."""
    values = ir.Constant(FLOATS, list(table))
    return call(builder, "llvm.x86.avx512.permvar.sf.512", FLOATS, [values, index])


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
        return _looked_up(builder, code, [float(value - ZERO) for value in range(16)])
    return builder.sitofp(builder.sub(builder.and_(code, lanes(15, INT32)), lanes(ZERO, INT32)), FLOATS)


def _uint8(builder: Any, line: Value, half: int) -> Value:
    return builder.sitofp(builder.zext(_byte_of_columns(builder, line, half), PAIRS), FLOATS)


def _uint4(builder: Any, line: Value, half: int) -> Value:
    code = _nibble(builder, line, half, PAIRS, INT32)
    if _has_avx512():
        return _looked_up(builder, code, list(range(16)))
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
        return _looked_up(builder, code, [value * 2.0**-14 for value in GRID])
    code = _nibble(builder, line, half, HALVES, INT16)
    size = builder.shl(builder.and_(code, lanes(7, INT16)), lanes(9, INT16))
    sign = builder.shl(builder.and_(code, lanes(8, INT16)), lanes(12, INT16))
    return builder.fpext(builder.bitcast(builder.or_(size, sign), _FP16), FLOATS)


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
