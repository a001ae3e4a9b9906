"""Grouped GEMM: multiplies tiles of rows with the weights of their experts, and sums each row's results.

    x [N, H] ──gather──▶ gate, up ──[+ bias]──▶ activation ──▶ [pairs, I] ──▶ down ──[+ bias]──▶ [pairs, H]
    y [N, H] ◀── a row's pairs, each times its weight, in the order of the choice

In a verified block each of many experts has few rows, so the time is that of reading weights. Programs own
rows of a weight, as in `linear/skinny_gemm.py`, and stream them past a tile's few rows of x. Each pair's
result has its own place and sums have a fixed order (no atomics), so a row's bits depend on no other row if
tiles have one height. Codes of 8 and 4 bits are unpacked in registers (`linear/packed_codes.py`); few rows of
MXFP4 on sm_100 are multiplied by its block-scaled products (`_sum_block_scaled`). Each step rounds as its own
operator would (`compute/eager/moe.py`).

Legend: N rows, k experts chosen per row, P = N k pairs, E experts, T tiles of pairs (`moe_align.py`), K
inputs, O outputs, I inner size, H hidden; in the kernels M pairs of a tile, C rows of a weight's tile (D
columns of a gate); per iteration S inputs, B words of two inputs, G blocks of 32 inputs.
"""

# Type checkers know neither Triton's launch options nor what a jitted function returns.
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...checkpoint.packed_codes import PackedCodes
from ...layers.moe import ExpertActivation
from ..common.element_ops import dependent_launch, expert_gate, wait_for_predecessor
from ..common.unpack_codes import split_e4m3
from ..linear.packed_codes import bytes_unpacked, row_elements, sum_codes, words
from .grouped_gemm_tiles import MOST_BLOCK_SCALED, cut_weight
from .moe_align import ExpertTiles

_FP32_PRODUCT = tl.constexpr("tf32x3")  # see `drafter/compute/gpu_triton/linear/skinny_gemm.py`
_SUM_BLOCK = 1024  # columns of a row per program
_E2M1, _E4M3 = tl.constexpr("e2m1"), tl.constexpr("e4m3")


