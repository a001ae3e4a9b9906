"""The gated delta rule (arXiv 2412.06464) row by row in Triton, for blocks that are verified.

Implements `compute/eager/delta_rule.py`. A program holds some columns of a value head's state: it loads them
once, folds in the records of accepted drafts, runs the rows, and stores the state after the last known row.
Drafts update only the program's copy and leave their updates (`u`) as records; `gated_norm.py` stores their
keys and decays, because other programs of this launch still read the old ones.

    slot's state [D, F] ── fold: S = e^g S + k u^T ──▶ known rows ──▶ stored; drafts ──▶ u

Every row runs the same instructions, and a fold the same operations: a row's bits depend neither on its batch
nor on what was drafted before. Long prompts run in chunks (`chunk_delta_rule.py`).

Legend: N rows, O outputs of the layer's projection, C channels, K key heads, V value heads, D key dim, F
value dim; in the kernel F columns of a program.
"""

# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from ...layers.gated_delta_net import DeltaNetShape
from ...memory.recurrent_state_cache import MAX_SAVES, DeviceStateRows, StateMemory
from ..common.element_ops import dependent_launch, wait_for_predecessor

MOST_ROWS = 16  # known rows of a request; longer ones run in chunks if allowed
_COLUMNS = 16


class DeltaPass(NamedTuple):
    """A layer's part of a pass: its shape, the rows by request, the memory, and its index in that."""

    shape: DeltaNetShape
    rows: DeviceStateRows
    memory: StateMemory
    layer: int


def run_rows(mixed_NO: Tensor, qkv_NC: Tensor, given: DeltaPass, read_NVF: Tensor, *, all_rows: bool) -> None:
    """Run requests' rows: write outputs, fp32, to `read`, and states and drafts' u to the memory.

    `mixed_NO` is the layer's projection (b and a come last), `qkv_NC` the result of `take_in`. `all_rows`
    also runs requests that `runs_in_chunks`, which otherwise are skipped.
    """
    kind, num_requests = given.shape.geometry, len(given.rows.slots_R)
    columns = min(_COLUMNS, triton.next_power_of_2(kind.value_dim))
    _run_rows[(num_requests, kind.num_value_heads, triton.cdiv(kind.value_dim, columns))](
        *operands(mixed_NO, qkv_NC, given), read_NVF,
        **sizes(given), MOST_ROWS=2**30 if all_rows else MOST_ROWS, COLUMNS=columns, num_warps=1,
        **dependent_launch(mixed_NO.device),
    )  # fmt: skip


def operands(mixed_NO: Tensor, qkv_NC: Tensor, given: DeltaPass) -> tuple[Any, ...]:
    """Return the leading arguments of both forms' kernels."""
    shape, rows, memory, layer = given
    records = (memory.k_LZPKD, memory.u_LZPVF, memory.g_LZPV)
    return (
        mixed_NO,
        qkv_NC,
        shape.rate_V,
        shape.dt_bias_V,
        memory.states_LZVDF[layer],
        *(record[layer] for record in records),
        rows.slots_R,
        rows.cu_rows_R1,
        rows.num_drafts_R,
        rows.pending_R,
        rows.first_R,
        rows.saves_2RM,
        0 if rows.saves_2RM is None else rows.saves_2RM.stride(0),
        mixed_NO.stride(0),
    )


def sizes(given: DeltaPass) -> dict[str, Any]:
    """Return compile-time arguments of both forms' kernels."""
    kind = given.shape.geometry
    return {
        "KEYS": kind.num_key_heads,
        "KEY_DIM": kind.key_dim,
        "VALUES": kind.num_value_heads,
        "VALUE_DIM": kind.value_dim,
        "MAX_DRAFTS": given.memory.max_drafts,
        "SAVES": MAX_SAVES,
        "KEY_WIDTH": 1 << (kind.key_dim - 1).bit_length(),
    }


