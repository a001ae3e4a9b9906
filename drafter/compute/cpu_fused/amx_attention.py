"""Attention in AMX tiles, 16 query rows at a time; the AMX variant of `attention.attend`.

    S^T [T, 16] = K [T, D] Q^T        keys as rows, queries as lanes: maxima and sums go lane by lane
    P [16, T]   = exp(S - max)^T      fp32, then bf16
    O [16, D]   = P [16, T] V [T, D]  / sum of P

Every query row has its own lane, so its result does not depend on the others.

A row of a draft tree sees some of its request's own rows. Their scores are moved to the places that the keys
have in a chain. Tiles sum the context's values up to the block of 16 keys in which the request's rows begin.
Values from there on differ from row to row; vectors add them, in a tile's order and with its bits.

Legend: T keys, D head dim.
"""

# Numba's functions are typed when they are compiled, not by annotations.
# pyright: reportCallIssue=false, reportArgumentType=false, reportPrivateImportUsage=false

from __future__ import annotations

import numpy as np
from numba import carray

from ..cpu_numba.element_ops import elements, pointer
from .qkv_heads import BLOCK, QUAD, find_blocks
from .simd_attention import position_of
from .tiles.amx_intrinsics import TILE_BYTES
from .tiles.amx_tiles import combine, score
from .tiles.simd_vectors import add_values, copy_lines, scale_rounded, soften, transpose, transpose_rounded

QUERIES = 16  # per tile
_INT32, _INT64, _FP32 = np.int32(0), np.int64(0), np.float32(0)
_LOG2_E = 1.4426950408889634


def tile_scratch_bytes(longest: int, head_dim: int) -> int:
    keys = -(-longest // (QUAD * BLOCK)) * QUAD * BLOCK
    per_key = 1 + QUERIES * 4 + QUERIES * 2  # addresses of blocks, S^T, P
    rows = QUERIES * head_dim * (2 + 2 + 4)  # Q, Q^T, O
    return keys * per_key + rows + 1024


def attend_tiles(
    qkv, out, kv, pages, first, num_rows, page_size, num_heads, num_kv, head_dim, head, row_begin, row_end,
    scale, causal, window, paths, depth, scratch,
):  # fmt: skip
    """Compute an item of attention; arguments: see `attention._attend_group`."""
    shared = num_heads // num_kv
    num_keys = first + num_rows
    num_blocks = (num_keys + QUAD * BLOCK - 1) // (QUAD * BLOCK) * QUAD
    row_bytes = (num_heads + 2 * num_kv) * head_dim * 2
    head_bytes = 2 * BLOCK * head_dim
    # Scratch layout: two rows of int32, scale and sums of lanes, places of a path's values; then Q, Q^T, O,
    # addresses of blocks, S^T, P.
    low, high, factor, totals = scratch, scratch + 64, scratch + 128, scratch + 192
    values = scratch + 256
    queries = values + 256
    packed = queries + QUERIES * head_dim * 2
    result = packed + QUERIES * head_dim * 2
    scores = result + QUERIES * head_dim * 4
    weights = scores + num_blocks * BLOCK * 64
    blocks = weights + num_blocks * BLOCK * 32
    low_L, high_L = carray(pointer(low, _INT32), (QUERIES,)), carray(pointer(high, _INT32), (QUERIES,))
    carray(pointer(factor, _FP32), (1,))[0] = scale * np.float32(_LOG2_E)
    find_blocks(kv, pages, blocks, num_keys, num_blocks, page_size, 2 * num_kv * head_bytes)
    for at in range(row_begin, row_end, QUERIES):
        count = min(QUERIES, row_end - at)
        lowest, highest = num_keys, 0
        for i in range(QUERIES):  # unused lanes repeat the last row
            row = (at + min(i, count - 1)) % num_rows
            position = position_of(first, row, paths, depth)
            begin, end = 0, position + 1 if causal else num_keys
            if window >= 0:
                begin, end = max(position - window + 1, 0), min(end, position + window)
            low_L[i], high_L[i] = begin, end
            lowest, highest = min(lowest, begin), max(highest, end, first + row + 1)
        # Only blocks that some lane sees; others would add zeros.
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
        quads = (seen + QUAD - 1) // QUAD * QUAD
        score(blocks + 8 * begin, quads, head * head_bytes, 2 * head_dim, packed, scores, head_dim // 32)
        if paths != 0:
            for i in range(count):
                path = paths + 4 * depth * ((at + i) % num_rows)
                _gather_path(scores + 4 * i, path, high_L[i] + begin * BLOCK - first, first - begin * BLOCK)
        soften(scores, seen * BLOCK, low, high, factor, totals)
        for t in range(seen):
            transpose_rounded(scores + t * TILE_BYTES, weights + 32 * t, seen * 32)
        offset = (num_kv + head) * head_bytes
        in_tiles = seen if paths == 0 else max(first // BLOCK - begin, 0)
        combine(blocks + 8 * begin, in_tiles, offset, weights, seen * 32, result, head_dim)
        for i in range(count):
            row = at + i
            if paths != 0:
                path = paths + 4 * depth * (row % num_rows)
                end = high_L[i] + begin * BLOCK
                for block in range(begin + in_tiles, (end + BLOCK - 1) // BLOCK):
                    _find_values(blocks, offset, path, first, block * BLOCK, end, values)
                    part = weights + 32 * (i * seen + block - begin)
                    add_values(values, values + 128, part, result + 4 * i * head_dim, head_dim // 16)
            q = head * shared + row // num_rows
            target = out + 2 * (row % num_rows * num_heads + q) * head_dim
            scale_rounded(result + 4 * i * head_dim, totals + 4 * i, target, head_dim // 16)


@elements
def _gather_path(scores, path, length, own):
    """Move a lane's scores to the places of its path's depths, from `own` on; places below 0 are not seen."""
    path_D = carray(pointer(path, _INT32), (length,))
    for d in range(max(-own, 0), length):  # a row's offset is at least its depth: no score is lost
        source = carray(pointer(scores + 64 * (own + path_D[d]), _FP32), (1,))
        carray(pointer(scores + 64 * (own + d), _FP32), (1,))[0] = source[0]


@elements
def _find_values(blocks, offset, path, first, begin, end, values):
    """List the lines and shifts of a row's 16 values from position `begin` on, for `add_values`.

    From `first` on they are the path's. The last one, before `end`, is repeated as padding.
    """
    path_D = carray(pointer(path, _INT32), (end - first,))
    lines_K = carray(pointer(values, _INT64), (BLOCK,))
    shifts_K = carray(pointer(values + 128, _INT32), (BLOCK,))
    for key in range(BLOCK):
        place = min(begin + key, end - 1)
        if place >= first:
            place = first + path_D[place - first]
        block = carray(pointer(blocks + 8 * (place // BLOCK), _INT64), (1,))[0]
        lines_K[key] = block + offset + 64 * (place % BLOCK // 2)
        shifts_K[key] = 16 * (place % 2)
