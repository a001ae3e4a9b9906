"""Attention over paged K/V in compiled code: bf16 tiles, no gathered copy of a step's contexts, no masks.

One *item* is 16 query rows (several: `_TILES`) of one K/V head of one request; heads that share it are stacked
as further rows. Keys and values of the item's context are brought together once per group of tiles, in cache:

    S^T [T, 16] = K [T, D] Q^T        keys as rows, queries as lanes: maxima and sums go lane by lane
    P [16, T]   = exp(S - max)^T      fp32, then bf16
    O [16, D]   = P [16, T] V [T, D]  / sum of P

Every query row has its own lane, sums run over keys in order, and keys that a row does not see add zeros: a
row's result does not depend on its companions nor on how far the context is padded.

Legend: R requests, N rows, Q query heads, K kv heads, C = Q / K, D head dim, T keys, P pages, S page size.
"""

# Numba's functions are typed when they are compiled, not by annotations.
# pyright: reportCallIssue=false, reportArgumentType=false, reportPrivateImportUsage=false

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numba import carray
from numpy.typing import NDArray

from .elements import elements, maxima, pointer, rounded
from .kernels import exp_of_negative
from .products import COLUMNS, SUMS_BYTES, multiply, multiply_narrow
from .vectors import TILE_BYTES, copy_lines, interleave, transpose, transpose_rounded

Ints = NDArray[np.integer]
_TILE = 16  # query rows
_TILES = 16  # of a group
_KEYS = 32  # a context is padded to a multiple
_BF16, _FP32, _INT64 = np.uint16(0), np.float32(0), np.int64(0)
_HIDDEN = np.float32(-np.inf)


@dataclass(frozen=True, slots=True)
class PagedContexts:
    """The requests of a step: what `AttentionBatch` is to PyTorch's attention. int64, in the host's memory.

    Attributes:
        first_R, rows_R: absolute position of each request's first row, and its rows.
        pages_RP: page ids of each request from position 0 on.
        longest: the longest context.
    """

    first_R: Ints
    rows_R: Ints
    pages_RP: Ints
    page_size: int
    longest: int

    @classmethod
    def build(
        cls, first_position_R: Ints, num_rows_R: Ints, pages_RP: Ints, page_size: int, device: torch.device | str
    ) -> PagedContexts:
        """As `AttentionBatch.build`."""
        first_R, rows_R = (np.ascontiguousarray(x, dtype=np.int64) for x in (first_position_R, num_rows_R))
        longest = int((first_R + rows_R).max())
        return cls(first_R, rows_R, np.ascontiguousarray(pages_RP, dtype=np.int64), page_size, longest)


