"""MLA of long prompts on a GPU, with latents expanded to per-head keys and values: less work for many rows.

The same sums as absorbed attention (`mla.py`) in another order, so last bits differ. `mla_prefill_work.py`
chooses the requests (docs/decisions/expanded-latents.md). Their keys are concatenated and processed in
*pieces* that fit a workspace:

    pages ── gather ─▶ [T, C + R] ── product with K and V of all heads ─▶ [T, J, E + F]       per piece
                                │
    queries [N, J, E + R] ──▶ a tile of rows, of one head ──▶ (m, l, o) ─▶ .. next piece .. ─▶ out [N, J, F]

A tile with keys in several pieces stores its partial sums (m, l and o of `paged_attention.py`), which the
next piece's launch continues. If there are too few tiles for all processors, several programs share a tile:
they take key tiles in turn and keep separate sums, which are added at the end (split K/V, as in
Flash-Decoding).

Legend: N rows, L expanded rows, B requests, J heads, E unrotated head dim, R rotated, F of values, C values
of a latent, W = C + R, U = E + F, T keys of a piece, Z programs of a tile, P pages, S page size; in the
kernels M rows of a tile, K keys of one.
"""

# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...layers.mla import MLALayer
from ..common.element_ops import dependent_launch, wait_for_predecessor
from .attention_tiles import find_request, tile_width
from .key_tiles import add_parts, inside, no_part
from .mla_prefill_work import Expansion, gather

_LOG2_E = tl.constexpr(1.4426950408889634)
_FP32_PRODUCT = tl.constexpr("tf32x3")  # see `key_tiles.py`
_FP16_MAX = tl.constexpr(65504.0)
_ADDING_WARPS = 16


def attend_expanded(
    q_NJO: Tensor, parts: MLALayer, pages_PSW: Tensor, expansion: Expansion, scale: float, out_NJF: Tensor
) -> None:
    """Attend causally from the rotated queries of the expansion into `out`; their latents are written."""
    (num_heads, unit, rank), workspace = parts.kv_up_JUC.shape, expansion.workspace
    assert q_NJO.stride(2) == pages_PSW.stride(2) == 1, "the last dimension is contiguous"
    assert out_NJF.is_contiguous() and parts.kv_up_JUC.is_contiguous(), "here all are"
    up_CO = parts.kv_up_JUC.flatten(0, 1).T
    # Allocated for one piece as for many, so a measured step allocates as much as any
    # (`targets/loading/warmup.py`).
    out_ZLJF = torch.empty(
        (expansion.num_splits, expansion.num_rows, num_heads, parts.v_dim),
        dtype=torch.float32,
        device=q_NJO.device,
    )
    max_ZLJ, sum_ZLJ = (out_ZLJF.new_empty(out_ZLJF.shape[:-1]) for _ in range(2))
    sums = (max_ZLJ, sum_ZLJ, out_ZLJF)
    for begin in range(0, expansion.num_keys, len(workspace.latents_TW)):
        count = min(expansion.num_keys - begin, len(workspace.latents_TW))
        latents_TW = workspace.latents_TW[:count]
        heads_TJU = workspace.heads_TJU[:count]
        gather(pages_PSW, expansion, begin, latents_TW)
        torch.mm(latents_TW[:, :rank], up_CO, out=heads_TJU.view(count, num_heads * unit))
        _attend(q_NJO, latents_TW, heads_TJU, parts, expansion, begin, scale, sums, out_NJF)
    if expansion.num_splits > 1:
        _add_up(parts, expansion, sums, out_NJF)


