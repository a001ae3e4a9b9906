"""Attention over paged K/V, in one launch or, where contexts are split, two: verify, draft and prefill.

Means what `drafter/compute/eager/attention.py` means (causality, window), plus sinks. Plans nothing on the
host but tile sizes (`tiles.py`): lengths, page ids and row offsets are read from memory, so a CUDA graph may
hold a call. Not the K/V write: a call's own rows are in the cache before. Called by the target's and the
drafter's layers.

A program serves one request, one kv head and one tile of rows; GQA heads are rows too, so a block of 16 rows
of 4 heads each is one tile of 64 that reads its K and V once. Several programs share a long context:

    rows of a tile (R)                 key tiles of a context         split 0  split 1  split 2
    token 0: head 0 1 2 3  ┐           |----|----|----|----|----|----|  m,l,o    m,l,o    m,l,o
    token 1: head 0 1 2 3  ├── x K^T ─►  lo ►  ► hi                        └────────┴────────┘
    ...                    ┘             (one split's loop)                   _combine ──► out

with m the greatest score so far (in powers of two), l the sum of 2^(score - m), o the sum weighted by V.

Legend: N rows, B requests, Q query heads, K kv heads, D head dim, P pages, S page size; in the kernels R rows
of a tile (tokens x heads of a group), T keys of a tile, C splits.
"""

# Type checkers know neither Triton's launch options nor what its functions take and return.
# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .tiles import MIN_SPLIT_TILES, AttentionWorkspace, PagedRows, TilePlan, plan_tiles

_LOG2_E = tl.constexpr(1.4426950408889634)
_MIN_TILES = tl.constexpr(MIN_SPLIT_TILES)
_FP32_PRODUCT = tl.constexpr("tf32x3")  # as exact as fp32, on the matrix unit; fp16 and bf16 ignore it


def verify_attention(
    q_NQD: Tensor,
    k_PSKD: Tensor,
    v_PSKD: Tensor,
    rows: PagedRows,
    scale: float,
    *,
    causal: bool = True,
    window: int | None = None,
    sinks_Q: Tensor | None = None,
    workspace: AttentionWorkspace,
) -> Tensor:
    """Attend from every row to its request's keys (the rows' own must be written already).

    Args:
        q_NQD: fp16, bf16 or fp32; N >= rows.cu_rows[B].
        k_PSKD, v_PSKD: a layer's keys and values by page, of q's dtype; any strides but the last.
        causal: whether a row sees only keys up to its own position.
        window: with it a row at p sees keys p - window < key < p + window; None sees all.
        sinks_Q: fp32 logit per head that takes part in the softmax and has no value (gpt-oss).
        workspace: holds at least the plan's `num_partials`.

    Returns:
        [N, Q * D] of q's dtype; zeros where rows are padding.
    """
    num_rows, num_heads, head_dim = q_NQD.shape
    _, page_size, num_kv_heads, _ = k_PSKD.shape
    _check_shapes(q_NQD, k_PSKD, v_PSKD, window)
    plan = plan_tiles(
        len(rows.slots_B),
        rows.max_rows,
        num_heads,
        num_kv_heads,
        head_dim,
        q_NQD.dtype,
        rows.page_table.shape[1] * page_size,
        batch_invariant=workspace.batch_invariant,
    )
    needed = plan.num_partials(num_rows, num_heads)
    assert needed <= len(workspace.max_E), f"the workspace holds {len(workspace.max_E)} partials of {needed}"
    out_NQD = torch.empty(q_NQD.shape, dtype=q_NQD.dtype, device=q_NQD.device)
    _launch(q_NQD, k_PSKD, v_PSKD, out_NQD, rows, scale, causal, window, sinks_Q, workspace, plan)
    return out_NQD.view(num_rows, -1)


