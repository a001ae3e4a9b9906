"""Attention over paged K/V in compiled code, without gathering K/V; only keys a row cannot see are masked.

One *item* is up to 256 query rows of one K/V head of one request; query heads that share it are stacked as
further rows. `amx_attention.py` computes items in AMX tiles, `simd_attention.py` in vector registers, from K
and V as `qkv_heads.py` writes them. Sums run over keys in order, and unseen keys add zeros: a row's result
depends neither on other rows nor on the padding of the context.

Legend: R requests, N rows, Q query heads, K kv heads, C = Q / K, D head dim, T keys, P pages, S page size.
"""

# Numba's functions are typed when they are compiled, not by annotations.
# pyright: reportCallIssue=false, reportArgumentType=false, reportPrivateImportUsage=false

from __future__ import annotations

import numpy as np
from numba import carray

from ..cpu_numba.element_ops import elements, pointer
from .amx_attention import attend_tiles, tile_scratch_bytes
from .simd_attention import attend_rows, row_scratch_bytes
from .tiles.amx_tiles import begin_attention
from .tiles.isa_dispatch import has_tiles, of_two_kinds

_GROUP = 256  # per item
_INT32, _INT64 = np.int32(0), np.int64(0)


def scratch_bytes(longest: int, head_dim: int) -> int:
    """Return the scratch memory of `attend` per thread, in bytes."""
    maximum = tile_scratch_bytes(longest, head_dim) if has_tiles() else row_scratch_bytes(longest, head_dim)
    return -(-maximum // 64) * 64  # every thread's is aligned to a cache line


@elements
def attend(
    qkv, out, kv, first, rows, pages, num_requests, num_pages, page_size, num_heads, num_kv, head_dim, scale,
    causal, window, paths, depth, scratch, first_head, last_head, thread, num_threads,
):  # fmt: skip
    """Compute this thread's items of a layer, for a range of K/V heads.

    Args:
        qkv: rows of [Q + 2 K, D], q and k normed and rotated; `out` has rows of [Q, D].
        kv: the layer's blocks, including the step's own K and V.
        first, rows, pages: addresses of the arrays of `PagedContexts`; num_pages is the width of `pages`.
        window: see `paged_attention`; -1 is unlimited.
        paths, depth: address and width of the rows' paths (`draft_trees.py`); 0 if all requests are chains.
    """
    begin_attention()
    first_R = carray(pointer(first, _INT64), (num_requests,))
    rows_R = carray(pointer(rows, _INT64), (num_requests,))
    shared = num_heads // num_kv
    item = row = 0
    for r in range(num_requests):
        num_stacked = rows_R[r] * shared
        own = _paths_at(paths, row, depth)
        for begin in range(0, num_stacked, _GROUP):
            for head in range(first_head, last_head):
                if item % num_threads == thread:
                    _attend_group(
                        qkv + 2 * row * (num_heads + 2 * num_kv) * head_dim,
                        out + 2 * row * num_heads * head_dim, kv, pages + 8 * r * num_pages, first_R[r],
                        rows_R[r], page_size, num_heads, num_kv, head_dim, head, begin,
                        min(begin + _GROUP, num_stacked), scale, causal, window, own, depth, scratch,
                    )  # fmt: skip
                item += 1
        row += rows_R[r]


@elements
def _paths_at(paths, row, depth):
    """Return the address of a request's paths, from its first row's; 0 if it is a chain."""
    if paths == 0:
        return paths
    first = paths + 4 * row * depth
    return first if carray(pointer(first, _INT32), (1,))[0] >= 0 else paths * 0


def _attend_group(
    qkv, out, kv, pages, first, num_rows, page_size, num_heads, num_kv, head_dim, head, begin, end, scale,
    causal, window, paths, depth, scratch,
):  # fmt: skip
    """Compute stacked rows [begin, end) of one K/V head of one request; `begin` is a multiple of 16.

    `paths` is the address of the request's paths, 0 for a chain.
    """


of_two_kinds(_attend_group, attend_tiles, attend_rows)
