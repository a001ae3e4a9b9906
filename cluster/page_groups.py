"""Layers that see the same window share pages: which groups a model needs, and how pools share memory.

A page holds `page_size` tokens of the layers of one *group*, and every group has a page table of its own: so
layers that see only the newest tokens give back the pages behind them while others keep all of theirs. Groups
draw page ids from *pools*. A pool's memory is [planes, pages, ..]; each layer of a group lies in a plane of
its own, and all groups of a pool use the same planes under different ids, so that any id can go to any group:

    12 layers, 10 of them with a window; 2 planes        one sequence's pages in the pool
      group 0   layers 5, 11; see all                      0 1 2 3 4 5 6 7
      group 1   layers 0, 1; see the last window           . . . . . . 8 9
      ..                                                   . . . . . . .
      group 5   layers 9, 10; likewise                     . . . . . . 16 17

Arithmetic only. `plan_pages` and `share_pages` are called while a model is loaded; `PageGroup`s are what the
scheduler knows of it. Who has which page is `page_books.py`'s.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from .pages import pages_for

_GROUP_COST = 0.02  # a page table more, as a share of what the model's pages take


@dataclass(frozen=True, slots=True)
class PageGroup:
    """Layers whose K/V share a page table.

    Attributes:
        pool: where its pages come from.
        window: a row at position p sees keys > p - window; None sees all. Pages behind it are given back.
    """

    pool: int = 0
    window: int | None = None

    def first_page(self, position: int, page_size: int) -> int:
        """The first page that a row at this position sees; equal to the row's own page at the earliest."""
        return 0 if self.window is None else max(position - self.window + 1, 0) // page_size

    def most_pages(self, num_tokens: int, page_size: int, max_rows: int) -> int:
        """Most pages that a sequence of so many tokens holds at once, in steps of at most `max_rows` rows."""
        all_pages = pages_for(num_tokens, page_size)
        if self.window is None:
            return all_pages
        return min(all_pages, pages_for(self.window + max_rows, page_size) + 1)


@dataclass(frozen=True, slots=True)
class LayerPlace:
    """Where a layer's K/V lie.

    Attributes:
        group: whose page table leads to them.
        plane: of the memory of that group's pool.
    """

    group: int
    plane: int


@dataclass(frozen=True, slots=True)
class PagePlan:
    """The groups of a target and its drafter.

    Attributes:
        groups: by number; a group of the full layers, which see all, comes first in its model.
        target, drafter: the place of each layer. Where both use a pool, page ids are the same and each has
            memory of its own.
    """

    groups: tuple[PageGroup, ...]
    target: tuple[LayerPlace, ...]
    drafter: tuple[LayerPlace, ...]

    @property
    def num_pools(self) -> int:
        return count_pools(self.groups)

    def num_planes(self, places: Iterable[LayerPlace], pool: int) -> int:
        """Planes that a model with these places (`target` or `drafter`) has in a pool."""
        return max((place.plane + 1 for place in places if self.groups[place.group].pool == pool), default=0)

    def pages_per_sequence(self, num_tokens: int, page_size: int, max_rows: int) -> tuple[int, ...]:
        """Most pages of each pool that a sequence of so many tokens holds at once."""
        return pages_per_sequence(self.groups, num_tokens, page_size, max_rows)


# A target and a drafter whose layers all share one page table.
ONE_GROUP = PagePlan((PageGroup(),), (LayerPlace(0, 0),), (LayerPlace(0, 0),))


def count_pools(groups: Sequence[PageGroup]) -> int:
    return 1 + max(group.pool for group in groups)


def pages_per_sequence(
    groups: Sequence[PageGroup], num_tokens: int, page_size: int, max_rows: int
) -> tuple[int, ...]:
    """Most pages of each pool that a sequence of so many tokens holds at once."""
    pages = [0] * count_pools(groups)
    for group in groups:
        pages[group.pool] += group.most_pages(num_tokens, page_size, max_rows)
    return tuple(pages)


def longest_sequence(
    groups: Sequence[PageGroup], num_pages: Sequence[int], page_size: int, max_rows: int, max_model_len: int
) -> int:
    """Tokens of the longest sequence that the pools hold; its last token is never computed, needs no page."""

    def is_too_long(num_tokens: int) -> bool:
        needed = pages_per_sequence(groups, num_tokens - 1, page_size, max_rows)
        return any(need > have for need, have in zip(needed, num_pages, strict=True))

    return bisect_left(range(1, max_model_len + 1), True, key=is_too_long)


