"""The gated delta rule over a prompt's rows in chunks of up to 32 rows: matrix products, states in fp32.

The chunked WY form (DeltaNet, arXiv 2406.06484; gated, arXiv 2412.06464; chunking as in FLA,
https://github.com/fla-org/flash-linear-attention) of `compute/eager/delta_rule.py`. For a chunk's rows i,
with G the cumulative sum of g and S the state before the chunk:

    A_ij = beta_i e^(G_i - G_j) k_i.k_j  for j < i      T = (I + A)^-1 beta
    P_ij = e^(G_i - G_j) q_i.k_j         for j <= i
    U = T (V - e^G K S)                                 what rows write under their keys
    O = e^G Q S + P U                                   their outputs
    S <- e^G_n S + sum over j of e^(G_n - G_j) k_j u_j^T

A first launch computes T and P of all chunks and heads at once (`_prepare`), inverting by forward
substitution: neighboring keys are similar, so powers of A would grow. A second launch runs from chunk to
chunk, a program per some columns of a head's state (`_run_chunks`), after folding the records of accepted
drafts.

Chunks begin at multiples of their size, which divides the page size: so every position at which a state is
saved (a page's end) is a chunk's end, and a row's bits depend on no other request, nor on where a prompt is
divided into steps, if that is at a page's end.

Legend: N rows, V value heads, M rows of a chunk, D key dim, F value dim.
"""

# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..common.element_ops import dependent_launch, wait_for_predecessor
from .recurrent_delta_rule import (
    MOST_ROWS,
    DeltaPass,
    decay_of,
    load_folded,
    operands,
    rows_of,
    runs_in_chunks,
    sigmoid,
    sizes,
    store_saves,
    store_state,
)

# Rows of a chunk: tensor cores' minimum; and the maximum whose operands fit in registers, in fp32 with the
# correction terms of the products.
_FEWEST, _MOST, _MAX_FP32 = 16, 32, 16
_COLUMNS, _COLUMNS_FP32, _STAGES, _PREPARING_WARPS = 16, 64, 2, 8
_WARPS, _WARPS_FP32 = 4, 8  # with fewer, fp32 spills registers on sm_100


def chunk_size(page_size: int, dtype: torch.dtype) -> int | None:
    """Return the rows of a chunk; None if the page size allows none."""
    size = min(page_size & -page_size, _MAX_FP32 if dtype is torch.float32 else _MOST)
    return size if size >= _FEWEST else None


def run_chunks(mixed_NO: Tensor, qkv_NC: Tensor, given: DeltaPass, read_NVF: Tensor, *, size: int) -> None:
    """Run the requests that `recurrent_delta_rule.run_rows` leaves out, in chunks of `size` rows."""
    kind, device = given.shape.geometry, mixed_NO.device
    num_chunks = triton.cdiv(given.rows.max_rows, size) + 1  # rows may begin within a chunk
    heads, num_requests = kind.num_value_heads, len(given.rows.slots_R)
    prepared_2NVM = torch.empty(2, len(mixed_NO), heads, size, dtype=torch.float32, device=device)
    arguments = operands(mixed_NO, qkv_NC, given)
    how = {"CHUNK": size, "MOST_ROWS": MOST_ROWS, **sizes(given)}
    # Inputs of 16-bit models have no more precision than tf32. In fp32, products must be exact; for small key
    # dims the plain fp32 units need fewer registers.
    is_fp32 = mixed_NO.dtype is torch.float32
    how["KEY_WIDTH"] = max(how["KEY_WIDTH"], _FEWEST)
    _prepare[(num_requests, num_chunks, heads)](
        *arguments, *prepared_2NVM,
        **how, PRODUCT="ieee" if is_fp32 else "tf32", num_warps=_PREPARING_WARPS, **dependent_launch(device),
    )  # fmt: skip
    columns = min(
        _COLUMNS_FP32 if is_fp32 else _COLUMNS, max(triton.next_power_of_2(kind.value_dim), _FEWEST)
    )
    _run_chunks[(num_requests, heads, triton.cdiv(kind.value_dim, columns))](
        *arguments, *prepared_2NVM, read_NVF,
        **how, PRODUCT="tf32x3" if is_fp32 else "tf32", COLUMNS=columns, num_stages=_STAGES,
        num_warps=_WARPS_FP32 if is_fp32 else _WARPS, **dependent_launch(device),
    )  # fmt: skip


