"""Where in a row large elements stand, sixteen lanes at a time, on any CPU. Used by `elements.py`."""

# The signatures of intrinsics are Numba's, not Python's.
# pyright: reportReturnType=false, reportArgumentType=false

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from .argmax import fp32_lanes, larger, widened_lanes
from .llvm import FLOATS, INT16, INT32, Value, integer, lanes


def _lane_floor(widen: Callable[[Any, Value, Value], Value]) -> Any:
    """An intrinsic (row, count), of 16 `count` elements: the least of the lanes' largest, so that no fewer
    than 16 elements reach it. NaNs are passed over."""

    def generate(context, builder, signature, args):
        row, count = args
        largest = cgutils.alloca_once(builder, FLOATS)
        builder.store(lanes(float("-inf")), largest)
        with cgutils.for_range(builder, count) as loop:
            builder.store(larger(builder, widen(builder, row, loop.index), builder.load(largest)), largest)
        value = builder.load(largest)
        for step in (8, 4, 2, 1):
            other = builder.shuffle_vector(
                value, value, ir.Constant(ir.VectorType(INT32, 16), [e ^ step for e in range(16)])
            )
            value = builder.select(builder.fcmp_ordered("<", other, value), other, value)
        return builder.extract_element(value, ir.Constant(INT32, 0))

    def typed(typing, row, count):
        return types.float32(types.int64, types.int64), generate

    return intrinsic(typed)


def _next_reaching(widen: Callable[[Any, Value, Value], Value]) -> Any:
    """An intrinsic (row, begin, count, floor): the first sixteen, from `begin` on, that has an element which
    is not below the floor; `count` if none has."""

    def generate(context, builder, signature, args):
        row, begin, count, floor = args
        here = cgutils.alloca_once_value(builder, begin)
        one = builder.insert_element(ir.Constant(FLOATS, ir.Undefined), floor, ir.Constant(INT32, 0))
        floors = builder.shuffle_vector(one, one, lanes(0, INT32))
        look, move, end = (builder.append_basic_block(name) for name in ("look", "move", "end"))
        test = builder.append_basic_block("test")
        builder.branch(test)
        builder.position_at_end(test)
        builder.cbranch(builder.icmp_signed("<", builder.load(here), count), look, end)
        builder.position_at_end(look)
        reaching = builder.fcmp_ordered(">=", widen(builder, row, builder.load(here)), floors)
        none = builder.icmp_unsigned("==", builder.bitcast(reaching, INT16), ir.Constant(INT16, 0))
        builder.cbranch(none, move, end)
        builder.position_at_end(move)
        builder.store(builder.add(builder.load(here), integer(1)), here)
        builder.branch(test)
        builder.position_at_end(end)
        return builder.load(here)

    def typed(typing, row, begin, count, floor):
        return types.int64(types.int64, types.int64, types.int64, types.float32), generate

    return intrinsic(typed)


lane_floor_bf16, lane_floor_fp32 = _lane_floor(widened_lanes), _lane_floor(fp32_lanes)
next_reaching_bf16, next_reaching_fp32 = _next_reaching(widened_lanes), _next_reaching(fp32_lanes)
