"""Manages pages: which are free, which sequence holds which, and which can be found again.

Each group of layers has a page table. A sequence's row in it begins at the first page that the group still
sees and ends where rows are planned:

    a group with a window    index   0 1 2 3 4 5 6 7 8
                             page    . . . . x x x . .       first = 4, end = 7

Pages below `first` were freed or never allocated; their stale entries are always masked, as `first` follows
from a position that the sequence reaches in any case. Steps run in order, so the next owner of such a page
writes it after every step in flight that reads it.

Recurrent states are managed next to the pages (`recurrent_state_manager.py`): a sequence that enters also
gets one.

Makes no decisions about sequences: `cluster/scheduler/scheduler.py`, its only caller, decides which ones grow
and leave.

Shape legend: G groups, S slots, P pages of the longest sequence, R requested sequences, K (group, sequence)
pairs that get or free pages, M pages that they get or free.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from itertools import chain, compress
from typing import NamedTuple

import numpy as np

from ..pages.kv_cache_groups import pages_for
from ..step.limits import SchedulerConfig
from ..step.scheduler_output import IntArray, StateEntry
from ..step.sequence import Sequence, SlotTable
from .prefix_cache import KVCacheMetricsCollector, PagePool, PrefixCache, PrefixHit, SampledPageTimes
from .recurrent_state_manager import RecurrentStateManager

_NOT_CACHED = np.iinfo(np.int32).max  # number of hashed pages that keeps a sequence's pages out of the cache


class PageTableUpdates(NamedTuple):
    """New entries of page tables, int32 [M] each, as in `SchedulerOutput`."""

    groups: IntArray
    slots: IntArray
    indices: IntArray
    pages: IntArray


class GroupPages:
    """A group's pages for a tier below (`kv_tier.py`), which holds them like a sequence while they move."""

    def __init__(self, group: int, cache: PrefixCache, pool: PagePool) -> None:
        self._group, self._cache, self._pool = group, cache, pool
        self.held = Counter[int]()

    def page_of(self, digest: bytes) -> int | None:
        return self._cache.page_of(self._group, digest)

    def num_computed(self, index: int) -> int:
        """Return how many pages are computed again without page `index`."""
        return 1

    def hold_new(self) -> int:
        """Return a free page without content, which is held."""
        (page,) = self._pool.allocate(1)
        self.held[page] += 1
        return page

    def hold(self, pages: list[int]) -> None:
        self._pool.touch(pages)
        self.held.update(pages)

    def insert(self, digest: bytes, page: int) -> None:
        self._cache.insert(self._group, [(digest, page)])

    def drop(self, pages: list[int]) -> None:
        self.held.subtract(pages)
        self._pool.release(pages)


