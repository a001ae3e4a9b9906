"""MLA (DeepSeek-V2, arXiv 2405.04434) on a GPU, absorbed except for long prompts; see `compute/eager/mla.py`.

    queries ── K of each head ──▶ main [N, J, C] ┐
        └─ rotated, in place ▶ tail [N, J, R] ───┼─▶ attention over one vector per token ── V of each head ──▶
    latent ── norm, rotation, write ─▶ pages ────┘                                (`paged_attention.py`)

Keys are one head that all query heads share. A tile takes as many query heads as registers hold accumulators
of a latent's width; the others are separate items that read the same keys. A tile of keys is copied to shared
memory once, asynchronously, for scores and values; keys in e4m3 are converted to a second copy there
(`e4m3.widen_once`). K and V up-projections of the heads are PyTorch batched products. `mla_prefill.py` has
the expanded form.

Legend: N rows, J heads, E unrotated head dim, R rotated, F of values, C values of a latent, P pages, S page
size; in the kernel G heads at once.
"""

# pyright: reportCallIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...block_weights import AttentionShape
from ...eager.mla import split_queries
from ...layers.mla import MLALayer
from ...layers.rope import RotaryEmbedding
from ...memory.kv_cache import PagedKVCache
from ..common.e4m3 import as_stored
from ..common.element_ops import dependent_launch, wait_for_predecessor
from .attention_tiles import AttentionKind, PagedRows, WorkList
from .mla_prefill import attend_expanded
from .mla_prefill_work import Expansion, ExpansionWorkspace
from .norm_rope_kv_write import load_columns, rotate_halves
from .paged_attention import verify_attention

# Heads, and so rows, per tile, by the accumulators (512 wide) that registers hold: twice as many where
# products read latents of 16 bits from shared memory; half in batch-invariant mode (three accumulators), with
# fp32 operands, and with latents in e4m3 (queries of 32 rows are in registers while a tile is converted).
_HEADS, _HEADS_TALL, _HEADS_E4M3, _HEADS_FP32, _HEADS_INVARIANT = 32, 64, 16, 16, 16
_TALL_CAPABILITIES = 9, 10  # Hopper and Blackwell of data centers
_HEADS_AT_ONCE = 8  # rotated by a program


def latent_kind(
    num_heads: int,
    rank: int,
    dtype: torch.dtype,
    page_size: int,
    *,
    causal: bool = True,
    window: int | None = None,
    first_key: int = 0,
    batch_invariant: bool = False,
    tile_rows: int | None = None,
) -> AttentionKind:
    """Return the kind of attention in which each tile of heads is a K/V head at the same address."""
    maximum = tile_rows or _HEADS
    if dtype is torch.float32 or batch_invariant:
        maximum, tile_rows = (_HEADS_FP32 if dtype is torch.float32 else _HEADS_INVARIANT), None
    kv_heads = num_heads // math.gcd(num_heads, maximum)
    sizes = num_heads, kv_heads, rank, rank
    return AttentionKind(*sizes, dtype, page_size, causal, window, first_key, tile_rows=tile_rows)


def _tile_rows(pages_PSW: Tensor, dtype: torch.dtype, *, has_masks: bool) -> int | None:
    if pages_PSW.dtype is not dtype:
        return _HEADS_E4M3
    return _HEADS_TALL if _holds_tall_tiles(pages_PSW.device) and not has_masks else None


@cache
def _holds_tall_tiles(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] in _TALL_CAPABILITIES


