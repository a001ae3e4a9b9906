"""GEMMs of few rows, which read each weight once; norm, gate and residual are fused.

A block's verification multiplies 16 rows per request, so it is bound by reading the weights. A program owns
64 rows of a weight and streams them past all rows of x at once, or 128 of them past 65 to 128 rows of x; the
weight is the left operand, so that Hopper's matrix instructions read it from shared memory. If there are too
few programs to fill the GPU, several split one tile's inputs (split K), and the last to finish adds their
sums in order. The splits depend only on the weight's shape and on the height of a tile of rows. Two tiles of
rows run side by side, and share the weight's tile in the L2 cache. Called by `projections.py`.

    x ──[norm: row scale from partial sums of squares, weight]──▶ x W^T ──[bias]──[gate]──[+ residual]──▶ y
                                                                    └──▶ sums of squares of y, per tile

Each step rounds as its separate kernel would: fused or not, only the order of a product's sums differs.

Legend: N rows, K inputs, O outputs, I inner size, P parts, L layers, R rows of a block of a weight, T tiles
of outputs; in the kernel C rows of a weight's tile (D columns of a gate), M rows of x, S inputs per
iteration.
"""

# Type checkers know neither Triton's launch options nor what a jitted function returns.
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from ...checkpoint.packed_codes import PackedCodes
from ...layers.linear import Activation
from ..common.e4m3 import widen
from ..common.element_ops import activate, dependent_launch, wait_for_predecessor
from .gemm_tiles import ProductTiling, ProductWorkspace
from .packed_codes import bytes_unpacked, sum_codes, words

_FP32_PRODUCT = tl.constexpr("tf32x3")  # fp32 precision on tensor cores; fp16 and bf16 ignore it
# Of each weight row: 16 KiB per program, which are 2 microseconds of an H100's memory if all its
# multiprocessors run three.
_PREFETCHED_LINES = tl.constexpr(2)


@dataclass(frozen=True, slots=True)
class Normed:
    """A norm to apply to x on load: fp32 partial sums of rows' squares; the weight may be wider."""

    squares_NT: Tensor
    weight_K: Tensor
    eps: float


