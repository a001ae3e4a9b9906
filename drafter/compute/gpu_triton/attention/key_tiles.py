"""Attention of a tile of rows over tiles of paged keys: the inner loop of `paged_attention.py`'s kernel.

For MLA (`mla.py`) the value is the first part of the key; a key also has a *tail*, and is read once.

Partial softmax sums are merged: two of them, and those of several programs (split K/V, as in Flash-Decoding).
A part is (m, l, o) as in `paged_attention.py`; a part that saw no key is (-inf, 0, 0) and changes no bit of
what it is added to. Parts are stored in the workspace, each in a *slot*. A program that stores one increments
a counter; the program that completes the count adds all parts in their order, so the order of arrival does
not matter. No program waits for another.

In batch-invariant mode sums have a fixed structure: each split of 256 keys starts fresh; the splits of a run
are added in order; runs are added in order, whether one program does all this or many. All boundaries are
absolute positions, and a tile in which a row sees no key changes none of its bits.

Legend: R rows of a tile (tokens x heads of a group), T keys of a tile, D head dim, F that of values, C of a
tail.
"""

# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false

from __future__ import annotations

import triton
import triton.language as tl

from ..common.e4m3 import widen, widen_once
from .attention_tiles import first_seen
from .tree_keys import ancestor_keys, first_own_tile, own_end, path_keys

_FP32_PRODUCT = tl.constexpr("tf32x3")  # fp32 precision on tensor cores; fp16 and bf16 ignore it


