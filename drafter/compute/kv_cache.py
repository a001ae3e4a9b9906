"""Paged K/V memory of one model: keys and values of all its layers, by page id.

Not the bookkeeping: who has which page is `cluster/page_books.py`'s business. The drafter's cache uses the
target's page ids in memory of its own, or ids of its own. Read by `eager/attention.py`, written by models.

A page holds some tokens of one page group's layers. The memory has a *plane* per layer of the largest group;
groups use the same planes with pages of their own, so that any page can be any group's:

    kv [A, P + 1, S, 2, K, D]      [..., 0, :, :] keys, [..., 1, :, :] values
    layer i                        plane `places[i].plane`, by the page table of group `places[i].group`

A row's K and V are written at its *slot* = page id * page_size + offset. One page more than `num_pages`
exists: rows whose K/V are not wanted (rejected drafts, padding) go to `skip_slot`, its first slot, so that
shapes stay fixed.

Legend: A planes, L layers, P pages, S page size, K kv heads, D head dim, N rows.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ...cluster.page_groups import LayerPlace


def skip_slot(num_pages: int, page_size: int) -> int:
    """The slot that swallows what nobody may see."""
    return num_pages * page_size


class PagedKVCache:
    """Keys and values of a model's layers in `num_pages` pages (plus the one that swallows).

    Args:
        places: of each layer, its page group and plane; or the number of layers that all share one group.
    """

    def __init__(
        self,
        places: Sequence[LayerPlace] | int,
        num_pages: int,
        page_size: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        if isinstance(places, int):
            places = [LayerPlace(0, layer) for layer in range(places)]
        self.num_layers, self.num_pages, self.page_size = len(places), num_pages, page_size
        self.num_kv_heads, self.head_dim, self.dtype = num_kv_heads, head_dim, dtype
        num_planes = 1 + max(place.plane for place in places)
        shape = (num_planes, num_pages + 1, page_size, 2, num_kv_heads, head_dim)
        self.kv = torch.zeros(shape, dtype=dtype, device=device)
        self.device = self.kv.device
        self.plane_bytes = self.kv.nbytes // num_planes
        self.places = tuple(places)
        # Views made once: indexing a tensor costs a microsecond, and there are many layers.
        self._slots_AN2KD = self.kv.view(num_planes, -1, 2, num_kv_heads, head_dim)
        planes, slots = self.kv.unbind(0), self._slots_AN2KD.split(1)
        self._layer_pages = tuple(planes[place.plane] for place in places)
        self._layer_slots = tuple(slots[place.plane] for place in places)
        self._groups = tuple(place.group for place in places)

    @property
    def skip_slot(self) -> int:
        return skip_slot(self.num_pages, self.page_size)

    def group(self, layer: int) -> int:
        """The page group that a layer's pages are of."""
        return self._groups[layer]

    def pages(self, layer: int) -> Tensor:
        """[P + 1, S, 2, K, D] of a layer."""
        return self._layer_pages[layer]

    def slots(self, layer: int, count: int = 1) -> Tensor:
        """[count, slots, 2, K, D] of some layers that follow each other in one group."""
        if count == 1:
            return self._layer_slots[layer]
        plane = self.places[layer].plane
        return self._slots_AN2KD[plane : plane + count]

    def planes(self, layer: int, count: int) -> Tensor:
        """[count, P + 1, S, 2, K, D] of the same."""
        plane = self.places[layer].plane
        return self.kv[plane : plane + count]

    def write(self, layer: int, slots_N: Tensor, kv_N2KD: Tensor) -> None:
        """Write rows of one layer. `slots` int64; unwanted rows carry `skip_slot`."""
        self._layer_slots[layer][0].index_copy_(0, slots_N, kv_N2KD)

    def write_all(self, first: int, slots_N: Tensor, kv_LN2KD: Tensor) -> None:
        """Write rows of some layers that follow each other in one group."""
        self.slots(first, len(kv_LN2KD)).index_copy_(1, slots_N, kv_LN2KD)

    @staticmethod
    def bytes_per_page(
        num_planes: int, page_size: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype
    ) -> int:
        """Memory of one page over all planes, keys and values."""
        return num_planes * page_size * 2 * num_kv_heads * head_dim * dtype.itemsize
