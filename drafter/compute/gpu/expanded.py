"""Latents of long prompts on a GPU, expanded into heads' own keys and values: less work from some rows on.

The same sums as absorbed attention (`latent.py`), made elsewhere, so they differ in last bits. Which requests
are expanded follows from their rows in a pass, and only of passes of which the host knows the lengths:
prompts', never those of a decoding graph (docs/decisions/expanded-latents.md). `backend.py` expands nothing
where rows' bits are promised.

The keys of all such requests stand one behind the other and are taken in *pieces* that fit into a workspace:

    pages ── gather ─▶ [T, C + R] ── product with K and V of all heads ─▶ [T, J, E + F]       of each piece
                                                    │
    queries [N, J, E + R] ──▶ a tile of rows, of one head ──▶ (m, l, o) ─▶ .. next piece .. ─▶ out [N, J, F]

A tile that sees keys of more than one piece leaves its sums (`attention.py` says what m, l and o are), which
the next launch goes on with: launches follow each other, so nothing is merged at the end.

Legend: N rows, B requests, J heads, E head dim of what is not rotated, R of what is, F of values, C values of
a latent, W = C + R, U = E + F, T keys of a piece, P pages, S page size; in the kernels M rows of a tile, K
keys of one.
"""

# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F

from ..latent import Latents
from .attention import inside
from .launch import dependent_launch, wait_for_predecessor
from .partials import no_part
from .tiles import PagedRows, tile_width
from .work import find_request

_LOG2_E = tl.constexpr(1.4426950408889634)
_FP32_PRODUCT = tl.constexpr("tf32x3")  # as in `attention.py`
# Rows, keys and warps of a tile: what registers hold; of fp32, beside what its products are corrected by.
_TILE, _TILE_FP32 = (128, 64, 8), (16, 32, 4)
_GATHERED = 8  # tokens of a program
PIECE_KEYS = 4096  # so many that to read a tile's sums again is little beside what it attends to
_REQUESTS = tl.constexpr(64)  # looked at in one turn


class ExpansionWorkspace:
    """Room for one piece of layers alike: allocated once, used by every one in turn.

    Args:
        parts: of such a layer.
        fewest: rows from which a request is expanded.

    Attributes:
        latents_TW, heads_TJU: of the weights' dtype.
    """

    __slots__ = ("fewest", "heads_TJU", "latents_TW")

    def __init__(self, parts: Latents, width: int, fewest: int) -> None:
        self.fewest, empty = fewest, parts.kv_up_JUC.new_empty
        self.latents_TW = empty(PIECE_KEYS, width)
        self.heads_TJU = empty(PIECE_KEYS, *parts.kv_up_JUC.shape[:2])

    @property
    def tile(self) -> tuple[int, int, int]:
        """Its rows, keys and warps."""
        return _TILE_FP32 if self.heads_TJU.dtype is torch.float32 else _TILE


@dataclass(frozen=True, slots=True)
class Expansion:
    """Who of a pass is expanded, for all layers of latents in a page group.

    Attributes:
        keys_before, tiles_before: int32 [B + 1], of those who are, keys and tiles of rows before each.
        num_keys, num_tiles: of all of them.
        takes_all: nobody else has rows.
    """

    rows: PagedRows
    workspace: ExpansionWorkspace
    keys_before: Tensor
    tiles_before: Tensor
    num_keys: int
    num_tiles: int
    takes_all: bool