@triton.jit
def attend_piece(
    queries, keys, tree, lo, hi,
    DIM: tl.constexpr, V_DIM: tl.constexpr, V_WIDTH: tl.constexpr, TAIL: tl.constexpr, PAGE: tl.constexpr,
    BLOCK_KEYS: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, FIRST_KEY: tl.constexpr,
    SPLIT_TILES: tl.constexpr, RUN_SPLITS: tl.constexpr, TREE: tl.constexpr,
):  # fmt: skip
    """Attend to key tiles lo..hi-1, lo < hi; return (m, l, o). In invariant mode a sum of runs of splits.

    `queries` are q [R, D], their tails [R, C], their positions [R] and the scale of scores, for exp2. `keys`
    are pointers to keys, values and the request's page table, the number of keys, and strides of pages and of
    tokens. `tree` is described in `tree_keys.py`.
    """
    if SPLIT_TILES == 0:
        return _attend_split(
            queries, keys, tree, lo, hi, DIM, V_DIM, V_WIDTH, TAIL, PAGE, BLOCK_KEYS, CAUSAL, WINDOW,
            FIRST_KEY, TREE, False,
        )  # fmt: skip
    else:
        RUN: tl.constexpr = SPLIT_TILES * RUN_SPLITS
        ROWS: tl.constexpr = queries[0].shape[0]
        m_R, l_R, o_RF = no_part(ROWS, V_WIDTH)
        for run in range(lo // RUN, tl.cdiv(hi, RUN)):
            run_m_R, run_l_R, run_o_RF = no_part(ROWS, V_WIDTH)
            run_lo = tl.maximum(lo, run * RUN)
            run_hi = tl.minimum(hi, run * RUN + RUN)
            for split in range(run_lo // SPLIT_TILES, tl.cdiv(run_hi, SPLIT_TILES)):
                split_lo = tl.maximum(run_lo, split * SPLIT_TILES)
                split_hi = tl.minimum(run_hi, split * SPLIT_TILES + SPLIT_TILES)
                split_m_R, split_l_R, split_o_RF = _attend_split(
                    queries, keys, tree, split_lo, split_hi, DIM, V_DIM, V_WIDTH, TAIL, PAGE, BLOCK_KEYS,
                    CAUSAL, WINDOW, FIRST_KEY, TREE, TREE,
                )  # fmt: skip
                run_m_R, run_l_R, run_o_RF = add_parts(
                    run_m_R, run_l_R, run_o_RF, split_m_R, split_l_R, split_o_RF
                )
            m_R, l_R, o_RF = add_parts(m_R, l_R, o_RF, run_m_R, run_l_R, run_o_RF)
        return m_R, l_R, o_RF


@triton.jit
def _attend_split(
    queries, keys, tree, lo, hi,
    DIM: tl.constexpr, V_DIM: tl.constexpr, V_WIDTH: tl.constexpr, TAIL: tl.constexpr, PAGE: tl.constexpr,
    BLOCK_KEYS: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, FIRST_KEY: tl.constexpr,
    TREE: tl.constexpr, BY_PATH: tl.constexpr,
):  # fmt: skip
    """Attend to key tiles lo..hi-1 from an empty sum; return (m, l, o). A tree's rows are in the last."""
    m_R, l_R, o_RF = no_part(queries[0].shape[0], V_WIDTH)
    shared = hi
    if TREE:
        shared = first_own_tile(tree, lo, hi, BLOCK_KEYS)
    m_R, l_R, o_RF = _attend_tiles(
        m_R, l_R, o_RF, queries, keys, tree, 0, lo, shared, DIM, V_DIM, V_WIDTH, TAIL, PAGE, BLOCK_KEYS,
        CAUSAL, WINDOW, FIRST_KEY, False, False,
    )  # fmt: skip
    if BY_PATH:
        first_token, tokens = tree[5], tree[6]
        for token in range(first_token, first_token + tokens):
            m_R, l_R, o_RF = _attend_tiles(
                m_R, l_R, o_RF, queries, keys, tree, token, shared, own_end(tree, token, hi, BLOCK_KEYS), DIM,
                V_DIM, V_WIDTH, TAIL, PAGE, BLOCK_KEYS, CAUSAL, WINDOW, FIRST_KEY, True, True,
            )  # fmt: skip
    elif TREE:
        m_R, l_R, o_RF = _attend_tiles(
            m_R, l_R, o_RF, queries, keys, tree, 0, shared, hi, DIM, V_DIM, V_WIDTH, TAIL, PAGE, BLOCK_KEYS,
            CAUSAL, WINDOW, FIRST_KEY, True, False,
        )  # fmt: skip
    return m_R, l_R, o_RF


@triton.jit
def _attend_tiles(
    m_R, l_R, o_RF, queries, keys, tree, token, lo, hi,
    DIM: tl.constexpr, V_DIM: tl.constexpr, V_WIDTH: tl.constexpr, TAIL: tl.constexpr, PAGE: tl.constexpr,
    BLOCK_KEYS: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, FIRST_KEY: tl.constexpr,
    TREE: tl.constexpr, BY_PATH: tl.constexpr,
):  # fmt: skip
    """Add key tiles lo..hi-1 to (m, l, o) with online softmax.

    With `TREE` tiles have a tree's rows, of which rows see those in their paths; `BY_PATH` it is those in the
    path of `token`, which only this token's rows see.

    Keys that a row does not see are multiplied by zero: all that pages hold is finite (`e4m3.as_stored`).
    """
    q_RD, q_tail_RC, position_R, scale = queries
    k_ptr, v_ptr, table_ptr, num_keys, page_stride, token_stride = keys
    dim_D = tl.arange(0, q_RD.shape[1])
    dim_F = tl.arange(0, V_WIDTH)
    first_position = tl.min(position_R, 0)
    oldest = tl.maximum(first_seen(first_position, WINDOW), tl.minimum(first_position, FIRST_KEY))
    for tile in tl.range(lo, hi, num_stages=1 if TREE else None):
        key_T = tile * BLOCK_KEYS + tl.arange(0, BLOCK_KEYS)
        there_T = key_T < num_keys
        read_T = tl.maximum(key_T, oldest) if WINDOW > 0 or FIRST_KEY > 0 else key_T
        if BY_PATH:
            read_T, there_T = path_keys(tree, token, key_T, read_T, there_T)
        page_T = tl.load(table_ptr + read_T // PAGE, mask=there_T, other=0).to(tl.int64)
        at_T = page_T * page_stride + (read_T % PAGE) * token_stride
        there_TD = inside(there_T[:, None], dim_D[None, :], DIM, q_RD.shape[1])
        k_TD = tl.load(k_ptr + at_T[:, None] + dim_D[None, :], mask=there_TD, other=0.0)
        k_TD = widen_once(k_TD, q_RD.dtype) if TAIL > 0 else widen(k_TD, q_RD.dtype)
        x_RT = tl.dot(q_RD, tl.trans(k_TD), input_precision=_FP32_PRODUCT)
        if TAIL > 0:
            dim_C = tl.arange(0, q_tail_RC.shape[1])
            there_TC = inside(there_T[:, None], dim_C[None, :], TAIL, q_tail_RC.shape[1])
            k_TC = tl.load(k_ptr + DIM + at_T[:, None] + dim_C[None, :], mask=there_TC, other=0.0)
            k_TC = widen(k_TC, q_RD.dtype)
            x_RT = tl.dot(q_tail_RC, tl.trans(k_TC), x_RT, input_precision=_FP32_PRODUCT)
            v_TF = k_TD
        else:
            there_TF = inside(there_T[:, None], dim_F[None, :], V_DIM, V_WIDTH)
            v_TF = tl.load(v_ptr + at_T[:, None] + dim_F[None, :], mask=there_TF, other=0.0)
            v_TF = widen(v_TF, q_RD.dtype)
        x_RT = x_RT * scale
        at_R, seen_RT = position_R[:, None], there_T[None, :]
        if BY_PATH:
            seen_RT = seen_RT & (tree[7] == token)[:, None]
        elif TREE:
            key_T, ancestors_RT = ancestor_keys(tree, key_T, there_T, BLOCK_KEYS)
            seen_RT = seen_RT & ancestors_RT
        seen_RT = _visible(key_T[None, :], at_R, seen_RT, CAUSAL, WINDOW, FIRST_KEY)
        x_RT = tl.where(seen_RT, x_RT, -float("inf"))
        new_m_R = tl.maximum(m_R, tl.max(x_RT, 1))
        base_R = tl.where(new_m_R == -float("inf"), 0.0, new_m_R)  # no key seen yet: avoid inf - inf
        p_RT = tl.exp2(x_RT - base_R[:, None])
        shrink_R = tl.exp2(m_R - base_R)
        l_R = l_R * shrink_R + tl.sum(p_RT, 1)
        o_RF = tl.dot(p_RT.to(v_TF.dtype), v_TF, o_RF * shrink_R[:, None], input_precision=_FP32_PRODUCT)
        m_R = new_m_R
    return m_R, l_R, o_RF


@triton.jit
def key_tiles(
    position, TOKENS: tl.constexpr, num_keys, BLOCK_KEYS: tl.constexpr, CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
):  # fmt: skip
    """Return the key tiles (from, to) that query rows at position..position+TOKENS-1 see."""
    end = num_keys
    if CAUSAL:
        end = tl.minimum(end, position + TOKENS)
    elif WINDOW > 0:
        end = tl.minimum(end, position + TOKENS - 1 + WINDOW)
    return first_seen(position, WINDOW) // BLOCK_KEYS, tl.cdiv(end, BLOCK_KEYS)


@triton.jit
def _visible(key, position, there, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, FIRST_KEY: tl.constexpr):
    seen = there
    if CAUSAL:
        seen = seen & (key <= position)
    if WINDOW > 0:
        seen = seen & (key > position - WINDOW)
        if not CAUSAL:
            seen = seen & (key < position + WINDOW)
    if FIRST_KEY > 0:
        seen = seen & ((key >= FIRST_KEY) | (key == position))
    return seen


@triton.jit
def inside(there, dim, DIM: tl.constexpr, WIDTH: tl.constexpr):
    """Mask the columns of a tile outside a head; all are inside if heads are as wide as tiles."""
    if DIM < WIDTH:
        there = there & (dim < DIM)
    return there


@triton.jit
def no_part(ROWS: tl.constexpr, DIM: tl.constexpr):
    m_R = tl.full([ROWS], -float("inf"), tl.float32)
    return m_R, tl.zeros([ROWS], tl.float32), tl.zeros([ROWS, DIM], tl.float32)


@triton.jit
def add_parts(m_R, l_R, o_RD, m2_R, l2_R, o2_RD):
    """Add two parts, rescaled to a common maximum."""
    top_R = tl.maximum(m_R, m2_R)
    base_R = tl.where(top_R == -float("inf"), 0.0, top_R)  # avoids inf - inf
    weight_R, weight2_R = tl.exp2(m_R - base_R), tl.exp2(m2_R - base_R)
    l_R = l_R * weight_R + l2_R * weight2_R
    return top_R, l_R, o_RD * weight_R[:, None] + o2_RD * weight2_R[:, None]


@triton.jit
def store_sums(parts, slot, m_R, l_R, real_R, ROWS: tl.constexpr):
    """Store a part's m and l in its slot of `parts`: pointers to the m, l and o of all slots."""
    max_ptr, sum_ptr, _ = parts
    place_R = slot * ROWS + tl.arange(0, ROWS)
    tl.store(max_ptr + place_R, m_R, mask=real_R, cache_modifier=".cg")
    tl.store(sum_ptr + place_R, l_R, mask=real_R, cache_modifier=".cg")


@triton.jit
def store_columns(parts, slot, column, o_RC, real_R, ROWS: tl.constexpr, DIM: tl.constexpr):
    """Store a part's o from a column on."""
    place_R = slot * ROWS + tl.arange(0, ROWS)
    at_RC = place_R[:, None] * DIM + (column + tl.arange(0, o_RC.shape[1]))[None, :]
    tl.store(parts[2] + at_RC, o_RC, mask=real_R[:, None], cache_modifier=".cg")


@triton.jit
def is_last(arrived_ptr, expected):
    """Count this program's part; return whether all parts are stored and may be read."""
    tl.debug_barrier()  # all threads' stores come before one thread's count
    last = tl.atomic_add(arrived_ptr, 1, sem="acq_rel", scope="gpu") == expected - 1
    if last:
        tl.store(arrived_ptr, 0)  # for the next launch
    return last


@triton.jit
def add_slots(
    parts, origin, begin, end, step, column, real_R, STRIDE: tl.constexpr, ROWS: tl.constexpr,
    DIM: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Add parts begin, begin + step, .. below end, in order; part i is in slot origin + i * STRIDE.

    Returns (m, l, o), with o from a column on.
    """
    max_ptr, sum_ptr, out_ptr = parts
    m_R, l_R, o_RC = no_part(ROWS, COLUMNS)
    for i in range(begin // step, tl.cdiv(end, step)):
        slot = origin + tl.maximum(begin, i * step) * STRIDE
        place_R = slot * ROWS + tl.arange(0, ROWS)
        m2_R = tl.load(max_ptr + place_R, mask=real_R, other=-float("inf"), cache_modifier=".cg")
        l2_R = tl.load(sum_ptr + place_R, mask=real_R, other=0.0, cache_modifier=".cg")
        at_RC = place_R[:, None] * DIM + (column + tl.arange(0, COLUMNS))[None, :]
        o2_RC = tl.load(out_ptr + at_RC, mask=real_R[:, None], other=0.0, cache_modifier=".cg")
        m_R, l_R, o_RC = add_parts(m_R, l_R, o_RC, m2_R, l2_R, o2_RC)
    return m_R, l_R, o_RC
