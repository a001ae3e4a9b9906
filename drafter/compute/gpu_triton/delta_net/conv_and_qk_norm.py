"""Inputs of a delta rule in one launch: the causal convolution, and queries and keys of unit length.

Implements `conv_chunk`, `conv_fold` and `unit` of `compute/eager/delta_rule.py`. A program handles a head of
one kind (query, key or value) for some rows of a request. Inputs before the first row are in the request's
slot:

    of earlier passes      window [W] | inputs of accepted drafts [pending]
    of row i, at tap t     input n = i - W + t: of this pass, or, if n is negative, element
                           pending + W + n of the two joined

so a window is folded by reading at an offset. The program with a request's first rows writes what the next
pass reads (the last W known inputs, and drafts'), which no other program reads.

Legend: N rows, O outputs of the layer's projection, C channels, K key heads, V value heads, T taps, W = T -
1, R requests; in the kernel N rows of a program, F columns of its head.
"""

# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...eager.delta_rule import EPS
from ...memory.recurrent_state_cache import MAX_SAVES
from ..common.element_ops import dependent_launch, wait_for_predecessor
from .recurrent_delta_rule import DeltaPass, rows_of

_ROWS = 16  # per program: a verified block


def take_in(mixed_NO: Tensor, given: DeltaPass) -> Tensor:
    """Return queries (scaled), keys and values of all heads, fp32 [N, C]; write windows and drafts' inputs.

    `mixed_NO` is the layer's projection, starting with the convolved channels; rows may have any stride.
    """
    shape, rows, memory, layer = given
    kind = shape.geometry
    assert mixed_NO.stride(1) == 1, "a row is contiguous"
    assert rows.max_drafts <= memory.max_drafts, "drafts' inputs have room"
    qkv_NC = torch.empty(len(mixed_NO), kind.channels, dtype=torch.float32, device=mixed_NO.device)
    heads = 2 * kind.num_key_heads + kind.num_value_heads
    _take_in[(len(rows.slots_R), triton.cdiv(rows.max_rows, _ROWS), heads)](
        mixed_NO, shape.kernel_CT, memory.windows_LZWC[layer], memory.x_LZPC[layer], qkv_NC, rows.slots_R,
        rows.cu_rows_R1, rows.num_drafts_R, rows.pending_R, rows.first_R, rows.saves_2RM,
        0 if rows.saves_2RM is None else rows.saves_2RM.stride(0), mixed_NO.stride(0),
        KEYS=kind.num_key_heads, KEY_DIM=kind.key_dim, VALUES=kind.num_value_heads, VALUE_DIM=kind.value_dim,
        WIDTH=triton.next_power_of_2(max(kind.key_dim, kind.value_dim)), TAPS=kind.taps,
        MAX_DRAFTS=memory.max_drafts, DRAFTS=triton.next_power_of_2(max(memory.max_drafts, 1)),
        SAVES=MAX_SAVES, EPS=EPS, ROWS=_ROWS, **dependent_launch(mixed_NO.device),
    )  # fmt: skip
    return qkv_NC