def scratch_bytes(longest: int, head_dim: int) -> int:
    """What `attend` needs per thread."""
    keys = -(-longest // _KEYS) * _KEYS
    per_key = 2 * head_dim * 2 + _TILE * 4 + _TILE * 2  # K, V, S^T, P
    size = keys * per_key + 2 * _TILE * head_dim + max(SUMS_BYTES, 2 * _TILE * head_dim)
    return -(-size // 64) * 64  # every thread's begins a cache line


@elements
def attend(
    qkv, out, kv, first, rows, pages, num_requests, num_pages, page_size, num_heads, num_kv, head_dim, scale,
    causal, window, scratch, thread, num_threads,
):  # fmt: skip
    """This thread's items of a layer.

    Args:
        qkv: rows of [Q + 2 K, D], q and k normed and rotated. `out`: rows of [Q, D].
        kv: the layer's slots, [slots, 2, K, D]. A step's own K and V are there already.
        first, rows, pages: addresses of the arrays of `PagedContexts`; num_pages is the width of `pages`.
        window: as `paged_attention`; -1 sees all.
    """
    first_R = carray(pointer(first, _INT64), (num_requests,))
    rows_R = carray(pointer(rows, _INT64), (num_requests,))
    shared = num_heads // num_kv
    item = row = 0
    for r in range(num_requests):
        num_tiles = (rows_R[r] * shared + _TILE - 1) // _TILE
        for tile in range(0, num_tiles, _TILES):
            for head in range(num_kv):
                if item % num_threads == thread:
                    _attend_group(
                        qkv + 2 * row * (num_heads + 2 * num_kv) * head_dim, out + 2 * row * num_heads * head_dim,
                        kv, pages + 8 * r * num_pages, first_R[r], rows_R[r], page_size, num_heads, num_kv,
                        head_dim, head, tile, min(tile + _TILES, num_tiles), scale, causal, window, scratch,
                    )  # fmt: skip
                item += 1
        row += rows_R[r]


@elements
def _attend_group(
    qkv, out, kv, pages, first, num_rows, page_size, num_heads, num_kv, head_dim, head, tile, last_tile, scale,
    causal, window, scratch,
):  # fmt: skip
    """Tiles of one request's one K/V head."""
    shared = num_heads // num_kv
    num_keys = first + num_rows
    padded = (num_keys + _KEYS - 1) // _KEYS * _KEYS
    keys = scratch
    values = keys + 2 * padded * head_dim
    scores = values + 2 * padded * head_dim
    weights = scores + padded * _TILE * 4
    queries = weights + padded * _TILE * 2
    sums = queries + 2 * _TILE * head_dim
    slots = scores  # free until there are scores
    _bring(kv, pages, slots, keys, values, num_keys, padded, page_size, num_kv, head_dim, head)
    row_bytes = (num_heads + 2 * num_kv) * head_dim * 2
    positions = np.empty(_TILE, dtype=np.int64)
    totals = np.empty(_TILE, dtype=np.float32)
    for at in range(tile * _TILE, last_tile * _TILE, _TILE):
        count = min(_TILE, num_rows * shared - at)
        for i in range(_TILE):  # lanes behind the last one repeat it
            positions[i] = first + (at + min(i, count - 1)) % num_rows
        _take_queries(qkv, row_bytes, queries, sums, num_rows, head * shared, head_dim, at, count)
        for t in range(0, padded, 32):
            multiply_narrow(
                keys + 2 * t * head_dim, 2 * head_dim, queries, scores + t * _TILE * 4, head_dim // 32
            )
        _soften(scores, positions, totals, num_keys, padded, scale, causal, window, _TILE)
        for t in range(0, padded, 16):
            transpose_rounded(scores + t * _TILE * 4, weights + 2 * t, 2 * padded)
        _combine(
            weights, values, sums, totals, out, padded, num_rows, num_heads, head * shared, head_dim, at, count
        )


@elements
def _bring(kv, pages, slots, keys, values, num_keys, padded, page_size, num_kv, head_dim, head):
    """K and V of a head from their pages: K as rows, V as a packed weight [D, T], zeros behind the last key.

    `slots` is room for an address per key.
    """
    row_bytes = 2 * head_dim
    slots_T = carray(pointer(slots, _INT64), (padded,))
    zeros = np.zeros(head_dim, dtype=np.uint16)
    _find_slots(kv + head * row_bytes, pages, slots_T, num_keys, page_size, 2 * num_kv * row_bytes)
    for t in range(num_keys):
        copy_lines(slots_T[t], keys + t * row_bytes, head_dim // 32)
        slots_T[t] += num_kv * row_bytes
    for t in range(num_keys, padded):
        slots_T[t] = zeros.ctypes.data
    for t in range(0, padded, 2):
        target = values + t // 32 * TILE_BYTES + t % 32 // 2 * 64
        for c in range(head_dim // 16):
            interleave(slots_T[t] + 32 * c, slots_T[t + 1] + 32 * c, target + c * padded * 32)


@elements
def _find_slots(kv, pages, slots_T, num_keys, page_size, slot_bytes):
    num_pages = (num_keys + page_size - 1) // page_size
    pages_P = carray(pointer(pages, _INT64), (num_pages,))
    t = 0
    for p in range(num_pages):
        slot = kv + pages_P[p] * page_size * slot_bytes
        for _ in range(min(page_size, num_keys - t)):
            slots_T[t] = slot
            slot += slot_bytes
            t += 1


@elements
def _take_queries(qkv, row_bytes, queries, rows, num_rows, first_head, head_dim, at, count):
    """Q^T of 16 rows from `at` on, as a packed weight; `rows` is room for them."""
    for i in range(_TILE):
        row = at + min(i, count - 1)
        source = qkv + row % num_rows * row_bytes + 2 * (first_head + row // num_rows) * head_dim
        copy_lines(source, rows + 2 * i * head_dim, head_dim // 32)
    for block in range(head_dim // 32):
        transpose(rows + 64 * block, 2 * head_dim, queries + TILE_BYTES * block)


@maxima
def _top(scores_TL, low_L, high_L, top_L, num_lanes):
    """The largest score that each lane sees; what it does not see becomes -inf."""
    seen_by_all = low_L.max(), high_L.min()
    for i in range(num_lanes):
        top_L[i] = _HIDDEN
    for t in range(len(scores_TL)):
        if t < seen_by_all[0] or t >= seen_by_all[1]:
            for i in range(num_lanes):
                scores_TL[t, i] = scores_TL[t, i] if low_L[i] <= t and t < high_L[i] else _HIDDEN
        for i in range(num_lanes):
            top_L[i] = max(top_L[i], scores_TL[t, i])


@elements
def _soften(scores, positions_L, totals_L, num_keys, padded, scale, causal, window, num_lanes):
    """exp(scale * (s - max)) of what a lane sees, 0 of the rest, in place; and their sums."""
    scores_TL = carray(pointer(scores, _FP32), (padded, num_lanes))
    low_L = np.zeros(num_lanes, dtype=np.int32)
    high_L = np.empty(num_lanes, dtype=np.int32)
    top_L = np.empty(num_lanes, dtype=np.float32)
    for i in range(num_lanes):
        high_L[i] = positions_L[i] + 1 if causal else num_keys
        if window >= 0:
            low_L[i] = max(positions_L[i] - window + 1, 0)
            high_L[i] = min(high_L[i], positions_L[i] + window)
        totals_L[i] = 0
    _top(scores_TL, low_L, high_L, top_L, num_lanes)
    for t in range(padded):
        for i in range(num_lanes):
            p = exp_of_negative((scores_TL[t, i] - top_L[i]) * scale)
            scores_TL[t, i] = p
            totals_L[i] += p


@elements
def _combine(
    weights, values, sums, totals_L, out, padded, num_rows, num_heads, first_head, head_dim, at, count
):  # fmt: skip
    """P V / sum of P, 32 columns at a time."""
    sums_LC = carray(pointer(sums, _FP32), (_TILE, COLUMNS))
    for column in range(0, head_dim, COLUMNS):
        multiply(
            weights, 2 * padded, values + column * 2 * padded, padded * 32, sums, padded // 32, _TILE
        )
        for i in range(count):
            row = at + i
            q = first_head + row // num_rows
            target = out + 2 * ((row % num_rows * num_heads + q) * head_dim + column)
            out_C = carray(pointer(target, _BF16), (COLUMNS,))
            inverse = np.float32(1) / totals_L[i]
            for c in range(COLUMNS):
                out_C[c] = rounded(sums_LC[i, c] * inverse, _BF16)