def _check_shapes(q_NQD: Tensor, k_PSKD: Tensor, v_PSKD: Tensor, window: int | None) -> None:
    _, num_heads, head_dim = q_NQD.shape
    _, page_size, num_kv_heads, kv_dim = k_PSKD.shape
    assert k_PSKD.shape == v_PSKD.shape and k_PSKD.stride() == v_PSKD.stride(), "K and V are laid out alike"
    assert q_NQD.dtype is k_PSKD.dtype is v_PSKD.dtype, "q, K and V have one dtype"
    assert kv_dim == head_dim and head_dim in (16, 32, 64, 128, 256), f"head_dim {head_dim} is no tile"
    assert num_heads % num_kv_heads == 0, "query heads come in groups of one size"
    assert page_size >= 16 and page_size & (page_size - 1) == 0, f"page size {page_size} is no power of two"
    assert q_NQD.stride(2) == 1 and k_PSKD.stride(3) == 1, "the last dimension is contiguous"
    assert window is None or window > 0, "a row sees itself at least"


def _launch(
    q_NQD: Tensor,
    k_PSKD: Tensor,
    v_PSKD: Tensor,
    out_NQD: Tensor,
    rows: PagedRows,
    scale: float,
    causal: bool,
    window: int | None,
    sinks_Q: Tensor | None,
    workspace: AttentionWorkspace,
    plan: TilePlan,
) -> None:
    num_rows, num_heads, head_dim = q_NQD.shape
    _, page_size, num_kv_heads, _ = k_PSKD.shape
    partials = (workspace.max_E, workspace.sum_E, workspace.out_ED)
    _attend[(plan.query_tiles * plan.num_splits, num_kv_heads, len(rows.slots_B))](
        q_NQD,
        k_PSKD,
        v_PSKD,
        out_NQD,
        sinks_Q,
        *partials,
        rows.slots_B,
        rows.cu_rows,
        rows.kv_lengths_B,
        rows.page_table,
        scale,
        num_rows,
        q_NQD.stride(0),
        q_NQD.stride(1),
        k_PSKD.stride(0),
        k_PSKD.stride(1),
        k_PSKD.stride(2),
        rows.page_table.stride(0),
        HEADS=num_heads,
        GROUP=num_heads // num_kv_heads,
        DIM=head_dim,
        PAGE=page_size,
        BLOCK_ROWS=plan.block_rows,
        BLOCK_KEYS=plan.block_keys,
        SPLITS=plan.num_splits,
        SPLIT_TILES=plan.split_tiles,
        CAUSAL=causal,
        WINDOW=window or 0,
        num_warps=plan.num_warps,
    )
    if plan.num_splits > 1:
        _combine[(num_rows * num_heads,)](
            *partials,
            out_NQD,
            sinks_Q,
            rows.cu_rows,
            len(rows.slots_B),
            HEADS=num_heads,
            DIM=head_dim,
            SPLITS=plan.num_splits,
        )


