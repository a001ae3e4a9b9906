"""Weights that stay codes of 8 or 4 bits on a GPU: their products, and their dequantization.

    projections     up to 256 rows, if it is faster: `skinny_gemm.py` with `sum_codes`, which unpacks codes in
                    registers
                    more: PyTorch's GEMM with the weight that `dequantize` writes
    TritonExperts   any rows: `moe/grouped_gemm.py` with `sum_codes`

All multiply with the values of `QuantizedMatrix.dequantized`. Made by
`drafter/compute/gpu_triton/backend.py`.

Legend: N rows, K inputs, O outputs, G groups of inputs with a scale; in kernels C rows of a weight's tile, M
rows of x, S inputs and B pairs of inputs per iteration.
"""

# Type checkers know neither Triton's launch options nor what a jitted function returns.
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportAssignmentType=false

from __future__ import annotations

from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F

from .....cluster.errors import CheckpointError
from ...checkpoint.packed_codes import PackedCodes
from ..common.arranged_codes import arrange, unpack_arranged
from ..common.unpack_codes import (
    MAX_EXPONENT,
    bytes_at_once,
    split_words,
    unpack_e2m1,
    unpack_e4m3,
    unpack_int4,
    unpack_int8,
    unpack_mxfp4,
)

_COLUMNS, _STEP = 64, 128  # of a program of `dequantize`
_FIRST_WITH_E4M3 = (8, 9)
_BLOCK_SCALED_CAPABILITY = 10  # major version: tcgen05


def for_kernels(packed: PackedCodes) -> PackedCodes:
    """Return codes in the order and dtype that the device loads.

    Raises:
        CheckpointError: a 4-bit scale is above 2.
    """
    assert packed.codes.is_contiguous() and packed.scales.is_contiguous(), "rows follow each other"
    if packed.code == "e2m1":
        _check_scales(packed)
    if packed.is_mxfp4 and not has_block_scaled(packed.device):
        return arrange(packed)
    if packed.code == "e4m3" and converts_e4m3(packed.device):
        return replace(packed, codes=packed.codes.view(torch.float8_e4m3fn))
    return packed


def has_block_scaled(device: torch.device) -> bool:
    """Return whether a device multiplies MXFP4 codes with e4m3 values, each in blocks with scales."""
    if device.type != "cuda" or torch.version.hip:
        return False
    return torch.cuda.get_device_capability(device)[0] == _BLOCK_SCALED_CAPABILITY


def bytes_unpacked(packed: PackedCodes | None) -> int:
    """Return the kernels' `PACK`: `unpack_codes.bytes_at_once`, or 0 if codes take a byte each."""
    return bytes_at_once(packed.device) if packed is not None and packed.has_pairs else 0


def words(x_NK: Tensor) -> Tensor:
    """Return x as words of two inputs each."""
    if x_NK.stride(0) % 2 or x_NK.storage_offset() % 2:
        x_NK = x_NK.contiguous()
    return x_NK.view(torch.int64 if x_NK.dtype is torch.float32 else torch.int32)


def dequantize(packed: PackedCodes, dtype: torch.dtype) -> Tensor:
    """Return the values of a matrix [O, K], as `QuantizedMatrix.dequantized`."""
    outputs, inputs = packed.shape
    weight_OK = torch.empty((outputs, inputs), dtype=dtype, device=packed.device)
    grid = (triton.cdiv(outputs, _COLUMNS), triton.cdiv(inputs, _STEP))
    _dequantize[grid](
        packed.codes, packed.scales, packed.zeros, weight_OK,
        CODE=packed.code, GROUP=packed.group, GROUPS=packed.scales.stride(-2), PACK=bytes_unpacked(packed),
        OUTPUTS=outputs, INPUTS=inputs, COLUMNS=_COLUMNS, STEP=_STEP, num_warps=4,
    )  # fmt: skip
    return weight_OK


def converts_e4m3(device: torch.device) -> bool:
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= _FIRST_WITH_E4M3


def _check_scales(packed: PackedCodes) -> None:
    """Raise CheckpointError if a scale, or (of uint8 ones) an exponent, is too large."""
    limit = MAX_EXPONENT if packed.scales.dtype is torch.uint8 else 2.0 ** (MAX_EXPONENT - 127)
    largest = max(float(packed.scales.max()), -float(packed.scales.min()))
    if largest > limit:
        scale = largest if limit != MAX_EXPONENT else 2.0 ** (largest - 127)
        raise CheckpointError(
            f"A group of 4-bit weights has the scale {scale:g}; the GPU's kernels take at most "
            f"{2 ** (MAX_EXPONENT - 127)}. Check the checkpoint's scales, or set attention_backend to "
            "'torch'."
        )


