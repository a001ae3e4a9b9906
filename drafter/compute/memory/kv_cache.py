"""Paged K/V memory of one model: keys and values of all its layers, by page id.

`cluster/kv_cache/kv_cache_manager.py` allocates the pages. The drafter's cache uses the target's page ids in
its own memory, or its own ids. A page holds tokens of one page group's layers. The memory has *planes*;
groups use the same planes with different pages, so any page can belong to any group. A plane is as wide as
the widest layer needs, and narrower layers share one (`cluster/pages/kv_cache_groups.py`, with a drawing):

    kv [A, P + 1, S, W]            a token's values in a plane
    layer i                        plane `places[i].plane`, by the page table of group `places[i].group`;
                                   of W its own w values, after those of `places[i].part` equal layers
    its w values                   keys of all heads [K, D], then values [K, F]; or only keys; their first
                                   F are the values (MLA)

K/V are stored in the model's dtype or in e4m3 (`kv_cache_dtype`), there divided by a constant of the layer
if the checkpoint has one. A value is rounded when it is written, before any row reads it, so what rows see
depends on neither batches nor drafts.

A row's K and V are written at its *slot* = page id * page_size + offset. There is one more page than
`num_pages`: discarded rows (rejected drafts, padding) are written to `skip_slot`, its first slot, so that
shapes stay fixed.

Legend: A planes, L layers, P pages, S page size, K kv heads, D head dim, F head dim of values, w values of a
token in a layer, W in a plane, N rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ....cluster.pages.kv_cache_groups import KVCacheSpec, LayerPlace, plane_width
from .recurrent_state_cache import StateMemory
from .zeroed_memory import zeros

E4M3_MAX = 448.0  # the largest finite value of float8_e4m3fn


class KVScales(NamedTuple):
    """A layer's scales of K and V in e4m3: x is stored as x / scale."""

    k: float = 1.0
    v: float = 1.0


UNSCALED = KVScales()


def skip_slot(num_pages: int, page_size: int) -> int:
    return num_pages * page_size


