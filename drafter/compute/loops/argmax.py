"""The index of a row's largest element, sixteen lanes at a time, on any CPU: LLVM's vectoriser finds none.

Used by `elements.py`.
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


def _argmax(widen: Callable[[Any, Value, Value], Value]) -> Any:
    """An intrinsic (row, count): the first of the largest of 16 `count` elements; NaNs are passed over.

    Args:
        widen: 16 elements as fp32, of (builder, row, which sixteen).
    """

    def generate(context, builder, signature, args):
        row, count = args
        steps = ir.Constant(PAIRS, list(range(16)))
        best, where = (cgutils.alloca_once(builder, kind) for kind in (FLOATS, PAIRS))
        builder.store(lanes(float("-inf")), best)
        builder.store(steps, where)
        with cgutils.for_range(builder, count) as loop:
            value = widen(builder, row, loop.index)
            greater = builder.fcmp_ordered(">", value, builder.load(best))
            begin = spread(builder, builder.trunc(builder.mul(loop.index, integer(16)), INT32))
            index = builder.add(begin, steps)
            builder.store(builder.select(greater, value, builder.load(best)), best)
            builder.store(builder.select(greater, index, builder.load(where)), where)
        value, index = builder.load(best), builder.load(where)
        for step in (8, 4, 2, 1):
            order = ir.Constant(PAIRS, [e ^ step for e in range(16)])
            other, other_index = (builder.shuffle_vector(x, x, order) for x in (value, index))
            equal = builder.fcmp_ordered("==", other, value)
            earlier = builder.and_(equal, builder.icmp_signed("<", other_index, index))
            take = builder.or_(builder.fcmp_ordered(">", other, value), earlier)
            value = builder.select(take, other, value)
            index = builder.select(take, other_index, index)
        return builder.zext(builder.extract_element(index, ir.Constant(INT32, 0)), INT64)

    def typed(typing, row, count):
        return types.int64(types.int64, types.int64), generate

    return intrinsic(typed)


# (row, count): index of the largest of 16 `count` bf16, or fp32.
argmax_bf16 = _argmax(lambda builder, row, i: widen(builder, at(builder, row, (i, 32))))


argmax_fp32 = _argmax(lambda builder, row, i: load(builder, at(builder, row, (i, 64)), FLOATS))