@triton.jit(do_not_specialize=["num_rows"])
def _attend(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    sinks_ptr,
    max_ptr,
    sum_ptr,
    partial_ptr,
    slots_ptr,
    cu_rows_ptr,
    kv_lengths_ptr,
    page_table_ptr,
    scale,
    num_rows,
    q_row_stride,
    q_head_stride,
    page_stride,
    token_stride,
    kv_head_stride,
    table_stride,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    SPLITS: tl.constexpr,
    SPLIT_TILES: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
):
    """One tile of a request's rows against one split of its keys."""
    TILE_TOKENS: tl.constexpr = BLOCK_ROWS // GROUP
    split = tl.program_id(0) % SPLITS
    kv_head = tl.program_id(1)
    request = tl.program_id(2)
    before = tl.load(cu_rows_ptr + request)
    request_rows = tl.load(cu_rows_ptr + request + 1) - before
    first_token = tl.program_id(0) // SPLITS * TILE_TOKENS
    if SPLITS == 1 and tl.program_id(0) == 0:
        _zero_padding(out_ptr, cu_rows_ptr, num_rows, HEADS, GROUP, DIM)
    if first_token >= request_rows:
        return
    num_keys = tl.load(kv_lengths_ptr + request)
    first = num_keys - request_rows
    place_R = tl.arange(0, BLOCK_ROWS)
    token_R = first_token + place_R // GROUP
    head_R = kv_head * GROUP + place_R % GROUP
    real_R = (place_R < TILE_TOKENS * GROUP) & (token_R < request_rows)
    row_R = (before + token_R).to(tl.int64)
    dim_D = tl.arange(0, DIM)
    lo, hi = _key_tiles(
        first + first_token, TILE_TOKENS, num_keys, split, BLOCK_KEYS, SPLITS, SPLIT_TILES, CAUSAL, WINDOW
    )
    used_R = real_R & (lo < hi)
    q_RD = tl.load(
        q_ptr + (row_R * q_row_stride + head_R * q_head_stride)[:, None] + dim_D[None, :],
        mask=used_R[:, None],
        other=0.0,
    )
    table_ptr = page_table_ptr + tl.load(slots_ptr + request).to(tl.int64) * table_stride
    m_R = tl.full([BLOCK_ROWS], -float("inf"), tl.float32)
    l_R = tl.zeros([BLOCK_ROWS], tl.float32)
    o_RD = tl.zeros([BLOCK_ROWS, DIM], tl.float32)
    for tile in range(lo, hi):
        key_T = tile * BLOCK_KEYS + tl.arange(0, BLOCK_KEYS)
        there_T = key_T < num_keys
        page_T = tl.load(table_ptr + key_T // PAGE, mask=there_T, other=0).to(tl.int64)
        at_T = page_T * page_stride + (key_T % PAGE) * token_stride + kv_head * kv_head_stride
        k_DT = tl.load(k_ptr + at_T[None, :] + dim_D[:, None], mask=there_T[None, :], other=0.0)
        v_TD = tl.load(v_ptr + at_T[:, None] + dim_D[None, :], mask=there_T[:, None], other=0.0)
        x_RT = tl.dot(q_RD, k_DT, input_precision=_FP32_PRODUCT) * (scale * _LOG2_E)
        seen_RT = _visible(key_T[None, :], (first + token_R)[:, None], there_T[None, :], CAUSAL, WINDOW)
        x_RT = tl.where(seen_RT, x_RT, -float("inf"))
        new_m_R = tl.maximum(m_R, tl.max(x_RT, 1))
        base_R = tl.where(new_m_R == -float("inf"), 0.0, new_m_R)  # nothing seen yet: inf - inf is no number
        p_RT = tl.exp2(x_RT - base_R[:, None])
        shrink_R = tl.exp2(m_R - base_R)
        l_R = l_R * shrink_R + tl.sum(p_RT, 1)
        o_RD = tl.dot(p_RT.to(v_TD.dtype), v_TD, o_RD * shrink_R[:, None], input_precision=_FP32_PRODUCT)
        m_R = new_m_R
    if SPLITS == 1:
        if sinks_ptr is not None:
            sink_R = tl.load(sinks_ptr + head_R, mask=real_R, other=0.0) * _LOG2_E
            base_R = tl.maximum(m_R, sink_R)
            shrink_R = tl.exp2(m_R - base_R)
            l_R = l_R * shrink_R + tl.exp2(sink_R - base_R)
            o_RD = o_RD * shrink_R[:, None]
        out_RD = o_RD / tl.where(l_R > 0, l_R, 1.0)[:, None]
        at_RD = ((row_R * HEADS + head_R) * DIM)[:, None] + dim_D[None, :]
        tl.store(out_ptr + at_RD, out_RD.to(out_ptr.dtype.element_ty), mask=real_R[:, None])
    else:
        partial_R = (row_R * HEADS + head_R) * SPLITS + split
        tl.store(max_ptr + partial_R, m_R, mask=real_R)
        tl.store(sum_ptr + partial_R, l_R, mask=real_R)
        tl.store(partial_ptr + partial_R[:, None] * DIM + dim_D[None, :], o_RD, mask=used_R[:, None])


@triton.jit
def _zero_padding(
    out_ptr, cu_rows_ptr, num_rows, HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr
):
    """Requests' programs share the rows behind the last request, where no second kernel writes them."""
    num_requests = tl.num_programs(2)
    end = tl.load(cu_rows_ptr + num_requests).to(tl.int64)
    dim_D = tl.arange(0, DIM)
    zero_D = tl.zeros([DIM], out_ptr.dtype.element_ty)
    for row in range(end + tl.program_id(2), num_rows, num_requests):
        for head in range(0, GROUP):
            at = (row * HEADS + tl.program_id(1) * GROUP + head) * DIM
            tl.store(out_ptr + at + dim_D, zero_D)


@triton.jit
def _key_tiles(
    position,
    tokens,
    num_keys,
    split,
    BLOCK_KEYS: tl.constexpr,
    SPLITS: tl.constexpr,
    SPLIT_TILES: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
):
    """Key tiles (from, to) of a split for query rows at position..position+tokens-1; empty if to <= from."""
    end = num_keys
    if CAUSAL:
        end = tl.minimum(end, position + tokens)
    elif WINDOW > 0:
        end = tl.minimum(end, position + tokens - 1 + WINDOW)
    begin = 0
    if WINDOW > 0:
        begin = tl.maximum(position - WINDOW + 1, 0) // BLOCK_KEYS
    end = tl.cdiv(end, BLOCK_KEYS)
    if SPLIT_TILES > 0:
        lo = tl.maximum(begin, split * SPLIT_TILES)
        hi = tl.minimum(end, split * SPLIT_TILES + SPLIT_TILES)
    else:
        share = tl.maximum(tl.cdiv(end - begin, SPLITS), _MIN_TILES)
        lo = begin + split * share
        hi = tl.minimum(end, lo + share)
    return lo, hi


@triton.jit
def _visible(key, position, there, CAUSAL: tl.constexpr, WINDOW: tl.constexpr):
    """Which keys a row at `position` sees, of those that exist."""
    seen = there
    if CAUSAL:
        seen = seen & (key <= position)
    if WINDOW > 0:
        seen = seen & (key > position - WINDOW)
        if not CAUSAL:
            seen = seen & (key < position + WINDOW)
    return seen


@triton.jit(do_not_specialize=["num_requests"])
def _combine(
    max_ptr,
    sum_ptr,
    partial_ptr,
    out_ptr,
    sinks_ptr,
    cu_rows_ptr,
    num_requests,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """One row's head: its splits brought to one scale, and the sink's share of the sum."""
    row_head = tl.program_id(0).to(tl.int64)
    split_C = tl.arange(0, SPLITS)
    dim_D = tl.arange(0, DIM)
    real = row_head // HEADS < tl.load(cu_rows_ptr + num_requests)
    partial_C = row_head * SPLITS + split_C
    m_C = tl.load(max_ptr + partial_C, mask=real, other=0.0)
    l_C = tl.load(sum_ptr + partial_C, mask=real, other=0.0)
    base = tl.max(m_C, 0)
    total = 0.0
    if sinks_ptr is not None:
        sink = tl.load(sinks_ptr + row_head % HEADS) * _LOG2_E
        base = tl.maximum(base, sink)
        total = tl.exp2(sink - base)
    weight_C = tl.where(l_C > 0, tl.exp2(m_C - base), 0.0)
    total += tl.sum(weight_C * l_C, 0)
    # Splits without keys stored no o: what stands there is an earlier layer's.
    o_CD = tl.load(
        partial_ptr + partial_C[:, None] * DIM + dim_D[None, :], mask=(l_C > 0)[:, None], other=0.0
    )
    out_D = tl.sum(o_CD * weight_C[:, None], 0) / tl.where(total > 0, total, 1.0)
    tl.store(out_ptr + row_head * DIM + dim_D, out_D.to(out_ptr.dtype.element_ty))