class PagedKVCache:
    """Keys and values of a model's layers in `num_pages` pages, plus one for discarded rows.

    `places` may be the number of layers that all share one group; `geometry` is of all layers, or of each;
    `dtype` is that of stored values; `scales` are each layer's, only of e4m3 and not of latents. `kv` is the
    memory of a cache with these layers; by default a new one.
    """

    def __init__(
        self,
        places: Sequence[LayerPlace] | int,
        num_pages: int,
        page_size: int,
        geometry: KVCacheSpec | Sequence[KVCacheSpec],
        dtype: torch.dtype,
        device: torch.device | str,
        states: StateMemory | None = None,
        scales: Sequence[KVScales] = (),
        kv: Tensor | None = None,
    ) -> None:
        self.states = states
        if isinstance(places, int):
            places = [LayerPlace(0, layer) for layer in range(places)]
        if isinstance(geometry, KVCacheSpec):
            geometry = [geometry] * len(places)
        self.num_layers, self.num_pages, self.page_size = len(places), num_pages, page_size
        self.places, self.geometries, self.dtype = tuple(places), tuple(geometry), dtype
        if kv is None:
            # One page more than there are: discarded values are written there.
            num_planes = 1 + max(place.plane for place in places)
            shape = (num_planes, num_pages + 1, page_size, plane_width(places, self.geometries))
            kv = zeros(shape, dtype, device)
        self.kv, self.device, self.plane_bytes = kv, kv.device, kv.nbytes // len(kv)
        # Views made once: indexing a tensor costs a microsecond, and there are many layers.
        kinds = [(kind, place.part) for kind, place in zip(self.geometries, places, strict=True)]
        spans = {(kind, part): self.kv[..., part * kind.width :][..., : kind.width] for kind, part in kinds}
        pairs = {kind: _pairs(spans[kind], kind[0]) for kind in spans}
        self._pages_APSw = tuple(spans[kind] for kind in kinds)
        self._pairs_APS2KD = tuple(pairs[kind] for kind in kinds)
        self._layer_pages = tuple(
            span[place.plane] for span, place in zip(self._pages_APSw, places, strict=True)
        )
        self._slots_1Nw = tuple(self._slots(layer, 1) for layer in range(len(places)))
        self._heads = tuple(self._split_heads(layer) for layer in range(len(places)))
        self._groups = tuple(place.group for place in places)
        self._scales = tuple(scales) or (UNSCALED,) * len(places)
        assert len(self._scales) == len(places), "one pair of scales per layer"
        is_scaled = any(pair != UNSCALED for pair in self._scales)
        self._scales_L2 = torch.tensor(self._scales, device=self.device) if is_scaled else None
        self._divisors_w = tuple(self._divisors(layer) for layer in range(len(places)))

    def _split_heads(self, layer: int) -> tuple[Tensor, Tensor]:
        kind = self.geometries[layer]
        if kind.v_in_k:
            k_PSKD = self.pages(layer).unflatten(-1, (kind.num_kv_heads, -1))
            return k_PSKD, k_PSKD[..., : kind.v_head_dim]
        sizes = [kind.num_kv_heads * kind.head_dim, kind.num_kv_heads * kind.v_head_dim]
        k_PSKD, v_PSKF = (
            part.unflatten(-1, (kind.num_kv_heads, -1)) for part in self.pages(layer).split(sizes, dim=-1)
        )
        return k_PSKD, v_PSKF

    def of_layers(self, layers: Sequence[int]) -> PagedKVCache:
        """Return these layers, in this order, in the same memory; a layer may appear several times."""
        places, geometries = [self.places[i] for i in layers], [self.geometries[i] for i in layers]
        shape = (self.num_pages, self.page_size)
        scales = [self._scales[i] for i in layers]
        return PagedKVCache(places, *shape, geometries, self.dtype, self.device, scales=scales, kv=self.kv)

    def _divisors(self, layer: int) -> Tensor | None:
        """Return the scale of each of a layer's w values, fp32; None if all are 1."""
        kind, scales = self.geometries[layer], self._scales[layer]
        if scales == UNSCALED:
            return None
        assert self.dtype is torch.float8_e4m3fn and not kind.v_in_k, (
            "scales are those of keys and values in e4m3"
        )
        sizes = torch.tensor([kind.num_kv_heads * kind.head_dim, kind.num_kv_heads * kind.v_head_dim])
        return torch.tensor(scales).repeat_interleave(sizes).to(self.device)

    @property
    def skip_slot(self) -> int:
        return skip_slot(self.num_pages, self.page_size)

    def group(self, layer: int) -> int:
        return self._groups[layer]

    def scales(self, layer: int) -> KVScales:
        return self._scales[layer]

    def scales_of(self, first: int, count: int) -> Tensor | None:
        """Return the scales of consecutive layers, fp32 [count, 2]; None if the cache has none."""
        return None if self._scales_L2 is None else self._scales_L2[first : first + count]

    def pages(self, layer: int) -> Tensor:
        """Return a layer's pages [P + 1, S, w]."""
        return self._layer_pages[layer]

    def heads(self, layer: int) -> tuple[Tensor, Tensor]:
        """Return keys [P + 1, S, K, D] and values [P + 1, S, K, F] of a layer."""
        return self._heads[layer]

    def slots(self, layer: int, count: int = 1) -> Tensor:
        """Return slots [count, slots, w] of `count` equal, consecutive layers of one group."""
        return self._slots_1Nw[layer] if count == 1 else self._slots(layer, count)

    def _slots(self, layer: int, count: int) -> Tensor:
        plane = self.places[layer].plane
        return self._pages_APSw[layer][plane : plane + count].flatten(1, 2)

    def planes(self, layer: int, count: int) -> Tensor:
        """Return [count, P + 1, S, 2, K, D] of equal layers with values as long as keys."""
        plane, all_planes = self.places[layer].plane, self._pairs_APS2KD[layer]
        assert all_planes is not None, "only keys and values of one size are one tensor"
        return all_planes[plane : plane + count]

    def all_planes(self, layer: int) -> Tensor | None:
        """Return [A, P + 1, S, 2, K, D], this part of every plane; None if values are shorter."""
        return self._pairs_APS2KD[layer]

    def write(self, layer: int, slots_N: Tensor, kv_Nw: Tensor) -> None:
        """Write rows of one layer. `slots` int64; discarded rows carry `skip_slot`.

        NaNs and infinities become 0: other requests gather these rows and hide them with an additive mask,
        which NaN + -inf and 0 x NaN would defeat.
        """
        _copy_rows(self._slots_1Nw[layer][0], 0, slots_N, kv_Nw, self._divisors_w[layer])

    def write_all(self, first: int, slots_N: Tensor, kv_LN2KD: Tensor) -> None:
        """Write rows of consecutive layers of one group, as `write` does."""
        if self.scales_of(first, len(kv_LN2KD)) is None:
            _copy_rows(self.planes(first, len(kv_LN2KD)).flatten(1, 2), 1, slots_N, kv_LN2KD)
            return
        for layer, kv_N2KD in enumerate(kv_LN2KD, first):
            self.write(layer, slots_N, kv_N2KD.flatten(1))

    def compact_rows(self, source_slots: Tensor, target_slots: Tensor) -> None:
        """Move rows of all planes, int64 slots of any shape, as if all were read before one is written.

        Of the rows of a draft tree an accepted path remains, at consecutive slots. Slots of several page
        groups may be in one call. The fused CPU backend orders slots otherwise: `Backend.compact_rows`.
        """
        stored_ANw = self.kv.flatten(1, 2)
        if stored_ANw.dtype is torch.float8_e4m3fn:  # as in `_copy_rows`
            stored_ANw = stored_ANw.view(torch.uint8)
        moved_ANw = stored_ANw.index_select(1, source_slots.flatten())
        stored_ANw.index_copy_(1, target_slots.flatten(), moved_ANw)

    @staticmethod
    def bytes_per_page(num_planes: int, page_size: int, width: int, dtype: torch.dtype) -> int:
        """Return the bytes of one page over all planes, with `width` values per token and plane."""
        return num_planes * page_size * width * dtype.itemsize


def _copy_rows(
    stored: Tensor, dim: int, slots_N: Tensor, values: Tensor, divisors_w: Tensor | None = None
) -> None:
    # A masked key's value is still multiplied, by a weight of 0, which a NaN or infinity would survive.
    values = values.nan_to_num(0.0, 0.0, 0.0)
    if stored.dtype is torch.float8_e4m3fn:  # copied as bytes: PyTorch has no index_copy_ of it on CPUs
        values = values.float() if divisors_w is None else values.float() / divisors_w
        codes = values.clamp(-E4M3_MAX, E4M3_MAX).to(stored.dtype)
        stored, values = stored.view(torch.uint8), codes.view(torch.uint8)
    stored.index_copy_(dim, slots_N, values)


def _pairs(kv_APSw: Tensor, kind: KVCacheSpec) -> Tensor | None:
    """Return a view [A, P + 1, S, 2, K, D]; None if values are shorter than keys or part of them."""
    if kind.head_dim != kind.v_head_dim or kind.v_in_k:
        return None
    return kv_APSw.unflatten(-1, (2, kind.num_kv_heads, kind.head_dim))
