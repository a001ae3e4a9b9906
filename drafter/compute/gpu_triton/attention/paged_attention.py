"""Attention over paged K/V in one launch per layer: verify, draft and prefill.

Implements `drafter/compute/eager/attention.py` (causality, window, sinks). The host chooses only tile sizes
(`attention_tiles.py`): lengths, page ids and row offsets are read from device memory, so a CUDA graph may
contain a call. Does not write K/V: a call's own rows are in the cache before. Called by the target's and the
drafter's layers.

Persistent programs, as many as the device runs at once, process a list of items (`attention_tiles.py`): one
request, one kv head, one tile of rows, one piece of its keys. GQA heads are rows too, so a block of 16 rows
of 4 heads each is one tile of 64 that reads its K and V once. If a context has several pieces, the last
program to finish adds them up (split K/V, as in Flash-Decoding, https://pytorch.org/blog/flash-decoding/):

    rows of a tile (R)                 key tiles of a context         piece 0  piece 1  piece 2
    token 0: head 0 1 2 3  ┐           |----|----|----|----|----|----|  m,l,o    m,l,o    m,l,o
    token 1: head 0 1 2 3  ├── x K^T ─►  lo ►  ► hi                        └────────┴────────┘
    ...                    ┘            (one program's loop)            the last one ──► out

with m the greatest score so far (in powers of two), l the sum of 2^(score - m), o the sum weighted by V
(online softmax, arXiv 1805.02867). If there are many pieces, runs of them are added first, each by its last
program, then the runs' sums by the last of those: one program would take as long to read 32 parts of 32 KB as
to read their keys.

`key_tiles.py` has a program's loop over key tiles, `tree_keys.py` the keys of draft trees.

Legend: N rows, B requests, Q query heads, K kv heads, D head dim, F that of values, P pages, S page size; in
the kernels R rows of a tile (tokens x heads of a group).
"""

# Type checkers know neither Triton's launch options nor what its functions take and return.
# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false
# pyright: reportAssignmentType=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..common.element_ops import dependent_launch, wait_for_predecessor
from .attention_tiles import (
    HEADER,
    AttentionKind,
    PagedRows,
    WorkList,
    count_pieces,
    find_request,
    first_seen,
    tile_width,
)
from .key_tiles import add_slots, attend_piece, inside, is_last, key_tiles, no_part, store_columns, store_sums

_LOG2_E = tl.constexpr(1.4426950408889634)
MAX_HEAD_DIM = 512  # the largest whose tiles fit into registers and shared memory
MOST_REGISTERS = 255  # with latents: the compiler would spill to fit two programs in a multiprocessor


