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

from ..backend import PlacedRows
from ..cpu_numba.element_ops import elements, finite_or_zero, pointer
from ..layers.rope import RotaryEmbedding
from ..memory.kv_cache import PagedKVCache
from .isa_dispatch import of_two_kinds
from .simd_vectors import copy_lines, norm_rotate, rotate

BLOCK = 16  # slots
QUAD = 4  # blocks scored at once
_BF16, _INT32, _INT64 = np.uint16(0), np.int32(0), np.int64(0)


class BlockedContextWriter:
    """A `backend.ContextWriter` into such blocks."""

    __slots__ = ("_eps_1", "_norm_JD", "_num_kv", "_num_layers")

    def __init__(self, k_norm_LD: Tensor, eps: float, num_kv_heads: int) -> None:
        self._norm_JD = k_norm_LD.repeat_interleave(num_kv_heads, dim=0).contiguous()
        self._eps_1 = np.full(1, eps, dtype=np.float32)
        self._num_kv, self._num_layers = num_kv_heads, len(k_norm_LD)

    def __call__(
        self, kv_NO: Tensor, rope: RotaryEmbedding, rows: PlacedRows, cache: PagedKVCache, first: int
    ) -> None:
        _write_context(
            kv_NO.data_ptr(), len(kv_NO), self._num_layers, self._num_kv, cache.geometries[first].head_dim,
            self._norm_JD.data_ptr(), rope.cos_TD.data_ptr(), rope.sin_TD.data_ptr(),
            rows.positions_N.data_ptr(), rows.kv_slots[cache.group(first)].data_ptr(),
            cache.slots(first, self._num_layers).data_ptr(), cache.plane_bytes, self._eps_1.ctypes.data,
        )  # fmt: skip


@elements
def _write_context(
    rows, num_rows, num_layers, num_kv, head_dim, weight, cos, sin, positions, slots, kv, plane_bytes, eps
):
    """Write rows of [L, K] keys and [L, K] values of D."""
    positions_N = carray(pointer(positions, _INT64), (num_rows,))
    slots_N = carray(pointer(slots, _INT64), (num_rows,))
    num_keys = num_layers * num_kv
    for n in range(num_rows):
        row = rows + 4 * n * num_keys * head_dim
        norm_rotate_heads(row, weight, cos, sin, positions_N[n], 0, num_keys, head_dim, eps)
        for layer in range(num_layers):
            k = row + 2 * layer * num_kv * head_dim
            write_slot(
                kv + layer * plane_bytes, slots_N[n], k, k + 2 * num_keys * head_dim, 0, num_kv, num_kv,
                head_dim,
            )  # fmt: skip


@elements
def norm_rotate_heads(row, weight, cos, sin, position, first, last, head_dim, eps):
    """Norm and rotate some heads of a row in place; weights are per head, or 0 without a norm."""
    at = 2 * position * head_dim
    for j in range(first, last):
        x = row + 2 * j * head_dim
        if weight != 0:
            norm_rotate(x, weight + 2 * j * head_dim, cos + at, sin + at, head_dim // 32, eps)
        else:
            rotate(x, np.int64(0), cos + at, sin + at, head_dim // 32, eps)


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