def _attend(
    q_NJO: Tensor,
    latents_TW: Tensor,
    heads_TJU: Tensor,
    parts: MLALayer,
    expansion: Expansion,
    begin: int,
    scale: float,
    sums: tuple[Tensor, Tensor, Tensor],
    out_NJF: Tensor,
) -> None:
    rows, (height, keys, warps, stages) = expansion.rows, expansion.workspace.tile
    rotated = q_NJO.shape[2] - parts.nope_dim
    _attend_expanded[(expansion.num_tiles * parts.num_heads, expansion.num_splits)](
        q_NJO, latents_TW, heads_TJU, out_NJF, *sums, expansion.keys_before, expansion.rows_before,
        expansion.tiles_before, rows.cu_rows, rows.kv_lengths_B, scale, begin, begin + len(latents_TW),
        expansion.num_rows, expansion.num_tiles, expansion.num_splits, len(rows.slots_B), q_NJO.stride(0),
        q_NJO.stride(1),
        HEADS=parts.num_heads, NOPE=parts.nope_dim, NOPE_WIDTH=tile_width(parts.nope_dim), ROTATED=rotated,
        ROTATED_WIDTH=tile_width(rotated), V_DIM=parts.v_dim, V_WIDTH=tile_width(parts.v_dim),
        RANK=parts.rank, BLOCK_ROWS=height, BLOCK_KEYS=keys, num_warps=warps,
        num_stages=stages, **dependent_launch(q_NJO.device),
    )  # fmt: skip


def _add_up(
    parts: MLALayer, expansion: Expansion, sums: tuple[Tensor, Tensor, Tensor], out_NJF: Tensor
) -> None:
    rows, (height, keys, *_) = expansion.rows, expansion.workspace.tile
    _add_splits[(expansion.num_tiles * parts.num_heads,)](
        out_NJF, *sums, expansion.rows_before, expansion.tiles_before, rows.cu_rows, rows.kv_lengths_B,
        expansion.num_rows, expansion.num_splits, len(rows.slots_B),
        HEADS=parts.num_heads, V_DIM=parts.v_dim, V_WIDTH=tile_width(parts.v_dim), BLOCK_ROWS=height,
        BLOCK_KEYS=keys, num_warps=_ADDING_WARPS, **dependent_launch(out_NJF.device),
    )  # fmt: skip


@triton.jit
def _tile_of(tile, tiles_before_ptr, cu_rows_ptr, kv_lengths_ptr, num_requests, BLOCK_ROWS: tl.constexpr):
    """Return a tile's request, its first row and row count, and the tile's rows, positions and keys."""
    request = find_request(tiles_before_ptr, tile, num_requests)
    begin = tl.load(cu_rows_ptr + request)
    count = tl.load(cu_rows_ptr + request + 1) - begin
    num_keys = tl.load(kv_lengths_ptr + request)
    row_M = (tile - tl.load(tiles_before_ptr + request)) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    position_M = num_keys - count + row_M
    return request, begin, count, row_M, position_M, tl.minimum(num_keys, tl.max(position_M, 0) + 1)


