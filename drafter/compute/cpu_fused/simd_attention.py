"""Attention in vector registers, for any number of query rows; the SIMD variant of `attention.attend`.

    S [rows, T] = Q [rows, D] K^T     rows packed as for products; maxima and sums go over a row's lanes
    P [rows, T] = exp(S - max)        fp32, in place
    O [rows, D] = P [rows, T] V       / sum of P

Keys are processed in chunks of 64 from position 0, so the lane that adds a key depends only on its position.

A row of a draft tree sees some of its request's own rows. Their scores are moved to the places that the keys
have in a chain, and back once they are weights; other rows' keys get weights of 0. Since the products of
weights and values are one chain over the keys, the bits are those of a chain.

Legend: T keys, D head dim.
"""

# Numba's functions are typed when they are compiled, not by annotations.
# pyright: reportCallIssue=false, reportArgumentType=false, reportPrivateImportUsage=false

from __future__ import annotations

import numpy as np
from numba import carray

from ..cpu_numba.element_ops import elements, pointer
from .qkv_heads import BLOCK, QUAD, find_blocks
from .tiles.simd_tiles import (
    CHUNK,
    ROW_BYTES,
    combine_rows,
    most_rows,
    pack_rows,
    packed_row_bytes,
    score_rows,
)
from .tiles.simd_vectors import scale_rounded, soften_row

_ROWS = 12  # of the highest tile
_INT32, _INT64, _FP32 = np.int32(0), np.int64(0), np.float32(0)
_LOG2_E = 1.4426950408889634


def row_scratch_bytes(longest: int, head_dim: int) -> int:
    keys = -(-longest // CHUNK) * CHUNK
    per_key = 1 + _ROWS * 4  # addresses of blocks, S
    rows = _ROWS * (-(-head_dim // CHUNK) * ROW_BYTES + 4 * head_dim)  # Q packed, O
    return keys * per_key + rows + 1024


def attend_rows(
    qkv, out, kv, pages, first, num_rows, page_size, num_heads, num_kv, head_dim, head, row_begin, row_end,
    scale, causal, window, paths, depth, scratch,
):  # fmt: skip
    """Compute an item of attention; arguments: see `attention._attend_group`."""
    shared = num_heads // num_kv
    num_keys = first + num_rows
    num_blocks = (num_keys + CHUNK - 1) // CHUNK * QUAD
    row_bytes = (num_heads + 2 * num_kv) * head_dim * 2
    head_bytes = 2 * BLOCK * head_dim
    # Scratch layout: scale, sum; bounds of rows; Q, O, addresses of blocks, S.
    factor, total, bounds = scratch, scratch + 8, scratch + 64
    queries = scratch + 512
    result = queries + _ROWS * ((head_dim + CHUNK - 1) // CHUNK * ROW_BYTES)
    blocks = result + _ROWS * head_dim * 4
    scores = blocks + (num_blocks + QUAD) * 8
    carray(pointer(factor, _FP32), (1,))[0] = scale * np.float32(_LOG2_E)
    bounds_R2 = carray(pointer(bounds, _INT64), (_ROWS, 2))
    find_blocks(kv, pages, blocks, num_keys, num_blocks, page_size, 2 * num_kv * head_bytes)
    parts = (row_end - row_begin + most_rows() - 1) // most_rows()
    for part in range(parts):
        at = row_begin + (row_end - row_begin) * part // parts
        count = row_begin + (row_end - row_begin) * (part + 1) // parts - at
        lowest, highest = num_keys, 0
        for i in range(count):
            row = at + i
            position = position_of(first, row % num_rows, paths, depth)
            begin, end = 0, position + 1 if causal else num_keys
            if window >= 0:
                begin, end = max(position - window + 1, 0), min(end, position + window)
            bounds_R2[i, 0], bounds_R2[i, 1] = begin, end
            lowest, highest = min(lowest, begin), max(highest, end, first + row % num_rows + 1)
            source = qkv + row % num_rows * row_bytes + 2 * (head * shared + row // num_rows) * head_dim
            place = queries + i * packed_row_bytes()
            pack_rows(source, _INT64, place, count * packed_row_bytes(), 1, head_dim)
        # Only chunks that some row sees; others would add zeros.
        begin = lowest // CHUNK
        chunks = (highest + CHUNK - 1) // CHUNK - begin
        seen = blocks + 8 * QUAD * begin
        score_rows(
            queries, count * packed_row_bytes(), seen, chunks, head * head_bytes, scores, head_dim // 2, count
        )  # fmt: skip
        for i in range(count):
            mine = scores + i * ROW_BYTES
            low, high = bounds_R2[i, 0] - begin * CHUNK, bounds_R2[i, 1] - begin * CHUNK
            if paths == 0:
                soften_row(mine, count * ROW_BYTES, chunks, low, high, factor, total + 4 * i)
            else:
                path = paths + 4 * depth * ((at + i) % num_rows)
                own, length = first - begin * CHUNK, bounds_R2[i, 1] - first
                _gather_path(mine, count * ROW_BYTES, path, length, own)
                soften_row(mine, count * ROW_BYTES, chunks, low, high, factor, total + 4 * i)
                _scatter_path(mine, count * ROW_BYTES, path, length, own)
        combine_rows(scores, seen, chunks * QUAD, (num_kv + head) * head_bytes, result, head_dim, count)
        for i in range(count):
            row = at + i
            q = head * shared + row // num_rows
            target = out + 2 * (row % num_rows * num_heads + q) * head_dim
            scale_rounded(result + 4 * i * head_dim, total + 4 * i, target, head_dim // 16)


@elements
def position_of(first, row, paths, depth):
    """Return the position of a request's row: as far from the first as it is in its path, or in the chain."""
    if paths == 0:
        return first + row
    path_D = carray(pointer(paths + 4 * depth * row, _INT32), (depth,))
    at = 0
    while path_D[at] != row:
        at += 1
    return first + at


@elements
def _score_at(scores, chunk_bytes, key):
    address = scores + key // CHUNK * chunk_bytes + 4 * (key % CHUNK)
    return carray(pointer(address, _FP32), (1,))


@elements
def _gather_path(scores, chunk_bytes, path, length, own):
    """Move a path's scores to the places of its depths, from `own` on; places below 0 are not seen."""
    path_D = carray(pointer(path, _INT32), (length,))
    for d in range(max(-own, 0), length):  # a row's offset is at least its depth: no score is lost
        _score_at(scores, chunk_bytes, own + d)[0] = _score_at(scores, chunk_bytes, own + path_D[d])[0]


@elements
def _scatter_path(scores, chunk_bytes, path, length, own):
    """Move a path's weights back to its rows' places; others between them become 0."""
    path_D = carray(pointer(path, _INT32), (length,))
    end = path_D[length - 1] + 1
    for d in range(length - 1, max(-own, 0) - 1, -1):
        weight, offset = _score_at(scores, chunk_bytes, own + d)[0], path_D[d]
        for other in range(offset + 1, end):
            _score_at(scores, chunk_bytes, own + other)[0] = 0
        _score_at(scores, chunk_bytes, own + offset)[0] = weight
        end = offset
    for other in range(max(-own, 0), end):
        _score_at(scores, chunk_bytes, own + other)[0] = 0