@triton.jit(
    do_not_specialize=["saves_stride"],
    do_not_specialize_on_alignment=["slots", "cu_rows", "num_drafts", "pendings", "firsts", "saves"],
)
def _run_rows(
    mixed, qkv, rates, dt_biases, states, k_records, u_records, g_records, slots, cu_rows, num_drafts,
    pendings, firsts, saves, saves_stride, row_stride, read,
    KEYS: tl.constexpr, KEY_DIM: tl.constexpr, VALUES: tl.constexpr, VALUE_DIM: tl.constexpr,
    MAX_DRAFTS: tl.constexpr, SAVES: tl.constexpr, KEY_WIDTH: tl.constexpr, MOST_ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Run the delta rule over a request's rows, in order, for some columns of a value head's state.

    The state is stored after the last known row; drafts only leave records, from which accepted ones are
    folded in later.
    """
    wait_for_predecessor(PDL)
    CHANNELS: tl.constexpr = 2 * KEYS * KEY_DIM + VALUES * VALUE_DIM
    request, head = tl.program_id(0), tl.program_id(1)
    key = head // (VALUES // KEYS)
    begin, count, drafts = rows_of(request, cu_rows, num_drafts)
    known = count - drafts
    if (count == 0) | runs_in_chunks(known, drafts, MOST_ROWS):
        return
    slot = tl.load(slots + request).to(tl.int64)
    d_D = tl.arange(0, KEY_WIDTH)
    f_F = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    is_d, is_f = d_D < KEY_DIM, f_F < VALUE_DIM
    records, pending = (k_records, u_records, g_records), tl.load(pendings + request)
    state_DF = load_folded(
        states, records, slot, key, head, pending, d_D, f_F, KEYS, KEY_DIM, VALUES, VALUE_DIM, MAX_DRAFTS
    )
    tl.debug_barrier()  # all threads have read the records that drafts overwrite
    rate, dt_bias = tl.load(rates + head), tl.load(dt_biases + head)
    a_mixed = mixed + begin.to(tl.int64) * row_stride + CHANNELS + VALUES * VALUE_DIM + head
    a_qkv = qkv + begin.to(tl.int64) * CHANNELS
    a_read = read + begin.to(tl.int64) * (VALUES * VALUE_DIM) + head * VALUE_DIM
    u_record = u_records + (slot * MAX_DRAFTS * VALUES + head) * VALUE_DIM
    at_q, at_k = key * KEY_DIM, (KEYS + key) * KEY_DIM
    at_v = 2 * KEYS * KEY_DIM + head * VALUE_DIM
    # Prefetch the next row's operands while this one's are used.
    q_D = tl.load(a_qkv + at_q + d_D, mask=is_d, other=0.0)
    k_D = tl.load(a_qkv + at_k + d_D, mask=is_d, other=0.0)
    v_F = tl.load(a_qkv + at_v + f_F, mask=is_f, other=0.0)
    b, a = tl.load(a_mixed), tl.load(a_mixed + VALUES)
    for n in range(count):
        this_q_D, this_k_D, this_v_F, this_b, this_a = q_D, k_D, v_F, b, a
        a_qkv += CHANNELS
        a_mixed += row_stride
        more = n + 1 < count
        q_D = tl.load(a_qkv + at_q + d_D, mask=is_d & more, other=0.0)
        k_D = tl.load(a_qkv + at_k + d_D, mask=is_d & more, other=0.0)
        v_F = tl.load(a_qkv + at_v + f_F, mask=is_f & more, other=0.0)
        b = tl.load(a_mixed, mask=more, other=0.0)
        a = tl.load(a_mixed + VALUES, mask=more, other=0.0)

        state_DF *= tl.exp(decay_of(this_a, rate, dt_bias))
        seen_F = tl.sum(state_DF * this_k_D[:, None], 0)
        u_F = sigmoid(this_b) * (this_v_F - seen_F)
        state_DF = tl.fma(this_k_D[:, None], u_F[None, :], state_DF)
        tl.store(a_read + n * (VALUES * VALUE_DIM) + f_F, tl.sum(state_DF * this_q_D[:, None], 0), mask=is_f)
        if n >= known:
            tl.store(u_record + (n - known) * (VALUES * VALUE_DIM) + f_F, u_F, mask=is_f)
        store_state(states, slot, state_DF, n == known - 1, head, d_D, f_F, KEY_DIM, VALUES, VALUE_DIM)
        if saves is not None:
            position = tl.where(n < known, tl.load(firsts + request) + n + 1, -1)
            lists = (saves + request * SAVES, saves_stride)
            store_saves(lists, position, states, state_DF, head, d_D, f_F, KEY_DIM, VALUES, VALUE_DIM, SAVES)


@triton.jit
def rows_of(request, cu_rows, num_drafts):
    """Return a request's first row, its number of rows, and how many of them are drafts."""
    begin = tl.load(cu_rows + request)
    return begin, tl.load(cu_rows + request + 1) - begin, tl.load(num_drafts + request)


@triton.jit
def runs_in_chunks(known, drafts, MOST_ROWS: tl.constexpr):
    """Return whether a request's rows run in chunks; depends only on that request."""
    return (drafts == 0) & (known > MOST_ROWS)


@triton.jit
def sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x.to(tl.float32)))


