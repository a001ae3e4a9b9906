"""Output norm and gate of a delta rule; also stores drafts' keys and decays as records.

Implements `_gated_norm` of `compute/eager/gated_delta_net.py` and, for records, `record`. Rows past the last
request's are padding and are zeroed.

Legend: N rows, O outputs of the layer's projection, C channels, V value heads, F value dim, R requests; in
the kernel N rows of a program.
"""

# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ..common.element_ops import dependent_launch, wait_for_predecessor
from .recurrent_delta_rule import DeltaPass, decay_of

_ROWS = 16  # per program


def gate_outputs(read_NVF: Tensor, mixed_NO: Tensor, qkv_NC: Tensor, given: DeltaPass) -> Tensor:
    """Return rms_w(each head's output) * silu(z), [N, V * F] in the dtype of `mixed`, rounded once."""
    shape, rows, memory, layer = given
    kind = shape.geometry
    y_NG = mixed_NO.new_empty(len(mixed_NO), kind.num_value_heads * kind.value_dim)
    grid = (len(rows.slots_R) + 1, triton.cdiv(rows.max_rows, _ROWS), kind.num_value_heads)
    _gate_outputs[grid](
        read_NVF, mixed_NO, qkv_NC, shape.norm_F, shape.rate_V, shape.dt_bias_V, memory.k_LZPKD[layer],
        memory.g_LZPV[layer], y_NG, rows.slots_R, rows.cu_rows_R1, rows.num_drafts_R, shape.eps,
        len(rows.slots_R), len(mixed_NO), mixed_NO.stride(0),
        KEYS=kind.num_key_heads, KEY_DIM=kind.key_dim, VALUES=kind.num_value_heads, VALUE_DIM=kind.value_dim,
        KEY_WIDTH=triton.next_power_of_2(kind.key_dim), VALUE_WIDTH=triton.next_power_of_2(kind.value_dim),
        MAX_DRAFTS=memory.max_drafts, ROWS=_ROWS, **dependent_launch(mixed_NO.device),
    )  # fmt: skip
    return y_NG


@triton.jit(
    do_not_specialize=["num_requests", "num_rows"],
    do_not_specialize_on_alignment=["slots", "cu_rows", "num_drafts"],
)
def _gate_outputs(
    read, mixed, qkv, norm, rates, dt_biases, k_records, g_records, y, slots, cu_rows, num_drafts, eps,
    num_requests, num_rows, row_stride,
    KEYS: tl.constexpr, KEY_DIM: tl.constexpr, VALUES: tl.constexpr, VALUE_DIM: tl.constexpr,
    KEY_WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr, MAX_DRAFTS: tl.constexpr, ROWS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Process rows of a request, or of padding, which is treated as one more request."""
    wait_for_predecessor(PDL)
    CHANNELS: tl.constexpr = 2 * KEYS * KEY_DIM + VALUES * VALUE_DIM
    GROUP: tl.constexpr = VALUES // KEYS
    request, head = tl.program_id(0), tl.program_id(2)
    is_padding = request == num_requests
    begin = tl.load(cu_rows + request)
    end = tl.load(cu_rows + request + 1, mask=request < num_requests, other=num_rows)
    count = end - begin
    f_F = tl.arange(0, VALUE_WIDTH)
    is_f = f_F < VALUE_DIM
    norm_F = tl.load(norm + f_F, mask=is_f, other=0.0)
    for block in range(tl.program_id(1) * ROWS, count, tl.num_programs(1) * ROWS):
        row_N = block + tl.arange(0, ROWS)
        at_N = (begin + row_N).to(tl.int64)
        inside_NF = (row_N < count)[:, None] & is_f[None, :]
        at_NF = at_N[:, None] * (VALUES * VALUE_DIM) + head * VALUE_DIM + f_F[None, :]
        is_read_NF = inside_NF & (request < num_requests)
        o_NF = tl.load(read + at_NF, mask=is_read_NF, other=0.0)
        z_at_NF = at_N[:, None] * row_stride + CHANNELS + head * VALUE_DIM + f_F[None, :]
        z_NF = tl.load(mixed + z_at_NF, mask=is_read_NF, other=0.0).to(tl.float32)
        scale_N = tl.rsqrt(tl.sum(o_NF * o_NF, 1) / VALUE_DIM + eps)
        y_NF = o_NF * scale_N[:, None] * norm_F[None, :] * (z_NF / (1.0 + tl.exp(-z_NF)))
        tl.store(y + at_NF, y_NF.to(y.dtype.element_ty), mask=inside_NF)
    if is_padding | (tl.program_id(1) > 0):
        return
    drafts = tl.load(num_drafts + request)
    record = tl.load(slots + request).to(tl.int64) * MAX_DRAFTS
    rate, dt_bias = tl.load(rates + head), tl.load(dt_biases + head)
    d_D = tl.arange(0, KEY_WIDTH)
    for draft in range(0, drafts, ROWS):
        draft_N = draft + tl.arange(0, ROWS)
        is_draft_N = draft_N < drafts
        at_N = (begin + count - drafts + draft_N).to(tl.int64)
        a_at_N = at_N * row_stride + CHANNELS + VALUES * VALUE_DIM + VALUES + head
        g_N = decay_of(tl.load(mixed + a_at_N, mask=is_draft_N, other=0.0), rate, dt_bias)
        tl.store(g_records + (record + draft_N) * VALUES + head, g_N, mask=is_draft_N)
        if head % GROUP == 0:
            key = head // GROUP
            is_k_ND = is_draft_N[:, None] & (d_D < KEY_DIM)[None, :]
            k_at_ND = at_N[:, None] * CHANNELS + (KEYS + key) * KEY_DIM + d_D[None, :]
            k_ND = tl.load(qkv + k_at_ND, mask=is_k_ND, other=0.0)
            to_ND = ((record + draft_N)[:, None] * KEYS + key) * KEY_DIM + d_D[None, :]
            tl.store(k_records + to_ND, k_ND, mask=is_k_ND)