def verify_attention(
    q_NQD: Tensor,
    k_PSKD: Tensor,
    v_PSKF: Tensor,
    rows: PagedRows,
    work: WorkList,
    scale: float,
    *,
    v_scale: float = 1.0,
    sinks_Q: Tensor | None = None,
    q_tail_NQC: Tensor | None = None,
) -> Tensor:
    """Attend from every row to its request's keys (the rows' own must be written already).

    Args:
        q_NQD: fp16, bf16 or fp32; N >= rows.cu_rows[B].
        k_PSKD, v_PSKF: a layer's keys and values by page, of q's dtype or e4m3, with equal strides of pages
            and tokens. Head strides are equal too, or values of another size are contiguous.
        work: `list_work` of these rows and of this layer's kind, which has causality, window and first key.
        scale, v_scale: factors of scores and of sums of values.
        sinks_Q: see `eager.attention.paged_attention`.
        q_tail_NQC: for MLA, queries of the C values after each key: keys are one shared head
            [P, S, 1, D + C], passed as both `k_PSKD` and `v_PSKF`; the first D are also the value.

    Returns:
        [N, Q * F] of q's dtype; zeros for padding rows.
    """
    kind, tiles, workspace = work.kind, work.tiles, work.workspace
    if q_tail_NQC is None:
        _check_shapes(q_NQD, k_PSKD, v_PSKF, kind)
    else:
        _check_latents(q_NQD, q_tail_NQC, k_PSKD, kind)
    tail = 0 if q_tail_NQC is None else q_tail_NQC.shape[2]
    out_NQF = q_NQD.new_empty(*q_NQD.shape[:2], kind.v_head_dim)
    paths_ND, positions_N = (None, None) if rows.tree is None else (rows.tree.paths_ND, rows.tree.positions_N)
    assert paths_ND is None or paths_ND.is_contiguous(), "paths follow one another"
    depth = 0 if paths_ND is None else paths_ND.shape[1]
    tail_strides = (0, 0) if q_tail_NQC is None else q_tail_NQC.stride()[:2]
    _attend[(work.num_programs,)](
        q_NQD, q_tail_NQC, k_PSKD, v_PSKF, out_NQF, sinks_Q,
        workspace.max_E, workspace.sum_E, workspace.out_EF, workspace.arrived, work.values,
        rows.slots_B, rows.cu_rows, rows.kv_lengths_B, rows.page_table, paths_ND, positions_N, scale,
        v_scale, len(q_NQD), len(rows.slots_B), depth, q_NQD.stride(0), q_NQD.stride(1), *tail_strides,
        k_PSKD.stride(0), k_PSKD.stride(1), 0 if tail else k_PSKD.stride(2), rows.page_table.stride(0),
        HEADS=kind.num_heads, GROUP=kind.num_heads // kind.num_kv_heads, DIM=kind.head_dim,
        V_DIM=kind.v_head_dim, WIDTH=tile_width(kind.head_dim), V_WIDTH=tile_width(kind.v_head_dim),
        TAIL=tail, TAIL_WIDTH=tile_width(tail), PAGE=kind.page_size, BLOCK_ROWS=tiles.block_rows,
        BLOCK_KEYS=tiles.block_keys, CAUSAL=kind.causal, WINDOW=kind.window or 0, FIRST_KEY=kind.first_key,
        SPLIT_TILES=tiles.split_keys // tiles.block_keys, RUN_SPLITS=tiles.run_splits,
        num_warps=tiles.num_warps, maxnreg=MOST_REGISTERS if tail else None,
        # No fused multiply-add in batch-invariant mode: the compiler decides which operations to fuse.
        enable_fp_fusion=not workspace.batch_invariant, **dependent_launch(q_NQD.device),
    )  # fmt: skip
    return out_NQF.view(len(q_NQD), -1)


def _check_shapes(q_NQD: Tensor, k_PSKD: Tensor, v_PSKF: Tensor, kind: AttentionKind) -> None:
    _, num_heads, head_dim = q_NQD.shape
    _, page_size, num_kv_heads, kv_dim = k_PSKD.shape
    assert (num_heads, num_kv_heads, head_dim) == (kind.num_heads, kind.num_kv_heads, kind.head_dim)
    assert v_PSKF.shape == (*k_PSKD.shape[:3], kind.v_head_dim), "there is a value for every key"
    assert k_PSKD.stride()[:2] == v_PSKF.stride()[:2], "K and V are laid out alike"
    assert v_PSKF.stride(2) == (k_PSKD.stride(2) if kind.v_head_dim == head_dim else kind.v_head_dim), (
        "as above"
    )
    assert q_NQD.dtype is kind.dtype and k_PSKD.dtype is v_PSKF.dtype, "K and V have one dtype"
    assert k_PSKD.dtype in (kind.dtype, torch.float8_e4m3fn), "K and V have q's dtype, or are e4m3"
    assert kv_dim == head_dim <= MAX_HEAD_DIM, f"head_dim {head_dim} is no tile"
    assert kind.v_head_dim <= head_dim, "a value is no longer than its key"
    assert num_heads % num_kv_heads == 0, "query heads come in groups of one size"
    assert page_size == kind.page_size >= 16, f"page size {page_size} is none"
    assert page_size & (page_size - 1) == 0, f"page size {page_size} is no power of two"
    assert q_NQD.stride(2) == k_PSKD.stride(3) == v_PSKF.stride(3) == 1, "the last dimension is contiguous"
    assert kind.window is None or kind.window > 0, "a row sees itself at least"


