"""Helpers for Numba intrinsics written in LLVM IR; stack memory; atomics. Used here and in `cpu_fused/`.

All addresses and strides are int64, strides in bytes.
"""

# The signatures of intrinsics are Numba's, not Python's.
# pyright: reportReturnType=false, reportArgumentType=false

from __future__ import annotations

import inspect
import platform
from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.typing.templates import signature
from numba.extending import intrinsic

BYTE, INT16, INT32, INT64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
FLOAT = ir.FloatType()
FLOATS, PAIRS, HALVES = (ir.VectorType(kind, 16) for kind in (FLOAT, INT32, INT16))
POINTER = BYTE.as_pointer()
VOID = ir.VoidType()
Value = Any  # llvmlite's values have no useful types


def call(builder: Any, name: str, result: ir.Type, args: Sequence[Value]) -> Value:
    kind = ir.FunctionType(result, [arg.type for arg in args])
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), args)


def at(builder: Any, address: Value, *terms: tuple[Value | int, int]) -> Value:
    """Emit address + the sum of value * factor."""
    for value, factor in terms:
        term = integer(value) if isinstance(value, int) else value
        address = builder.add(address, builder.mul(term, integer(factor)))
    return address


def integer(value: int) -> ir.Constant:
    return ir.Constant(INT64, value)


def load(builder: Any, address: Value, kind: ir.Type) -> Value:
    return builder.load(builder.inttoptr(address, kind.as_pointer()), align=1)


def store(builder: Any, value: Value, address: Value) -> None:
    builder.store(value, builder.inttoptr(address, value.type.as_pointer()), align=1)


def prefetch(builder: Any, address: Value) -> None:
    """Start to read the cache line at an address, which need not be valid."""
    hints = [ir.Constant(INT32, value) for value in (0, 3, 1)]  # for reading, into all caches, data
    call(builder, "llvm.prefetch.p0i8", VOID, [builder.inttoptr(address, POINTER), *hints])


def procedure(num_args: int, emit: Callable[[Any, Sequence[Value]], None]) -> Any:
    """Return an intrinsic over int64 that returns nothing; `emit(builder, args)` emits its body."""

    def generate(context, builder, signature, args):
        emit(builder, args)
        return context.get_dummy_value()

    def typed(*_):
        return types.void(*[types.int64] * num_args), generate

    names = ["typing", *(f"arg{i}" for i in range(num_args))]  # Numba inspects the signature
    parameters = [inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in names]
    typed.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return intrinsic(typed)


def lanes(value: float | int, kind: ir.Type = FLOAT) -> ir.Constant:
    """Return the value in all of 16 lanes."""
    return ir.Constant(ir.VectorType(kind, 16), [value] * 16)


class BFloat(ir.Type):
    """LLVM's bfloat type, which llvmlite lacks."""

    def __str__(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, BFloat)

    def __hash__(self) -> int:
        return hash(BFloat)


def widen(builder: Any, address: Value) -> Value:
    """Load 16 bf16 as fp32."""
    return widened(builder, load(builder, address, HALVES))


def widened(builder: Any, halves: Value) -> Value:
    """Return 16 bf16 as fp32."""
    bits = builder.zext(halves, PAIRS)
    return builder.bitcast(builder.shl(bits, lanes(16, INT32)), FLOATS)


def spread(builder: Any, value: Value) -> Value:
    """Broadcast the int32 to 16 lanes."""
    one = builder.insert_element(ir.Constant(PAIRS, ir.Undefined), value, ir.Constant(INT32, 0))
    return builder.shuffle_vector(one, one, lanes(0, INT32))


def _emit_pause(builder, args):
    if platform.machine() == "aarch64":
        call(builder, "llvm.aarch64.hint", VOID, [ir.Constant(INT32, 1)])
    else:
        call(builder, "llvm.x86.sse2.pause", VOID, [])


# Spin-wait hint.
pause = procedure(0, _emit_pause)
# Lets another thread that waits for this core run.
yield_core = types.ExternalFunction("sched_yield", signature(types.int32))


def stack_memory(num_bytes: int) -> Any:
    """Return an intrinsic that allocates `num_bytes` (a multiple of 64) until its caller returns.

    Unlike an array's address, it stays valid: Numba frees an array after its last use.
    """

    def generate(context, builder, signature, args):
        memory = cgutils.alloca_once(builder, ir.ArrayType(BYTE, num_bytes))
        memory.align = 64
        return builder.ptrtoint(memory, INT64)

    def typed(typing):
        return types.int64(), generate

    return intrinsic(typed)


@intrinsic
def fetch_add(context, address, value):
    """Atomically add to a shared int64; return its previous value."""

    def generate(context, builder, signature, args):
        pointer = builder.inttoptr(args[0], INT64.as_pointer())
        return builder.atomic_rmw("add", pointer, args[1], "seq_cst")

    return types.int64(types.int64, types.int64), generate


@intrinsic
def read_shared(context, address):
    def generate(context, builder, signature, args):
        pointer = builder.inttoptr(args[0], INT64.as_pointer())
        return builder.load_atomic(pointer, "seq_cst", 8)

    return types.int64(types.int64), generate


@intrinsic
def write_shared(context, address, value):
    def generate(context, builder, signature, args):
        pointer = builder.inttoptr(args[0], INT64.as_pointer())
        builder.store_atomic(args[1], pointer, "seq_cst", 8)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


@intrinsic
def compare_and_swap(context, address, expected, value):
    """Atomically replace a shared int64 if it is `expected`; return whether it was."""

    def generate(context, builder, signature, args):
        pointer = builder.inttoptr(args[0], INT64.as_pointer())
        found = builder.cmpxchg(pointer, args[1], args[2], "seq_cst", "seq_cst")
        return builder.extract_value(found, 1)

    return types.boolean(types.int64, types.int64, types.int64), generate


@intrinsic
def call_task(context, address, args, thread, num_threads):
    """Call the compiled task at an address: task(args, thread, num_threads)."""

    def generate(context, builder, signature, values):
        kind = ir.FunctionType(VOID, [INT64] * 3).as_pointer()
        builder.call(builder.inttoptr(values[0], kind), values[1:])
        return context.get_dummy_value()

    return types.void(*[types.int64] * 4), generate
