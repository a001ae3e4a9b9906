"""Vector code of sixteen lanes that LLVM's vectorizer does not find: epilogues, norms, rotation, softmax.

Uses AVX-512 intrinsics where they help and the CPU has them.
"""

# The signatures of intrinsics are Numba's, not Python's.
# pyright: reportReturnType=false, reportArgumentType=false

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from typing import Any

from llvmlite import ir
from numba.core import cgutils

from ...cpu_numba.cpu_features import Instructions, bf16_instructions
from ...cpu_numba.llvm_intrinsics import (
    FLOATS,
    HALVES,
    INT16,
    INT32,
    INT64,
    PAIRS,
    BFloat,
    Value,
    at,
    call,
    integer,
    lanes,
    load,
    procedure,
    spread,
    store,
    widen,
    widened,
)


def _transposed(builder: Any, source: Value, stride: Value) -> list[Value]:
    """Return 16 rows of 16 int32 transposed, by exchanging halves, quarters, eighths, single elements."""
    rows = [load(builder, at(builder, source, (stride, i)), PAIRS) for i in range(16)]
    for step in (8, 4, 2, 1):
        low = [e if e & step == 0 else 16 + (e ^ step) for e in range(16)]
        high = [e ^ step if e & step == 0 else 16 + e for e in range(16)]
        traded = list(rows)
        for i in range(16):
            if i & step == 0:
                pair = rows[i], rows[i | step]
                traded[i] = builder.shuffle_vector(*pair, ir.Constant(PAIRS, low))
                traded[i | step] = builder.shuffle_vector(*pair, ir.Constant(PAIRS, high))
        rows = traded
    return rows


def rounded_lanes(builder: Any, floats: Value) -> Value:
    """Round 16 fp32 to bf16, to nearest even; NaNs stay NaNs."""
    if bf16_instructions() not in (Instructions.AMX, Instructions.AVX512_BF16):
        return _round_bits(builder, floats)
    rounded = call(builder, "llvm.x86.avx512bf16.cvtneps2bf16.512", ir.VectorType(BFloat(), 16), [floats])
    return builder.bitcast(rounded, HALVES)


