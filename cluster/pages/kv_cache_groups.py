"""Groups of layers with the same window share pages: which groups a model needs, and how pools share memory.

A page holds `page_size` tokens of the layers of one *group*, and every group has a page table. So layers with
a sliding window can free old pages while others keep all of theirs. Groups draw page ids from *pools*. A
pool's memory is [planes, pages, ..]; each layer of a group has a plane, and all groups of a pool use the same
planes with different ids, so that any id can go to any group:

    12 layers, 10 of them with a window; 2 planes        one sequence's pages in the pool
      group 0   layers 5, 11; full                         0 1 2 3 4 5 6 7
      group 1   layers 0, 1; see the last window           . . . . . . 8 9
      ..                                                   . . . . . . .
      group 5   layers 9, 10; likewise                     . . . . . . 16 17

Layers may differ in geometry (heads and their sizes), but not within a group. A plane is as wide as the
widest layer needs; narrower layers are next to each other in it, each in a *part* of every token's values:

    a token in a plane, K and V of 16 heads of 256   [ a sliding layer                       ]
    the same, K and V of 4 heads of 512              [ a full layer     | another full layer ]

Arithmetic only. `plan_kv_cache` and `share_pages` are called while a model is loaded; the scheduler knows
only the `KVCacheGroup`s. `cluster/kv_cache/kv_cache_manager.py` manages the pages themselves.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

_GROUP_COST = 0.02  # cost of another page table, as a share of what the model's pages take


def pages_for(num_tokens: int, page_size: int) -> int:
    """Return the pages that `num_tokens` tokens fill, including a partial last one."""
    return -(-num_tokens // page_size)


@dataclass(frozen=True, slots=True)
class KVCacheGroup:
    """Layers with K/V in one page table of `pool`; a row at position p sees keys > p - window (None: all)."""

    pool: int = 0
    window: int | None = None

    def first_page(self, position: int, page_size: int) -> int:
        """Return the first page that a row at this position sees; at most the row's own page."""
        return 0 if self.window is None else max(position - self.window + 1, 0) // page_size

    def most_pages(self, num_tokens: int, page_size: int, max_rows: int) -> int:
        """Return the most pages that a sequence of `num_tokens` tokens holds at once."""
        all_pages = pages_for(num_tokens, page_size)
        if self.window is None:
            return all_pages
        return min(all_pages, pages_for(self.window + max_rows, page_size) + 1)


@dataclass(frozen=True, slots=True)
class KVCacheSpec:
    """K/V of a token in a layer, on one rank; `v_in_k`: a value is the beginning of its key (MLA)."""

    num_kv_heads: int
    head_dim: int
    v_head_dim: int
    v_in_k: bool = False

    @property
    def width(self) -> int:
        return self.num_kv_heads * (self.head_dim + self.v_head_dim * (not self.v_in_k))


@dataclass(frozen=True, slots=True)
class LayerPlace:
    """The location of a layer's K/V: the group of its page table, and the plane in that group's pool.

    `part` is the number of layers with this geometry before it in each token's values.
    """

    group: int
    plane: int
    part: int = 0


@dataclass(frozen=True, slots=True)
class KVCacheLayout:
    """The groups of a target and its drafter.

    Attributes:
        groups: by index; the group of a model's full layers comes first.
        target, drafter: the location of each layer. Where both use a pool, page ids are the same and each has
            memory of its own.
    """

    groups: tuple[KVCacheGroup, ...]
    target: tuple[LayerPlace, ...]
    drafter: tuple[LayerPlace, ...]

    @property
    def num_pools(self) -> int:
        return count_pools(self.groups)

    def num_planes(self, places: Iterable[LayerPlace], pool: int) -> int:
        return max((place.plane + 1 for place in places if self.groups[place.group].pool == pool), default=0)

    def pages_per_sequence(self, num_tokens: int, page_size: int, max_rows: int) -> tuple[int, ...]:
        return pages_per_sequence(self.groups, num_tokens, page_size, max_rows)


# A target and a drafter whose layers all share one page table.
ONE_GROUP = KVCacheLayout((KVCacheGroup(),), (LayerPlace(0, 0),), (LayerPlace(0, 0),))