class DequantizingLinear:
    """A `block_weights.Projection` that dequantizes the weight to x's dtype on each call."""

    __slots__ = ("_bias_O", "_codes")

    def __init__(self, codes: PackedCodes, bias_O: Tensor | None) -> None:
        self._codes, self._bias_O = codes, bias_O

    def __call__(self, x_NK: Tensor, residual_NO: Tensor | None = None) -> Tensor:
        y_NO = F.linear(x_NK, dequantize(self._codes, x_NK.dtype), self._bias_O)
        return y_NO if residual_NO is None else y_NO.add_(residual_NO)


@triton.jit
def sum_codes(
    x_ptrs_M, code_ptrs_C, scale_ptr, zero_ptr, number_C, norm_ptr, scale_M, split, dtype: tl.constexpr,
    CODE: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr, PACK: tl.constexpr, INPUTS: tl.constexpr,
    SPLIT_TILES: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, STEP: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Return one split's product, transposed, as `skinny_gemm._sum_split` does.

    `x_ptrs_M` are of words of two inputs where a byte has two codes: even and odd inputs are multiplied
    separately.
    """
    sum_CM = tl.zeros([COLUMNS, ROWS], tl.float32)
    for i in range(SPLIT_TILES):
        start = (split * SPLIT_TILES + i) * STEP
        if (CODE == "int4" or CODE == "e2m1") and code_ptrs_C.dtype.element_ty == tl.uint8:
            at_B = start // 2 + tl.arange(0, STEP // 2)
            inside_B = at_B < INPUTS // 2
            low_CB, high_CB = _load_pairs(
                code_ptrs_C, scale_ptr, zero_ptr, number_C, start, dtype,
                CODE, GROUP, GROUPS, PACK, INPUTS, STEP,
            )  # fmt: skip
            word_BM = tl.load(x_ptrs_M[None, :] + at_B[:, None], mask=inside_B[:, None], other=0)
            even_BM, odd_BM = split_words(word_BM, dtype)
            if norm_ptr is not None:
                norm_B = tl.load(norm_ptr + 2 * at_B, mask=inside_B, other=0.0).to(tl.float32)
                even_BM = (even_BM.to(tl.float32) * scale_M[None, :] * norm_B[:, None]).to(dtype)
                norm_B = tl.load(norm_ptr + 2 * at_B + 1, mask=inside_B, other=0.0).to(tl.float32)
                odd_BM = (odd_BM.to(tl.float32) * scale_M[None, :] * norm_B[:, None]).to(dtype)
            sum_CM = tl.dot(low_CB, even_BM, sum_CM, input_precision=PRECISION)
            sum_CM = tl.dot(high_CB, odd_BM, sum_CM, input_precision=PRECISION)
        else:
            at_S = start + tl.arange(0, STEP)
            inside_S = at_S < INPUTS
            weight_CS = _load_values(
                code_ptrs_C, scale_ptr, number_C, start, dtype, CODE, GROUP, GROUPS, INPUTS, STEP
            )
            x_SM = tl.load(x_ptrs_M[None, :] + at_S[:, None], mask=inside_S[:, None], other=0.0)
            if norm_ptr is not None:
                norm_S = tl.load(norm_ptr + at_S, mask=inside_S, other=0.0).to(tl.float32)
                x_SM = (x_SM.to(tl.float32) * scale_M[None, :] * norm_S[:, None]).to(dtype)
            sum_CM = tl.dot(weight_CS, x_SM, sum_CM, input_precision=PRECISION)
    return sum_CM


@triton.jit
def row_elements(code_ptr, CODE: tl.constexpr, INPUTS: tl.constexpr):
    """Return the elements of a row of codes."""
    BITS: tl.constexpr = 4 if CODE == "int4" or CODE == "e2m1" else 8
    return INPUTS * BITS // code_ptr.dtype.element_ty.primitive_bitwidth


@triton.jit
def _load_pairs(
    code_ptrs_C, scale_ptr, zero_ptr, number_C, start, dtype: tl.constexpr, CODE: tl.constexpr,
    GROUP: tl.constexpr, GROUPS: tl.constexpr, PACK: tl.constexpr, INPUTS: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """Return the values of even and of odd inputs from `start` on; beyond the last input, any values."""
    at_B = start // 2 + tl.arange(0, STEP // 2)
    byte_CB = tl.load(code_ptrs_C[:, None] + at_B[None, :], mask=(at_B < INPUTS // 2)[None, :], other=0)
    scale_CG = _load_groups(scale_ptr, number_C, start, GROUP, GROUPS, STEP)
    if CODE == "e2m1":
        if scale_ptr.dtype.element_ty == tl.uint8:
            return unpack_mxfp4(byte_CB, scale_CG, dtype, PACK)
        else:
            return unpack_e2m1(byte_CB, scale_CG, dtype, PACK)
    else:
        if zero_ptr is None:
            return unpack_int4(byte_CB, scale_CG, None, dtype, PACK)
        else:
            zero_CG = _load_groups(zero_ptr, number_C, start, GROUP, GROUPS, STEP)
            return unpack_int4(byte_CB, scale_CG, zero_CG, dtype, PACK)


@triton.jit
def _load_values(
    code_ptrs_C, scale_ptr, number_C, start, dtype: tl.constexpr, CODE: tl.constexpr, GROUP: tl.constexpr,
    GROUPS: tl.constexpr, INPUTS: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """Return the values of inputs from `start` on; beyond the last input, any values."""
    PART: tl.constexpr = 4 if CODE == "e2m1" else 1  # inputs of an element
    at_L = start // PART + tl.arange(0, STEP // PART)
    none: tl.constexpr = 0.0 if code_ptrs_C.dtype.element_ty.is_floating() else 0
    code_CL = tl.load(code_ptrs_C[:, None] + at_L[None, :], mask=(at_L < INPUTS // PART)[None, :], other=none)
    scale_CG = _load_groups(scale_ptr, number_C, start, GROUP, GROUPS, STEP)
    if CODE == "e2m1":
        return unpack_arranged(code_CL, scale_CG, dtype)
    elif CODE == "int8":
        return unpack_int8(code_CL, scale_CG, dtype)
    else:
        return unpack_e4m3(code_CL, scale_CG, dtype)


@triton.jit
def _load_groups(ptr, number_C, start, GROUP: tl.constexpr, GROUPS: tl.constexpr, STEP: tl.constexpr):
    """Return the scales or zeros of the groups of a step; 0 beyond the last group."""
    COUNT: tl.constexpr = STEP // GROUP if GROUP < STEP else 1
    group_G = start // GROUP + tl.arange(0, COUNT)
    ptrs_CG = ptr + (number_C.to(tl.int64) * GROUPS)[:, None] + group_G[None, :]
    return tl.load(ptrs_CG, mask=(group_G < GROUPS)[None, :], other=0)


@triton.jit
def _dequantize(
    code_ptr, scale_ptr, zero_ptr, weight_ptr,
    CODE: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr, PACK: tl.constexpr, OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr, COLUMNS: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    dtype: tl.constexpr = weight_ptr.dtype.element_ty
    number_C = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    inside_C = number_C < OUTPUTS
    number_C = tl.minimum(number_C, OUTPUTS - 1)
    start = tl.program_id(1) * STEP
    code_ptrs_C = code_ptr + number_C.to(tl.int64) * row_elements(code_ptr, CODE, INPUTS)
    if (CODE == "int4" or CODE == "e2m1") and code_ptr.dtype.element_ty == tl.uint8:
        low_CB, high_CB = _load_pairs(
            code_ptrs_C, scale_ptr, zero_ptr, number_C, start, dtype,
            CODE, GROUP, GROUPS, PACK, INPUTS, STEP,
        )  # fmt: skip
        weight_CS = tl.interleave(low_CB, high_CB)
    else:
        weight_CS = _load_values(
            code_ptrs_C, scale_ptr, number_C, start, dtype, CODE, GROUP, GROUPS, INPUTS, STEP
        )
    at_S = start + tl.arange(0, STEP)
    ptrs_CS = weight_ptr + (number_C.to(tl.int64) * INPUTS)[:, None] + at_S[None, :]
    tl.store(ptrs_CS, weight_CS, mask=inside_C[:, None] & (at_S < INPUTS)[None, :])
