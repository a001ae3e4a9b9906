"""A row's largest element and the next, sixteen lanes at a time, on any CPU: LLVM's vectoriser finds none.

Used by `elements.py` and `scans.py`.
"""

# The signatures of intrinsics are Numba's, not Python's.
# pyright: reportReturnType=false, reportArgumentType=false

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from .llvm import (
    FLOATS,
    HALVES,
    INT32,
    INT64,
    PAIRS,
    Value,
    at,
    integer,
    lanes,
    load,
    spread,
)


def widen(builder: Any, address: Value) -> Value:
    """16 bf16 as fp32."""
    bits = builder.zext(load(builder, address, HALVES), PAIRS)
    return builder.bitcast(builder.shl(bits, lanes(16, INT32)), FLOATS)


def _top_two(widen: Callable[[Any, Value, Value], Value]) -> Any:
    """An intrinsic (row, count), of 16 `count` elements: the index of the first of the largest, its value,
    and the largest value of the others. NaNs are passed over; what is not there is -inf.

    Args:
        widen: 16 elements as fp32, of (builder, row, which sixteen).
    """

    def generate(context, builder, signature, args):
        row, count = args
        steps = ir.Constant(PAIRS, list(range(16)))
        best, second, where = (cgutils.alloca_once(builder, kind) for kind in (FLOATS, FLOATS, PAIRS))
        for place, value in ((best, lanes(float("-inf"))), (second, lanes(float("-inf"))), (where, steps)):
            builder.store(value, place)
        with cgutils.for_range(builder, count) as loop:
            value, old = widen(builder, row, loop.index), builder.load(best)
            greater = builder.fcmp_ordered(">", value, old)
            begin = spread(builder, builder.trunc(builder.mul(loop.index, integer(16)), INT32))
            index = builder.add(begin, steps)
            builder.store(larger(builder, builder.select(greater, old, value), builder.load(second)), second)
            builder.store(builder.select(greater, value, old), best)
            builder.store(builder.select(greater, index, builder.load(where)), where)
        value, index, behind = builder.load(best), builder.load(where), builder.load(second)
        for step in (8, 4, 2, 1):
            order = ir.Constant(PAIRS, [e ^ step for e in range(16)])
            other, other_index, other_behind = (
                builder.shuffle_vector(x, x, order) for x in (value, index, behind)
            )
            equal = builder.fcmp_ordered("==", other, value)
            earlier = builder.and_(equal, builder.icmp_signed("<", other_index, index))
            take = builder.or_(builder.fcmp_ordered(">", other, value), earlier)
            behind = larger(builder, behind, other_behind)
            behind = larger(builder, behind, builder.select(take, value, other))
            value = builder.select(take, other, value)
            index = builder.select(take, other_index, index)
        index, value, behind = (
            builder.extract_element(x, ir.Constant(INT32, 0)) for x in (index, value, behind)
        )
        found = builder.zext(index, INT64), value, behind
        return context.make_tuple(builder, signature.return_type, found)

    def typed(typing, row, count):
        found = types.Tuple((types.int64, types.float32, types.float32))
        return found(types.int64, types.int64), generate

    return intrinsic(typed)


def larger(builder: Any, x: Value, y: Value) -> Value:
    """Of each lane; y where x is NaN."""
    return builder.select(builder.fcmp_ordered(">", x, y), x, y)


def widened_lanes(builder: Any, row: Value, i: Value) -> Value:
    """The i-th sixteen of bf16, as fp32."""
    return widen(builder, at(builder, row, (i, 32)))


def fp32_lanes(builder: Any, row: Value, i: Value) -> Value:
    """Of fp32."""
    return load(builder, at(builder, row, (i, 64)), FLOATS)


# (row, count): see `_top_two`.
top_two_bf16, top_two_fp32 = _top_two(widened_lanes), _top_two(fp32_lanes)