def plane_width(places: Sequence[LayerPlace], geometries: Sequence[KVCacheSpec]) -> int:
    return max((place.part + 1) * kind.width for place, kind in zip(places, geometries, strict=True))


def count_pools(groups: Sequence[KVCacheGroup]) -> int:
    return 1 + max(group.pool for group in groups)


def pages_per_sequence(
    groups: Sequence[KVCacheGroup], num_tokens: int, page_size: int, max_rows: int
) -> tuple[int, ...]:
    """Return the most pages of each pool that a sequence of `num_tokens` tokens holds at once."""
    pages = [0] * count_pools(groups)
    for group in groups:
        pages[group.pool] += group.most_pages(num_tokens, page_size, max_rows)
    return tuple(pages)


def longest_sequence(
    groups: Sequence[KVCacheGroup],
    num_pages: Sequence[int],
    page_size: int,
    max_rows: int,
    max_model_len: int,
) -> int:
    """Return the longest sequence that the pools hold. Its last token is never computed and needs no page."""

    def is_too_long(num_tokens: int) -> bool:
        needed = pages_per_sequence(groups, num_tokens - 1, page_size, max_rows)
        return any(
            needed_pages > available for needed_pages, available in zip(needed, num_pages, strict=True)
        )

    return bisect_left(range(1, max_model_len + 1), True, key=is_too_long)


def plan_kv_cache(
    target_windows: Sequence[int | None],
    drafter_windows: Sequence[int | None],
    max_model_len: int,
    target_geometries: Sequence[KVCacheSpec] = (),
) -> KVCacheLayout:
    """Return the groups of a target's and a drafter's layers, given each layer's window (empty: no drafter).

    Two models that are one group each, with the same window, share it: the same page ids, each with memory of
    its own. Otherwise each has a pool of its own. Within a model the layers of a window and geometry are
    split into groups of at most p planes. A small p makes many groups with a page table each; a large p
    leaves planes unused, and a window's few layers take as much as another's many. The p with the lowest cost
    is chosen: planes relative to layers, the pages of a sequence of `max_model_len` relative to those with a
    page table per layer, and a small cost per group. A single group for all layers, with the memory of its
    widest window, is also tried if there is one geometry.

    Args:
        target_geometries: of the target's layers on a rank; by default all are equal, like a drafter's.
    """
    target = _plan_model(_clip(target_windows, max_model_len), target_geometries, max_model_len)
    if not drafter_windows:
        return KVCacheLayout(*target, ())
    drafter = _plan_model(_clip(drafter_windows, max_model_len), (), max_model_len)
    if len(target[0]) == 1 and target[0] == drafter[0]:
        return KVCacheLayout(*target, drafter[1])
    places = tuple(replace(place, group=place.group + len(target[0])) for place in drafter[1])
    return KVCacheLayout((*target[0], *(replace(group, pool=1) for group in drafter[0])), target[1], places)


_Model = tuple[tuple[KVCacheGroup, ...], tuple[LayerPlace, ...]]
_SAME_GEOMETRY = KVCacheSpec(1, 1, 1)


@dataclass(frozen=True, slots=True)
class _Layer:
    """The properties by which layers are grouped; `parts` such layers fit into a plane."""

    window: int | None
    geometry: KVCacheSpec
    parts: int


def _clip(windows: Sequence[int | None], max_model_len: int) -> list[int | None]:
    return [None if window is None or window >= max_model_len else window for window in windows]


