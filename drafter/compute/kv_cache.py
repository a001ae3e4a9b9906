"""Paged K/V memory of one model: keys and values of all its layers, by page id.

Not the bookkeeping: which page belongs to whom is `cluster/pages.py`'s business. The drafter's cache uses the
target's page ids in a pool of its own. Read by `eager/attention.py`, written by the models.

A row's K and V are written at its *slot* = page id * page_size + offset. One page more than `num_pages`
exists: rows whose K/V are not wanted (rejected drafts, padding) go to `skip_slot`, its first slot, so that
shapes stay fixed.

Legend: L layers, P pages, S page size, K kv heads, D head dim, N rows.

    kv [L, P + 1, S, 2, K, D]      [..., 0, :, :] keys, [..., 1, :, :] values
"""

from __future__ import annotations

import torch
from torch import Tensor


def skip_slot(num_pages: int, page_size: int) -> int:
    """The slot that swallows what nobody may see."""
    return num_pages * page_size


class PagedKVCache:
    """Keys and values of `num_layers` layers in `num_pages` pages (plus the one that swallows)."""

    def __init__(
        self,
        num_layers: int,
        num_pages: int,
        page_size: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        self.num_layers, self.num_pages, self.page_size = num_layers, num_pages, page_size
        self.num_kv_heads, self.head_dim, self.dtype = num_kv_heads, head_dim, dtype
        shape = (num_layers, num_pages + 1, page_size, 2, num_kv_heads, head_dim)
        self.kv = torch.zeros(shape, dtype=dtype, device=device)
        self.device = self.kv.device
        self.layer_bytes = self.kv.nbytes // num_layers
        # Views made once: indexing a tensor costs a microsecond, and there are many layers.
        self.slots_LN2KD = self.kv.view(num_layers, -1, 2, num_kv_heads, head_dim)
        self._layer_slots = tuple(self.slots_LN2KD.split(1))
        self._layer_pages = tuple(self.kv.unbind(0))

    @property
    def skip_slot(self) -> int:
        return skip_slot(self.num_pages, self.page_size)

    def pages(self, layer: int) -> Tensor:
        """[P + 1, S, 2, K, D] of a layer."""
        return self._layer_pages[layer]

    def slots(self, layer: int) -> Tensor:
        """[1, slots, 2, K, D] of a layer: its part of `slots_LN2KD`."""
        return self._layer_slots[layer]

    def write(self, layer: int, slots_N: Tensor, kv_N2KD: Tensor) -> None:
        """Write rows of one layer. `slots` int64; unwanted rows carry `skip_slot`."""
        self._layer_slots[layer][0].index_copy_(0, slots_N, kv_N2KD)

    def write_all(self, slots_N: Tensor, kv_LN2KD: Tensor) -> None:
        """Write rows of all layers at once."""
        self.slots_LN2KD.index_copy_(1, slots_N, kv_LN2KD)

    @staticmethod
    def bytes_per_page(
        num_layers: int, page_size: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype
    ) -> int:
        """Memory of one page over all layers, keys and values."""
        return num_layers * page_size * 2 * num_kv_heads * head_dim * dtype.itemsize
