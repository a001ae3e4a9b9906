"""Attention over paged K/V in compiled code: nothing gathered, nothing masked but where a row cannot see.

One *item* is 16 query rows (several: `_TILES`) of one K/V head of one request; heads that share it are
stacked as further rows.

    S^T [T, 16] = K [T, D] Q^T        keys as rows, queries as lanes: maxima and sums go lane by lane
    P [16, T]   = exp(S - max)^T      fp32, then bf16
    O [16, D]   = P [16, T] V [T, D]  / sum of P

Every query row has its own lane, sums run over keys in order, and keys that a row does not see add zeros: a
row's result does not depend on its companions nor on how far the context is padded.

K and V lie in the cache as `heads.py` writes them, so that products read them where they are.

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

from ..loops.elements import elements, pointer
from .heads import BLOCK
from .instructions import QUERIES, begin_attention, combine, score
from .tiles import TILE_BYTES
from .vectors import copy_lines, scale_rounded, soften, transpose, transpose_rounded

Ints = NDArray[np.integer]
_TILES = 16  # of a group
_QUAD = 4  # blocks that are scored at once
_BF16, _INT32, _INT64, _FP32 = np.uint16(0), np.int32(0), np.int64(0), np.float32(0)
_LOG2_E = 1.4426950408889634


@dataclass(frozen=True, slots=True)
class PagedContexts:
    """The requests of a step: what `AttentionBatch` is to PyTorch's attention. int64, in the host's memory.

    Attributes:
        first_R, rows_R: absolute position of each request's first row, and its rows.
        pages_RP: page ids of each request from position 0 on.
        pages_address: where they lie.
        longest: the longest context.
    """

    first_R: Ints
    rows_R: Ints
    pages_RP: Ints
    pages_address: int
    page_size: int
    longest: int

    @classmethod
    def build(
        cls,
        first_position_R: Ints,
        num_rows_R: Ints,
        pages_RP: Ints,
        page_size: int,
        device: torch.device | str,
        window: int | None = None,
    ) -> PagedContexts:
        """As `AttentionBatch.build`."""
        first_R, rows_R = (np.ascontiguousarray(x, dtype=np.int64) for x in (first_position_R, num_rows_R))
        longest = int((first_R + rows_R).max())
        pages_RP = np.ascontiguousarray(pages_RP, dtype=np.int64)
        return cls(first_R, rows_R, pages_RP, pages_RP.ctypes.data, page_size, longest)


def scratch_bytes(longest: int, head_dim: int) -> int:
    """What `attend` needs per thread."""
    keys = -(-longest // (_QUAD * BLOCK)) * _QUAD * BLOCK
    per_key = 1 + QUERIES * 4 + QUERIES * 2  # addresses of blocks, S^T, P
    rows = QUERIES * head_dim * (2 + 2 + 4)  # Q, Q^T, O
    return -(-(keys * per_key + rows + 1024) // 64) * 64  # every thread's begins a cache line


@elements
def attend(
    qkv, out, kv, first, rows, pages, num_requests, num_pages, page_size, num_heads, num_kv, head_dim, scale,
    causal, window, scratch, first_head, last_head, thread, num_threads,
):  # fmt: skip
    """This thread's items of a layer, of some K/V heads.

    Args:
        qkv: rows of [Q + 2 K, D], q and k normed and rotated. `out`: rows of [Q, D].
        kv: the layer's blocks. A step's own K and V are there already.
        first, rows, pages: addresses of the arrays of `PagedContexts`; num_pages is the width of `pages`.
        window: as `paged_attention`; -1 sees all.
    """
    begin_attention()
    first_R = carray(pointer(first, _INT64), (num_requests,))
    rows_R = carray(pointer(rows, _INT64), (num_requests,))
    shared = num_heads // num_kv
    item = row = 0
    for r in range(num_requests):
        num_tiles = (rows_R[r] * shared + QUERIES - 1) // QUERIES
        for tile in range(0, num_tiles, _TILES):
            for head in range(first_head, last_head):
                if item % num_threads == thread:
                    _attend_group(
                        qkv + 2 * row * (num_heads + 2 * num_kv) * head_dim,
                        out + 2 * row * num_heads * head_dim, kv, pages + 8 * r * num_pages, first_R[r],
                        rows_R[r], page_size, num_heads, num_kv, head_dim, head, tile,
                        min(tile + _TILES, num_tiles), scale, causal, window, scratch,
                    )  # fmt: skip
                item += 1
        row += rows_R[r]


@elements
def _attend_group(
    qkv, out, kv, pages, first, num_rows, page_size, num_heads, num_kv, head_dim, head, tile, last_tile,
    scale, causal, window, scratch,
):  # fmt: skip
    """Tiles of one request's one K/V head."""
    shared = num_heads // num_kv
    num_keys = first + num_rows
    num_blocks = (num_keys + _QUAD * BLOCK - 1) // (_QUAD * BLOCK) * _QUAD
    row_bytes = (num_heads + 2 * num_kv) * head_dim * 2
    head_bytes = 2 * BLOCK * head_dim
    # In `scratch`: two rows of int32, scale and sums of lanes; then Q, Q^T, O, addresses of blocks, S^T, P.
    low, high, factor, totals = scratch, scratch + 64, scratch + 128, scratch + 192
    queries = scratch + 256
    packed = queries + QUERIES * head_dim * 2
    result = packed + QUERIES * head_dim * 2
    scores = result + QUERIES * head_dim * 4
    weights = scores + num_blocks * BLOCK * 64
    blocks = weights + num_blocks * BLOCK * 32
    low_L, high_L = carray(pointer(low, _INT32), (QUERIES,)), carray(pointer(high, _INT32), (QUERIES,))
    carray(pointer(factor, _FP32), (1,))[0] = scale * np.float32(_LOG2_E)
    _find_blocks(kv, pages, blocks, num_keys, num_blocks, page_size, 2 * num_kv * head_bytes)
    for at in range(tile * QUERIES, last_tile * QUERIES, QUERIES):
        count = min(QUERIES, num_rows * shared - at)
        lowest, highest = num_keys, 0
        for i in range(QUERIES):  # lanes behind the last one repeat it
            position = first + (at + min(i, count - 1)) % num_rows
            begin, end = 0, position + 1 if causal else num_keys
            if window >= 0:
                begin, end = max(position - window + 1, 0), min(end, position + window)
            low_L[i], high_L[i] = begin, end
            lowest, highest = min(lowest, begin), max(highest, end)
        # Only blocks that a lane sees; what stands before or behind would add zeros.
        begin = lowest // BLOCK
        seen = (highest + BLOCK - 1) // BLOCK - begin
        for i in range(QUERIES):
            low_L[i] -= begin * BLOCK
            high_L[i] -= begin * BLOCK
        for i in range(QUERIES):
            row = at + min(i, count - 1)
            source = qkv + row % num_rows * row_bytes + 2 * (head * shared + row // num_rows) * head_dim
            copy_lines(source, queries + 2 * i * head_dim, head_dim // 32)
        for step in range(head_dim // 32):
            transpose(queries + 64 * step, 2 * head_dim, packed + TILE_BYTES * step)
        quads = (seen + _QUAD - 1) // _QUAD * _QUAD
        score(blocks + 8 * begin, quads, head * head_bytes, 2 * head_dim, packed, scores, head_dim // 32)
        soften(scores, seen * BLOCK, low, high, factor, totals)
        for t in range(seen):
            transpose_rounded(scores + t * TILE_BYTES, weights + 32 * t, seen * 32)
        combine(blocks + 8 * begin, seen, (num_kv + head) * head_bytes, weights, seen * 32, result, head_dim)
        for i in range(count):
            row = at + i
            q = head * shared + row // num_rows
            target = out + 2 * (row % num_rows * num_heads + q) * head_dim
            scale_rounded(result + 4 * i * head_dim, totals + 4 * i, target, head_dim // 16)


@elements
def _find_blocks(kv, pages, blocks, num_keys, num_blocks, page_size, block_bytes):
    """Addresses of the context's blocks; the last one stands for those behind it."""
    per_page = page_size // BLOCK
    used = (num_keys + BLOCK - 1) // BLOCK
    pages_P = carray(pointer(pages, _INT64), ((used + per_page - 1) // per_page,))
    blocks_B = carray(pointer(blocks, _INT64), (num_blocks + _QUAD,))
    b = 0
    for p in range(len(pages_P)):
        address = kv + pages_P[p] * per_page * block_bytes
        for _ in range(min(per_page, used - b)):
            blocks_B[b] = address
            address += block_bytes
            b += 1
    for behind in range(used, num_blocks + _QUAD):
        blocks_B[behind] = blocks_B[used - 1]