class TritonLatentAttention:
    """MLA of one layer: absorbed, except for long prompts if there is a workspace to expand them."""

    __slots__ = ("_batch_invariant", "_parts", "_rope", "_shape", "_workspace")

    def __init__(
        self, shape: AttentionShape, workspace: ExpansionWorkspace | None, *, batch_invariant: bool
    ) -> None:
        assert shape.latent is not None and shape.rope is not None, "a layer of latents"
        self._shape, self._parts, self._rope = shape, shape.latent, shape.rope
        self._workspace, self._batch_invariant = workspace, batch_invariant

    def __call__(self, qkv_NO: Tensor, step: Any, cache: PagedKVCache, layer: int) -> Tensor:
        """Return [N, J * F] from the block's first projection, after writing its latents."""
        shape, parts, group = self._shape, self._parts, cache.group(layer)
        rows: PagedRows = step.rows.batches[group]
        expansion: Expansion | None = None
        if self._workspace is not None:
            expansion = step.expansion(group, self._workspace)
        q_NJO, latent_NW = split_queries(qkv_NO, parts, self._rope.cos_TD.shape[1])
        positions_N, slots_N, pages_PSW = step.rows.positions_N, step.rows.kv_slots[group], cache.pages(layer)
        norm_rotate_write_latents(q_NJO, latent_NW, parts, self._rope, positions_N, slots_N, pages_PSW)
        if expansion is not None and expansion.takes_all:
            out_NO = q_NJO.new_empty(len(q_NJO), parts.num_heads * parts.v_dim)
        else:
            kind = latent_kind(
                shape.num_heads,
                parts.rank,
                qkv_NO.dtype,
                cache.page_size,
                causal=shape.causal,
                window=shape.window,
                first_key=shape.first_key,
                batch_invariant=self._batch_invariant,
                tile_rows=_tile_rows(pages_PSW, qkv_NO.dtype, has_masks=rows.has_masks),
            )
            if expansion is not None:
                kind = replace(kind, most_rows=expansion.workspace.fewest - 1)
            work = step.prepared(group, kind)
            out_NO = _attend_absorbed(q_NJO, parts, pages_PSW, rows, work, shape.scale)
        if expansion is not None:
            out_NJF = out_NO.unflatten(-1, (parts.num_heads, -1))
            attend_expanded(q_NJO, parts, pages_PSW, expansion, shape.scale, out_NJF)
        return out_NO


def _attend_absorbed(
    q_NJO: Tensor, parts: MLALayer, pages_PSW: Tensor, rows: PagedRows, work: WorkList, scale: float
) -> Tensor:
    """Attend in absorbed form; rows that the work list skips are undefined."""
    nope = parts.nope_dim
    main_JNC = torch.bmm(q_NJO[..., :nope].transpose(0, 1), parts.k_up())
    k_PS1W = pages_PSW.unsqueeze(2)
    attended_NO = verify_attention(
        main_JNC.transpose(0, 1), k_PS1W, k_PS1W, rows, work, scale, q_tail_NQC=q_NJO[..., nope:]
    )
    attended_JNC = attended_NO.unflatten(-1, (parts.num_heads, -1)).transpose(0, 1)
    return torch.bmm(attended_JNC, parts.v_up().transpose(1, 2)).transpose(0, 1).flatten(1)


def norm_rotate_write_latents(
    q_NJO: Tensor,
    latent_NW: Tensor,
    parts: MLALayer,
    rope: RotaryEmbedding,
    positions_N: Tensor,
    kv_slots_N: Tensor,
    pages_PSW: Tensor,
) -> None:
    """Norm latents, rotate their keys, and write both; rotate the last R of each query's E + R, in place."""
    num_rows, num_heads, q_dim = q_NJO.shape
    rotated = rope.cos_TD.shape[1]
    assert latent_NW.shape[1] == pages_PSW.shape[2] == parts.rank + rotated, (
        "a latent, and a key that is rotated"
    )
    assert q_NJO.stride()[1:] == (q_dim, 1) and latent_NW.stride(1) == 1, "a row is contiguous"
    assert pages_PSW.stride(0) == pages_PSW.shape[1] * pages_PSW.stride(1), "a page follows the one before"
    heads_at_once = min(_HEADS_AT_ONCE, triton.next_power_of_2(num_heads))
    _norm_rotate_write_latents[(num_rows, 1 + triton.cdiv(num_heads, heads_at_once))](
        q_NJO, latent_NW, parts.kv_norm.weight_H, rope.cos_TD, rope.sin_TD, positions_N, kv_slots_N,
        pages_PSW, parts.kv_norm.eps, q_NJO.stride(0), latent_NW.stride(0), pages_PSW.stride(1),
        HEADS=num_heads, NOPE=parts.nope_dim, RANK=parts.rank, RANK_WIDTH=triton.next_power_of_2(parts.rank),
        HALF=rotated // 2, WIDTH=triton.next_power_of_2(rotated // 2), AT_ONCE=heads_at_once, num_warps=1,
        **dependent_launch(q_NJO.device),
    )  # fmt: skip