@triton.jit(
    do_not_specialize=["saves_stride"],
    do_not_specialize_on_alignment=["slots", "cu_rows", "num_drafts", "pendings", "firsts", "saves"],
)
def _take_in(
    mixed, kernel, windows, inputs, qkv, slots, cu_rows, num_drafts, pendings, firsts, saves, saves_stride,
    row_stride,
    KEYS: tl.constexpr, KEY_DIM: tl.constexpr, VALUES: tl.constexpr, VALUE_DIM: tl.constexpr,
    WIDTH: tl.constexpr, TAPS: tl.constexpr, MAX_DRAFTS: tl.constexpr, DRAFTS: tl.constexpr,
    SAVES: tl.constexpr, EPS: tl.constexpr, ROWS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Convolve a block of a request's rows for one head, and norm it if it is of queries or keys.

    The first block's program also updates the window of the next step's inputs, after known rows alone, and
    keeps the inputs of drafts, of which some may be accepted.
    """
    wait_for_predecessor(PDL)
    CHANNELS: tl.constexpr = 2 * KEYS * KEY_DIM + VALUES * VALUE_DIM
    WINDOW: tl.constexpr = TAPS - 1
    request, block, head = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    begin, count, drafts = rows_of(request, cu_rows, num_drafts)
    if block * ROWS >= count:
        return
    slot = tl.load(slots + request).to(tl.int64)
    known = count - drafts
    is_value = head >= 2 * KEYS
    channel_F = tl.arange(0, WIDTH)
    inside_F = channel_F < tl.where(is_value, VALUE_DIM, KEY_DIM)
    channel_F += tl.where(is_value, 2 * KEYS * KEY_DIM + (head - 2 * KEYS) * VALUE_DIM, head * KEY_DIM)
    fresh = mixed + begin.to(tl.int64) * row_stride
    window = windows + slot * (WINDOW * CHANNELS)
    kept = inputs + slot * (MAX_DRAFTS * CHANNELS)
    source = (fresh, row_stride, window, kept, tl.load(pendings + request))

    row_N = block * ROWS + tl.arange(0, ROWS)
    is_row_N = row_N < count
    total_NF = tl.zeros([ROWS, WIDTH], tl.float32)
    for tap in tl.static_range(TAPS):
        weight_F = tl.load(kernel + channel_F * TAPS + tap, mask=inside_F, other=0.0)
        x_NF = _input(row_N - WINDOW + tap, is_row_N, channel_F, inside_F, source, CHANNELS, WINDOW)
        total_NF += x_NF.to(tl.float32) * weight_F[None, :]
    y_NF = (total_NF / (1.0 + tl.exp(-total_NF))).to(mixed.dtype.element_ty).to(tl.float32)
    if head < 2 * KEYS:
        y_NF *= tl.rsqrt(tl.sum(y_NF * y_NF, 1) + EPS)[:, None]
    if head < KEYS:
        y_NF *= KEY_DIM**-0.5
    to_NF = (begin + row_N).to(tl.int64)[:, None] * CHANNELS + channel_F[None, :]
    tl.store(qkv + to_NF, y_NF, mask=is_row_N[:, None] & inside_F[None, :])

    if block == 0:
        if saves is not None:
            first = tl.load(firsts + request)
            for save in range(SAVES):
                passed = tl.load(saves + request * SAVES + save) - first
                if (passed > 0) & (passed <= known):
                    to = tl.load(saves + saves_stride + request * SAVES + save).to(tl.int64)
                    to_window = windows + to * (WINDOW * CHANNELS)
                    _write_window(to_window, passed, channel_F, inside_F, source, CHANNELS, WINDOW)
        _write_window(window, known, channel_F, inside_F, source, CHANNELS, WINDOW)
        draft_P = tl.arange(0, DRAFTS)
        is_draft_PF = (known + draft_P < count)[:, None] & inside_F[None, :]
        from_PF = (known + draft_P).to(tl.int64)[:, None] * row_stride + channel_F[None, :]
        x_PF = tl.load(fresh + from_PF, mask=is_draft_PF, other=0.0)
        tl.store(kept + draft_P[:, None] * CHANNELS + channel_F[None, :], x_PF, mask=is_draft_PF)


@triton.jit
def _input(n_N, wanted_N, channel_F, inside_F, source, CHANNELS: tl.constexpr, WINDOW: tl.constexpr):
    """Return inputs n of this pass; negative ones are earlier, see the module's docstring."""
    fresh, row_stride, window, kept, pending = source
    before_N = pending + WINDOW + n_N
    is_fresh_N = wanted_N & (n_N >= 0)
    in_window_N = wanted_N & (n_N < 0) & (before_N < WINDOW)
    is_kept_N = wanted_N & (n_N < 0) & (before_N >= WINDOW)
    column_1F = channel_F[None, :]
    x_NF = tl.load(
        fresh + n_N.to(tl.int64)[:, None] * row_stride + column_1F,
        mask=is_fresh_N[:, None] & inside_F[None, :],
        other=0.0,
    )
    w_NF = tl.load(
        window + before_N[:, None] * CHANNELS + column_1F,
        mask=in_window_N[:, None] & inside_F[None, :],
        other=0.0,
    )
    k_NF = tl.load(
        kept + (before_N - WINDOW)[:, None] * CHANNELS + column_1F,
        mask=is_kept_N[:, None] & inside_F[None, :],
        other=0.0,
    )
    return tl.where(is_fresh_N[:, None], x_NF, tl.where(in_window_N[:, None], w_NF, k_NF))


@triton.jit
def _write_window(to, count, channel_F, inside_F, source, CHANNELS: tl.constexpr, WINDOW: tl.constexpr):
    """Write the inputs before row `count`, in an order that allows `to` to be the source.

    All threads have read the source and drafts' inputs then.
    """
    one_1 = tl.zeros([1], tl.int32)
    for w in tl.static_range(WINDOW):
        x_1F = _input(one_1 + count - WINDOW + w, one_1 == 0, channel_F, inside_F, source, CHANNELS, WINDOW)
        tl.debug_barrier()  # all threads have read
        tl.store(to + w * CHANNELS + channel_F[None, :], x_1F, mask=inside_F[None, :])
