"""Instructions that Numba has no words for: tiles of bf16, vectors of 16, atomics, calls by address.

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
_FLOAT = ir.FloatType()
_FLOATS, _PAIRS, _HALVES = (ir.VectorType(kind, 16) for kind in (_FLOAT, _INT32, _INT16))
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

        for tile in c_tiles:
            _call(builder, "llvm.x86.tilezero", _VOID, [tile])
        with cgutils.for_range(builder, blocks) as loop:
            for i, tile in enumerate(a_tiles):
                address = _at(builder, a, (loop.index, 64), (a_stride, 16 * i))
                _move_tile(builder, "load", tile, address, a_stride)
            for j in range(columns):
                address = _at(builder, b, (loop.index, TILE_BYTES), (b_stride, j))
                _move_tile(builder, "load", b_tile, address, _int(64))
                for i, tile in enumerate(a_tiles):
                    _call(builder, "llvm.x86.tdpbf16ps", _VOID, [c_tiles[i * columns + j], tile, b_tile])
        for i in range(rows):
            for j in range(columns):
                address = _at(builder, c, (c_stride, 16 * i), (j, 64))
                _move_tile(builder, "store", c_tiles[i * columns + j], address, c_stride)

    return _procedure(7, emit)


def amx_scores() -> Any:
    """S^T [64 keys, 16 queries] fp32 = K Q^T, four blocks of 16 keys at a time.

    The intrinsic takes (blocks, count, offset, stride, queries, scores, steps): addresses of blocks of keys
    (a multiple of 4 of them), what is added to each, bytes from key to key, Q^T as packed for a product,
    K / 32.
    """

    def emit(builder, args):
        blocks, count, offset, stride, queries, scores, steps = args
        tiles = [ir.Constant(_BYTE, i) for i in range(6)]
        with cgutils.for_range(builder, builder.udiv(count, _int(4))) as quad:
            keys = [
                builder.add(offset, _load(builder, _at(builder, blocks, (quad.index, 32), (i, 8)), _INT64))
                for i in range(4)
            ]
            for i in range(4):
                _call(builder, "llvm.x86.tilezero", _VOID, [tiles[i]])
            with cgutils.for_range(builder, steps) as loop:
                _move_tile(
                    builder, "load", tiles[5], _at(builder, queries, (loop.index, TILE_BYTES)), _int(64)
                )
                for i in range(4):
                    _move_tile(builder, "load", tiles[4], _at(builder, keys[i], (loop.index, 64)), stride)
                    _call(builder, "llvm.x86.tdpbf16ps", _VOID, [tiles[i], tiles[4], tiles[5]])
            for i in range(4):
                address = _at(builder, scores, (quad.index, 4 * TILE_BYTES), (i, TILE_BYTES))
                _move_tile(builder, "store", tiles[i], address, _int(64))

    return _procedure(7, emit)


def amx_combination(columns: int) -> Any:
    """O [16, 16 `columns`] fp32 = P V over blocks of 16 keys.

    The intrinsic takes (blocks, count, offset, weights, stride, result, result_stride): addresses of blocks
    of values, what is added to each, P [16, 16 count] bf16 and bytes from row to row. A block holds per 16
    columns 8 pairs of keys, [8, 16, 2].
    """

    def emit(builder, args):
        blocks, count, offset, weights, stride, result, result_stride = args
        tiles = [ir.Constant(_BYTE, i) for i in range(8)]
        for j in range(columns):
            _call(builder, "llvm.x86.tilezero", _VOID, [tiles[j]])
        with cgutils.for_range(builder, count) as loop:
            block = builder.add(offset, _load(builder, _at(builder, blocks, (loop.index, 8)), _INT64))
            _move_tile(builder, "load", tiles[6], _at(builder, weights, (loop.index, 32)), stride)
            for j in range(columns):
                _move_tile(builder, "load", tiles[7], _at(builder, block, (j, TILE_BYTES // 2)), _int(64))
                _call(builder, "llvm.x86.tdpbf16ps", _VOID, [tiles[j], tiles[6], tiles[7]])
        for j in range(columns):
            _move_tile(builder, "store", tiles[j], _at(builder, result, (j, 64)), result_stride)

    return _procedure(7, emit)


def _move_tile(builder: Any, way: str, tile: ir.Constant, address: _Value, stride: _Value) -> None:
    name = {"load": "llvm.x86.tileloadd64", "store": "llvm.x86.tilestored64"}[way]
    _call(builder, name, _VOID, [tile, builder.inttoptr(address, _POINTER), stride])


def avx512_product(rows: int, columns: int) -> Any:
    """As `amx_product` for `rows` single rows (not sixteens), by AVX512_BF16's dot products."""

    def emit(builder, args):
        a, a_stride, b, b_stride, c, c_stride, blocks = args
        sums = _Sums(builder, rows, columns)
        with cgutils.for_range(builder, builder.mul(blocks, _int(16))) as loop:
            pairs = [_at(builder, b, (loop.index, 64), (b_stride, j)) for j in range(columns)]
            sums.add(_at(builder, a, (loop.index, 4)), a_stride, pairs)
        sums.store(c, c_stride)

    return _procedure(7, emit)