def rounded_pairs(builder: Any, evens: Value, odds: Value) -> Value:
    """Return 16 pairs of bf16 as int32, the even one in the lower half; each is rounded to nearest even."""
    if bf16_instructions() in (Instructions.AMX, Instructions.AVX512_BF16):
        name, kind = "llvm.x86.avx512bf16.cvtne2ps2bf16.512", ir.VectorType(BFloat(), 32)
        both = builder.bitcast(call(builder, name, kind, [odds, evens]), ir.VectorType(INT16, 32))
        order = ir.Constant(ir.VectorType(INT32, 32), [e // 2 + 16 * (e % 2) for e in range(32)])
        return builder.bitcast(builder.shuffle_vector(both, both, order), PAIRS)
    low, high = (builder.zext(rounded_lanes(builder, floats), PAIRS) for floats in (evens, odds))
    return builder.or_(low, builder.shl(high, lanes(16, INT32)))


def _round_bits(builder: Any, floats: Value) -> Value:
    bits = builder.bitcast(floats, PAIRS)
    odd = builder.and_(builder.lshr(bits, lanes(16, INT32)), lanes(1, INT32))
    nearest = builder.lshr(builder.add(builder.add(bits, odd), lanes(0x7FFF, INT32)), lanes(16, INT32))
    is_nan = builder.fcmp_unordered("uno", floats, floats)
    return builder.trunc(builder.select(is_nan, lanes(0x7FC0, INT32), nearest), HALVES)


def _has_avx512() -> bool:
    kind = bf16_instructions()
    return kind in (Instructions.AMX, Instructions.AVX512_BF16, Instructions.AVX512)


def _float(builder: Any, name: str, *args: Value) -> Value:
    return call(builder, f"llvm.{name}.v16f32", FLOATS, args)


def _exp2(builder: Any, x: Value) -> Value:
    """Return 2^x to an ulp or two, 0 for -inf: x = n + f with |f| <= 1/2, and Cephes' polynomial for 2^f."""
    n = _float(builder, "roundeven", x)
    f = builder.fsub(x, n)
    y = lanes(1.535336188319500e-4)
    for factor in (
        1.339887440266574e-3,
        9.618437357674640e-3,
        5.550332471162809e-2,
        2.402264791363012e-1,
        6.931472028550421e-1,
        1.0,
    ):
        y = _float(builder, "fma", y, f, lanes(factor))
    if not _has_avx512():
        return _times_power(builder, y, n)
    mask, exact = ir.Constant(INT16, -1), ir.Constant(INT32, 4)  # all lanes, current rounding mode
    args = [y, n, lanes(0.0), mask, exact]
    return call(builder, "llvm.x86.avx512.mask.scalef.ps.512", FLOATS, args)


def _times_power(builder: Any, y: Value, n: Value) -> Value:
    """Return y 2^n for 1/2 < y < 2 and an integer n up to 127; 0 if the result would be below 2^-125."""
    normal = builder.fcmp_ordered(">", n, lanes(-126.0))
    n = builder.select(normal, n, lanes(0.0))  # also for -inf
    power = builder.shl(builder.add(builder.fptosi(n, PAIRS), lanes(127, INT32)), lanes(23, INT32))
    return builder.select(normal, builder.fmul(y, builder.bitcast(power, FLOATS)), lanes(0.0))


def _emit_finish(builder, args, *, adds: bool):
    """Emit `finish`, or with `adds` `finish_added`, in halves of 16: 64 bytes of fp32, 32 of bf16."""
    sums, residual, target = args if adds else (args[0], None, args[1])
    for half in (0, 1):
        value = load(builder, at(builder, sums, (half, 64)), FLOATS)
        if residual is not None:
            value = builder.fadd(value, widen(builder, at(builder, residual, (half, 32))))
        store(builder, rounded_lanes(builder, value), at(builder, target, (half, 32)))


def _emit_gate(builder, args, activate: Callable[[Any, Value], Value]):
    sums, target = args
    gate, up = (load(builder, at(builder, sums, (half, 64)), FLOATS) for half in (0, 1))
    store(builder, rounded_lanes(builder, builder.fmul(activate(builder, gate), up)), target)


def _silu(builder: Any, x: Value) -> Value:
    x = _at_least(builder, x, -80.0)  # below, it is 0 in fp32's precision, and e^80 is finite
    return builder.fmul(x, _sigmoid(builder, x))


def _gelu_tanh(builder: Any, x: Value) -> Value:
    """Return x (1 + tanh(u)) / 2 = x sigmoid(2 u), where u = sqrt(2 / pi) (x + 0.044715 x^3)."""
    x = _at_least(builder, x, -9.0)  # below, it is 0 in fp32's precision, and e^(-2 u) is finite
    cube = builder.fmul(builder.fmul(x, x), builder.fmul(x, lanes(0.044715)))
    return builder.fmul(x, _sigmoid(builder, builder.fmul(builder.fadd(x, cube), lanes(1.5957691216057308))))


def _at_least(builder: Any, x: Value, bound: float) -> Value:
    return builder.select(builder.fcmp_ordered("<", x, lanes(bound)), lanes(bound), x)


def _sigmoid(builder: Any, x: Value) -> Value:
    """Return 1 / (1 + e^-x) of x >= -80."""
    power = builder.fmul(x, lanes(-1.4426950408889634))
    return _reciprocal(builder, builder.fadd(_exp2(builder, power), lanes(1.0)))


def _reciprocal(builder: Any, x: Value) -> Value:
    """Return 1 / x of 1 <= x < 2^126 to an ulp: a 14-bit estimate and a Newton step."""
    if not _has_avx512():
        return builder.fdiv(lanes(1.0), x)
    args = [x, lanes(0.0), ir.Constant(INT16, -1)]
    y = call(builder, "llvm.x86.avx512.rcp14.ps.512", FLOATS, args)
    rest = _float(builder, "fma", builder.fneg(x), y, lanes(1.0))
    return _float(builder, "fma", y, rest, y)


def _inverse_rms(builder: Any, x: Value, count: Value, eps: Value) -> Value:
    """Return 1 / sqrt(mean of squares + eps) of 16 `count` bf16, in all lanes; `eps` is an address."""
    total = cgutils.alloca_once(builder, FLOATS)
    builder.store(lanes(0.0), total)
    with cgutils.for_range(builder, count) as loop:
        value = widen(builder, at(builder, x, (loop.index, 32)))
        builder.store(_float(builder, "fma", value, value, builder.load(total)), total)
    folded = builder.load(total)
    for step in (8, 4, 2, 1):
        order = ir.Constant(PAIRS, [e ^ step for e in range(16)])
        folded = builder.fadd(folded, builder.shuffle_vector(folded, folded, order))
    width = builder.uitofp(builder.mul(count, integer(16)), ir.FloatType())
    mean = builder.fdiv(builder.extract_element(folded, ir.Constant(INT32, 0)), width)
    mean = builder.fadd(mean, load(builder, eps, ir.FloatType()))
    root = call(builder, "llvm.sqrt.f32", ir.FloatType(), [mean])
    inverse = builder.bitcast(builder.fdiv(ir.Constant(ir.FloatType(), 1.0), root), INT32)
    return builder.bitcast(spread(builder, inverse), FLOATS)


def _emit_norm(builder, args, *, adds: bool):
    x, weight, target, count, eps = args
    scale = _inverse_rms(builder, x, count, eps)
    with cgutils.for_range(builder, count) as loop:
        place = (loop.index, 32)
        value = builder.fmul(widen(builder, at(builder, x, place)), scale)
        value = builder.fmul(value, load(builder, at(builder, weight, (loop.index, 64)), FLOATS))
        value = rounded_lanes(builder, value)
        if adds:
            sums = builder.fadd(widened(builder, value), widen(builder, at(builder, target, place)))
            value = rounded_lanes(builder, sums)
        store(builder, value, at(builder, target, place))


def _emit_rotate(builder, args, *, norms: bool):
    x, weight, cos, sin, half, eps = args
    scale = _inverse_rms(builder, x, builder.mul(half, integer(2)), eps) if norms else None
    with cgutils.for_range(builder, half) as loop:
        places = [[(loop.index, 32)], [(loop.index, 32), (half, 32)]]
        first, second = (widen(builder, at(builder, x, *place)) for place in places)
        if scale is not None:
            weight_places = [[(loop.index, 64)], [(loop.index, 64), (half, 64)]]
            weights = [load(builder, at(builder, weight, *place), FLOATS) for place in weight_places]
            first, second = (
                builder.fmul(builder.fmul(value, scale), factor)
                for value, factor in zip((first, second), weights, strict=True)
            )
        for value, other, place in ((first, second, places[0]), (second, first, places[1])):
            swapped = builder.fmul(other, widen(builder, at(builder, sin, *place)))
            turned = _float(builder, "fma", value, widen(builder, at(builder, cos, *place)), swapped)
            store(builder, rounded_lanes(builder, turned), at(builder, x, *place))


def _emit_soften(builder, args):
    """Emit `soften`: one pass masks the scores and finds the maxima, another makes weights and sums."""
    scores, count, low, high, scale, totals = args
    low, high = (load(builder, address, PAIRS) for address in (low, high))
    scale = builder.bitcast(spread(builder, load(builder, scale, INT32)), FLOATS)
    steps = 4  # independent chains of maxima and sums
    tops = [cgutils.alloca_once_value(builder, lanes(float("-inf"))) for _ in range(steps)]
    sums = [cgutils.alloca_once_value(builder, lanes(0.0)) for _ in range(steps)]
    for slot in (*tops, *sums):
        builder.store(lanes(float("-inf") if slot in tops else 0.0), slot)
    with cgutils.for_range(builder, builder.udiv(count, integer(steps))) as loop:
        for i in range(steps):
            t = builder.add(builder.mul(loop.index, integer(steps)), integer(i))
            address = at(builder, scores, (t, 64))
            row = spread(builder, builder.trunc(t, INT32))
            seen = builder.and_(builder.icmp_signed("<=", low, row), builder.icmp_signed("<", row, high))
            score = builder.select(seen, load(builder, address, FLOATS), lanes(float("-inf")))
            store(builder, score, address)
            greater = builder.fcmp_ordered(">", score, builder.load(tops[i]))
            builder.store(builder.select(greater, score, builder.load(tops[i])), tops[i])
    top = builder.load(tops[0])
    for slot in tops[1:]:
        other = builder.load(slot)
        top = builder.select(builder.fcmp_ordered(">", other, top), other, top)
    with cgutils.for_range(builder, builder.udiv(count, integer(steps))) as loop:
        for i in range(steps):
            address = at(builder, scores, (loop.index, 64 * steps), (i, 64))
            power = builder.fmul(builder.fsub(load(builder, address, FLOATS), top), scale)
            weight = _exp2(builder, power)
            store(builder, weight, address)
            builder.store(builder.fadd(builder.load(sums[i]), weight), sums[i])
    total = builder.load(sums[0])
    for slot in sums[1:]:
        total = builder.fadd(total, builder.load(slot))
    store(builder, total, totals)


def _emit_soften_row(builder, args):
    """Emit `soften_row`: one pass masks the scores and finds the maximum, another makes weights."""
    scores, chunk_bytes, chunks, low, high, scale, totals = args
    low, high = (spread(builder, builder.trunc(bound, INT32)) for bound in (low, high))
    scale = builder.bitcast(spread(builder, load(builder, scale, INT32)), FLOATS)
    steps = 4  # groups of 16 of a chunk, independent
    tops, sums = ([cgutils.alloca_once(builder, FLOATS) for _ in range(steps)] for _ in range(2))
    for slot in (*tops, *sums):
        builder.store(lanes(float("-inf") if slot in tops else 0.0), slot)
    numbers = ir.Constant(PAIRS, list(range(16)))
    with cgutils.for_range(builder, chunks) as loop:
        line = builder.add(scores, builder.mul(loop.index, chunk_bytes))
        first = builder.trunc(builder.mul(loop.index, integer(16 * steps)), INT32)
        for i in range(steps):
            key = builder.add(builder.add(spread(builder, first), numbers), lanes(16 * i, INT32))
            seen = builder.and_(builder.icmp_signed("<=", low, key), builder.icmp_signed("<", key, high))
            score = builder.select(
                seen, load(builder, at(builder, line, (i, 64)), FLOATS), lanes(float("-inf"))
            )
            store(builder, score, at(builder, line, (i, 64)))
            greater = builder.fcmp_ordered(">", score, builder.load(tops[i]))
            builder.store(builder.select(greater, score, builder.load(tops[i])), tops[i])
    top = _folded(builder, [builder.load(slot) for slot in tops], _larger)
    with cgutils.for_range(builder, chunks) as loop:
        line = builder.add(scores, builder.mul(loop.index, chunk_bytes))
        for i in range(steps):
            address = at(builder, line, (i, 64))
            weight = _exp2(builder, builder.fmul(builder.fsub(load(builder, address, FLOATS), top), scale))
            store(builder, weight, address)
            builder.store(builder.fadd(builder.load(sums[i]), weight), sums[i])
    total = _folded(builder, [builder.load(slot) for slot in sums], lambda builder, a, b: builder.fadd(a, b))
    store(builder, builder.extract_element(total, ir.Constant(INT32, 0)), totals)


def _larger(builder: Any, a: Value, b: Value) -> Value:
    return builder.select(builder.fcmp_ordered(">", a, b), a, b)


def _folded(builder: Any, vectors: list[Value], join: Callable[[Any, Value, Value], Value]) -> Value:
    """Reduce all lanes of all vectors, into every lane."""
    whole = reduce(lambda a, b: join(builder, a, b), vectors)
    for step in (8, 4, 2, 1):
        order = ir.Constant(PAIRS, [e ^ step for e in range(16)])
        whole = join(builder, whole, builder.shuffle_vector(whole, whole, order))
    return whole


def _emit_scale(builder, args):
    sums, total, target, count = args
    factor = builder.fdiv(lanes(1.0), builder.bitcast(spread(builder, load(builder, total, INT32)), FLOATS))
    with cgutils.for_range(builder, count) as loop:
        value = builder.fmul(load(builder, at(builder, sums, (loop.index, 64)), FLOATS), factor)
        store(builder, rounded_lanes(builder, value), at(builder, target, (loop.index, 32)))


def _emit_add_values(builder, args):
    """Emit `add_values`: a bf16 is widened to fp32 by 16 bits of zeros below it."""
    lines, shifts, weights, sums, count = args
    zero, sixteen = lanes(0.0), lanes(16, INT32)
    with cgutils.for_range(builder, count) as loop:
        parts = [zero, zero]
        for key in range(16):
            line = load(builder, at(builder, lines, (key, 8)), INT64)
            pairs = load(builder, at(builder, line, (loop.index, 512)), PAIRS)
            shift = spread(builder, load(builder, at(builder, shifts, (key, 4)), INT32))
            # this key's half of each int32, as fp32
            value = builder.bitcast(builder.shl(builder.lshr(pairs, shift), sixteen), FLOATS)
            bits = builder.zext(load(builder, at(builder, weights, (key, 2)), INT16), INT32)
            weight = builder.bitcast(builder.shl(spread(builder, bits), sixteen), FLOATS)
            parts[key % 2] = _float(builder, "fma", weight, value, parts[key % 2])
        place = at(builder, sums, (loop.index, 64))
        store(builder, builder.fadd(load(builder, place, FLOATS), builder.fadd(*parts)), place)


def _emit_transpose(builder, args):
    source, stride, target = args
    for i, row in enumerate(_transposed(builder, source, stride)):
        store(builder, row, at(builder, target, (i, 64)))


def _emit_transpose_rounded(builder, args):
    source, target, stride = args
    for i, row in enumerate(_transposed(builder, source, integer(64))):
        store(builder, rounded_lanes(builder, builder.bitcast(row, FLOATS)), at(builder, target, (stride, i)))


def _emit_copy(builder, args):
    source, target, count = args
    with cgutils.for_range(builder, count) as loop:
        line = load(builder, at(builder, source, (loop.index, 64)), PAIRS)
        store(builder, line, at(builder, target, (loop.index, 64)))


def _emit_group_sums(builder, args):
    x, x_stride, target, rows, groups, width = args
    vectors = builder.udiv(width, integer(16))
    total = cgutils.alloca_once(builder, FLOATS)
    with cgutils.for_range(builder, rows) as row, cgutils.for_range(builder, groups) as group:
        begin = builder.add(x, builder.mul(row.index, x_stride))
        begin = builder.add(begin, builder.mul(group.index, at(builder, width, (width, 1))))
        builder.store(lanes(0.0), total)
        with cgutils.for_range(builder, vectors) as loop:
            value = widen(builder, at(builder, begin, (loop.index, 32)))
            builder.store(builder.fadd(builder.load(total), value), total)
        folded = _folded(builder, [builder.load(total)], lambda builder, a, b: builder.fadd(a, b))
        place = builder.add(builder.mul(group.index, rows), row.index)
        one = builder.extract_element(folded, ir.Constant(INT32, 0))
        store(builder, one, at(builder, target, (place, 4)))


# (source, target, count): copy 64 `count` bytes.
copy_lines = procedure(3, _emit_copy)
# (sums, target): round 32 fp32 to bf16.
finish = procedure(2, lambda builder, args: _emit_finish(builder, args, adds=False))
# (sums, residual, target): round 32 fp32 + 32 bf16 to bf16.
finish_added = procedure(3, lambda builder, args: _emit_finish(builder, args, adds=True))
# (sums, target): activation(gate) * up of 16 fp32 of gate, 16 of up, rounded to bf16.
finish_silu = procedure(2, lambda builder, args: _emit_gate(builder, args, _silu))
finish_gelu = procedure(2, lambda builder, args: _emit_gate(builder, args, _gelu_tanh))
# (x, x_stride, target, rows, groups, width): fp32 [groups, rows], the sums of each `width` bf16 of a row, a
# multiple of 16.
sum_groups = procedure(6, _emit_group_sums)
# (x, weight, target, count, eps): RMSNorm of 16 `count` bf16; `weight` is fp32, `eps` the address of an fp32.
norm = procedure(5, lambda builder, args: _emit_norm(builder, args, adds=False))
# The same, rounded to bf16, is added to `target`.
add_norm = procedure(5, lambda builder, args: _emit_norm(builder, args, adds=True))
# (x, weight, cos, sin, half, eps): RMSNorm of 32 `half` bf16 with weights in fp32, and their rotation
# (`layers.RotaryEmbedding`), in place; `rotate` skips the norm.
norm_rotate = procedure(6, lambda builder, args: _emit_rotate(builder, args, norms=True))
rotate = procedure(6, lambda builder, args: _emit_rotate(builder, args, norms=False))
# (scores, count, low, high, scale, totals): replace `count` rows (a multiple of 4) of 16 fp32 lanes by
# 2^(scale * (s - the lane's maximum)) where low <= row < high, int32 per lane, else 0; and sum per lane.
soften = procedure(6, _emit_soften)
# (scores, chunk_bytes, chunks, low, high, scale, total): the same for a row of chunks of 64 fp32, where low
# <= key < high; and its sum.
soften_row = procedure(7, _emit_soften_row)
# (sums, total, target, count): count * 16 fp32 divided by the one at `total`, rounded to bf16.
scale_rounded = procedure(4, _emit_scale)
# (lines, shifts, weights, sums, count): add 16 bf16 weights times as many keys' values to 16 `count` fp32
# sums, with the bits of TDPBF16PS: even and odd keys in sums of their own. A key's value is in the low (shift
# 0) or high (16) halves of the int32 of its line, as `qkv_heads.py` writes pairs; lines are 512 bytes apart.
add_values = procedure(5, _emit_add_values)
# (source, source_stride, target): transpose 16 x 16 elements of 4 bytes; target rows have 64 bytes.
transpose = procedure(3, _emit_transpose)
# (source, target, target_stride): transpose 16 x 16 fp32 in rows of 64 bytes, rounded to bf16.
transpose_rounded = procedure(3, _emit_transpose_rounded)