def plan_pages(
    target_windows: Sequence[int | None], drafter_windows: Sequence[int | None], max_model_len: int
) -> PagePlan:
    """Groups for a target's and a drafter's layers (none: no drafter), given each layer's window.

    Two models that are one group each, with the same window, share it: the same page ids, each its own
    memory. Else each has a pool of its own. Within a model each window's layers are cut into groups of at
    most p, the number of planes. A small p makes many groups, each with a page table; a large one leaves
    planes of groups unused, and makes a window's few layers take as much as another's many. So p is what
    costs least: planes beside layers, what a sequence of `max_model_len` holds beside what a page table per
    layer would hold, and a little for each group. One group for all, which holds what its widest layer needs,
    is tried, too.
    """
    target = _plan_model(_clip(target_windows, max_model_len), max_model_len)
    if not drafter_windows:
        return PagePlan(*target, ())
    drafter = _plan_model(_clip(drafter_windows, max_model_len), max_model_len)
    if len(target[0]) == 1 and target[0] == drafter[0]:
        return PagePlan(*target, drafter[1])
    places = tuple(replace(place, group=place.group + len(target[0])) for place in drafter[1])
    return PagePlan((*target[0], *(replace(group, pool=1) for group in drafter[0])), target[1], places)


_Model = tuple[tuple[PageGroup, ...], tuple[LayerPlace, ...]]


def _clip(windows: Sequence[int | None], max_model_len: int) -> list[int | None]:
    return [None if window is None or window >= max_model_len else window for window in windows]


def _plan_model(windows: list[int | None], max_model_len: int) -> _Model:
    """Groups of one model, all in pool 0."""
    layers_of: dict[int | None, list[int]] = {None: []} if None in windows else {}
    for layer, window in enumerate(windows):
        layers_of.setdefault(window, []).append(layer)
    widest = next(iter(layers_of)) if None in layers_of else max(w for w in layers_of if w is not None)
    candidates = [_cut({widest: list(range(len(windows)))}, len(windows))]
    if len(layers_of) > 1:
        planes = range(1, 1 + max(len(layers) for layers in layers_of.values()))
        candidates += [_cut(layers_of, p) for p in planes]
    return min(candidates, key=lambda model: _cost(model, windows, max_model_len))


def _cut(layers_of: dict[int | None, list[int]], num_planes: int) -> _Model:
    groups: list[PageGroup] = []
    places: dict[int, LayerPlace] = {}
    for window, layers in layers_of.items():
        for nth, layer in enumerate(layers):
            if nth % num_planes == 0:
                groups.append(PageGroup(window=window))
            places[layer] = LayerPlace(len(groups) - 1, nth % num_planes)
    return tuple(groups), tuple(places[layer] for layer in sorted(places))


def _cost(model: _Model, windows: list[int | None], max_model_len: int) -> float:
    groups, places = model
    planes = 1 + max(place.plane for place in places)

    def held(windows: Iterable[int | None]) -> float:
        return sum(1.0 if window is None else window / max_model_len for window in windows)

    padding = planes * len(groups) / len(windows)
    excess = planes * held(group.window for group in groups) / held(windows)
    return padding + excess + _GROUP_COST * len(groups)


def share_pages(
    plan: PagePlan,
    page_size: int,
    max_rows: int,
    max_num_seqs: int,
    max_model_len: int,
    page_bytes: tuple[int, ...],
    budget_bytes: int,
) -> tuple[int, ...]:
    """Pages of each pool, such that all run out together when `max_num_seqs` sequences of one length run.

    That length is the greatest that fits. Each pool holds at least one sequence of `max_model_len` tokens, if
    the budget allows; the others get what is left.

    Args:
        page_bytes: of a page of each pool, in all its planes.
    """

    def per_sequence(num_tokens: int) -> tuple[int, ...]:
        return plan.pages_per_sequence(num_tokens, page_size, max_rows)

    def cost(num_tokens: int) -> int:
        return max_num_seqs * _dot(per_sequence(num_tokens), page_bytes)

    length = max(bisect_right(range(1, max_model_len + 1), budget_bytes, key=cost), 1)
    weights, least = per_sequence(length), per_sequence(max_model_len)
    if _dot(least, page_bytes) > budget_bytes:
        return tuple(_by_weight(weights, page_bytes, budget_bytes))
    pages = list(least)
    free = set(range(len(pages)))  # pools that get more than the least
    while free:
        fixed = sum(pages[p] * page_bytes[p] for p in range(len(pages)) if p not in free)
        shares = _by_weight(
            [w * (p in free) for p, w in enumerate(weights)], page_bytes, budget_bytes - fixed
        )
        short = {p for p in free if shares[p] < least[p]}
        if not short:
            return tuple(shares[p] if p in free else pages[p] for p in range(len(pages)))
        free -= short
    return tuple(pages)


def _by_weight(weights: Sequence[int], page_bytes: Sequence[int], budget_bytes: int) -> list[int]:
    unit_bytes = _dot(weights, page_bytes)
    return [budget_bytes * weight // unit_bytes for weight in weights]


def _dot(pages: Sequence[int], page_bytes: Sequence[int]) -> int:
    return sum(count * size for count, size in zip(pages, page_bytes, strict=True))
