"""Head norm, rotation and K/V write of a layer's q, k and v, in the fused backend's cache layout.

The compiled attention (`attention.py`) multiplies K and V in place. Slots are grouped in *blocks* of 16:

    [K heads] [16 slots, D] keys, then [K heads] [D / 16] [8 pairs of slots, 16, 2] values

Without AMX a head's keys are [D / 2] pairs of [16 slots, 2], like 16 columns of a packed weight.

Legend: N rows, J heads, K kv heads, D head dim, L layers.
"""

# Numba's functions are typed when they are compiled, not by annotations.
# pyright: reportCallIssue=false, reportArgumentType=false, reportPrivateImportUsage=false

from __future__ import annotations

import numpy as np
from numba import carray
from torch import Tensor

from ..cpu_numba.element_ops import elements, finite_or_zero, pointer, record_dtype
from ..memory.kv_cache import PagedKVCache
from .tiles.isa_dispatch import has_tiles, of_two_kinds
from .tiles.simd_vectors import copy_lines, norm_rotate, rotate

BLOCK = 16  # slots
QUAD = 4  # blocks scored at once
_BF16, _INT32, _INT64 = np.uint16(0), np.int32(0), np.int64(0)


CONTEXT = record_dtype("num_layers num_kv head_dim head_norm cos sin kv plane_bytes", "eps")
_EPS = CONTEXT.itemsize - 4  # offset of `eps`, which is passed by address


@elements
def write_context(context_1, rows, num_rows, positions, slots):
    """Norm and rotate the keys of rows of [L, K] keys and [L, K] values of D, and write both.

    Args:
        context_1: one CONTEXT; `kv` is the address of the first layer's blocks.
        rows, positions, slots: addresses of the rows, their positions, and their slots.
    """
    c = context_1[0]
    positions_N = carray(pointer(positions, _INT64), (num_rows,))
    slots_N = carray(pointer(slots, _INT64), (num_rows,))
    eps, num_keys = context_1.ctypes.data + _EPS, c.num_layers * c.num_kv
    for n in range(num_rows):
        row = rows + 4 * n * num_keys * c.head_dim
        norm_rotate_heads(row, c.head_norm, c.cos, c.sin, positions_N[n], 0, num_keys, c.head_dim, eps)
        for layer in range(c.num_layers):
            k = row + 2 * layer * c.num_kv * c.head_dim
            v = k + 2 * num_keys * c.head_dim
            write_slot(c.kv + layer * c.plane_bytes, slots_N[n], k, v, 0, c.num_kv, c.num_kv, c.head_dim)


@elements
def norm_rotate_heads(row, weight, cos, sin, position, first, last, head_dim, eps):
    """Norm and rotate heads `first` to `last` - 1 of a row of bf16 in place.

    `row`, `weight`, `cos`, `sin` and `eps` are addresses: the weights of the norms are fp32 [J, D], or 0
    without norms; the tables of the rotation are bf16 [T, D].
    """
    table_row = 2 * position * head_dim
    half_vectors = head_dim // 32  # vectors of 16 values in half a head
    no_weight = np.int64(0)
    for j in range(first, last):
        x = row + 2 * j * head_dim
        if weight != 0:
            norm_rotate(x, weight + 4 * j * head_dim, cos + table_row, sin + table_row, half_vectors, eps)
        else:
            rotate(x, no_weight, cos + table_row, sin + table_row, half_vectors, eps)


@elements
def write_slot(kv, slot, k, v, first, last, num_kv, head_dim):
    """Copy some heads of a row's K and V to their slot of the layer at `kv`.

    NaNs and infinities become 0 in the cache and in the row, as in `PagedKVCache.write`.
    """
    size = 2 * BLOCK * head_dim  # bytes of a head's block
    block, t = slot // BLOCK, slot % BLOCK
    base = kv + block * 2 * num_kv * size
    for head in range(first, last):
        k_D = carray(pointer(k + 2 * head * head_dim, _BF16), (head_dim,))
        for d in range(head_dim):
            k_D[d] = finite_or_zero(k_D[d])
        _write_key(k + 2 * head * head_dim, base + head * size, t, head_dim)
        v_D = carray(pointer(v + 2 * head * head_dim, _BF16), (head_dim,))
        block_D = carray(pointer(base + (num_kv + head) * size + 64 * (t // 2), _BF16), (BLOCK * head_dim,))
        for c in range(head_dim // 16):
            for d in range(16):
                block_D[256 * c + 2 * d + t % 2] = finite_or_zero(v_D[16 * c + d])


def _write_key(k, block, t, head_dim):
    """Write one head's key to place `t` of its block."""


def _key_as_row(k, block, t, head_dim):
    copy_lines(k, block + 2 * t * head_dim, head_dim // 32)


def _key_as_column(k, block, t, head_dim):
    pairs_P = carray(pointer(k, _INT32), (head_dim // 2,))
    block_PT = carray(pointer(block, _INT32), (head_dim // 2, BLOCK))
    for pair in range(head_dim // 2):
        block_PT[pair, t] = pairs_P[pair]


of_two_kinds(_write_key, _key_as_row, _key_as_column)


def compact_blocks(cache: PagedKVCache, source_slots: Tensor, target_slots: Tensor) -> None:
    """Move rows of all layers to other slots, as `PagedKVCache.compact_rows` does, within these blocks."""
    kind = cache.geometries[0]
    heads, dim = kind.num_kv_heads, kind.head_dim
    k_LBKE, v_LBKE = cache.kv.view(len(cache.kv), -1, 2, heads, BLOCK * dim).unbind(2)
    v = v_LBKE.unflatten(3, (dim // 16, BLOCK // 2, 16, 2))
    source_N, target_N = source_slots.flatten(), target_slots.flatten()
    from_block, from_t, to_block, to_t = (
        part for slots in (source_N, target_N) for part in (slots // BLOCK, slots % BLOCK)
    )
    if has_tiles():
        k = k_LBKE.unflatten(3, (BLOCK, dim))
        moved_k = k[:, from_block, :, from_t]
    else:
        k = k_LBKE.unflatten(3, (dim // 2, BLOCK, 2))
        moved_k = k[:, from_block, :, :, from_t]
    moved_v = v[:, from_block, :, :, from_t // 2, :, from_t % 2]
    if has_tiles():
        k[:, to_block, :, to_t] = moved_k
    else:
        k[:, to_block, :, :, to_t] = moved_k
    v[:, to_block, :, :, to_t // 2, :, to_t % 2] = moved_v


@elements
def find_blocks(kv, pages, blocks, num_keys, num_blocks, page_size, block_bytes):
    """List the addresses of the context's blocks; the last one is repeated as padding."""
    per_page = page_size // BLOCK
    used = (num_keys + BLOCK - 1) // BLOCK
    pages_P = carray(pointer(pages, _INT64), ((used + per_page - 1) // per_page,))
    blocks_B = carray(pointer(blocks, _INT64), (num_blocks + QUAD,))
    b = 0
    for p in range(len(pages_P)):
        address = kv + pages_P[p] * per_page * block_bytes
        for _ in range(min(per_page, used - b)):
            blocks_B[b] = address
            address += block_bytes
            b += 1
    for next_block in range(used, num_blocks + QUAD):
        blocks_B[next_block] = blocks_B[used - 1]
