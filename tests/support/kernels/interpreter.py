"""Triton's interpreter, with what it lacks and caches for repeated work.

What kernels compute in it is untouched, but for the order of a product's sums, and bf16. `devices.py` calls
this before any kernel is imported.
"""

# Methods of Triton's classes are replaced, which types do not allow.
# pyright: reportAttributeAccessIssue=false, reportArgumentType=false

from __future__ import annotations

import functools
import math
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter


def prepare() -> None:
    _compute_in_bf16()
    _multiply_row_by_row()
    _multiply_scaled_blocks()
    _patch_the_language_once_a_launch()
    _look_up_kinds_of_numbers_once()
    _make_shapes_once()
    _make_block_types_once()
    _call_builtins_directly()
    _check_no_silent_overflow()


def _compute_in_bf16() -> None:
    """Compute on bf16 in fp32, rounded to the nearest: the interpreter takes its bits for integers."""
    builder = interpreter.InterpreterBuilder
    arithmetic = "fadd fsub fmul fdiv frem precise_divf fma minimumf minnumf maximumf maxnumf clampf"
    compared = [f"fcmp{order}{kind}" for order in "OU" for kind in ("LT", "GT", "LE", "GE", "EQ", "NE")]
    functions = "cos sin exp exp2 log log2 sqrt precise_sqrt rsqrt erf floor ceil"

    def widened(operation: Any) -> Any:
        def compute(builder: Any, *operands: Any) -> Any:
            if not any(_is_bf16(each) for each in operands):
                return operation(builder, *operands)
            done = operation(builder, *(_as_fp32(each) if _is_bf16(each) else each for each in operands))
            return _as_bf16(done) if done.data.dtype == np.float32 else done

        return compute

    for name in (*arithmetic.split(), *compared, *functions.split()):
        setattr(builder, f"create_{name}", widened(getattr(builder, f"create_{name}")))

    cast, convert, reduce = builder.cast_impl, builder.create_fp_to_fp, interpreter.ReduceOps.apply

    def cast_impl(self: Any, source: Any, kind: Any) -> Any:
        source = _as_fp32(source) if _is_bf16(source) else source
        if kind.scalar == tl.bfloat16:
            return _as_bf16(cast(self, source, tl.float32))
        return source if kind.scalar == source.dtype.scalar else cast(self, source, kind)

    def create_fp_to_fp(self: Any, source: Any, kind: Any, rounding: Any) -> Any:
        if kind.scalar == tl.bfloat16 and source.dtype.scalar == tl.float32:
            return _as_bf16(source)
        return convert(self, source, kind, rounding)

    def apply(self: Any, values: Any) -> Any:
        tensors = values if isinstance(values, tuple) else (values,)
        assert all(each.dtype != tl.bfloat16 for each in tensors), "no reduction is of bf16"
        return reduce(self, values)

    builder.cast_impl, builder.create_fp_to_fp = cast_impl, create_fp_to_fp
    interpreter.ReduceOps.apply = apply


def _is_bf16(handle: Any) -> bool:
    return isinstance(handle, interpreter.TensorHandle) and handle.dtype.scalar == tl.bfloat16


def _as_fp32(handle: Any) -> Any:
    bits = handle.data.astype(np.uint32) << 16
    return interpreter.TensorHandle(bits.view(np.float32), tl.float32)


def _as_bf16(handle: Any) -> Any:
    values = torch.from_numpy(np.ascontiguousarray(handle.data, dtype=np.float32)).bfloat16()
    return interpreter.TensorHandle(values.view(torch.int16).numpy().view(np.uint16), tl.bfloat16)


def _multiply_row_by_row() -> None:
    """A tile's product, row by row, as in a tensor core: a row's sums do not depend on its position.

    NumPy's BLAS sums a matrix's last rows in another order than the others, on a CPU without AVX-512.
    """

    of_floats_of_8_bits = interpreter.InterpreterBuilder.create_dot

    def create_dot(builder: Any, a: Any, b: Any, d: Any, *precision: object) -> Any:
        if a.dtype.is_fp8() or b.dtype.is_fp8():
            return of_floats_of_8_bits(builder, a, b, d, *precision)
        a, b = (_as_fp32(each) if _is_bf16(each) else each for each in (a, b))
        rows = np.matmul(a.data[..., None, :], b.data[..., None, :, :], dtype=d.data.dtype)
        return interpreter.TensorHandle(rows[..., 0, :] + d.data, d.dtype.scalar)

    interpreter.InterpreterBuilder.create_dot = create_dot