class KVCacheManager:
    """Manages pages and page tables; the workers' page tables follow through the plans."""

    def __init__(self, config: SchedulerConfig) -> None:
        self._config = config
        self.groups = config.page_groups
        self.page_size = config.page_size
        self.times = SampledPageTimes()
        self.pools = tuple(
            PagePool(count, KVCacheMetricsCollector(self.times, count)) for count in config.num_pages
        )
        self.states: RecurrentStateManager | None = None
        if config.num_states is not None:
            saves = config.enable_prefix_caching
            self.states = RecurrentStateManager(
                config.num_states, config.num_slots, self.page_size, saves=saves
            )
        self.cache = PrefixCache(self.pools, self.groups, self.page_size, self.states)
        self._group_pages = tuple(
            GroupPages(number, self.cache, self.pools[group.pool]) for number, group in enumerate(self.groups)
        )
        shape = (len(self.groups), config.num_slots, pages_for(config.max_model_len, self.page_size))
        self.table_GSP = np.zeros(shape, dtype=np.int32)
        self.first_GS = np.zeros(shape[:2], dtype=np.int32)
        self.end_GS = np.zeros(shape[:2], dtype=np.int32)
        self._num_hashed_S = np.zeros(config.num_slots, dtype=np.int32)  # leading pages that the cache has
        self._pool_of = tuple(self.pools[group.pool] for group in self.groups)
        self._num_groups_of = [sum(g.pool == p for g in self.groups) for p in range(len(self.pools))]
        self._windows = [(g, group.window) for g, group in enumerate(self.groups) if group.window is not None]
        self._new_entries: list[IntArray] = []  # [4, M] each, of the plan being made

    @property
    def movable(self) -> tuple[GroupPages | RecurrentStateManager, ...]:
        """What moves to and from a tier below: the pages of each group, then states if there are any."""
        return self._group_pages if self.states is None else (*self._group_pages, self.states)

    @property
    def has_windows(self) -> bool:
        return bool(self._windows)

    @property
    def usage(self) -> float:
        """Share of pages in use in the fullest pool, or share of states if they are scarcer."""
        pages = max(1.0 - pool.num_free / pool.num_pages for pool in self.pools)
        return pages if self.states is None else max(pages, self.states.usage)

    # A sequence enters.

    def find_prefix(self, sequence: Sequence) -> PrefixHit:
        """Return a sequence's cached prefix, without its last token (its row yields the next one)."""
        digests = self.prefix_digests(sequence)
        return self.cache.match(digests) if digests else self.cache.no_hit

    def prefix_digests(self, sequence: Sequence) -> list[bytes]:
        """Return the digests of the pages that a sequence may take from the cache; none if it may not."""
        request = sequence.request
        uses_cache = self._config.enable_prefix_caching and request.uses_cache
        if not uses_cache or sequence.lacks_prompt_logprobs:
            return []
        usable = (len(sequence.token_ids) - 1) // self.page_size
        self.cache.hash_pages(sequence.digests, sequence.token_ids, usable, request.cache_salt)
        return sequence.digests[:usable]

    @property
    def has_state(self) -> bool:
        """Whether there is a state for a sequence that enters, if it needs one."""
        return self.states is None or self.states.num_available > 0

    def can_admit(self, hit: PrefixHit, num_tokens: int, num_running: int) -> bool:
        """Return whether a sequence can enter and leave every running one a page to grow in every group."""
        needed = [num_running * count for count in self._num_groups_of]
        for group, pages, (first, end) in zip(
            self.groups, hit.pages, self._page_spans(hit, num_tokens), strict=True
        ):
            pool = self.pools[group.pool]
            needed[group.pool] += end - first - len(pages) + pool.num_evictable(pages)
        return self._fits(needed)

    def admit(self, slot: int, hit: PrefixHit, sequence: Sequence) -> StateEntry | None:
        """Allocate the pages of a prefix and of the tokens after it, and a state.

        In groups that free no pages these are all pages of the tokens, so that a prompt never lacks any; in
        the others as many as the sequence can hold at once.
        """
        num_tokens, entry = len(sequence.token_ids), None
        is_cached = sequence.request.uses_cache
        if self.states is not None:  # before a page is evicted, and its state with it
            entry = self.states.admit(slot, sequence.digests, hit.num_pages, hit.num_shared, num_tokens)
        for pool, pages in zip(self._pool_of, hit.pages, strict=True):
            pool.touch(pages)
        self._num_hashed_S[slot] = hit.num_pages if is_cached else _NOT_CACHED
        for g, (first, end) in enumerate(self._page_spans(hit, num_tokens)):
            pages = hit.pages[g] + self._pool_of[g].allocate(end - first - len(hit.pages[g]))
            self.first_GS[g, slot], self.end_GS[g, slot] = first, end
            indices_M = np.arange(first, end, dtype=np.int32)
            self._write(np.full_like(indices_M, g), np.full_like(indices_M, slot), indices_M, pages)
        return entry

    def _page_spans(self, hit: PrefixHit, num_tokens: int) -> Iterable[tuple[int, int]]:
        """Yield the first index and the end of each group's pages when a sequence enters."""
        for group, pages in zip(self.groups, hit.pages, strict=True):
            first = hit.num_pages - len(pages)
            maximum = group.most_pages(num_tokens, self.page_size, self._config.max_rows)
            yield first, min(first + maximum, pages_for(num_tokens, self.page_size))

    # A sequence grows.

    def free_out_of_window(self, slots_R: IntArray, computed_R: IntArray) -> None:
        """Free the pages that no row at position `computed_R` or later sees."""
        for g, window in self._windows:
            first_R = np.maximum(computed_R - (window - 1), 0) // self.page_size
            freed = np.flatnonzero(first_R > self.first_GS[g, slots_R])
            if not len(freed):
                continue
            slots_K, begins_K = slots_R[freed], self.first_GS[g, slots_R[freed]]
            picks_M, indices_M = _expand_ranges(begins_K, first_R[freed] - begins_K)
            pages = self.table_GSP[g, slots_K[picks_M], indices_M].tolist()
            self._pool_of[g].release(reversed(pages))
            self.first_GS[g, slots_K] = first_R[freed]

    def short_of_pages(self, slots_R: IntArray, num_tokens_R: IntArray) -> list[int]:
        """Return the indices of the sequences that need pages for this many tokens."""
        return np.flatnonzero(self._num_missing_pages(slots_R, num_tokens_R).any(axis=0)).tolist()

    def can_allocate(self, slot: int, num_tokens: int) -> bool:
        """Return whether pages for this many tokens of a sequence are allocated or free, in every group."""
        needed, num_pages = [0] * len(self.pools), pages_for(num_tokens, self.page_size)
        for group, end in zip(self.groups, self.end_GS[:, slot].tolist(), strict=True):
            needed[group.pool] += max(num_pages - end, 0)
        return self._fits(needed)

    def allocate(self, slots_R: IntArray, num_tokens_R: IntArray) -> bool:
        """Allocate the pages for this many tokens of each sequence; False if there are too few for all."""
        missing_GR = self._num_missing_pages(slots_R, num_tokens_R)
        return not missing_GR.any() or self._allocate_missing(slots_R, missing_GR)

    def _allocate_missing(self, slots_R: IntArray, missing_GR: IntArray) -> bool:
        """Allocate this many pages in each group for each sequence; False if there are too few for all."""
        counts_G, needed = missing_GR.sum(axis=1).tolist(), [0] * len(self.pools)
        for group, count in zip(self.groups, counts_G, strict=True):
            needed[group.pool] += count
        if not self._fits(needed):
            return False
        groups_K, rows_K = (indices.astype(np.int32) for indices in np.nonzero(missing_GR))
        slots_K = slots_R[rows_K]
        begins_K, counts_K = self.end_GS[groups_K, slots_K], missing_GR[groups_K, rows_K]
        picks_M, indices_M = _expand_ranges(begins_K, counts_K)
        new_pages = [pool.allocate(count) for pool, count in zip(self._pool_of, counts_G, strict=True)]
        self._write(groups_K[picks_M], slots_K[picks_M], indices_M, [*chain.from_iterable(new_pages)])
        self.end_GS[groups_K, slots_K] = begins_K + counts_K
        return True

    def allocate_up_to(self, slot: int, num_tokens: int) -> int:
        """Allocate pages for up to `num_tokens` tokens of a sequence; return for how many."""
        while not self.can_allocate(slot, num_tokens):
            num_tokens = (pages_for(num_tokens, self.page_size) - 1) * self.page_size
        self.allocate(np.array([slot], dtype=np.int32), np.array([num_tokens], dtype=np.int32))
        return num_tokens

    def _num_missing_pages(self, slots_R: IntArray, num_tokens_R: IntArray) -> IntArray:
        return np.maximum(-(-num_tokens_R // self.page_size) - self.end_GS[:, slots_R], 0)

    def _fits(self, needed: list[int]) -> bool:
        return all(count <= pool.num_free for count, pool in zip(needed, self.pools, strict=True))

    def _write(self, groups_M: IntArray, slots_M: IntArray, indices_M: IntArray, pages: list[int]) -> None:
        entries = np.empty((4, len(pages)), dtype=np.int32)
        entries[0], entries[1], entries[2], entries[3] = groups_M, slots_M, indices_M, pages
        self.table_GSP[groups_M, slots_M, indices_M] = entries[3]
        self._new_entries.append(entries)

    def take_page_table_updates(self) -> PageTableUpdates:
        """Return what was written into the page tables since the last call, for the plan."""
        entries = self._new_entries or [np.empty((4, 0), dtype=np.int32)]
        self._new_entries = []
        return PageTableUpdates(*(entries[0] if len(entries) == 1 else np.concatenate(entries, axis=1)))

    # Its pages fill, and it leaves.

    def cache_full_pages(self, table: SlotTable, slots_R: IntArray) -> None:
        """Insert pages that are now full of computed, committed tokens into the prefix cache."""
        if not self._config.enable_prefix_caching:
            return
        full_R = table.num_computed_S[slots_R] // self.page_size
        grown = np.flatnonzero(full_R > self._num_hashed_S[slots_R])
        if len(grown):
            self._insert_pages(table, slots_R[grown], full_R[grown])

    def _insert_pages(self, table: SlotTable, slots_K: IntArray, full_K: IntArray) -> None:
        """Insert those of the first `full_K` pages of each sequence that the prefix cache lacks."""
        begins_K = self._num_hashed_S[slots_K]
        columns, digests_M = (slots_K, begins_K, full_K), list[bytes]()
        for slot, num_hashed, num_full in zip(*(c.tolist() for c in columns), strict=True):
            digests, salt = table.sequences[slot].digests, table.sequences[slot].request.cache_salt
            self.cache.hash_pages(digests, table.token_ids_SL[slot], num_full, salt)
            digests_M += digests[num_hashed:num_full]
        picks_M, indices_M = _expand_ranges(begins_K, full_K - begins_K)
        slots_M = slots_K[picks_M]
        for g, group in enumerate(self.groups):
            pages = zip(digests_M, self.table_GSP[g, slots_M, indices_M].tolist(), strict=True)
            if group.window is not None:
                # A page that was freed while its step was in flight belongs to another sequence.
                pages = compress(pages, (indices_M >= self.first_GS[g, slots_M]).tolist())
            self.cache.insert(g, pages)
        self._num_hashed_S[slots_K] = full_K

    def invalidate(self, slots: Iterable[int], *, marked: bool = False) -> None:
        """Empty the prefix cache, and keep these sequences' pages out of it until they enter again."""
        if not marked:
            self.cache.clear()
        self.cache.evict_marked()
        self._num_hashed_S[list(slots)] = _NOT_CACHED

    def free(self, slot: int) -> None:
        """Free a sequence's pages, the last of every group first, so that those are evicted first."""
        indices_P = np.arange(int(self.end_GS[:, slot].max()))[:, None]
        held_PG = (indices_P >= self.first_GS[:, slot]) & (indices_P < self.end_GS[:, slot])
        indices_M, groups_M = np.nonzero(held_PG[::-1])
        pages_M = self.table_GSP[groups_M, slot, len(indices_P) - 1 - indices_M]
        pools_M = np.array([group.pool for group in self.groups])[groups_M]
        for p, pool in enumerate(self.pools):
            pool.release(pages_M[pools_M == p].tolist())
        self.first_GS[:, slot] = self.end_GS[:, slot] = 0
        if self.states is not None:
            self.states.free(slot)

    def pages(self, group: int, slot: int) -> list[int]:
        return self.table_GSP[group, slot, self.first_GS[group, slot] : self.end_GS[group, slot]].tolist()

    def check_invariants(self, table: SlotTable) -> None:
        """Assert that no page is lost or duplicated, written while shared, or held in excess."""
        self.cache.check_invariants()
        if self.states is not None:
            self.states.check_invariants(table.sequences)
        uses = [np.zeros(pool.num_pages, dtype=np.int32) for pool in self.pools]
        for group, pages in zip(self.groups, self._group_pages, strict=True):
            np.add.at(uses[group.pool], list(pages.held.elements()), 1)
        group_of: dict[tuple[int, int], int] = {}
        for slot in table.sequences:
            for g, group in enumerate(self.groups):
                pages = self._check_row(table, g, slot)
                uses[group.pool][pages] += 1
                owners = {group_of.setdefault((group.pool, page), g) for page in pages}
                assert owners <= {g}, "a page is used by two groups"
        for pool, uses_P in zip(self.pools, uses, strict=True):
            pool.check_invariants()
            assert uses_P.tolist() == pool.ref_counts, "pages are used by no running sequence"
        idle = [slot for slot in range(self.end_GS.shape[1]) if slot not in table.sequences]
        assert not self.end_GS[:, idle].any(), "pages are held by no running sequence"

    def _check_row(self, table: SlotTable, g: int, slot: int) -> list[int]:
        """Return the pages of a sequence in a group, after checking that they are the right ones."""
        group, pool, pages = self.groups[g], self._pool_of[g], self.pages(g, slot)
        first, end = int(self.first_GS[g, slot]), int(self.end_GS[g, slot])
        num_computed = int(table.num_computed_S[slot])
        seen = group.first_page(int(table.min_computed(np.array([slot]))[0]), self.page_size)
        assert first <= seen, "a page was given back that a row still sees"
        assert end >= pages_for(num_computed, self.page_size) and len(set(pages)) == len(pages) == end - first
        # Rows of drafts that branch may go beyond the last token: see `DraftShape.limit`.
        branches = self._config.draft_shape.branches
        longest = self._config.max_length if branches else int(table.max_length_S[slot])
        assert len(pages) <= group.most_pages(longest, self.page_size, self._config.max_rows), (
            "too many pages"
        )
        for page in pages[max(num_computed // self.page_size - first, 0) :]:
            assert pool.ref_counts[page] == 1, f"page {page} is written by one sequence and used by another"
            assert page not in pool.cached_pages, f"page {page} is known to the cache but not full"
        return pages


def _expand_ranges(begins_K: IntArray, counts_K: IntArray) -> tuple[IntArray, IntArray]:
    """Return the elements of all ranges, int32 [M]: the index of each one's range, and its value."""
    shifts_K = begins_K + counts_K - np.cumsum(counts_K, dtype=np.int32)
    picks_M = np.repeat(np.arange(len(counts_K), dtype=np.int32), counts_K)
    return picks_M, np.arange(len(picks_M), dtype=np.int32) + shifts_K[picks_M]