@triton.jit(
    do_not_specialize=["saves_stride"],
    do_not_specialize_on_alignment=["slots", "cu_rows", "num_drafts", "pendings", "firsts", "saves"],
)
def _prepare(
    mixed, qkv, rates, dt_biases, states, k_records, u_records, g_records, slots, cu_rows, num_drafts,
    pendings, firsts, saves, saves_stride, row_stride, writes, reads,
    KEYS: tl.constexpr, KEY_DIM: tl.constexpr, VALUES: tl.constexpr, VALUE_DIM: tl.constexpr,
    MAX_DRAFTS: tl.constexpr, SAVES: tl.constexpr, KEY_WIDTH: tl.constexpr, CHUNK: tl.constexpr,
    MOST_ROWS: tl.constexpr, PRODUCT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Compute T and P of a chunk and a head, one row of them per row."""
    wait_for_predecessor(PDL)
    CHANNELS: tl.constexpr = 2 * KEYS * KEY_DIM + VALUES * VALUE_DIM
    request, chunk, head = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    begin, count, drafts = rows_of(request, cu_rows, num_drafts)
    if not runs_in_chunks(count - drafts, drafts, MOST_ROWS):
        return
    low, high = _span(tl.load(firsts + request), count, chunk, CHUNK)
    if low >= high:
        return
    i_M = tl.arange(0, CHUNK)
    is_row_M = i_M < high - low
    at_M = (begin + low + i_M).to(tl.int64)
    d_D = tl.arange(0, KEY_WIDTH)
    k_MD = _keys(qkv, at_M, is_row_M, d_D, KEYS + head // (VALUES // KEYS), CHANNELS, KEY_DIM)
    g_M, beta_M = _gates(
        mixed, rates, dt_biases, at_M, is_row_M, row_stride, head, CHANNELS, VALUES, VALUE_DIM
    )
    sum_M = tl.cumsum(g_M, 0)
    lower_MM = i_M[:, None] > i_M[None, :]
    decay_MM = tl.exp(tl.where(lower_MM, sum_M[:, None] - sum_M[None, :], 0.0))
    to_MM = (at_M[:, None] * VALUES + head) * CHUNK + i_M[None, :]
    q_MD = _keys(qkv, at_M, is_row_M, d_D, head // (VALUES // KEYS), CHANNELS, KEY_DIM)
    p_MM = tl.dot(q_MD, tl.trans(k_MD), input_precision=PRODUCT)
    seen_MM = i_M[:, None] >= i_M[None, :]
    tl.store(reads + to_MM, tl.where(seen_MM, decay_MM * p_MM, 0.0), mask=is_row_M[:, None])
    a_MM = tl.dot(k_MD, tl.trans(k_MD), input_precision=PRODUCT)
    a_MM = tl.where(lower_MM, beta_M[:, None] * decay_MM * a_MM, 0.0)
    t_MM = (i_M[:, None] == i_M[None, :]).to(tl.float32)
    for i in range(1, high - low):
        is_i_M1 = (i_M == i)[:, None]
        a_M = tl.sum(tl.where(is_i_M1, a_MM, 0.0), 0)
        t_M = tl.sum(a_M[:, None] * t_MM, 0)  # rows before i are done, and `a` is 0 from i on
        t_MM = tl.where(is_i_M1, t_MM - t_M[None, :], t_MM)
    tl.store(writes + to_MM, t_MM * beta_M[None, :], mask=is_row_M[:, None])


@triton.jit(
    do_not_specialize=["saves_stride"],
    do_not_specialize_on_alignment=["slots", "cu_rows", "num_drafts", "pendings", "firsts", "saves"],
)
def _run_chunks(
    mixed, qkv, rates, dt_biases, states, k_records, u_records, g_records, slots, cu_rows, num_drafts,
    pendings, firsts, saves, saves_stride, row_stride, writes, reads, read,
    KEYS: tl.constexpr, KEY_DIM: tl.constexpr, VALUES: tl.constexpr, VALUE_DIM: tl.constexpr,
    MAX_DRAFTS: tl.constexpr, SAVES: tl.constexpr, KEY_WIDTH: tl.constexpr, CHUNK: tl.constexpr,
    MOST_ROWS: tl.constexpr, PRODUCT: tl.constexpr, COLUMNS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Run some columns of a head's state through all of a request's chunks."""
    wait_for_predecessor(PDL)
    CHANNELS: tl.constexpr = 2 * KEYS * KEY_DIM + VALUES * VALUE_DIM
    request, head = tl.program_id(0), tl.program_id(1)
    key = head // (VALUES // KEYS)
    begin, count, drafts = rows_of(request, cu_rows, num_drafts)
    if not runs_in_chunks(count - drafts, drafts, MOST_ROWS):
        return
    slot = tl.load(slots + request).to(tl.int64)
    first = tl.load(firsts + request)
    i_M, d_D = tl.arange(0, CHUNK), tl.arange(0, KEY_WIDTH)
    f_F = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    is_f = f_F < VALUE_DIM
    records, pending = (k_records, u_records, g_records), tl.load(pendings + request)
    state_DF = load_folded(
        states, records, slot, key, head, pending, d_D, f_F, KEYS, KEY_DIM, VALUES, VALUE_DIM, MAX_DRAFTS
    )
    tl.debug_barrier()  # all threads have read the state that is replaced
    for chunk in range(0, tl.cdiv(first % CHUNK + count, CHUNK)):
        low, high = _span(first, count, chunk, CHUNK)
        is_row_M = i_M < high - low
        at_M = (begin + low + i_M).to(tl.int64)
        g_M, _ = _gates(
            mixed, rates, dt_biases, at_M, is_row_M, row_stride, head, CHANNELS, VALUES, VALUE_DIM
        )
        sum_M, whole = tl.cumsum(g_M, 0), tl.sum(g_M, 0)
        decay_M1 = tl.exp(sum_M)[:, None]
        inside_MF = is_row_M[:, None] & is_f[None, :]
        at_MM = (at_M[:, None] * VALUES + head) * CHUNK + i_M[None, :]
        # Keys are loaded twice, to save registers.
        k_MD = _keys(qkv, at_M, is_row_M, d_D, KEYS + key, CHANNELS, KEY_DIM)
        w_MF = -decay_M1 * tl.dot(k_MD, state_DF, input_precision=PRODUCT)
        v_at_MF = at_M[:, None] * CHANNELS + 2 * KEYS * KEY_DIM + head * VALUE_DIM + f_F[None, :]
        w_MF += tl.load(qkv + v_at_MF, mask=inside_MF, other=0.0)
        t_MM = tl.load(writes + at_MM, mask=is_row_M[:, None], other=0.0)
        u_MF = tl.dot(t_MM, w_MF, input_precision=PRODUCT)
        q_MD = _keys(qkv, at_M, is_row_M, d_D, key, CHANNELS, KEY_DIM)
        o_MF = decay_M1 * tl.dot(q_MD, state_DF, input_precision=PRODUCT)
        p_MM = tl.load(reads + at_MM, mask=is_row_M[:, None], other=0.0)
        o_MF = tl.dot(p_MM, u_MF, o_MF, input_precision=PRODUCT)
        o_at_MF = at_M[:, None] * (VALUES * VALUE_DIM) + head * VALUE_DIM + f_F[None, :]
        tl.store(read + o_at_MF, o_MF, mask=inside_MF)
        k_at_DM = at_M[None, :] * CHANNELS + (KEYS + key) * KEY_DIM + d_D[:, None]
        k_DM = tl.load(qkv + k_at_DM, mask=is_row_M[None, :] & (d_D < KEY_DIM)[:, None], other=0.0)
        left_MF = tl.exp(whole - sum_M)[:, None] * u_MF
        state_DF = tl.dot(k_DM, left_MF, state_DF * tl.exp(whole), input_precision=PRODUCT)
        if saves is not None:
            lists = (saves + request * SAVES, saves_stride)
            store_saves(
                lists, first + high, states, state_DF, head, d_D, f_F, KEY_DIM, VALUES, VALUE_DIM, SAVES
            )
    store_state(states, slot, state_DF, True, head, d_D, f_F, KEY_DIM, VALUES, VALUE_DIM)


@triton.jit
def _span(first, count, chunk, CHUNK: tl.constexpr):
    """Return the rows of a request that are in a chunk: low .. high - 1."""
    low = chunk * CHUNK - first % CHUNK
    return tl.maximum(low, 0), tl.minimum(low + CHUNK, count)


@triton.jit
def _keys(qkv, at_M, is_row_M, d_D, head, CHANNELS: tl.constexpr, KEY_DIM: tl.constexpr):
    at_MD = at_M[:, None] * CHANNELS + head * KEY_DIM + d_D[None, :]
    return tl.load(qkv + at_MD, mask=is_row_M[:, None] & (d_D < KEY_DIM)[None, :], other=0.0)


@triton.jit
def _gates(
    mixed, rates, dt_biases, at_M, is_row_M, row_stride, head,
    CHANNELS: tl.constexpr, VALUES: tl.constexpr, VALUE_DIM: tl.constexpr,
):  # fmt: skip
    """Return g and beta; 0 for missing rows, which then change nothing."""
    a_head = mixed + at_M * row_stride + CHANNELS + VALUES * VALUE_DIM + head
    b_M = tl.load(a_head, mask=is_row_M, other=0.0)
    a_M = tl.load(a_head + VALUES, mask=is_row_M, other=0.0)
    g_M = decay_of(a_M, tl.load(rates + head), tl.load(dt_biases + head))
    return tl.where(is_row_M, g_M, 0.0), tl.where(is_row_M, sigmoid(b_M), 0.0)
