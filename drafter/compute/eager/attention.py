"""Attention over paged K/V with PyTorch's own kernel: gathers pages, then calls scaled_dot_product_attention.

Used by this backend and `cpu_numba/`: a handful of framework calls per layer and group of requests
(`attention_metadata.py`). A request with `num_rows` query rows at positions first..first+num_rows-1 sees keys
0..first+num_rows-1 of its pages, limited by causality and window; later entries (rejected drafts) are masked.
A row's result does not depend on other rows, given the paddings of rows here and of keys in
`attention_metadata.py`: measured bitwise on the CPUs tried, and checked at start (`batch_invariance.py`).

Legend: N rows, G requests of a group, W query rows (padded), Q query heads, K kv heads, C = Q / K, D head
dim, F that of values, T context tokens (padded), P pages of a request, S page size, M rows of a group, A
planes.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from ..layers.linear import in_fp32
from ..memory.kv_cache import PagedKVCache
from .attention_metadata import AttentionBatch, Group, VisibleKeys, pad_rows

# The CPU kernel's rounding depends on the number of query rows (measured, AVX-512, MKL): few rows (1 to 3; in
# fp32 fewer than 8 with heads of 128, fewer than 16 with heads of 192 to 512) round differently. Query rows
# are processed in blocks of 32 or 64, the last of which may be short. So rows are padded to multiples that
# divide 32.
_ROW_MULTIPLE, _MAX_ROW_MULTIPLE, _HEAD_DIM_PER_ROWS = 4, 32, 64


def paged_attention(
    q_NQD: Tensor,
    cache: PagedKVCache,
    layer: int,
    batch: AttentionBatch,
    scale: float,
    *,
    causal: bool = True,
    window: int | None = None,
    sinks_Q: Tensor | None = None,
    first_key: int = 0,
) -> Tensor:
    """Attend from every row to its request's keys in `cache`, the rows' own included; return [N, Q * F].

    The layer's scales of K and V multiply scores and sums.

    Args:
        causal: whether a row sees only keys up to its own position.
        window: a row at p sees keys p - window < key < p + window; None is unlimited.
        sinks_Q: fp32 logit per head that takes part in the softmax and has no value (gpt-oss).
        first_key: keys before this position are masked, except a row's own (EAGLE-3's position 0 has none).
    """
    groups, seen = batch.groups, VisibleKeys(causal, window, first_key)
    scale *= cache.scales(layer).k
    if len(groups) == 1 and isinstance(groups[0].rows, slice):
        return _flat(_attend(q_NQD, cache, layer, groups[0], scale, seen, sinks_Q), cache, layer)
    out_NQD = torch.empty_like(q_NQD)
    for group in groups:
        if isinstance(group.rows, slice):
            rows_MQD = q_NQD[group.rows]
            out_NQD[group.rows] = _attend(rows_MQD, cache, layer, group, scale, seen, sinks_Q)
        else:
            padded_MQD = q_NQD.index_select(0, group.rows.padded_M)
            result_MQD = _attend(padded_MQD, cache, layer, group, scale, seen, sinks_Q)
            real_NQD = result_MQD.index_select(0, group.rows.real_places_N)
            out_NQD.index_copy_(0, group.rows.real_N, real_NQD)
    return _flat(out_NQD, cache, layer)


def _flat(out_NQD: Tensor, cache: PagedKVCache, layer: int) -> Tensor:
    kind = cache.geometries[layer]
    if kind.v_head_dim < kind.head_dim:
        out_NQD = out_NQD[..., : kind.v_head_dim]
    if (scale := cache.scales(layer).v) != 1.0:
        out_NQD = out_NQD * scale
    return out_NQD.reshape(len(out_NQD), -1)


def _attend(
    q_MQD: Tensor,
    cache: PagedKVCache,
    layer: int,
    group: Group,
    scale: float,
    seen: VisibleKeys,
    sinks_Q: Tensor | None,
) -> Tensor:
    kind = cache.geometries[layer]
    shared = q_MQD.shape[1] // kind.num_kv_heads
    width = _width(group.num_rows, kind.head_dim, q_MQD.dtype)
    if group.num_requests == 1:
        mask_11WT = group.mask(seen, q_MQD.dtype, 1, width)
        kv = _context_of_one(cache, layer, group, shared, q_MQD.dtype)
        return _attend_one(q_MQD, kv, mask_11WT, width, scale, sinks_Q)
    mask_G1WT = group.mask(seen, q_MQD.dtype, shared, width)
    kv_2GKTD = _context(cache, layer, group, q_MQD.dtype)
    return _attend_many(q_MQD, kv_2GKTD, mask_G1WT, width, scale, sinks_Q)


def _width(num_rows: int, head_dim: int, dtype: torch.dtype) -> int:
    """Return the padded number of query rows, from which on products round alike."""
    wide = 1 if dtype.itemsize == 2 else -(-head_dim // _HEAD_DIM_PER_ROWS)
    multiple = min(_ROW_MULTIPLE << (wide - 1).bit_length(), _MAX_ROW_MULTIPLE)
    return -(-num_rows // multiple) * multiple


def _context(cache: PagedKVCache, layer: int, group: Group, dtype: torch.dtype) -> Tensor:
    """Gather K and V of the group's requests, of `dtype`: [2, G, K, T, D].

    PyTorch's flash kernel needs keys and values of one size: shorter values are padded with zeros, and values
    that are a part of their keys are the whole keys.
    """
    kind, shape = cache.geometries[layer], (group.num_requests, group.num_keys)
    found = cache.pages(layer).index_select(0, group.pages_GP).to(dtype)
    if group.branches is not None:
        own_Mw = cache.slots(layer)[0].index_select(0, group.branches.slots_M).to(dtype)
        found.view(-1, kind.width).index_copy_(0, group.branches.places_M, own_Mw)
    if kind.v_in_k:
        k_GTKD = found.view(*shape, kind.num_kv_heads, kind.head_dim)
        return k_GTKD.transpose(1, 2).expand(2, -1, -1, -1, -1)
    if kind.v_head_dim == kind.head_dim:
        return found.view(*shape, 2, kind.num_kv_heads, kind.head_dim).permute(2, 0, 3, 1, 4)
    heads = found.view(*shape, -1).split(kind.num_kv_heads * kind.head_dim, dim=-1)
    filled = found.new_zeros(2, *shape, kind.num_kv_heads, kind.head_dim)
    for half, flat in zip(filled, heads, strict=True):
        split = flat.unflatten(-1, (kind.num_kv_heads, -1))
        half[..., : split.shape[-1]] = split
    return filled.transpose(2, 3)


def _context_of_one(
    cache: PagedKVCache, layer: int, group: Group, shared: int, dtype: torch.dtype
) -> tuple[Tensor, ...]:
    """Return K and V [K, C, T, D] of the group's only request: views if its pages are consecutive.

    K and V of another dtype than queries are always converted copies.
    """
    count, num_pages = group.num_keys // cache.page_size, cache.num_pages + 1
    kv_APS2KD = cache.all_planes(layer) if cache.dtype is dtype else None
    if kv_APS2KD is not None and group.first_page is not None and group.first_page + count <= num_pages:
        known = group.views.get(id(kv_APS2KD))
        if known is None:
            known = kv_APS2KD, _views(kv_APS2KD, group.first_page, count, shared)
            group.views[id(kv_APS2KD)] = known
        return known[1][cache.places[layer].plane]
    kv_2K1TD = _context(cache, layer, group, dtype)[:, 0].unsqueeze(2)
    return kv_2K1TD.expand(-1, -1, shared, -1, -1).unbind(0)


def _views(kv_APS2KD: Tensor, first: int, count: int, shared: int) -> list[tuple[Tensor, ...]]:
    """Return K and V [K, C, T, D] of every plane; other requests' pages are masked."""
    kv_AT2KD = kv_APS2KD.narrow(1, first, count).flatten(1, 2)
    kv_A2KCTD = kv_AT2KD.permute(0, 2, 3, 1, 4).unsqueeze(3).expand(-1, -1, -1, shared, -1, -1)
    return [pair.unbind(0) for pair in kv_A2KCTD.unbind(0)]