def _multiply_scaled_blocks() -> None:
    """Products of e2m1 and e4m3 with e8m0 scales per 32 values (OCP MX v1.0), which the interpreter lacks."""
    positive = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    of_e2m1 = np.concatenate((positive, -positive))

    def scales(each: Any) -> Any:
        return np.repeat(torch.from_numpy(each.data).view(torch.float8_e8m0fnu).double().numpy(), 32, axis=1)

    def create_dot_scaled(
        builder: Any, a: Any, a_scale: Any, a_kind: Any, b: Any, b_scale: Any, b_kind: Any, *more: Any
    ) -> Any:
        *_, d = more
        assert b.dtype is tl.float8e4nv and a.data.dtype == np.uint8, (a_kind, b_kind)
        codes = np.stack((a.data & 15, a.data >> 4), axis=-1).reshape(len(a.data), -1)
        values = torch.from_numpy(b.data.view(np.uint8)).view(torch.float8_e4m3fn).double().numpy()
        product = (of_e2m1[codes] * scales(a_scale)) @ (values * scales(b_scale).T)
        return interpreter.TensorHandle((product + d.data).astype(d.data.dtype), d.dtype.scalar)

    interpreter.InterpreterBuilder.create_dot_scaled = create_dot_scaled


def _patch_the_language_once_a_launch() -> None:
    """A launch replaces the language's functions, and then so does each call of a helper within it.

    That takes half of the interpreter's time, and changes something only where a helper's module names a part
    of the language that the kernel's does not.
    """

    def call(helper: Any, *args: object, **kwargs: object) -> object:
        named = [part for part in helper.fn.__globals__.values() if part is tl or part is tl.core]
        if any(part.static_print is not print for part in named):
            interpreter._patch_lang(helper.fn)
        try:
            return helper.rewrite()(*args, **kwargs)
        except Exception as error:
            raise interpreter.InterpreterError(repr(error)) from error

    interpreter.InterpretedFunction.__call__ = call


def _look_up_kinds_of_numbers_once() -> None:
    """NumPy's dtype of Triton's, from a table that is otherwise rebuilt for each value."""
    numpy_kind = functools.lru_cache(maxsize=64)(interpreter._get_np_dtype)
    address = np.dtype(np.uint64)

    def look_up(kind: Any) -> np.dtype[Any]:
        scalar = kind.scalar
        return address if isinstance(scalar, tl.pointer_type) else numpy_kind(scalar)

    interpreter._get_np_dtype = look_up


def _make_shapes_once() -> None:
    """A value's shape and number of elements are compile-time constants, otherwise made for each value."""

    @functools.cache
    def shape_of(*sizes: int) -> tuple[Any, Any]:
        return tl.constexpr(math.prod(sizes)), tl.tuple([tl.constexpr(size) for size in sizes])

    def initialize(tensor: Any, handle: Any, kind: Any) -> None:
        tensor.handle, tensor.type, tensor.dtype = handle, kind, kind.scalar
        tensor.numel, tensor.shape = shape_of(*(kind.shape if kind.is_block() else ()))

    tl.tensor.__init__ = initialize


def _make_block_types_once() -> None:
    """A block's type is made for each value, which checks and prints its shape, and compared size by size.

    Blocks of one shape share its tuple here, so that operands of one shape need no broadcast.
    """
    make, broadcast = tl.block_type.__init__, interpreter.TritonSemantic.broadcast_impl_value
    of_scalar = tl.dtype.__eq__

    @functools.cache
    def shape_of(*sizes: int) -> tuple[Any, int]:
        block = tl.block_type.__new__(tl.block_type)
        make(block, tl.int32, list(sizes))
        return block.shape, block.numel

    def initialize(block: Any, element: Any, shape: Any) -> None:
        sizes = [size if type(size) is int else tl.core._unwrap_if_constexpr(size) for size in shape]
        block.element_ty = element
        block.shape, block.numel = shape_of(*sizes)
        block.name = f"<{sizes}, {element.name}>"

    def with_element(block: Any, element: Any) -> Any:
        return block if element is block.element_ty else tl.block_type(element, block.shape)

    def of_one_shape(self: Any, lhs: Any, rhs: Any) -> Any:
        if getattr(lhs.type, "shape", None) is getattr(rhs.type, "shape", ()):
            return lhs, rhs
        return broadcast(self, lhs, rhs)

    tl.block_type.__init__ = initialize
    tl.block_type.with_element_ty = with_element
    tl.dtype.__eq__ = lambda kind, other: kind is other or of_scalar(kind, other)
    interpreter.TritonSemantic.broadcast_impl_value = of_one_shape


def _call_builtins_directly() -> None:
    """Call a function of the language with the interpreter's semantics, without copies of its arguments."""
    semantic = interpreter.interpreter_semantic

    def patch(owner: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
        function = getattr(member, "__wrapped__", member)

        def call(*args: object, **kwargs: object) -> object:
            kwargs["_semantic"] = semantic
            return function(*args, **kwargs)

        scope.set_attr(owner, name, call)

    interpreter._patch_attr = patch


def _check_no_silent_overflow() -> None:
    """Each sum of integers is recomputed in 64 bits and compared, for a debug assertion only."""
    options = interpreter.interpreter_builder.options
    assert not options.debug, "where overflow is told, it must be looked for"
    interpreter.interpreter_builder.options = replace(options, sanitize_overflow=False)