def find_expansion(rows: PagedRows, workspace: ExpansionWorkspace) -> Expansion | None:
    """Of a pass; None where there is nobody with so many rows, or the host does not know.

    Launch sizes are the host's; the lists are made on the device, of what stands there: no upload.
    """
    if rows.host_spans_B2 is None:
        return None
    first_B, rows_B = rows.host_spans_B2.T
    fewest, height = workspace.fewest, workspace.tile[0]
    expands_B = rows_B >= fewest
    if not expands_B.any():
        return None
    count_B = rows.cu_rows.diff()
    wanted_B = count_B >= fewest
    tiles_B = (count_B + (height - 1)).div(height, rounding_mode="floor")
    return Expansion(
        rows=rows,
        workspace=workspace,
        keys_before=_before_each(rows.kv_lengths_B * wanted_B),
        tiles_before=_before_each(tiles_B * wanted_B),
        num_keys=int((first_B + rows_B)[expands_B].sum()),
        num_tiles=int((-(-rows_B[expands_B] // height)).sum()),
        takes_all=bool((expands_B | (rows_B == 0)).all()),
    )


def _before_each(count_B: Tensor) -> Tensor:
    return F.pad(count_B.cumsum(0, dtype=torch.int32), (1, 0))


def attend_expanded(
    q_NJO: Tensor,
    parts: Latents,
    pages_PSW: Tensor,
    expansion: Expansion,
    scale: float,
    out_NJF: Tensor,
) -> None:
    """Causal attention of the expansion's requests; other rows of `out` stay as they are.

    Args:
        q_NJO: E + R of each head, rotated.
        pages_PSW: of a layer; the rows' own latents are written already.
    """
    (num_heads, unit, rank), workspace = parts.kv_up_JUC.shape, expansion.workspace
    assert q_NJO.stride(2) == pages_PSW.stride(2) == 1, "the last dimension is contiguous"
    assert out_NJF.is_contiguous() and parts.kv_up_JUC.is_contiguous(), "here all are"
    up_CO = parts.kv_up_JUC.flatten(0, 1).T
    # Made for one piece as for many: so a measured step has taken what any takes (`loading/warm_up.py`).
    sums_NJ = [q_NJO.new_empty(*out_NJF.shape[:2], dtype=torch.float32) for _ in range(2)]
    sums = (*sums_NJ, torch.empty_like(out_NJF, dtype=torch.float32))
    for begin in range(0, expansion.num_keys, len(workspace.latents_TW)):
        count = min(expansion.num_keys - begin, len(workspace.latents_TW))
        latents_TW = workspace.latents_TW[:count]
        heads_TJU = workspace.heads_TJU[:count]
        _gather(pages_PSW, expansion, begin, latents_TW)
        torch.mm(latents_TW[:, :rank], up_CO, out=heads_TJU.view(count, num_heads * unit))
        _attend(q_NJO, latents_TW, heads_TJU, parts, expansion, begin, scale, sums, out_NJF)


def _gather(pages_PSW: Tensor, expansion: Expansion, begin: int, latents_TW: Tensor) -> None:
    """Keys begin.. of the expansion's requests."""
    (count, width), rows = latents_TW.shape, expansion.rows
    _gather_latents[triton.cdiv(count, _GATHERED),](
        pages_PSW,
        latents_TW,
        expansion.keys_before,
        rows.slots_B,
        rows.page_table,
        begin,
        count,
        len(rows.slots_B),
        rows.page_table.stride(0),
        pages_PSW.stride(0),
        pages_PSW.stride(1),
        VALUES=width,
        WIDTH=triton.next_power_of_2(width),
        PAGE=pages_PSW.shape[1],
        TOKENS=_GATHERED,
        **dependent_launch(latents_TW.device),
    )


def _attend(
    q_NJO: Tensor,
    latents_TW: Tensor,
    heads_TJU: Tensor,
    parts: Latents,
    expansion: Expansion,
    begin: int,
    scale: float,
    sums: tuple[Tensor, Tensor, Tensor],
    out_NJF: Tensor,
) -> None:
    """One piece, which begins with that key."""
    rows, (height, keys, warps) = expansion.rows, expansion.workspace.tile
    rotated = q_NJO.shape[2] - parts.nope_dim
    _attend_expanded[(expansion.num_tiles * parts.num_heads,)](
        q_NJO,
        latents_TW,
        heads_TJU,
        out_NJF,
        *sums,
        expansion.keys_before,
        expansion.tiles_before,
        rows.cu_rows,
        rows.kv_lengths_B,
        scale,
        begin,
        begin + len(latents_TW),
        expansion.num_tiles,
        len(rows.slots_B),
        q_NJO.stride(0),
        q_NJO.stride(1),
        HEADS=parts.num_heads,
        NOPE=parts.nope_dim,
        NOPE_WIDTH=tile_width(parts.nope_dim),
        ROTATED=rotated,
        ROTATED_WIDTH=tile_width(rotated),
        V_DIM=parts.v_dim,
        V_WIDTH=tile_width(parts.v_dim),
        RANK=parts.rank,
        BLOCK_ROWS=height,
        BLOCK_KEYS=keys,
        num_warps=warps,
        **dependent_launch(q_NJO.device),
    )


@triton.jit(
    do_not_specialize=["begin", "count", "num_requests", "table_stride"],
    do_not_specialize_on_alignment=["slots_ptr", "page_table_ptr"],
)
def _gather_latents(
    pages_ptr,
    out_ptr,
    keys_before_ptr,
    slots_ptr,
    page_table_ptr,
    begin,
    count,
    num_requests,
    table_stride,
    page_stride,
    token_stride,
    VALUES: tl.constexpr,
    WIDTH: tl.constexpr,
    PAGE: tl.constexpr,
    TOKENS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Some tokens' latents and rotated keys, out of pages."""
    wait_for_predecessor(PDL)
    place_K = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    there_K = place_K < count
    owner_K = tl.zeros([TOKENS], tl.int32)  # requests whose keys all lie before
    for first in range(0, num_requests, _REQUESTS):
        request_B = first + tl.arange(0, _REQUESTS)
        end_B = tl.load(keys_before_ptr + 1 + request_B, mask=request_B < num_requests, other=2**31 - 1)
        owner_K += tl.sum((end_B[None, :] <= (begin + place_K)[:, None]).to(tl.int32), 1)
    key_K = begin + place_K - tl.load(keys_before_ptr + owner_K, mask=there_K, other=0)
    slot_K = tl.load(slots_ptr + owner_K, mask=there_K, other=0).to(tl.int64)
    page_K = tl.load(page_table_ptr + slot_K * table_stride + key_K // PAGE, mask=there_K, other=0)
    from_K = page_K.to(tl.int64) * page_stride + (key_K % PAGE) * token_stride
    value_W = tl.arange(0, WIDTH)
    there_KW = there_K[:, None] & (value_W < VALUES)[None, :]
    latents_KW = tl.load(pages_ptr + from_K[:, None] + value_W[None, :], mask=there_KW, other=0.0)
    tl.store(out_ptr + place_K[:, None] * VALUES + value_W[None, :], latents_KW, mask=there_KW)


@triton.jit(
    do_not_specialize=["piece_begin", "piece_end", "num_tiles", "num_requests"],
    do_not_specialize_on_alignment=["cu_rows_ptr", "kv_lengths_ptr"],
)
def _attend_expanded(
    q_ptr,
    latents_ptr,
    heads_ptr,
    out_ptr,
    max_ptr,
    sum_ptr,
    partial_ptr,
    keys_before_ptr,
    tiles_before_ptr,
    cu_rows_ptr,
    kv_lengths_ptr,
    scale,
    piece_begin,
    piece_end,
    num_tiles,
    num_requests,
    q_row_stride,
    q_head_stride,
    HEADS: tl.constexpr,
    NOPE: tl.constexpr,
    NOPE_WIDTH: tl.constexpr,
    ROTATED: tl.constexpr,
    ROTATED_WIDTH: tl.constexpr,
    V_DIM: tl.constexpr,
    V_WIDTH: tl.constexpr,
    RANK: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    PDL: tl.constexpr,
):
    """What a tile of a request's rows sees of a piece, for one head."""
    wait_for_predecessor(PDL)
    head = tl.program_id(0) % HEADS
    tile = num_tiles - 1 - tl.program_id(0) // HEADS  # late rows first: they see more
    request = find_request(tiles_before_ptr, tile, num_requests)
    row_begin = tl.load(cu_rows_ptr + request)
    num_rows = tl.load(cu_rows_ptr + request + 1) - row_begin
    num_keys = tl.load(kv_lengths_ptr + request)
    origin = tl.load(keys_before_ptr + request) - piece_begin  # of the request's first key in the piece
    row_M = (tile - tl.load(tiles_before_ptr + request)) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    position_M = num_keys - num_rows + row_M
    end = tl.minimum(num_keys, tl.max(position_M, 0) + 1)
    lo, hi = tl.maximum(-origin, 0), tl.minimum(end, piece_end - piece_begin - origin)
    if lo >= hi:
        return
    real_M = row_M < num_rows
    at_M = (row_begin + row_M).to(tl.int64)
    nope_E, rotated_R = tl.arange(0, NOPE_WIDTH), tl.arange(0, ROTATED_WIDTH)
    value_F = tl.arange(0, V_WIDTH)
    from_M = q_ptr + at_M * q_row_stride + head * q_head_stride
    there_ME = inside(real_M[:, None], nope_E[None, :], NOPE, NOPE_WIDTH)
    q_ME = tl.load(from_M[:, None] + nope_E[None, :], mask=there_ME, other=0.0)
    there_MR = inside(real_M[:, None], rotated_R[None, :], ROTATED, ROTATED_WIDTH)
    q_MR = tl.load(from_M[:, None] + NOPE + rotated_R[None, :], mask=there_MR, other=0.0)
    sums_M = at_M * HEADS + head
    out_MF = (sums_M * V_DIM)[:, None] + value_F[None, :]
    there_MF = inside(real_M[:, None], value_F[None, :], V_DIM, V_WIDTH)
    m_M, l_M, o_MF = no_part(BLOCK_ROWS, V_WIDTH)
    if lo > 0:  # this tile was here before
        m_M = tl.load(max_ptr + sums_M, mask=real_M, other=-float("inf"))
        l_M = tl.load(sum_ptr + sums_M, mask=real_M, other=0.0)
        o_MF = tl.load(partial_ptr + out_MF, mask=there_MF, other=0.0)
    for first in range(lo, hi, BLOCK_KEYS):
        key_K = first + tl.arange(0, BLOCK_KEYS)
        there_K = key_K < hi
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
        base_M = tl.where(new_m_M == -float("inf"), 0.0, new_m_M)  # nothing seen yet: inf - inf is no number
        p_MK = tl.exp2(x_MK - base_M[:, None])
        shrink_M = tl.exp2(m_M - base_M)
        l_M = l_M * shrink_M + tl.sum(p_MK, 1)
        there_KF = inside(there_K[:, None], value_F[None, :], V_DIM, V_WIDTH)
        v_KF = tl.load(from_K[:, None] + NOPE + value_F[None, :], mask=there_KF, other=0.0)
        o_MF = tl.dot(p_MK.to(v_KF.dtype), v_KF, o_MF * shrink_M[:, None], input_precision=_FP32_PRODUCT)
        m_M = new_m_M
    if hi == end:
        o_MF = o_MF / l_M[:, None]  # every row has seen its own key
        tl.store(out_ptr + out_MF, o_MF.to(out_ptr.dtype.element_ty), mask=there_MF)
    else:
        tl.store(max_ptr + sums_M, m_M, mask=real_M)
        tl.store(sum_ptr + sums_M, l_M, mask=real_M)
        tl.store(partial_ptr + out_MF, o_MF, mask=there_MF)