def multiply(
    x_NK: Tensor,
    weight_PLRK: Tensor,
    tiling: ProductTiling,
    workspace: ProductWorkspace,
    tile: int,
    *,
    packed: PackedCodes | None = None,
    scale_O: Tensor | None = None,
    bias_O: Tensor | None = None,
    norm: Normed | None = None,
    activation: Activation | None = None,
    residual_NO: Tensor | None = None,
    squares_NT: Tensor | None = None,
) -> Tensor:
    """Return y [N, O] in the dtype of x.

    Args:
        x_NK: rows may have any stride, a row is contiguous.
        weight_PLRK: O = P * L * R outputs; a row is contiguous, blocks of R rows may have any stride. With an
            activation its parts are gate and up (P = 2, L = 1), and O = R.
        tiling: of this weight, with `tile_columns(tile)`.
        tile: rows of x per program; more rows take several programs, which read the weights again. If the
            workspace has no room for the sums of all, every program adds up all splits by itself.
        packed: the weight if it is packed; `weight_PLRK` is a view of its codes then.
        scale_O: fp32, per row of the weight, which is e4m3 then (`fp8_linear.py`).
        bias_O: per row of the weight, in the order of outputs.
        residual_NO: added to the rounded product.
        squares_NT: fp32 [N, tiling.tiles], written: sums of squares of y over each tile of its columns.
    """
    num_rows, inputs = x_NK.shape
    parts, layers, span, _ = weight_PLRK.shape
    outputs = span if activation else parts * layers * span
    assert inputs == (weight_PLRK.shape[3] if packed is None else packed.in_features), "x fits the weight"
    has_codes = scale_O is not None or packed is not None
    assert has_codes or x_NK.dtype is weight_PLRK.dtype, "and has its dtype, but for codes"
    assert weight_PLRK.stride(3) == 1 and x_NK.stride(1) == 1, "a row must be contiguous"
    assert activation is None or (parts, layers) == (2, 1), "gate, then up"
    y_NO = x_NK.new_empty((num_rows, outputs))
    row_tiles = -(-num_rows // tile)
    if row_tiles == 0:
        return y_NO
    if packed is not None and packed.has_pairs and not packed.is_arranged:
        x_NK = words(x_NK)
    step, split_tiles, stages = tiling.stepping(tile)
    is_split = workspace.has_room(row_tiles * tiling.tiles * tiling.splits, tiling.columns, tile)
    programs = tiling.splits if is_split else 1  # per tile of y
    _multiply[(row_tiles, tiling.tiles * programs)](
        x_NK, weight_PLRK, None if packed is None else packed.scales,
        None if packed is None else packed.zeros, scale_O, bias_O, residual_NO, y_NO,
        None if norm is None else norm.weight_K, None if norm is None else norm.squares_NT, squares_NT,
        workspace.sums_E, workspace.arrived_E, 0.0 if norm is None else norm.eps, num_rows, x_NK.stride(0),
        0 if residual_NO is None else residual_NO.stride(0), weight_PLRK.stride(0), weight_PLRK.stride(1),
        weight_PLRK.stride(2),
        INPUTS=inputs, OUTPUTS=outputs, LAYERS=layers, SPAN=span, GATED=activation is not None,
        GELU=activation == "gelu_tanh", SQUARES=1 if norm is None else norm.squares_NT.shape[1],
        SPLITS=tiling.splits, SPLIT_TILES=split_tiles, PROGRAMS=programs, ROWS=tile, COLUMNS=tiling.columns,
        STEP=step, CODE=None if packed is None else packed.code, GROUP=0 if packed is None else packed.group,
        GROUPS=0 if packed is None else packed.scales.stride(-2), PACK=bytes_unpacked(packed),
        num_warps=tiling.num_warps, num_stages=stages, **dependent_launch(x_NK.device),
    )  # fmt: skip
    return y_NO


@triton.jit(do_not_specialize=["num_rows"])
def _multiply(
    x_ptr, weight_ptr, group_scale_ptr, group_zero_ptr, scale_ptr, bias_ptr, residual_ptr, y_ptr, norm_ptr,
    squares_ptr, new_squares_ptr, sums_ptr, arrived_ptr, eps, num_rows, x_stride, residual_stride,
    part_stride, layer_stride, row_stride,
    INPUTS: tl.constexpr, OUTPUTS: tl.constexpr, LAYERS: tl.constexpr, SPAN: tl.constexpr,
    GATED: tl.constexpr, GELU: tl.constexpr, SQUARES: tl.constexpr, SPLITS: tl.constexpr,
    SPLIT_TILES: tl.constexpr, PROGRAMS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    STEP: tl.constexpr, CODE: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr, PACK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Compute a tile of y, or a split of one; rows and columns out of range are not written."""
    row_tile, tile = tl.program_id(0), tl.program_id(1) // PROGRAMS
    at_C, number_C = _weight_rows(
        tile, part_stride, layer_stride, row_stride, OUTPUTS, LAYERS, SPAN, GATED, COLUMNS
    )
    if PDL and CODE is None:  # products of codes are bound by their instructions
        _prefetch(weight_ptr + at_C, tl.program_id(1) % PROGRAMS * SPLIT_TILES * STEP, INPUTS)
    wait_for_predecessor(PDL)
    row_M = row_tile * ROWS + tl.arange(0, ROWS)
    real_M = row_M < num_rows
    row_M = tl.minimum(row_M, num_rows - 1).to(tl.int64)
    scale_M = real_M.to(tl.float32)
    if norm_ptr is not None:
        scale_M = _scales(squares_ptr, row_M, eps, INPUTS, SQUARES)
    x_ptrs_M, weight_ptrs_C = x_ptr + row_M * x_stride, weight_ptr + at_C
    sum_CM = tl.zeros([COLUMNS, ROWS], tl.float32)
    if PROGRAMS == 1:
        for split in range(SPLITS):
            sum_CM += _sum_split(
                x_ptrs_M, weight_ptrs_C, group_scale_ptr, group_zero_ptr, number_C, norm_ptr, scale_M, split,
                y_ptr.dtype.element_ty,
                INPUTS, SPLITS, SPLIT_TILES, ROWS, COLUMNS, STEP, CODE, GROUP, GROUPS, PACK,
            )  # fmt: skip
    else:
        split = tl.program_id(1) % SPLITS
        part_CM = _sum_split(
            x_ptrs_M, weight_ptrs_C, group_scale_ptr, group_zero_ptr, number_C, norm_ptr, scale_M, split,
            y_ptr.dtype.element_ty,
            INPUTS, SPLITS, SPLIT_TILES, ROWS, COLUMNS, STEP, CODE, GROUP, GROUPS, PACK,
        )  # fmt: skip
        place = row_tile * (tl.num_programs(1) // PROGRAMS) + tile
        sums_ptrs_CM = sums_ptr + place * SPLITS * COLUMNS * ROWS
        sums_ptrs_CM += tl.arange(0, COLUMNS)[:, None] * ROWS + tl.arange(0, ROWS)[None, :]
        tl.store(sums_ptrs_CM + split * COLUMNS * ROWS, part_CM)
        tl.debug_barrier()  # all of the program's sums are stored before it is counted
        arrived = tl.atomic_add(arrived_ptr + place, 1, sem="acq_rel", scope="gpu")
        if arrived < SPLITS - 1:
            return
        tl.store(arrived_ptr + place, 0)
        for other in range(SPLITS):
            sum_CM += tl.load(sums_ptrs_CM + other * COLUMNS * ROWS, cache_modifier=".cg")
    if scale_ptr is not None:
        sum_CM *= tl.load(scale_ptr + number_C)[:, None]
    if bias_ptr is not None:
        sum_CM += tl.load(bias_ptr + number_C).to(tl.float32)[:, None]
    _finish(
        sum_CM, tile, row_M, real_M, residual_ptr, residual_stride, y_ptr, new_squares_ptr,
        OUTPUTS, GATED, GELU, ROWS, COLUMNS,
    )  # fmt: skip


@triton.jit
def _prefetch(weight_ptrs_C, first, INPUTS: tl.constexpr):
    """Prefetch a program's first weights into L2, while it waits for the previous kernel.

    L2 is where other kernels' writes arrive, so weights that were replaced just before are read as they are.
    """
    LINE: tl.constexpr = 1024 // weight_ptrs_C.dtype.element_ty.primitive_bitwidth  # 128 bytes
    at_L = tl.minimum(first + tl.arange(0, _PREFETCHED_LINES) * LINE, INPUTS - 1)
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
        "=r,l",
        [weight_ptrs_C[:, None] + at_L[None, :]],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def _weight_rows(
    tile, part_stride, layer_stride, row_stride,
    OUTPUTS: tl.constexpr, LAYERS: tl.constexpr, SPAN: tl.constexpr, GATED: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """Return the offsets and indices of the rows of a weight's tile; a gate's rows alternate gate and up."""
    lane_C = tl.arange(0, COLUMNS)
    if GATED:
        column_C = tl.minimum(tile * (COLUMNS // 2) + lane_C // 2, OUTPUTS - 1)
        at_C = (lane_C % 2).to(tl.int64) * part_stride + column_C.to(tl.int64) * row_stride
        number_C = (lane_C % 2) * OUTPUTS + column_C
    else:
        number_C = tl.minimum(tile * COLUMNS + lane_C, OUTPUTS - 1)
        block_C = (number_C // SPAN).to(tl.int64)
        at_C = (block_C // LAYERS) * part_stride + (block_C % LAYERS) * layer_stride
        at_C += (number_C % SPAN).to(tl.int64) * row_stride
    return at_C, number_C


@triton.jit
def _finish(
    sum_CM, tile, row_M, real_M, residual_ptr, residual_stride, y_ptr, squares_ptr,
    OUTPUTS: tl.constexpr, GATED: tl.constexpr, GELU: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Apply gate and residual to a tile, rounding in between; write it and its sums of squares."""
    dtype: tl.constexpr = y_ptr.dtype.element_ty
    y_CM = sum_CM.to(dtype)
    out_C = tile * COLUMNS + tl.arange(0, COLUMNS)
    if GATED:
        pairs_DM2 = tl.permute(tl.reshape(y_CM, (COLUMNS // 2, 2, ROWS)), (0, 2, 1))
        gate_DM, up_DM = tl.split(pairs_DM2)
        y_CM = (activate(gate_DM.to(tl.float32), GELU, dtype) * up_DM.to(tl.float32)).to(dtype)
        out_C = tile * (COLUMNS // 2) + tl.arange(0, COLUMNS // 2)
    written_CM = (out_C < OUTPUTS)[:, None] & real_M[None, :]
    if residual_ptr is not None:
        at_CM = (row_M * residual_stride)[None, :] + out_C[:, None]
        residual_CM = tl.load(residual_ptr + at_CM, mask=written_CM, other=0.0)
        y_CM = (residual_CM.to(tl.float32) + y_CM.to(tl.float32)).to(dtype)
    tl.store(y_ptr + (row_M * OUTPUTS)[None, :] + out_C[:, None], y_CM, mask=written_CM)
    if squares_ptr is not None:
        value_CM = tl.where(written_CM, y_CM.to(tl.float32), 0.0)
        tiles: tl.constexpr = (OUTPUTS + COLUMNS - 1) // COLUMNS
        tl.store(squares_ptr + row_M * tiles + tile, tl.sum(value_CM * value_CM, 0), mask=real_M)


@triton.jit
def _scales(squares_ptr, row_M, eps, INPUTS: tl.constexpr, SQUARES: tl.constexpr):
    """Return 1 / sqrt(mean(x^2) + eps) per row, from partial sums of squares."""
    part_T = tl.arange(0, triton.next_power_of_2(SQUARES))
    squares_MT = tl.load(
        squares_ptr + (row_M * SQUARES)[:, None] + part_T[None, :],
        mask=(part_T < SQUARES)[None, :],
        other=0.0,
    )
    return tl.rsqrt(tl.sum(squares_MT, 1) / INPUTS + eps)


@triton.jit
def _sum_split(
    x_ptrs_M, weight_ptrs_C, group_scale_ptr, group_zero_ptr, number_C, norm_ptr, scale_M, split,
    dtype: tl.constexpr, INPUTS: tl.constexpr, SPLITS: tl.constexpr, SPLIT_TILES: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, STEP: tl.constexpr, CODE: tl.constexpr, GROUP: tl.constexpr,
    GROUPS: tl.constexpr, PACK: tl.constexpr,
):  # fmt: skip
    """Return one split's product, transposed: weight rows fill the instruction's M dimension."""
    if CODE is None:
        return _sum_plain(
            x_ptrs_M, weight_ptrs_C, norm_ptr, scale_M, split,
            INPUTS, SPLITS, SPLIT_TILES, ROWS, COLUMNS, STEP,
        )  # fmt: skip
    else:
        return sum_codes(
            x_ptrs_M, weight_ptrs_C, group_scale_ptr, group_zero_ptr, number_C, norm_ptr, scale_M, split,
            dtype, CODE, GROUP, GROUPS, PACK, INPUTS, SPLIT_TILES, ROWS, COLUMNS, STEP, _FP32_PRODUCT,
        )  # fmt: skip


@triton.jit
def _sum_plain(
    x_ptrs_M, weight_ptrs_C, norm_ptr, scale_M, split,
    INPUTS: tl.constexpr, SPLITS: tl.constexpr, SPLIT_TILES: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    sum_CM = tl.zeros([COLUMNS, ROWS], tl.float32)
    dtype: tl.constexpr = x_ptrs_M.dtype.element_ty
    for i in range(SPLIT_TILES):
        at_S = (split * SPLIT_TILES + i) * STEP + tl.arange(0, STEP)
        if SPLITS * SPLIT_TILES * STEP == INPUTS:
            weight_CS = tl.load(weight_ptrs_C[:, None] + at_S[None, :])
            x_SM = tl.load(x_ptrs_M[None, :] + at_S[:, None])
        else:
            inside_S = at_S < INPUTS
            weight_CS = tl.load(weight_ptrs_C[:, None] + at_S[None, :], mask=inside_S[None, :], other=0.0)
            x_SM = tl.load(x_ptrs_M[None, :] + at_S[:, None], mask=inside_S[:, None], other=0.0)
        if norm_ptr is not None:
            norm_S = tl.load(norm_ptr + at_S, mask=at_S < INPUTS, other=0.0).to(tl.float32)
            x_SM = (x_SM.to(tl.float32) * scale_M[None, :] * norm_S[:, None]).to(dtype)
        weight_CS = widen(weight_CS, dtype)
        sum_CM = tl.dot(weight_CS, x_SM, sum_CM, input_precision=_FP32_PRODUCT)
    return sum_CM
