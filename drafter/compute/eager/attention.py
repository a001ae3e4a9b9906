"""Attention over paged K/V with PyTorch's own kernel: gather pages, then scaled dot products.

The CPU's backend, and the fallback elsewhere. `AttentionBatch` is built once per step from host integers and
holds every index and mask that the layers need; `paged_attention` then costs a handful of framework calls per
layer. Called by this backend and by `loops/`; batches are built by `step/states.py`.

A request with `num_rows` query rows at positions first..first+num_rows-1 sees keys 0..first+num_rows-1 of its
pages, cut by causality and window. Whatever lies behind in its pages (rejected drafts) is always masked.

Requests are put into groups: short ones (decoding) of similar context together, padded to the longest; each
long one (prefill) alone, in tiles of query rows. A row's result does not depend on its companions: measured
bitwise on the CPUs tried (`invariance.py` repeats it at start), given the paddings below. What lies wholly
before a window is not gathered, in whole blocks of keys: one that a row does not see changes no bit of it.

Legend: N rows, G requests of a group, W query rows (padded), Q query heads, K kv heads, C = Q / K, D head
dim, F that of values, T context tokens (padded), P pages of a request, S page size, M rows of a group, A
planes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from ..kv_cache import PagedKVCache

Ints = NDArray[np.integer]

_SHORT_ROWS = 32  # requests with at most so many rows share a group
_TILE_ROWS = 512  # query rows of a long request that are computed at once
# How the CPU kernel's products round (measured, AVX-512, MKL): few query rows otherwise than more (1 to 3;
# in fp32 fewer than 8 with heads of 128, than 16 with heads of 192 to 512), where query rows come in 32s or
# 64s, the last of them as few as are left; keys are summed in blocks of 512, and within a block a sum whose
# length is no multiple of 16 (with AMX: of 32) otherwise than others, and one of more than 192 is cut where
# its length says (AMD: at 192 from 384 on; Intel with AMX: 384 at once, 512 not). So rows and such lengths
# are filled up, rows to multiples that divide 32.
_ROW_MULTIPLE, _MAX_ROW_MULTIPLE, _HEAD_DIM_PER_ROWS = 4, 32, 64
_KEY_MULTIPLE, _KEY_BLOCK, _SHORT_KEYS = 32, 512, 192


@dataclass(frozen=True, slots=True)
class _PaddedRows:
    """Row of each padded query row; places among them that are real; the rows that these are. int64."""

    padded_M: Tensor
    real_places_N: Tensor
    real_N: Tensor


@dataclass(slots=True)
class _Group:
    """Requests that one product serves.

    Attributes:
        num_requests, num_rows, num_keys: G, W before `_width` and T.
        rows: the group's rows, as a slice if they stand in order and equally many.
        pages_GP: page ids (int64, flat).
        first_page: the first page of the only request, if its pages are consecutive; else None.
        begins_G: absolute position of the first key.
        positions_GW: absolute position of each query row; a shorter request's last one is repeated.
        lengths_G: keys that exist.
        masks: additive masks by their meaning, made when first asked for.
        views: every plane's K and V of consecutive pages, likewise, by what they are views of; see `_views`.
    """

    num_requests: int
    num_rows: int
    num_keys: int
    rows: slice | _PaddedRows
    pages_GP: Tensor
    first_page: int | None
    begins_G: Tensor
    positions_GW: Tensor
    lengths_G: Tensor
    masks: dict[tuple[bool, int | None, torch.dtype, int, int], Tensor] = field(default_factory=dict)
    views: dict[int, tuple[Tensor, list[tuple[Tensor, ...]]]] = field(default_factory=dict)

    def mask(self, causal: bool, window: int | None, dtype: torch.dtype, copies: int, width: int) -> Tensor:
        """[G, 1, copies * width, T], or 1 for rows that all see the same: 0 where visible, else -inf."""
        key = (causal, window, dtype, copies, width)
        if key not in self.masks:
            mask_G1WT = self._make_mask(causal, window, dtype)
            if mask_G1WT.shape[2] > 1:
                mask_G1WT = _pad_rows(mask_G1WT, width).repeat(1, 1, copies, 1)
            self.masks[key] = mask_G1WT
        return self.masks[key]

    def _make_mask(self, causal: bool, window: int | None, dtype: torch.dtype) -> Tensor:
        keys_T = torch.arange(self.num_keys, device=self.positions_GW.device)
        keys_G1T, query_GW1 = keys_T + self.begins_G.view(-1, 1, 1), self.positions_GW.unsqueeze(-1)
        hidden_GWT = keys_G1T >= self.lengths_G.view(-1, 1, 1)
        if causal:
            hidden_GWT = hidden_GWT | (keys_G1T > query_GW1)
        if window is not None:
            hidden_GWT = hidden_GWT | (keys_G1T <= query_GW1 - window) | (keys_G1T >= query_GW1 + window)
        zero = torch.zeros((), dtype=dtype, device=keys_T.device)
        return torch.where(hidden_GWT, zero - float("inf"), zero).unsqueeze(1)


class AttentionBatch:
    """Indices and masks of one step for one cache geometry; see the module's text."""

    __slots__ = ("groups", "num_rows")

    def __init__(self, groups: list[_Group], num_rows: int) -> None:
        self.groups = groups
        self.num_rows = num_rows

    @classmethod
    def build(
        cls,
        first_position_R: Ints,
        num_rows_R: Ints,
        pages_RP: Ints,
        page_size: int,
        device: torch.device | str,
        window: int | None = None,
    ) -> AttentionBatch:
        """Plan the attention of rows laid out request after request.

        Args:
            first_position_R: absolute position of each request's first row.
            num_rows_R: rows of each request, at least 1.
            pages_RP: page ids of each request from position 0 on; columns beyond its length are ignored.
            window: of the layers to come, at most; pages behind it may be another's.
        """
        lengths_R = first_position_R + num_rows_R
        starts_R = np.cumsum(num_rows_R) - num_rows_R
        step = _Step(first_position_R, num_rows_R, lengths_R, starts_R, pages_RP, page_size, device, window)
        groups: list[_Group] = []
        for members in _companions(num_rows_R, lengths_R - step.begins(first_position_R), page_size):
            groups += step.long_request(members[0]) if len(members) == 1 else [step.short_requests(members)]
        return cls(groups, int(num_rows_R.sum()))