def _check_latents(q_NQD: Tensor, q_tail_NQC: Tensor, k_PSKD: Tensor, kind: AttentionKind) -> None:
    (rows, num_heads, dim), tail = q_NQD.shape, q_tail_NQC.shape[2]
    assert q_tail_NQC.shape[:2] == (rows, num_heads) == (rows, kind.num_heads), "a tail for each query"
    assert dim == kind.head_dim == kind.v_head_dim <= MAX_HEAD_DIM, f"a latent of {dim} is no tile"
    assert k_PSKD.shape[1:] == (kind.page_size, 1, dim + tail), "one key for all heads"
    assert q_NQD.dtype is q_tail_NQC.dtype is kind.dtype, "queries have one dtype"
    assert k_PSKD.dtype in (kind.dtype, torch.float8_e4m3fn), "K has q's dtype, or is e4m3"
    assert q_NQD.stride(2) == q_tail_NQC.stride(2) == k_PSKD.stride(3) == 1, (
        "the last dimension is contiguous"
    )
    assert kind.page_size >= 16 and kind.page_size & (kind.page_size - 1) == 0, "a page of a power of two"


@triton.jit(
    do_not_specialize=[
        # Views into a step's buffer with any alignment, from which single numbers are read.
        "slots_ptr",
        "cu_rows_ptr",
        "kv_lengths_ptr",
        "page_table_ptr",
        "paths_ptr",
        "positions_ptr",
        "num_rows",
        "num_requests",
        "depth",
        "table_stride",
    ]
)
def _attend(
    q_ptr, q_tail_ptr, k_ptr, v_ptr, out_ptr, sinks_ptr, max_ptr, sum_ptr, partial_ptr, arrived_ptr, work_ptr,
    slots_ptr, cu_rows_ptr, kv_lengths_ptr, page_table_ptr, paths_ptr, positions_ptr, scale, v_scale,
    num_rows, num_requests, depth, q_row_stride, q_head_stride, tail_row_stride, tail_head_stride,
    page_stride, token_stride, kv_head_stride, table_stride,
    HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, V_DIM: tl.constexpr, WIDTH: tl.constexpr,
    V_WIDTH: tl.constexpr, TAIL: tl.constexpr, TAIL_WIDTH: tl.constexpr, PAGE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_KEYS: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr,
    FIRST_KEY: tl.constexpr, SPLIT_TILES: tl.constexpr, RUN_SPLITS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    KV_HEADS: tl.constexpr = HEADS // GROUP
    TILE_TOKENS: tl.constexpr = BLOCK_ROWS // GROUP
    TREE: tl.constexpr = paths_ptr is not None
    wait_for_predecessor(PDL)
    _zero_padding(out_ptr, tl.load(cu_rows_ptr + num_requests), num_rows, HEADS, V_DIM, V_WIDTH)
    piece_keys = tl.load(work_ptr)
    run_pieces = tl.load(work_ptr + 1)
    before_ptr = work_ptr + HEADER
    shared_before_ptr = before_ptr + num_requests + 1
    place_R = tl.arange(0, BLOCK_ROWS)
    dim_D = tl.arange(0, WIDTH)
    num_items = tl.load(before_ptr + num_requests) * KV_HEADS
    # No loop-invariant code motion: hoisted values of an item would spill.
    for item in tl.range(tl.program_id(0), num_items, tl.num_programs(0), disable_licm=True):
        pair = item // KV_HEADS
        kv_head = item % KV_HEADS
        request = find_request(before_ptr, pair, num_requests)
        row_begin = tl.load(cu_rows_ptr + request)
        request_rows = tl.load(cu_rows_ptr + request + 1) - row_begin
        num_keys = tl.load(kv_lengths_ptr + request)
        first = num_keys - request_rows  # the first row's position
        first_key = first_seen(first, WINDOW)
        pieces = count_pieces(first_key, num_keys - 1, piece_keys)
        place = pair - tl.load(before_ptr + request)
        # Late rows first: they see more keys, and long items should not come last.
        first_token = (tl.cdiv(request_rows, TILE_TOKENS) - 1 - place // pieces) * TILE_TOKENS
        piece = first_key // piece_keys + place % pieces
        tile_lo, tile_hi = key_tiles(first + first_token, TILE_TOKENS, num_keys, BLOCK_KEYS, CAUSAL, WINDOW)
        if TREE:
            request_paths_ptr = paths_ptr + row_begin * depth
            is_tree = tl.load(request_paths_ptr) >= 0
            # A late row may be near the root, and see as far back as the first.
            tile_lo = tl.where(is_tree, first_key // BLOCK_KEYS, tile_lo)
        piece_tiles = piece_keys // BLOCK_KEYS
        lo = tl.maximum(tile_lo, piece * piece_tiles)
        hi = tl.minimum(tile_hi, piece * piece_tiles + piece_tiles)
        if lo < hi:
            token_R = first_token + place_R // GROUP
            head_R = kv_head * GROUP + place_R % GROUP
            real_R = (place_R < TILE_TOKENS * GROUP) & (token_R < request_rows)
            row_R = (row_begin + token_R).to(tl.int64)
            at_R = row_R * q_row_stride + head_R * q_head_stride
            there_RD = inside(real_R[:, None], dim_D[None, :], DIM, WIDTH)
            q_RD = tl.load(q_ptr + at_R[:, None] + dim_D[None, :], mask=there_RD, other=0.0)
            q_tail_RC = q_RD  # placeholder
            if TAIL > 0:
                dim_C = tl.arange(0, TAIL_WIDTH)
                tail_R = row_R * tail_row_stride + head_R * tail_head_stride
                there_RC = inside(real_R[:, None], dim_C[None, :], TAIL, TAIL_WIDTH)
                q_tail_RC = tl.load(q_tail_ptr + tail_R[:, None] + dim_C[None, :], mask=there_RC, other=0.0)
            table_ptr = page_table_ptr + tl.load(slots_ptr + request).to(tl.int64) * table_stride
            keys = (
                k_ptr + kv_head * kv_head_stride,
                v_ptr + kv_head * (kv_head_stride if V_DIM == DIM else V_DIM),
                table_ptr,
                num_keys,
                page_stride,
                token_stride,
            )
            position_R = first + token_R
            tree = (table_ptr,)  # placeholder
            if TREE:
                own_R = tl.load(positions_ptr + row_R, mask=real_R, other=0).to(tl.int32)
                position_R = tl.where(is_tree, tl.where(real_R, own_R, first), position_R)
                tokens = tl.minimum(request_rows - first_token, TILE_TOKENS)
                tree = (
                    is_tree, request_paths_ptr, positions_ptr + row_begin, depth, first, first_token, tokens,
                    token_R, real_R,
                )  # fmt: skip
            queries = (q_RD, q_tail_RC, position_R, scale * _LOG2_E)
            m_R, l_R, o_RF = attend_piece(
                queries, keys, tree, lo, hi, DIM, V_DIM, V_WIDTH, TAIL, PAGE, BLOCK_KEYS, CAUSAL, WINDOW,
                FIRST_KEY, SPLIT_TILES, RUN_SPLITS, TREE,
            )  # fmt: skip
            begin = tile_lo // piece_tiles
            end = tl.cdiv(tile_hi, piece_tiles)
            out_R = (row_R * HEADS + head_R) * V_DIM
            if end - begin == 1:
                _write_out(
                    out_ptr, out_R, sinks_ptr, head_R, 0, m_R, l_R, o_RF, v_scale, real_R, V_DIM, V_WIDTH
                )
            else:
                # A tile's pieces are adjacent among shared pairs; this is the index its piece 0 would have.
                origin = (tl.load(shared_before_ptr + request) + place - piece) * KV_HEADS + kv_head
                slot = origin + piece * KV_HEADS
                parts = (max_ptr, sum_ptr, partial_ptr)
                store_sums(parts, slot, m_R, l_R, real_R, BLOCK_ROWS)
                store_columns(parts, slot, 0, o_RF, real_R, BLOCK_ROWS, V_WIDTH)
                _finish_tile(
                    parts, arrived_ptr, origin, piece, begin, end, run_pieces, out_ptr, out_R, sinks_ptr,
                    head_R, v_scale, real_R, KV_HEADS, BLOCK_ROWS, V_DIM, V_WIDTH,
                )  # fmt: skip


@triton.jit
def _finish_tile(
    parts, arrived_ptr, origin, piece, begin, end, run_pieces, out_ptr, out_R, sinks_ptr, head_R, v_scale,
    real_R, KV_HEADS: tl.constexpr, BLOCK_ROWS: tl.constexpr, V_DIM: tl.constexpr, V_WIDTH: tl.constexpr,
):  # fmt: skip
    """Add up what this piece completes: its run, and possibly the tile of pieces begin..end-1.

    Some columns at a time: two whole sums of a latent's width would spill registers.
    """
    COLUMNS: tl.constexpr = min(V_WIDTH, 128)
    run_begin = tl.maximum(begin, piece // run_pieces * run_pieces)
    run_end = tl.minimum(end, piece // run_pieces * run_pieces + run_pieces)
    run_slot = origin + run_begin * KV_HEADS
    if is_last(arrived_ptr + 2 * run_slot, run_end - run_begin):
        if run_end - run_begin == end - begin:
            for column in range(0, V_WIDTH, COLUMNS):
                m_R, l_R, o_RC = add_slots(
                    parts, origin, begin, end, 1, column, real_R, KV_HEADS, BLOCK_ROWS, V_WIDTH, COLUMNS
                )
                _write_out(
                    out_ptr, out_R, sinks_ptr, head_R, column, m_R, l_R, o_RC, v_scale, real_R, V_DIM, V_WIDTH
                )
        else:
            run_m_R, run_l_R, _ = no_part(BLOCK_ROWS, COLUMNS)
            for column in range(0, V_WIDTH, COLUMNS):
                run_m_R, run_l_R, o_RC = add_slots(
                    parts, origin, run_begin, run_end, 1, column, real_R, KV_HEADS, BLOCK_ROWS, V_WIDTH,
                    COLUMNS,
                )  # fmt: skip
                tl.debug_barrier()  # all threads have read the columns that the run's sum replaces
                store_columns(parts, run_slot, column, o_RC, real_R, BLOCK_ROWS, V_WIDTH)
            store_sums(parts, run_slot, run_m_R, run_l_R, real_R, BLOCK_ROWS)
            runs = tl.cdiv(end, run_pieces) - begin // run_pieces
            if is_last(arrived_ptr + 2 * (origin + begin * KV_HEADS) + 1, runs):
                for column in range(0, V_WIDTH, COLUMNS):
                    m_R, l_R, o_RC = add_slots(
                        parts, origin, begin, end, run_pieces, column, real_R, KV_HEADS, BLOCK_ROWS, V_WIDTH,
                        COLUMNS,
                    )  # fmt: skip
                    _write_out(
                        out_ptr, out_R, sinks_ptr, head_R, column, m_R, l_R, o_RC, v_scale, real_R, V_DIM,
                        V_WIDTH,
                    )  # fmt: skip


@triton.jit
def _write_out(
    out_ptr, out_R, sinks_ptr, head_R, column, m_R, l_R, o_RC, v_scale, real_R, V_DIM: tl.constexpr,
    V_WIDTH: tl.constexpr,
):  # fmt: skip
    """Normalize and write finished rows, from a column on; a sink is added to the sum."""
    if sinks_ptr is not None:
        sink_R = tl.load(sinks_ptr + head_R, mask=real_R, other=0.0) * _LOG2_E
        base_R = tl.maximum(m_R, sink_R)
        shrink_R = tl.exp2(m_R - base_R)
        l_R = l_R * shrink_R + tl.exp2(sink_R - base_R)
        o_RC = o_RC * shrink_R[:, None]
    o_RC = o_RC / tl.where(l_R > 0, l_R, 1.0)[:, None] * v_scale
    dim_C = column + tl.arange(0, o_RC.shape[1])
    there_RC = inside(real_R[:, None], dim_C[None, :], V_DIM, V_WIDTH)
    tl.store(out_ptr + out_R[:, None] + dim_C[None, :], o_RC.to(out_ptr.dtype.element_ty), mask=there_RC)


@triton.jit
def _zero_padding(out_ptr, end, num_rows, HEADS: tl.constexpr, V_DIM: tl.constexpr, V_WIDTH: tl.constexpr):
    dim_F = tl.arange(0, V_WIDTH)
    zero_F = tl.zeros([V_WIDTH], out_ptr.dtype.element_ty)
    first_ptr = out_ptr + end.to(tl.int64) * HEADS * V_DIM
    for head in range(tl.program_id(0), (num_rows - end) * HEADS, tl.num_programs(0)):
        if V_DIM < V_WIDTH:
            tl.store(first_ptr + head * V_DIM + dim_F, zero_F, mask=dim_F < V_DIM)
        else:
            tl.store(first_ptr + head * V_DIM + dim_F, zero_F)