def _attend_one(
    q_MQD: Tensor,
    kv: tuple[Tensor, ...],
    mask_11WT: Tensor,
    num_rows: int,
    scale: float,
    sinks_Q: Tensor | None,
) -> Tensor:
    """Attend for one request: kv heads are the batch dimension."""
    k_KCTD, v_KCTD = kv
    num_kv, shared, _, head_dim = k_KCTD.shape
    q_KCWD = pad_rows(q_MQD.view(-1, num_kv, shared, head_dim).permute(1, 2, 0, 3), num_rows)
    sinks_KC1 = None if sinks_Q is None else sinks_Q.view(num_kv, shared, 1)
    out_KCWD = _softmax_of_values(q_KCWD, k_KCTD, v_KCTD, mask_11WT, scale, sinks_KC1)
    return out_KCWD[:, :, : len(q_MQD)].permute(2, 0, 1, 3).reshape(q_MQD.shape)


def _attend_many(
    q_MQD: Tensor, kv_2GKTD: Tensor, mask_G1WT: Tensor, num_rows: int, scale: float, sinks_Q: Tensor | None
) -> Tensor:
    """Attend for several requests: query heads of a kv head become query rows of it (C * W)."""
    _, num_requests, num_kv, _, head_dim = kv_2GKTD.shape
    shared, rows_each = q_MQD.shape[1] // num_kv, len(q_MQD) // num_requests
    q_GKCWD = q_MQD.view(num_requests, rows_each, num_kv, shared, head_dim).permute(0, 2, 3, 1, 4)
    q_GKMD = pad_rows(q_GKCWD, num_rows).reshape(num_requests, num_kv, shared * num_rows, head_dim)
    k_GKTD, v_GKTD = kv_2GKTD.unbind(0)
    sinks_KM = None if sinks_Q is None else sinks_Q.view(num_kv, shared).repeat_interleave(num_rows, 1)
    out_GKMD = _softmax_of_values(q_GKMD, k_GKTD, v_GKTD, mask_G1WT, scale, sinks_KM)
    out_GKCWD = out_GKMD.view(num_requests, num_kv, shared, num_rows, head_dim)
    return out_GKCWD[..., :rows_each, :].permute(0, 3, 1, 2, 4).reshape(q_MQD.shape)


def _softmax_of_values(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float, sinks: Tensor | None
) -> Tensor:
    """Return softmax(q k scale + mask) v, in batches of two dimensions.

    A sink (broadcast over the rows of the batches) is one more logit without a value: it scales the result by
    sum / (sum + exp(sink)), where `sum` is of exp(logit), which is sigmoid(log sum - sink). So K and V are
    not copied, and a row's bits do not depend on others. The sigmoid is of fp64, since PyTorch's of fp32
    rounds otherwise in vectors of a tensor than in its last elements.
    """
    if sinks is None:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
    if q.device.type == "cpu":  # the same kernel, which also returns the log-sum-exp
        out, log_sums = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, attn_mask=mask, scale=scale
        )
    else:
        logits = in_fp32(q) @ in_fp32(k).transpose(-1, -2) * scale + mask
        out, log_sums = logits.softmax(-1) @ in_fp32(v), logits.logsumexp(-1)
    shares = torch.sigmoid((log_sums - sinks).double()).to(log_sums.dtype)
    return (out * shares.unsqueeze(-1)).to(q.dtype)