@triton.jit
def decay_of(a, rate, dt_bias):
    """Return g = rate * softplus(a + dt_bias), with a log1p corrected for the rounding of 1 + x."""
    x = a.to(tl.float32) + dt_bias
    small = tl.exp(-tl.abs(x))
    sum_ = 1.0 + small
    log1p = tl.where(sum_ == 1.0, small, tl.log(sum_) * (small / tl.where(sum_ == 1.0, 1.0, sum_ - 1.0)))
    return rate * (tl.maximum(x, 0.0) + log1p)


@triton.jit
def load_folded(
    states, records, slot, key, head, pending, d_D, f_F,
    KEYS: tl.constexpr, KEY_DIM: tl.constexpr, VALUES: tl.constexpr, VALUE_DIM: tl.constexpr,
    MAX_DRAFTS: tl.constexpr,
):  # fmt: skip
    """Return columns [D, F] of a slot's state after folding the first `pending` of its records (k, u, g)."""
    k_records, u_records, g_records = records
    inside_DF = (d_D < KEY_DIM)[:, None] & (f_F < VALUE_DIM)[None, :]
    at_DF = d_D[:, None] * VALUE_DIM + f_F[None, :]
    state_DF = tl.load(
        states + (slot * VALUES + head) * (KEY_DIM * VALUE_DIM) + at_DF, mask=inside_DF, other=0.0
    )
    record = slot * MAX_DRAFTS
    for n in range(pending):
        g = tl.load(g_records + (record + n) * VALUES + head)
        k_D = tl.load(k_records + ((record + n) * KEYS + key) * KEY_DIM + d_D, mask=d_D < KEY_DIM, other=0.0)
        u_F = tl.load(
            u_records + ((record + n) * VALUES + head) * VALUE_DIM + f_F, mask=f_F < VALUE_DIM, other=0.0
        )
        state_DF *= tl.exp(g)
        state_DF = tl.fma(k_D[:, None], u_F[None, :], state_DF)
    return state_DF


@triton.jit
def store_state(
    states, slot, state_DF, wanted, head, d_D, f_F,
    KEY_DIM: tl.constexpr, VALUES: tl.constexpr, VALUE_DIM: tl.constexpr,
):  # fmt: skip
    """Store the state if `wanted`, as a mask: a branch would prevent pipelining of the loop."""
    inside_DF = (d_D < KEY_DIM)[:, None] & (f_F < VALUE_DIM)[None, :] & wanted
    at_DF = d_D[:, None] * VALUE_DIM + f_F[None, :]
    tl.store(states + (slot * VALUES + head) * (KEY_DIM * VALUE_DIM) + at_DF, state_DF, mask=inside_DF)


@triton.jit
def store_saves(
    lists, position, states, state_DF, head, d_D, f_F,
    KEY_DIM: tl.constexpr, VALUES: tl.constexpr, VALUE_DIM: tl.constexpr, SAVES: tl.constexpr,
):  # fmt: skip
    """Store the state in the slots that the request's saves (address, stride) name for this position."""
    saves, saves_stride = lists
    for save in tl.static_range(SAVES):
        wanted = tl.load(saves + save) == position
        to = tl.load(saves + saves_stride + save).to(tl.int64)
        store_state(states, to, state_DF, wanted, head, d_D, f_F, KEY_DIM, VALUES, VALUE_DIM)