@triton.jit(do_not_specialize=["positions_ptr", "slots_ptr"])  # views with any alignment
def _norm_rotate_write_latents(
    q_ptr, latent_ptr, norm_ptr, cos_ptr, sin_ptr, positions_ptr, slots_ptr, pages_ptr, eps, q_stride,
    latent_stride, slot_stride,
    HEADS: tl.constexpr, NOPE: tl.constexpr, RANK: tl.constexpr, RANK_WIDTH: tl.constexpr, HALF: tl.constexpr,
    WIDTH: tl.constexpr, AT_ONCE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait_for_predecessor(PDL)
    row = tl.program_id(0).to(tl.int64)
    at = tl.load(positions_ptr + row).to(tl.int64) * 2 * HALF
    column_C = tl.arange(0, WIDTH)
    cos_1C = load_columns(cos_ptr + at, column_C, HALF, WIDTH)[None, :]
    sin_1C = load_columns(sin_ptr + at + HALF, column_C, HALF, WIDTH)[None, :]
    if tl.program_id(1) == 0:
        from_ptr = latent_ptr + row * latent_stride
        to_ptr = pages_ptr + tl.load(slots_ptr + row).to(tl.int64) * slot_stride
        _norm(from_ptr, to_ptr, norm_ptr, eps, RANK, RANK_WIDTH)
        one_1 = tl.zeros([1], tl.int32)
        _rotate(from_ptr + RANK, to_ptr + RANK, one_1, one_1 == 0, column_C, cos_1C, sin_1C, HALF, True)
    else:
        head_G = (tl.program_id(1) - 1) * AT_ONCE + tl.arange(0, AT_ONCE)
        first_ptr = q_ptr + row * q_stride + NOPE
        offset_G = head_G * (NOPE + 2 * HALF)
        _rotate(first_ptr, first_ptr, offset_G, head_G < HEADS, column_C, cos_1C, sin_1C, HALF, False)


@triton.jit
def _norm(from_ptr, to_ptr, weight_ptr, eps, RANK: tl.constexpr, WIDTH: tl.constexpr):
    column_C = tl.arange(0, WIDTH)
    inside_C = column_C < RANK
    x_C = tl.load(from_ptr + column_C, mask=inside_C, other=0.0).to(tl.float32)
    weight_C = tl.load(weight_ptr + column_C, mask=inside_C, other=0.0).to(tl.float32)
    y_C = x_C * tl.rsqrt(tl.sum(x_C * x_C, 0) / RANK + eps) * weight_C
    y_C = as_stored(y_C.to(from_ptr.dtype.element_ty), to_ptr.dtype.element_ty)
    tl.store(to_ptr + column_C, y_C, mask=inside_C)


@triton.jit
def _rotate(
    from_ptr, to_ptr, offset_G, there_G, column_C, cos_1C, sin_1C, HALF: tl.constexpr, IS_KEY: tl.constexpr
):  # fmt: skip
    at_GC = offset_G[:, None] + column_C[None, :]
    inside_GC = there_G[:, None] & (column_C < HALF)[None, :]
    low_GC = tl.load(from_ptr + at_GC, mask=inside_GC, other=0.0)
    high_GC = tl.load(from_ptr + at_GC + HALF, mask=inside_GC, other=0.0)
    low_GC, high_GC = rotate_halves(low_GC, high_GC, cos_1C, sin_1C)
    if IS_KEY:
        kept: tl.constexpr = to_ptr.dtype.element_ty
        low_GC, high_GC = as_stored(low_GC, kept), as_stored(high_GC, kept)
    tl.store(to_ptr + at_GC, low_GC, mask=inside_GC)
    tl.store(to_ptr + at_GC + HALF, high_GC, mask=inside_GC)