def _plan_model(windows: list[int | None], geometries: Sequence[KVCacheSpec], max_model_len: int) -> _Model:
    """Group a model's layers by window and geometry into pages, by the plan with the least `_cost`.

    Candidates have 1, 2, .. planes; with one geometry also a single group, with the widest window for all
    layers.
    """
    kinds = geometries or (_SAME_GEOMETRY,) * len(windows)
    width = max(kind.width for kind in kinds)
    layers = [_Layer(w, kind, width // kind.width) for w, kind in zip(windows, kinds, strict=True)]
    layers_of: dict[_Layer, list[int]] = {layer: [] for layer in layers if layer.window is None}
    for i, layer in enumerate(layers):
        layers_of.setdefault(layer, []).append(i)
    maximum = max(-(-len(members) // kind.parts) for kind, members in layers_of.items())
    candidates = [_cut(layers_of, p) for p in range(1, 1 + maximum)]
    if len(set(kinds)) == 1:
        widest = replace(
            layers[0], window=None if None in windows else max(w for w in windows if w is not None)
        )
        candidates.insert(0, _cut({widest: list(range(len(layers)))}, len(layers)))
    return min(candidates, key=lambda model: _cost(model, layers, max_model_len))


def _cut(layers_of: Mapping[_Layer, list[int]], num_planes: int) -> _Model:
    groups: list[KVCacheGroup] = []
    places: dict[int, LayerPlace] = {}
    for kind, members in layers_of.items():
        for nth, layer in enumerate(members):
            plane, part = divmod(nth % (num_planes * kind.parts), kind.parts)
            if plane == part == 0:
                groups.append(KVCacheGroup(window=kind.window))
            places[layer] = LayerPlace(len(groups) - 1, plane, part)
    return tuple(groups), tuple(places[layer] for layer in sorted(places))


def _cost(model: _Model, layers: Sequence[_Layer], max_model_len: int) -> float:
    """Return the memory that a plan takes relative to what the layers need, plus a cost per group.

    `padding`: empty planes. `excess`: pages that a long sequence holds for groups whose window is wider than
    needed.
    """
    groups, places = model
    planes = 1 + max(place.plane for place in places)

    def pages_held(window: int | None) -> float:
        return 1.0 if window is None else window / max_model_len

    padding = planes * len(groups) / sum(1 / layer.parts for layer in layers)
    needed = sum(pages_held(layer.window) / layer.parts for layer in layers)
    excess = planes * sum(pages_held(group.window) for group in groups) / needed
    return padding + excess + _GROUP_COST * len(groups)


def share_pages(
    plan: KVCacheLayout,
    page_size: int,
    max_rows: int,
    max_num_seqs: int,
    max_model_len: int,
    page_bytes: tuple[int, ...],
    budget_bytes: int,
) -> tuple[int, ...]:
    """Return the pages of each pool such that all run out together with `max_num_seqs` equal sequences.

    Their length is the greatest that fits. Each pool holds at least one sequence of `max_model_len` tokens,
    if the budget allows; the others get the rest. `page_bytes` are those of a page of each pool, over all its
    planes.
    """

    def per_sequence(num_tokens: int) -> tuple[int, ...]:
        return plan.pages_per_sequence(num_tokens, page_size, max_rows)

    def cost(num_tokens: int) -> int:
        return max_num_seqs * _dot(per_sequence(num_tokens), page_bytes)

    length = max(bisect_right(range(1, max_model_len + 1), budget_bytes, key=cost), 1)
    weights, minimum = per_sequence(length), per_sequence(max_model_len)
    if _dot(minimum, page_bytes) > budget_bytes:
        return tuple(_by_weight(weights, page_bytes, budget_bytes))
    pages = list(minimum)
    free = set(range(len(pages)))  # pools that get more than the minimum
    while free:
        fixed = sum(pages[p] * page_bytes[p] for p in range(len(pages)) if p not in free)
        shares = _by_weight(
            [w * (p in free) for p, w in enumerate(weights)], page_bytes, budget_bytes - fixed
        )
        short = {p for p in free if shares[p] < minimum[p]}
        if not short:
            return tuple(shares[p] if p in free else pages[p] for p in range(len(pages)))
        free -= short
    return tuple(pages)


def _by_weight(weights: Sequence[int], page_bytes: Sequence[int], budget_bytes: int) -> list[int]:
    unit_bytes = _dot(weights, page_bytes)
    return [budget_bytes * weight // unit_bytes for weight in weights]


def _dot(pages: Sequence[int], page_bytes: Sequence[int]) -> int:
    return sum(count * size for count, size in zip(pages, page_bytes, strict=True))
