"""Vectorized scans over a row of logits, sixteen lanes at a time, which LLVM's vectorizer does not find.

Rows are addresses of bf16 or fp32 elements, according to `like` (`element_ops.LIKE`); `count` is in groups of
sixteen. NaNs are ignored. Called by `step/cpu_numba/`.
"""

# The signatures of intrinsics are Numba's, not Python's.
# pyright: reportReturnType=false, reportArgumentType=false

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from .llvm_intrinsics import (
    FLOATS,
    INT16,
    INT32,
    INT64,
    PAIRS,
    Value,
    at,
    integer,
    lanes,
    load,
    spread,
    widen,
)


@intrinsic
def top_two(context, row, count, like):
    """Return the first index of the largest element, its value, and the largest value of the others.

    Values are fp32; -inf if there is no element.
    """

    def generate(context, builder, signature, args):
        row, count, _ = args
        steps = ir.Constant(PAIRS, list(range(16)))
        best, second, where = (cgutils.alloca_once(builder, kind) for kind in (FLOATS, FLOATS, PAIRS))
        for place, value in ((best, lanes(float("-inf"))), (second, lanes(float("-inf"))), (where, steps)):
            builder.store(value, place)
        with cgutils.for_range(builder, count) as loop:
            value, old = _sixteen(builder, row, loop.index, like), builder.load(best)
            greater = builder.fcmp_ordered(">", value, old)
            begin = spread(builder, builder.trunc(builder.mul(loop.index, integer(16)), INT32))
            index = builder.add(begin, steps)
            builder.store(_larger(builder, builder.select(greater, old, value), builder.load(second)), second)
            builder.store(builder.select(greater, value, old), best)
            builder.store(builder.select(greater, index, builder.load(where)), where)
        value, index, second_value = builder.load(best), builder.load(where), builder.load(second)
        for step in (8, 4, 2, 1):
            other, other_index, other_second = (
                _swapped(builder, x, step) for x in (value, index, second_value)
            )
            equal = builder.fcmp_ordered("==", other, value)
            earlier = builder.and_(equal, builder.icmp_signed("<", other_index, index))
            take = builder.or_(builder.fcmp_ordered(">", other, value), earlier)
            second_value = _larger(builder, second_value, other_second)
            second_value = _larger(builder, second_value, builder.select(take, value, other))
            value = builder.select(take, other, value)
            index = builder.select(take, other_index, index)
        index, value, second_value = (
            builder.extract_element(x, ir.Constant(INT32, 0)) for x in (index, value, second_value)
        )
        found = builder.zext(index, INT64), value, second_value
        return context.make_tuple(builder, signature.return_type, found)

    found = types.Tuple((types.int64, types.float32, types.float32))
    return found(types.int64, types.int64, like), generate


@intrinsic
def lane_floor(context, row, count, like):
    """Return the least of the lanes' maxima, fp32: at least 16 elements are not below it."""

    def generate(context, builder, signature, args):
        row, count, _ = args
        largest = cgutils.alloca_once(builder, FLOATS)
        builder.store(lanes(float("-inf")), largest)
        with cgutils.for_range(builder, count) as loop:
            value = _sixteen(builder, row, loop.index, like)
            builder.store(_larger(builder, value, builder.load(largest)), largest)
        value = builder.load(largest)
        for step in (8, 4, 2, 1):
            other = _swapped(builder, value, step)
            value = builder.select(builder.fcmp_ordered("<", other, value), other, value)
        return builder.extract_element(value, ir.Constant(INT32, 0))

    return types.float32(types.int64, types.int64, like), generate


@intrinsic
def next_reaching(context, row, begin, count, floor, like):
    """Return the first group of sixteen, from `begin` on, with an element >= `floor`; `count` if none."""

    def generate(context, builder, signature, args):
        row, begin, count, floor, _ = args
        here = cgutils.alloca_once_value(builder, begin)
        one = builder.insert_element(ir.Constant(FLOATS, ir.Undefined), floor, ir.Constant(INT32, 0))
        floors = builder.shuffle_vector(one, one, lanes(0, INT32))
        look, move, end = (builder.append_basic_block(name) for name in ("look", "move", "end"))
        test = builder.append_basic_block("test")
        builder.branch(test)
        builder.position_at_end(test)
        builder.cbranch(builder.icmp_signed("<", builder.load(here), count), look, end)
        builder.position_at_end(look)
        reaching = builder.fcmp_ordered(">=", _sixteen(builder, row, builder.load(here), like), floors)
        none = builder.icmp_unsigned("==", builder.bitcast(reaching, INT16), ir.Constant(INT16, 0))
        builder.cbranch(none, move, end)
        builder.position_at_end(move)
        builder.store(builder.add(builder.load(here), integer(1)), here)
        builder.branch(test)
        builder.position_at_end(end)
        return builder.load(here)

    return types.int64(types.int64, types.int64, types.int64, types.float32, like), generate


def _sixteen(builder: Any, row: Value, i: Value, like: types.Type) -> Value:
    if isinstance(like, types.Integer):
        return widen(builder, at(builder, row, (i, 32)))
    return load(builder, at(builder, row, (i, 64)), FLOATS)


def _larger(builder: Any, x: Value, y: Value) -> Value:
    """Return the larger value per lane; y where x is NaN."""
    return builder.select(builder.fcmp_ordered(">", x, y), x, y)


def _swapped(builder: Any, value: Value, step: int) -> Value:
    return builder.shuffle_vector(value, value, ir.Constant(PAIRS, [e ^ step for e in range(16)]))