@triton.jit(
    do_not_specialize=["piece_begin", "piece_end", "num_sums", "num_tiles", "num_splits", "num_requests"],
    do_not_specialize_on_alignment=["cu_rows_ptr", "kv_lengths_ptr"],
)
def _attend_expanded(
    q_ptr, latents_ptr, heads_ptr, out_ptr, max_ptr, sum_ptr, partial_ptr, keys_before_ptr, rows_before_ptr,
    tiles_before_ptr, cu_rows_ptr, kv_lengths_ptr, scale, piece_begin, piece_end, num_sums, num_tiles,
    num_splits, num_requests, q_row_stride, q_head_stride,
    HEADS: tl.constexpr, NOPE: tl.constexpr, NOPE_WIDTH: tl.constexpr, ROTATED: tl.constexpr,
    ROTATED_WIDTH: tl.constexpr, V_DIM: tl.constexpr, V_WIDTH: tl.constexpr, RANK: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_KEYS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Attend from a tile of a request's rows, for one head, to every Z-th key tile of a piece."""
    wait_for_predecessor(PDL)
    head = tl.program_id(0) % HEADS
    tile = num_tiles - 1 - tl.program_id(0) // HEADS  # late rows first: they see more keys
    split = tl.program_id(1)
    request, begin, count, row_M, position_M, end = _tile_of(
        tile, tiles_before_ptr, cu_rows_ptr, kv_lengths_ptr, num_requests, BLOCK_ROWS
    )
    origin = tl.load(keys_before_ptr + request) - piece_begin  # of the request's first key in the piece
    lo, hi = tl.maximum(-origin, 0), tl.minimum(end, piece_end - piece_begin - origin)
    key_tile = lo // BLOCK_KEYS
    first_key = (key_tile + (split + num_splits - key_tile % num_splits) % num_splits) * BLOCK_KEYS
    if tl.maximum(lo, first_key) >= hi:
        return
    real_M = row_M < count
    at_M = (begin + row_M).to(tl.int64)
    nope_E, rotated_R = tl.arange(0, NOPE_WIDTH), tl.arange(0, ROTATED_WIDTH)
    value_F = tl.arange(0, V_WIDTH)
    from_M = q_ptr + at_M * q_row_stride + head * q_head_stride
    there_ME = inside(real_M[:, None], nope_E[None, :], NOPE, NOPE_WIDTH)
    q_ME = tl.load(from_M[:, None] + nope_E[None, :], mask=there_ME, other=0.0)
    there_MR = inside(real_M[:, None], rotated_R[None, :], ROTATED, ROTATED_WIDTH)
    q_MR = tl.load(from_M[:, None] + NOPE + rotated_R[None, :], mask=there_MR, other=0.0)
    sums_M = _sum_offsets(rows_before_ptr, request, row_M, split, num_sums, head, HEADS)
    sums_MF = (sums_M * V_DIM)[:, None] + value_F[None, :]
    there_MF = inside(real_M[:, None], value_F[None, :], V_DIM, V_WIDTH)
    m_M, l_M, o_MF = no_part(BLOCK_ROWS, V_WIDTH)
    if lo > split * BLOCK_KEYS:  # continue this program's earlier sums
        m_M = tl.load(max_ptr + sums_M, mask=real_M, other=-float("inf"))
        l_M = tl.load(sum_ptr + sums_M, mask=real_M, other=0.0)
        o_MF = tl.load(partial_ptr + sums_MF, mask=there_MF, other=0.0)
    for first in range(first_key, hi, BLOCK_KEYS * num_splits):
        key_K = first + tl.arange(0, BLOCK_KEYS)
        there_K = (key_K >= lo) & (key_K < hi)
        place_K = origin + key_K
        from_K = heads_ptr + (place_K * HEADS + head) * (NOPE + V_DIM)
        there_EK = inside(there_K[None, :], nope_E[:, None], NOPE, NOPE_WIDTH)
        k_EK = tl.load(from_K[None, :] + nope_E[:, None], mask=there_EK, other=0.0)
        x_MK = tl.dot(q_ME, k_EK, input_precision=_FP32_PRODUCT)
        rotated_K = latents_ptr + place_K * (RANK + ROTATED) + RANK
        there_RK = inside(there_K[None, :], rotated_R[:, None], ROTATED, ROTATED_WIDTH)
        k_RK = tl.load(rotated_K[None, :] + rotated_R[:, None], mask=there_RK, other=0.0)
        x_MK = tl.dot(q_MR, k_RK, x_MK, input_precision=_FP32_PRODUCT) * (scale * _LOG2_E)
        seen_MK = there_K[None, :] & (key_K[None, :] <= position_M[:, None])
        x_MK = tl.where(seen_MK, x_MK, -float("inf"))
        new_m_M = tl.maximum(m_M, tl.max(x_MK, 1))
        base_M = tl.where(new_m_M == -float("inf"), 0.0, new_m_M)  # no key seen yet: avoid inf - inf
        p_MK = tl.exp2(x_MK - base_M[:, None])
        shrink_M = tl.exp2(m_M - base_M)
        l_M = l_M * shrink_M + tl.sum(p_MK, 1)
        there_KF = inside(there_K[:, None], value_F[None, :], V_DIM, V_WIDTH)
        v_KF = tl.load(from_K[:, None] + NOPE + value_F[None, :], mask=there_KF, other=0.0)
        if v_KF.dtype == tl.float16:  # zero times an overflow that a row does not see would be NaN
            v_KF = tl.clamp(v_KF, -_FP16_MAX, _FP16_MAX)
        o_MF = tl.dot(p_MK.to(v_KF.dtype), v_KF, o_MF * shrink_M[:, None], input_precision=_FP32_PRODUCT)
        m_M = new_m_M
    if (hi == end) & (num_splits == 1):
        _write_rows(out_ptr, at_M, head, l_M, o_MF, there_MF, HEADS, V_DIM)
    else:
        tl.store(max_ptr + sums_M, m_M, mask=real_M)
        tl.store(sum_ptr + sums_M, l_M, mask=real_M)
        tl.store(partial_ptr + sums_MF, o_MF, mask=there_MF)


@triton.jit(
    do_not_specialize=["num_sums", "num_splits", "num_requests"],
    do_not_specialize_on_alignment=["cu_rows_ptr", "kv_lengths_ptr"],
)
def _add_splits(
    out_ptr, max_ptr, sum_ptr, partial_ptr, rows_before_ptr, tiles_before_ptr, cu_rows_ptr, kv_lengths_ptr,
    num_sums, num_splits, num_requests,
    HEADS: tl.constexpr, V_DIM: tl.constexpr, V_WIDTH: tl.constexpr, BLOCK_ROWS: tl.constexpr,
    BLOCK_KEYS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Add the programs' sums of a tile and head; with few key tiles, later programs have none."""
    wait_for_predecessor(PDL)
    head, tile = tl.program_id(0) % HEADS, tl.program_id(0) // HEADS
    request, begin, count, row_M, _, end = _tile_of(
        tile, tiles_before_ptr, cu_rows_ptr, kv_lengths_ptr, num_requests, BLOCK_ROWS
    )
    real_M = row_M < count
    value_F = tl.arange(0, V_WIDTH)
    there_MF = inside(real_M[:, None], value_F[None, :], V_DIM, V_WIDTH)
    m_M, l_M, o_MF = no_part(BLOCK_ROWS, V_WIDTH)
    for split in range(0, tl.minimum(num_splits, tl.cdiv(end, BLOCK_KEYS))):
        sums_M = _sum_offsets(rows_before_ptr, request, row_M, split, num_sums, head, HEADS)
        sums_MF = (sums_M * V_DIM)[:, None] + value_F[None, :]
        m2_M = tl.load(max_ptr + sums_M, mask=real_M, other=-float("inf"))
        l2_M = tl.load(sum_ptr + sums_M, mask=real_M, other=0.0)
        o2_MF = tl.load(partial_ptr + sums_MF, mask=there_MF, other=0.0)
        m_M, l_M, o_MF = add_parts(m_M, l_M, o_MF, m2_M, l2_M, o2_MF)
    _write_rows(out_ptr, (begin + row_M).to(tl.int64), head, l_M, o_MF, there_MF, HEADS, V_DIM)


@triton.jit
def _sum_offsets(rows_before_ptr, request, row_M, split, num_sums, head, HEADS: tl.constexpr):
    place_M = (tl.load(rows_before_ptr + request) + row_M).to(tl.int64)
    return (split * num_sums + place_M) * HEADS + head


@triton.jit
def _write_rows(out_ptr, at_M, head, l_M, o_MF, there_MF, HEADS: tl.constexpr, V_DIM: tl.constexpr):
    """Normalize and write finished rows; every real row has seen its own key."""
    out_MF = ((at_M * HEADS + head) * V_DIM)[:, None] + tl.arange(0, o_MF.shape[1])[None, :]
    o_MF = o_MF / tl.where(l_M > 0, l_M, 1.0)[:, None]
    tl.store(out_ptr + out_MF, o_MF.to(out_ptr.dtype.element_ty), mask=there_MF)