def multiply_tiles(
    x_RK: Tensor,
    weights_EOK: Tensor | PackedCodes,
    tiles: ExpertTiles,
    *,
    bias_EO: Tensor | None = None,
    activation: ExpertActivation | None = None,
    limit: float | None = None,
) -> Tensor:
    """Return, for each pair in a tile, its row times its expert's weight: [P, O] in the dtype of `x`.

    Pairs that are in no tile are not written.

    Args:
        x_RK: a row for each pair, or for each k of them (R = N); any stride, a row is contiguous.
        weights_EOK: of x's dtype, or codes (`packed_codes.for_kernels`), contiguous; with an activation gate
            rows, then up rows, and the result has half as many columns.
        bias_EO: one per row of the weights, contiguous.
        limit: of `swiglu_clamped`.
    """
    packed = weights_EOK if isinstance(weights_EOK, PackedCodes) else None
    codes = weights_EOK if isinstance(weights_EOK, Tensor) else weights_EOK.codes
    _, outputs, inputs = weights_EOK.shape
    rows, height = len(x_RK), tiles.pairs_TM.shape[1]
    is_arranged = packed is not None and packed.is_arranged
    is_scaled = packed is not None and packed.is_mxfp4 and not is_arranged  # the device has such products
    is_scaled = is_scaled and x_RK.dtype is torch.bfloat16 and height <= MOST_BLOCK_SCALED
    assert x_RK.shape == (rows, inputs) and x_RK.stride(1) == 1, "a row of x is what a weight takes"
    assert tiles.num_pairs % rows == 0, "each row has the same number of pairs"
    assert rows * x_RK.stride(0) < 2**31, "offsets of rows have 32 bits, which leaves registers for codes"
    assert packed is not None or x_RK.dtype is codes.dtype, "x is what the weight takes"
    y_PO = x_RK.new_empty((tiles.num_pairs, outputs // 2 if activation else outputs))
    if packed is not None and packed.has_pairs and not (is_scaled or is_arranged):
        x_RK = words(x_RK)
    cut = cut_weight(
        height, y_PO.dtype, packed=packed is not None, is_scaled=is_scaled, is_arranged=is_arranged
    )
    _multiply_tiles[(len(tiles.experts_T), triton.cdiv(outputs, cut.columns))](
        x_RK, codes, None if packed is None else packed.scales, None if packed is None else packed.zeros,
        bias_EO, y_PO, tiles.pairs_TM, tiles.experts_T, tiles.count_1, 0.0 if limit is None else limit,
        tiles.num_pairs, x_RK.stride(0),
        PLACES=tiles.num_pairs // rows, INPUTS=inputs, OUTPUTS=outputs, ACTIVATION=activation, HEIGHT=height,
        COLUMNS=cut.columns, STEP=cut.step, CODE=None if packed is None else packed.code,
        GROUP=0 if packed is None else packed.group, GROUPS=0 if packed is None else packed.scales.stride(-2),
        PACK=0 if is_scaled else bytes_unpacked(packed), num_warps=cut.warps, num_stages=cut.stages,
        **dependent_launch(x_RK.device),
    )  # fmt: skip
    return y_PO


def add_up(
    outputs_PH: Tensor, expert_ids_Nk: Tensor, weights_Nk: Tensor, num_experts: int, first_expert: int
) -> Tensor:
    """Return y [N, H]: each row's pair outputs times their weights, added in fp32 in their order.

    Pairs of other ranks' experts count as 0. Ids are int32, weights fp32, both contiguous.
    """
    assert weights_Nk.is_contiguous() and expert_ids_Nk.is_contiguous(), "a pair's place is its number"
    num_rows, places = weights_Nk.shape
    width = outputs_PH.shape[1]
    y_NH = outputs_PH.new_empty((num_rows, width))
    block = min(triton.next_power_of_2(width), _SUM_BLOCK)
    _add_up[(num_rows, triton.cdiv(width, block))](
        outputs_PH, expert_ids_Nk, weights_Nk, y_NH,
        FIRST=first_expert, EXPERTS=num_experts, PLACES=places, WIDTH=width, BLOCK=block, num_warps=4,
        **dependent_launch(outputs_PH.device),
    )  # fmt: skip
    return y_NH


@triton.jit(do_not_specialize=["num_pairs"])
def _multiply_tiles(
    x_ptr, weight_ptr, scale_ptr, zero_ptr, bias_ptr, y_ptr, pairs_ptr, experts_ptr, count_ptr, limit,
    num_pairs, x_stride,
    PLACES: tl.constexpr, INPUTS: tl.constexpr, OUTPUTS: tl.constexpr, ACTIVATION: tl.constexpr,
    HEIGHT: tl.constexpr, COLUMNS: tl.constexpr, STEP: tl.constexpr, CODE: tl.constexpr, GROUP: tl.constexpr,
    GROUPS: tl.constexpr, PACK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait_for_predecessor(PDL)
    tile = tl.program_id(0)
    if tile >= tl.load(count_ptr):
        return
    expert = tl.load(experts_ptr + tile).to(tl.int64)
    pair_M = tl.load(pairs_ptr + tile * HEIGHT + tl.arange(0, HEIGHT))
    real_M = pair_M < num_pairs
    number_C = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    if ACTIVATION is not None:  # a column's gate and up are adjacent
        number_C = number_C // 2 + (number_C % 2) * (OUTPUTS // 2)
    number_C = tl.minimum(number_C, OUTPUTS - 1)
    row_C = expert * OUTPUTS + number_C
    x_ptrs_M = x_ptr + (tl.minimum(pair_M, num_pairs - 1) // PLACES) * x_stride
    if CODE is None:
        sum_CM = _sum_plain(x_ptrs_M, weight_ptr + row_C * INPUTS, real_M, INPUTS, HEIGHT, COLUMNS, STEP)
    elif CODE == "e2m1" and PACK == 0:
        sum_CM = _sum_block_scaled(
            x_ptrs_M, weight_ptr + row_C * (INPUTS // 2), scale_ptr + row_C * (INPUTS // 32), real_M,
            INPUTS, HEIGHT, COLUMNS, STEP,
        )  # fmt: skip
    else:
        STEPS: tl.constexpr = (INPUTS + STEP - 1) // STEP
        weight_ptrs_C = weight_ptr + row_C * row_elements(weight_ptr, CODE, INPUTS)
        sum_CM = sum_codes(
            x_ptrs_M, weight_ptrs_C, scale_ptr, zero_ptr, row_C, None, None, 0,
            y_ptr.dtype.element_ty, CODE, GROUP, GROUPS, PACK, INPUTS, STEPS, HEIGHT, COLUMNS, STEP,
            _FP32_PRODUCT,
        )  # fmt: skip
    if bias_ptr is not None:
        sum_CM += tl.load(bias_ptr + row_C).to(tl.float32)[:, None]
    _finish(sum_CM, pair_M, real_M, limit, y_ptr, OUTPUTS, ACTIVATION, HEIGHT, COLUMNS)


@triton.jit
def _sum_plain(
    x_ptrs_M, weight_ptrs_C, real_M,
    INPUTS: tl.constexpr, HEIGHT: tl.constexpr, COLUMNS: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """Return the product, transposed: weight rows fill the instruction's M dimension."""
    sum_CM = tl.zeros([COLUMNS, HEIGHT], tl.float32)
    for start in range(0, INPUTS, STEP):
        at_S = start + tl.arange(0, STEP)
        if INPUTS % STEP == 0:
            weight_CS = tl.load(weight_ptrs_C[:, None] + at_S[None, :])
            x_SM = tl.load(x_ptrs_M[None, :] + at_S[:, None], mask=real_M[None, :], other=0.0)
        else:
            inside_S = at_S < INPUTS
            weight_CS = tl.load(weight_ptrs_C[:, None] + at_S[None, :], mask=inside_S[None, :], other=0.0)
            here_SM = inside_S[:, None] & real_M[None, :]
            x_SM = tl.load(x_ptrs_M[None, :] + at_S[:, None], mask=here_SM, other=0.0)
        sum_CM = tl.dot(weight_CS, x_SM, sum_CM, input_precision=_FP32_PRODUCT)
    return sum_CM


@triton.jit
def _sum_block_scaled(
    x_ptrs_M, weight_ptrs_C, scale_ptrs_C, real_M,
    INPUTS: tl.constexpr, HEIGHT: tl.constexpr, COLUMNS: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """Return the product with MXFP4 by instructions that take codes and scales as they are stored.

    They do not take bf16, so x is split in two e4m3 values.
    """
    sum_CM = tl.zeros([COLUMNS, HEIGHT], tl.float32)
    for start in range(0, INPUTS, STEP):
        at_S, at_B = start + tl.arange(0, STEP), start // 2 + tl.arange(0, STEP // 2)
        block_G = start // 32 + tl.arange(0, STEP // 32)
        inside_S, inside_B, inside_G = at_S < INPUTS, at_B < INPUTS // 2, block_G < INPUTS // 32
        byte_CB = tl.load(weight_ptrs_C[:, None] + at_B[None, :], mask=inside_B[None, :], other=0)
        scale_CG = tl.load(scale_ptrs_C[:, None] + block_G[None, :], mask=inside_G[None, :], other=0)
        here_SM = inside_S[:, None] & real_M[None, :]
        x_SM = tl.load(x_ptrs_M[None, :] + at_S[:, None], mask=here_SM, other=0.0)
        high_SM, low_SM, high_MG, low_MG = split_e4m3(x_SM)
        sum_CM = tl.dot_scaled(byte_CB, scale_CG, _E2M1, high_SM, high_MG, _E4M3, sum_CM)
        sum_CM = tl.dot_scaled(byte_CB, scale_CG, _E2M1, low_SM, low_MG, _E4M3, sum_CM)
    return sum_CM


@triton.jit
def _finish(
    sum_CM, pair_M, real_M, limit, y_ptr,
    OUTPUTS: tl.constexpr, ACTIVATION: tl.constexpr, HEIGHT: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Round, apply the activation, and write each pair to its place."""
    dtype: tl.constexpr = y_ptr.dtype.element_ty
    y_CM = sum_CM.to(dtype)
    if ACTIVATION is None:
        width: tl.constexpr = OUTPUTS
        out_C = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    else:
        width: tl.constexpr = OUTPUTS // 2
        out_C = tl.program_id(1) * (COLUMNS // 2) + tl.arange(0, COLUMNS // 2)
        pairs_DM2 = tl.permute(tl.reshape(y_CM, (COLUMNS // 2, 2, HEIGHT)), (0, 2, 1))
        gate_DM, up_DM = tl.split(pairs_DM2)
        y_CM = expert_gate(gate_DM.to(tl.float32), up_DM.to(tl.float32), limit, ACTIVATION, dtype)
    at_CM = (pair_M.to(tl.int64) * width)[None, :] + out_C[:, None]
    tl.store(y_ptr + at_CM, y_CM, mask=(out_C < width)[:, None] & real_M[None, :])


@triton.jit
def _add_up(
    outputs_ptr, ids_ptr, weights_ptr, y_ptr,
    FIRST: tl.constexpr, EXPERTS: tl.constexpr, PLACES: tl.constexpr, WIDTH: tl.constexpr,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait_for_predecessor(PDL)
    row = tl.program_id(0).to(tl.int64)
    column_H = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside_H = column_H < WIDTH
    total_H = tl.zeros([BLOCK], tl.float32)
    for place in range(PLACES):
        pair = row * PLACES + place
        expert = tl.load(ids_ptr + pair) - FIRST
        mine = (expert >= 0) & (expert < EXPERTS)
        output_H = tl.load(outputs_ptr + pair * WIDTH + column_H, mask=inside_H & mine, other=0.0)
        total_H += output_H.to(tl.float32) * tl.load(weights_ptr + pair)
    tl.store(y_ptr + row * WIDTH + column_H, total_H.to(y_ptr.dtype.element_ty), mask=inside_H)