def avx512_combination(rows: int, columns: int) -> Any:
    """As `amx_combination` for `rows` rows."""

    def emit(builder, args):
        blocks, count, offset, weights, stride, result, result_stride = args
        sums = _Sums(builder, rows, columns)
        with cgutils.for_range(builder, count) as outer:
            block = builder.add(offset, _load(builder, _at(builder, blocks, (outer.index, 8)), _INT64))
            with cgutils.for_range(builder, _int(8)) as loop:
                pairs = [_at(builder, block, (loop.index, 64), (j, TILE_BYTES // 2)) for j in range(columns)]
                sums.add(_at(builder, weights, (outer.index, 32), (loop.index, 4)), stride, pairs)
        sums.store(result, result_stride)

    return _procedure(7, emit)


class _Sums:
    """[rows, 16 columns] fp32 in registers."""

    def __init__(self, builder: Any, rows: int, columns: int) -> None:
        self._builder, self._rows, self._columns = builder, rows, columns
        self._slots = [cgutils.alloca_once(builder, _FLOATS) for _ in range(rows * columns)]
        for slot in self._slots:
            builder.store(_lanes(0.0), slot)

    def add(self, a: _Value, a_stride: _Value, pairs: Sequence[_Value]) -> None:
        """A pair of each row at `a` times a pair of rows of each 16 columns."""
        builder, kind = self._builder, ir.VectorType(_BFloat(), 32)
        b_vectors = [builder.bitcast(_load(builder, address, _PAIRS), kind) for address in pairs]
        for i in range(self._rows):
            pair = _load(builder, _at(builder, a, (a_stride, i)), _INT32)
            spread = builder.bitcast(_spread(builder, pair), kind)
            for j, vector in enumerate(b_vectors):
                slot = self._slots[i * self._columns + j]
                args = [builder.load(slot), spread, vector]
                builder.store(_call(builder, "llvm.x86.avx512bf16.dpbf16ps.512", _FLOATS, args), slot)

    def store(self, c: _Value, c_stride: _Value) -> None:
        for i in range(self._rows):
            for j in range(self._columns):
                value = self._builder.load(self._slots[i * self._columns + j])
                _store(self._builder, value, _at(self._builder, c, (c_stride, i), (j, 64)))


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
    return builder.shuffle_vector(one, one, _lanes(0, _INT32))


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


def _lanes(value: float | int, kind: ir.Type = _FLOAT) -> ir.Constant:
    """The value in all of 16 lanes."""
    return ir.Constant(ir.VectorType(kind, 16), [value] * 16)


def _widen(builder: Any, address: _Value) -> _Value:
    """16 bf16 as fp32."""
    bits = builder.zext(_load(builder, address, _HALVES), _PAIRS)
    return builder.bitcast(builder.shl(bits, _lanes(16, _INT32)), _FLOATS)


def _round(builder: Any, floats: _Value) -> _Value:
    """16 fp32 as bf16, to nearest even; NaNs stay NaNs."""
    rounded = _call(builder, "llvm.x86.avx512bf16.cvtneps2bf16.512", ir.VectorType(_BFloat(), 16), [floats])
    return builder.bitcast(rounded, _HALVES)


def _float(builder: Any, name: str, *args: _Value) -> _Value:
    return _call(builder, f"llvm.{name}.v16f32", _FLOATS, args)


def _exp2(builder: Any, x: _Value) -> _Value:
    """2^x to an ulp or two; 0 of -inf: x = n + f with |f| <= 1/2, and Cephes' polynomial for 2^f."""
    n = _float(builder, "roundeven", x)
    f = builder.fsub(x, n)
    y = _lanes(1.535336188319500e-4)
    for factor in (
        1.339887440266574e-3,
        9.618437357674640e-3,
        5.550332471162809e-2,
        2.402264791363012e-1,
        6.931472028550421e-1,
        1.0,
    ):
        y = _float(builder, "fma", y, f, _lanes(factor))
    mask, exact = ir.Constant(_INT16, -1), ir.Constant(_INT32, 4)  # all lanes, rounding as usual
    args = [y, n, _lanes(0.0), mask, exact]
    return _call(builder, "llvm.x86.avx512.mask.scalef.ps.512", _FLOATS, args)


def _emit_finish(builder, args, *, adds: bool):
    sums, residual, target = args if adds else (args[0], None, args[1])
    for half in (0, 1):
        value = _load(builder, _at(builder, sums, (half, 64)), _FLOATS)
        if residual is not None:
            value = builder.fadd(value, _widen(builder, _at(builder, residual, (half, 32))))
        _store(builder, _round(builder, value), _at(builder, target, (half, 32)))


def _emit_gate(builder, args):
    sums, target = args
    gate, up = (_load(builder, _at(builder, sums, (half, 64)), _FLOATS) for half in (0, 1))
    # Below -80 silu is as good as 0, and e^80 is finite.
    gate = builder.select(builder.fcmp_ordered("<", gate, _lanes(-80.0)), _lanes(-80.0), gate)
    power = builder.fmul(gate, _lanes(-1.4426950408889634))
    silu = builder.fmul(gate, _reciprocal(builder, builder.fadd(_exp2(builder, power), _lanes(1.0))))
    _store(builder, _round(builder, builder.fmul(silu, up)), target)


def _reciprocal(builder: Any, x: _Value) -> _Value:
    """1 / x of 1 <= x < 2^126 to an ulp: 14 bits of it, and Newton's step."""
    args = [x, _lanes(0.0), ir.Constant(_INT16, -1)]
    y = _call(builder, "llvm.x86.avx512.rcp14.ps.512", _FLOATS, args)
    rest = _float(builder, "fma", builder.fneg(x), y, _lanes(1.0))
    return _float(builder, "fma", y, rest, y)


def _inverse_rms(builder: Any, x: _Value, count: _Value, eps: _Value) -> _Value:
    """1 / sqrt(mean of squares + eps) of 16 `count` bf16, in all lanes; `eps` is the address of an fp32."""
    total = cgutils.alloca_once(builder, _FLOATS)
    builder.store(_lanes(0.0), total)
    with cgutils.for_range(builder, count) as loop:
        value = _widen(builder, _at(builder, x, (loop.index, 32)))
        builder.store(_float(builder, "fma", value, value, builder.load(total)), total)
    spread = builder.load(total)
    for step in (8, 4, 2, 1):
        order = ir.Constant(_PAIRS, [e ^ step for e in range(16)])
        spread = builder.fadd(spread, builder.shuffle_vector(spread, spread, order))
    width = builder.uitofp(builder.mul(count, _int(16)), ir.FloatType())
    mean = builder.fdiv(builder.extract_element(spread, ir.Constant(_INT32, 0)), width)
    mean = builder.fadd(mean, _load(builder, eps, ir.FloatType()))
    root = _call(builder, "llvm.sqrt.f32", ir.FloatType(), [mean])
    inverse = builder.bitcast(builder.fdiv(ir.Constant(ir.FloatType(), 1.0), root), _INT32)
    return builder.bitcast(_spread(builder, inverse), _FLOATS)


def _emit_norm(builder, args):
    x, weight, target, count, eps = args
    scale = _inverse_rms(builder, x, count, eps)
    with cgutils.for_range(builder, count) as loop:
        at = (loop.index, 32)
        value = builder.fmul(_widen(builder, _at(builder, x, at)), scale)
        value = builder.fmul(value, _widen(builder, _at(builder, weight, at)))
        _store(builder, _round(builder, value), _at(builder, target, at))


def _emit_rotate(builder, args, *, norms: bool):
    x, weight, cos, sin, half, eps = args
    scale = _inverse_rms(builder, x, builder.mul(half, _int(2)), eps) if norms else None
    with cgutils.for_range(builder, half) as loop:
        places = [[(loop.index, 32)], [(loop.index, 32), (half, 32)]]
        first, second = (_widen(builder, _at(builder, x, *place)) for place in places)
        if scale is not None:
            weights = [_widen(builder, _at(builder, weight, *place)) for place in places]
            first, second = (
                builder.fmul(builder.fmul(value, scale), factor)
                for value, factor in zip((first, second), weights, strict=True)
            )
        for value, other, place in ((first, second, places[0]), (second, first, places[1])):
            swapped = builder.fmul(other, _widen(builder, _at(builder, sin, *place)))
            turned = _float(builder, "fma", value, _widen(builder, _at(builder, cos, *place)), swapped)
            _store(builder, _round(builder, turned), _at(builder, x, *place))


def _argmax(widen: Callable[[Any, _Value, _Value], _Value]) -> Any:
    """An intrinsic (row, count): the first of the largest of 16 `count` elements; NaNs are passed over.

    Args:
        widen: 16 elements as fp32, of (builder, row, which sixteen).
    """

    def generate(context, builder, signature, args):
        row, count = args
        steps = ir.Constant(_PAIRS, list(range(16)))
        best, where = (cgutils.alloca_once(builder, kind) for kind in (_FLOATS, _PAIRS))
        builder.store(_lanes(float("-inf")), best)
        builder.store(steps, where)
        with cgutils.for_range(builder, count) as loop:
            value = widen(builder, row, loop.index)
            greater = builder.fcmp_ordered(">", value, builder.load(best))
            begin = _spread(builder, builder.trunc(builder.mul(loop.index, _int(16)), _INT32))
            at = builder.add(begin, steps)
            builder.store(builder.select(greater, value, builder.load(best)), best)
            builder.store(builder.select(greater, at, builder.load(where)), where)
        value, at = builder.load(best), builder.load(where)
        for step in (8, 4, 2, 1):
            order = ir.Constant(_PAIRS, [e ^ step for e in range(16)])
            other, other_at = (builder.shuffle_vector(x, x, order) for x in (value, at))
            equal = builder.fcmp_ordered("==", other, value)
            earlier = builder.and_(equal, builder.icmp_signed("<", other_at, at))
            take = builder.or_(builder.fcmp_ordered(">", other, value), earlier)
            value, at = builder.select(take, other, value), builder.select(take, other_at, at)
        return builder.zext(builder.extract_element(at, ir.Constant(_INT32, 0)), _INT64)

    def typed(typing, row, count):
        return types.int64(types.int64, types.int64), generate

    return intrinsic(typed)


def _emit_soften(builder, args):
    """See `soften`."""
    scores, count, low, high, scale, totals = args
    low, high = (_load(builder, address, _PAIRS) for address in (low, high))
    scale = builder.bitcast(_spread(builder, _load(builder, scale, _INT32)), _FLOATS)
    steps = 4  # chains of maxima and sums side by side
    tops = [cgutils.alloca_once_value(builder, _lanes(float("-inf"))) for _ in range(steps)]
    sums = [cgutils.alloca_once_value(builder, _lanes(0.0)) for _ in range(steps)]
    for slot in (*tops, *sums):
        builder.store(_lanes(float("-inf") if slot in tops else 0.0), slot)
    with cgutils.for_range(builder, builder.udiv(count, _int(steps))) as loop:
        for i in range(steps):
            t = builder.add(builder.mul(loop.index, _int(steps)), _int(i))
            address = _at(builder, scores, (t, 64))
            at = _spread(builder, builder.trunc(t, _INT32))
            seen = builder.and_(builder.icmp_signed("<=", low, at), builder.icmp_signed("<", at, high))
            score = builder.select(seen, _load(builder, address, _FLOATS), _lanes(float("-inf")))
            _store(builder, score, address)
            greater = builder.fcmp_ordered(">", score, builder.load(tops[i]))
            builder.store(builder.select(greater, score, builder.load(tops[i])), tops[i])
    top = builder.load(tops[0])
    for slot in tops[1:]:
        other = builder.load(slot)
        top = builder.select(builder.fcmp_ordered(">", other, top), other, top)
    with cgutils.for_range(builder, builder.udiv(count, _int(steps))) as loop:
        for i in range(steps):
            address = _at(builder, scores, (loop.index, 64 * steps), (i, 64))
            power = builder.fmul(builder.fsub(_load(builder, address, _FLOATS), top), scale)
            weight = _exp2(builder, power)
            _store(builder, weight, address)
            builder.store(builder.fadd(builder.load(sums[i]), weight), sums[i])
    total = builder.load(sums[0])
    for slot in sums[1:]:
        total = builder.fadd(total, builder.load(slot))
    _store(builder, total, totals)


def _emit_scale(builder, args):
    """See `scale_rounded`."""
    sums, total, target, count = args
    factor = builder.fdiv(
        _lanes(1.0), builder.bitcast(_spread(builder, _load(builder, total, _INT32)), _FLOATS)
    )
    with cgutils.for_range(builder, count) as loop:
        value = builder.fmul(_load(builder, _at(builder, sums, (loop.index, 64)), _FLOATS), factor)
        _store(builder, _round(builder, value), _at(builder, target, (loop.index, 32)))


def _emit_transpose(builder, args):
    source, stride, target = args
    for i, row in enumerate(_transposed(builder, source, stride)):
        _store(builder, row, _at(builder, target, (i, 64)))


def _emit_transpose_rounded(builder, args):
    source, target, stride = args
    for i, row in enumerate(_transposed(builder, source, _int(64))):
        _store(builder, _round(builder, builder.bitcast(row, _FLOATS)), _at(builder, target, (stride, i)))


def _emit_copy(builder, args):
    source, target, count = args
    with cgutils.for_range(builder, count) as loop:
        line = _load(builder, _at(builder, source, (loop.index, 64)), _PAIRS)
        _store(builder, line, _at(builder, target, (loop.index, 64)))


# (source, target, count): times 64 bytes.
copy_lines = _procedure(3, _emit_copy)
# (sums, target): 32 fp32, rounded to bf16.
finish = _procedure(2, lambda builder, args: _emit_finish(builder, args, adds=False))
# (sums, residual, target): the same of 32 fp32 + 32 bf16.
finish_added = _procedure(3, lambda builder, args: _emit_finish(builder, args, adds=True))
# (sums, target): of 16 fp32 of gate, 16 of up: silu(gate) * up, rounded.
finish_gated = _procedure(2, _emit_gate)
# (x, weight, target, count, eps): RMSNorm of 16 `count` bf16; `eps` is the address of an fp32.
norm = _procedure(5, _emit_norm)
# (x, weight, cos, sin, half, eps): RMSNorm of 32 `half` bf16, and their rotation (`layers.RotaryEmbedding`),
# in place; `rotate` does without the norm.
norm_rotate = _procedure(6, lambda builder, args: _emit_rotate(builder, args, norms=True))
rotate = _procedure(6, lambda builder, args: _emit_rotate(builder, args, norms=False))
# (row, count): index of the largest of 16 `count` bf16, or fp32.
argmax_bf16 = _argmax(lambda builder, row, i: _widen(builder, _at(builder, row, (i, 32))))
argmax_fp32 = _argmax(lambda builder, row, i: _load(builder, _at(builder, row, (i, 64)), _FLOATS))
# (scores, count, low, high, scale, totals): of `count` rows (a multiple of 4) of 16 fp32 lanes, in place,
# 2^(scale * (s - the lane's maximum)) where low <= row < high, int32 per lane, else 0; and sums per lane.
soften = _procedure(6, _emit_soften)
# (sums, total, target, count): count * 16 fp32 divided by the one at `total`, rounded to bf16.
scale_rounded = _procedure(4, _emit_scale)
# (source, source_stride, target): 16 x 16 elements of 4 bytes, target rows of 64 bytes.
transpose = _procedure(3, _emit_transpose)
# (source, target, target_stride): 16 x 16 fp32 in rows of 64 bytes -> bf16.
transpose_rounded = _procedure(3, _emit_transpose_rounded)
# (address of 64 bytes that describe the tiles)
configure_tiles = _procedure(
    1, lambda b, args: _call(b, "llvm.x86.ldtilecfg", _VOID, [b.inttoptr(args[0], _POINTER)])
)
release_tiles = _procedure(0, lambda b, args: _call(b, "llvm.x86.tilerelease", _VOID, []))
# A breath in a loop that waits for another thread.
pause = _procedure(0, lambda b, args: _call(b, "llvm.x86.sse2.pause", _VOID, []))


def stack_memory(num_bytes: int) -> Any:
    """An intrinsic: the address of so many bytes, a multiple of 64, that live as long as the function's call.

    An array's address does not keep the array: Numba frees it behind its last mention.
    """

    def generate(context, builder, signature, args):
        memory = cgutils.alloca_once(builder, ir.ArrayType(_BYTE, num_bytes))
        memory.align = 64
        return builder.ptrtoint(memory, _INT64)

    def typed(typing):
        return types.int64(), generate

    return intrinsic(typed)


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