def _companions(num_rows_R: Ints, num_keys_R: Ints, page_size: int) -> list[list[int]]:
    """Which requests are computed together: short ones within a factor of two in the keys they see."""
    if len(num_rows_R) == 1:
        return [[0]]
    groups: dict[int, list[int]] = {}
    for r, (rows, keys) in enumerate(zip(num_rows_R.tolist(), num_keys_R.tolist(), strict=True)):
        key = -1 - r if rows > _SHORT_ROWS else max(keys - 1, page_size, 64).bit_length()
        groups.setdefault(key, []).append(r)
    return list(groups.values())


def _padded(length: int, page_size: int) -> int:
    """Context tokens to gather: whole pages, and a number whose sums are cut like those of any longer one."""
    unit = math.lcm(page_size, _KEY_MULTIPLE)
    count = -(-length // unit) * unit
    blocks, rest = divmod(count, _KEY_BLOCK)
    if rest > _SHORT_KEYS:
        count = -(-(blocks + 1) * _KEY_BLOCK // unit) * unit
    return count


@dataclass(frozen=True, slots=True)
class _Step:
    """Makes groups out of a step's host integers."""

    first_R: Ints
    rows_R: Ints
    lengths_R: Ints
    starts_R: Ints
    pages_RP: Ints
    page_size: int
    device: torch.device | str
    window: int | None

    def begins(self, first_R: Ints) -> Ints:
        """Of rows at `first` and behind, the first key that is gathered: of a block that one of them sees."""
        if self.window is None:
            return np.zeros_like(first_R)
        unit = math.lcm(_KEY_BLOCK, self.page_size)
        return np.maximum(first_R - self.window + 1, 0) // unit * unit

    def _tensor(self, values: Ints | list[int]) -> Tensor:
        return torch.from_numpy(np.asarray(values, dtype=np.int64)).to(self.device)

    def _pages(self, requests: list[int], begins_G: Ints, num_keys: int) -> Ints:
        """Page ids [G, T / S]; what a request has not got is page 0, which the masks hide."""
        columns_GP = begins_G[:, None] // self.page_size + np.arange(num_keys // self.page_size)
        used_G = -(-self.lengths_R[requests] // self.page_size)
        last = self.pages_RP.shape[1] - 1
        have_GP = self.pages_RP[np.array(requests)[:, None], np.minimum(columns_GP, last)]
        return np.where(columns_GP < used_G[:, None], have_GP, 0)

    def long_request(self, r: int) -> list[_Group]:
        """One request alone, in tiles of query rows; every tile gathers only the keys up to its end."""
        tiles: list[_Group] = []
        first, start, rows = int(self.first_R[r]), int(self.starts_R[r]), int(self.rows_R[r])
        for begin in range(0, rows, _TILE_ROWS):
            # Causal tiles need no later keys, but bidirectional ones do: keep them all.
            size = min(_TILE_ROWS, rows - begin)
            tiles.append(self._tile(r, first + begin, start + begin, size))
        return tiles

    def _tile(self, r: int, position: int, row: int, size: int) -> _Group:
        length, begins_1 = int(self.lengths_R[r]), self.begins(np.array([position]))
        span = length - int(begins_1[0])
        num_keys = _padded(span, self.page_size)
        pages_P = self._pages([r], begins_1, num_keys)[0]
        consecutive = bool((np.diff(pages_P[: -(-span // self.page_size)]) == 1).all())
        return _Group(
            num_requests=1,
            num_rows=size,
            num_keys=num_keys,
            rows=slice(row, row + size),
            pages_GP=self._tensor(pages_P),
            first_page=int(pages_P[0]) if consecutive else None,
            begins_G=self._tensor(begins_1),
            positions_GW=self._tensor(position + np.arange(size)[None]),
            lengths_G=self._tensor([length]),
        )

    def short_requests(self, members: list[int]) -> _Group:
        """Several requests, padded to the longest; padding repeats a request's last row."""
        rows_G, starts_G = self.rows_R[members], self.starts_R[members]
        longest = int(rows_G.max())
        begins_G = self.begins(self.first_R[members])
        num_keys = max(_padded(int(n), self.page_size) for n in self.lengths_R[members] - begins_G)
        places_GW = np.minimum(np.arange(longest), rows_G[:, None] - 1)
        rows_GW = starts_G[:, None] + places_GW
        real_GW = np.arange(longest) < rows_G[:, None]
        begin, end = int(starts_G[0]), int(starts_G[0]) + longest * len(members)
        if (rows_G == longest).all() and (starts_G == np.arange(begin, end, longest)).all():
            rows: slice | _PaddedRows = slice(begin, end)
        else:
            rows = _PaddedRows(
                padded_M=self._tensor(rows_GW.ravel()),
                real_places_N=self._tensor(np.flatnonzero(real_GW)),
                real_N=self._tensor(rows_GW[real_GW]),
            )
        return _Group(
            num_requests=len(members),
            num_rows=longest,
            num_keys=num_keys,
            rows=rows,
            pages_GP=self._tensor(self._pages(members, begins_G, num_keys).ravel()),
            first_page=None,
            begins_G=self._tensor(begins_G),
            positions_GW=self._tensor(self.first_R[members][:, None] + places_GW),
            lengths_G=self._tensor(self.lengths_R[members]),
        )


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
) -> Tensor:
    """Attend from every row to its request's keys in `cache` (the rows' own must be written already).

    Args:
        causal: whether a row sees only keys up to its own position.
        window: with it a row at p sees keys p - window < key < p + window; None sees all.
        sinks_Q: fp32 logit per head that takes part in the softmax and has no value (gpt-oss).

    Returns:
        [N, Q * F], ready for the output projection.
    """
    groups = batch.groups
    if len(groups) == 1 and isinstance(groups[0].rows, slice):
        return _flat(_attend(q_NQD, cache, layer, groups[0], scale, causal, window, sinks_Q), cache, layer)
    out_NQD = torch.empty_like(q_NQD)
    for group in groups:
        if isinstance(group.rows, slice):
            rows_MQD = q_NQD[group.rows]
            out_NQD[group.rows] = _attend(rows_MQD, cache, layer, group, scale, causal, window, sinks_Q)
        else:
            padded_MQD = q_NQD.index_select(0, group.rows.padded_M)
            result_MQD = _attend(padded_MQD, cache, layer, group, scale, causal, window, sinks_Q)
            real_NQD = result_MQD.index_select(0, group.rows.real_places_N)
            out_NQD.index_copy_(0, group.rows.real_N, real_NQD)
    return _flat(out_NQD, cache, layer)


def _flat(out_NQD: Tensor, cache: PagedKVCache, layer: int) -> Tensor:
    """[N, Q * F]: without what values were filled up with."""
    kind = cache.geometries[layer]
    if kind.v_head_dim < kind.head_dim:
        out_NQD = out_NQD[..., : kind.v_head_dim]
    return out_NQD.reshape(len(out_NQD), -1)


def _attend(
    q_MQD: Tensor,
    cache: PagedKVCache,
    layer: int,
    group: _Group,
    scale: float,
    causal: bool,
    window: int | None,
    sinks_Q: Tensor | None,
) -> Tensor:
    """M rows of one group -> [M, Q, D]."""
    kind = cache.geometries[layer]
    shared = q_MQD.shape[1] // kind.num_kv_heads
    width = _width(group.num_rows, kind.head_dim, q_MQD.dtype)
    if group.num_requests == 1:
        mask_11WT = group.mask(causal, window, q_MQD.dtype, 1, width)
        kv = _context_of_one(cache, layer, group, shared)
        return _attend_one(q_MQD, kv, mask_11WT, width, scale, sinks_Q)
    mask_G1WT = group.mask(causal, window, q_MQD.dtype, shared, width)
    return _attend_many(q_MQD, _context(cache, layer, group), mask_G1WT, width, scale, sinks_Q)


def _width(num_rows: int, head_dim: int, dtype: torch.dtype) -> int:
    """Query rows to compute: a number whose products round like those of any more."""
    wide = 1 if dtype.itemsize == 2 else -(-head_dim // _HEAD_DIM_PER_ROWS)
    multiple = min(_ROW_MULTIPLE << (wide - 1).bit_length(), _MAX_ROW_MULTIPLE)
    return -(-num_rows // multiple) * multiple


def _context(cache: PagedKVCache, layer: int, group: _Group) -> Tensor:
    """K and V of the group's requests, gathered: [2, G, K, T, D].

    Shorter values are filled up with zeros: PyTorch's kernel, whose rows do not depend on each other, wants
    keys and values of one size.
    """
    kind, shape = cache.geometries[layer], (group.num_requests, group.num_keys)
    found = cache.pages(layer).index_select(0, group.pages_GP)
    if kind.v_head_dim == kind.head_dim:
        return found.view(*shape, 2, kind.num_kv_heads, kind.head_dim).permute(2, 0, 3, 1, 4)
    heads = found.view(*shape, -1).split(kind.num_kv_heads * kind.head_dim, dim=-1)
    filled = found.new_zeros(2, *shape, kind.num_kv_heads, kind.head_dim)
    for half, flat in zip(filled, heads, strict=True):
        split = flat.unflatten(-1, (kind.num_kv_heads, -1))
        half[..., : split.shape[-1]] = split
    return filled.transpose(2, 3)


def _context_of_one(cache: PagedKVCache, layer: int, group: _Group, shared: int) -> tuple[Tensor, ...]:
    """K and V [K, C, T, D] of the group's only request: views where its pages are consecutive.

    Grouped heads copy neither K nor V.
    """
    count, num_pages = group.num_keys // cache.page_size, cache.num_pages + 1
    kv_APS2KD = cache.all_planes(layer)
    if kv_APS2KD is not None and group.first_page is not None and group.first_page + count <= num_pages:
        known = group.views.get(id(kv_APS2KD))
        if known is None:
            known = kv_APS2KD, _views(kv_APS2KD, group.first_page, count, shared)
            group.views[id(kv_APS2KD)] = known
        return known[1][cache.places[layer].plane]
    kv_2K1TD = _context(cache, layer, group)[:, 0].unsqueeze(2)
    return kv_2K1TD.expand(-1, -1, shared, -1, -1).unbind(0)


def _views(kv_APS2KD: Tensor, first: int, count: int, shared: int) -> list[tuple[Tensor, ...]]:
    """K and V [K, C, T, D] of every plane. Pages behind the context are strangers', and masked."""
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
    """One request: kv heads take the place of the batch."""
    k_KCTD, v_KCTD = kv
    num_kv, shared, _, head_dim = k_KCTD.shape
    q_KCWD = _pad_rows(q_MQD.view(-1, num_kv, shared, head_dim).permute(1, 2, 0, 3), num_rows)
    sinks_KC1 = None if sinks_Q is None else sinks_Q.view(num_kv, shared, 1)
    out_KCWD = _softmax_of_values(q_KCWD, k_KCTD, v_KCTD, mask_11WT, scale, sinks_KC1)
    return out_KCWD[:, :, : len(q_MQD)].permute(2, 0, 1, 3).reshape(q_MQD.shape)


def _pad_rows(q: Tensor, num_rows: int) -> Tensor:
    """Repeat the last but one dimension's last row up to `num_rows`."""
    missing = num_rows - q.shape[-2]
    if missing == 0:
        return q
    # Copied: a row stride of 0 takes the slow way through the product.
    return torch.cat((q, *[q[..., -1:, :]] * missing), dim=-2)


def _attend_many(
    q_MQD: Tensor,
    kv_2GKTD: Tensor,
    mask_G1WT: Tensor,
    num_rows: int,
    scale: float,
    sinks_Q: Tensor | None,
) -> Tensor:
    """Several requests: the heads that share a kv head become further query rows of it (C * W in all)."""
    _, num_requests, num_kv, _, head_dim = kv_2GKTD.shape
    shared, rows_each = q_MQD.shape[1] // num_kv, len(q_MQD) // num_requests
    q_GKCWD = q_MQD.view(num_requests, rows_each, num_kv, shared, head_dim).permute(0, 2, 3, 1, 4)
    q_GKMD = _pad_rows(q_GKCWD, num_rows).reshape(num_requests, num_kv, shared * num_rows, head_dim)
    k_GKTD, v_GKTD = kv_2GKTD.unbind(0)
    sinks_KM = None if sinks_Q is None else sinks_Q.view(num_kv, shared).repeat_interleave(num_rows, 1)
    out_GKMD = _softmax_of_values(q_GKMD, k_GKTD, v_GKTD, mask_G1WT, scale, sinks_KM)
    out_GKCWD = out_GKMD.view(num_requests, num_kv, shared, num_rows, head_dim)
    return out_GKCWD[..., :rows_each, :].permute(0, 3, 1, 2, 4).reshape(q_MQD.shape)


def _softmax_of_values(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float, sinks: Tensor | None
) -> Tensor:
    """softmax(q k scale + mask) v, in batches of two dimensions. A row's sink is one more logit without a
    value: it leaves the values the share sum / (sum + exp(sink)) of what they get without, where `sum` is of
    their exp(logit): sigmoid(log sum - sink). So K and V stay where they are, and a row's bits its own.

    Args:
        sinks: broadcast over the rows of the batches; None: there are none.
    """
    if sinks is None:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
    if q.device.type == "cpu":  # the same kernel, asked for the sums, too
        out, log_sums = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, attn_mask=mask, scale=scale
        )
    else:
        logits = q.float() @ k.float().transpose(-1, -2) * scale + mask
        out, log_sums = logits.softmax(-1) @ v.float(), logits.logsumexp(-1)
    return (out * torch.sigmoid(log_sums - sinks).unsqueeze(-1)).to(q.dtype)
