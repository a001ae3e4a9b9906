"""Pools of K/V pages, and the prefix cache, which finds full pages by their content. Ids only, no memory.

`PagePool` counts references and orders free pages. A free page with content worth keeping (`mark_cached`)
stays intact until nothing else is free: blank pages are used first, then kept ones, least recently used
first. `PrefixCache` knows what a page holds, `kv_cache_manager.py` which sequence uses it.

A page's digest covers its tokens and, through its parent's digest, all tokens before them; K/V at a position
depend on exactly these. The salt is the root of the chain, so users with different salts share nothing. Pages
of generated tokens are cached like pages of prompts.

    root(salt) ──▶ digest 0 = H(root, tokens 0..15) ──▶ digest 1 = H(digest 0, tokens 16..31) ──▶ ...

A page's key is its group and digest. A prefix is a hit if all its pages are there in groups without a window,
and in groups with a window those that the next row sees:

    full      0 1 2 3 4 5 .      6 pages are a hit, as this window reaches two pages back. Without page 5 in
    window    . 1 2 . 4 5 6      either group, 3 pages would be: after 4 or 5 pages the window sees page 3

For targets with recurrent layers, a prefix must also end in a saved state (`recurrent_state_manager.py`).

Called by `kv_cache_manager.py`: `match` before a sequence enters, `insert` when a page is full of computed,
committed tokens. Pages that are not full are never used.

A pool also measures lifetime, idle time and reuse gap of a sample of its pages, for metrics only:

    taken ──▶ full, kept ──▶ free ──▶ reused ──▶ free ──▶ evicted
      │                        └─ reuse gap ─┘    └─ idle ─┤
      └────────────────────── lifetime ────────────────────┘

Pages with content that was never kept are not measured to their end, as nothing of value is lost with them.
The time is the scheduler's.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from hashlib import blake2b
from typing import NamedTuple

from ..metrics.metric import PAGE_S, Histogram
from ..pages.kv_cache_groups import KVCacheGroup
from ..step.scheduler_output import IntArray
from .recurrent_state_manager import RecurrentStateManager

DIGEST_BYTES = 16
# Whether a group's page with this digest is there; for the number of groups, the state at the page's end.
Has = Callable[[int, bytes], bool]
_SAMPLE_SIZE = 512  # sampled pages per pool, approximately


class PagePool:
    """Pages 0 .. num_pages - 1 of one pool."""

    def __init__(self, num_pages: int, ages: KVCacheMetricsCollector | None = None) -> None:
        self.num_pages = num_pages
        self._ages = ages or KVCacheMetricsCollector(SampledPageTimes(), 0)
        self.ref_counts = [0] * num_pages
        self.on_evict: Callable[[int], None] = lambda page: None  # called with kept pages that are evicted
        self._cached: set[int] = set()
        self._blank = list(range(num_pages - 1, -1, -1))  # a stack with low ids on top
        self._evictable: OrderedDict[int, None] = OrderedDict()  # kept and free, oldest first

    @property
    def num_free(self) -> int:
        return len(self._blank) + len(self._evictable)

    @property
    def num_blank(self) -> int:
        """Number of free pages without content that is worth keeping."""
        return len(self._blank)

    def num_evictable(self, pages: Sequence[int]) -> int:
        return sum(self.ref_counts[page] == 0 for page in pages)

    def allocate(self, count: int) -> list[int]:
        """Allocate free pages; their old content is lost. The caller has checked `num_free`."""
        assert count <= self.num_free, f"{count} pages wanted, {self.num_free} free"
        pages = [self._blank.pop() if self._blank else self._evict() for _ in range(count)]
        for page in pages:
            self.ref_counts[page] = 1
        self._ages.on_allocate(pages)
        return pages

    def touch(self, pages: Iterable[int]) -> None:
        for page in pages:
            if self.ref_counts[page] == 0:
                del self._evictable[page]
                self._ages.on_reuse(page)
            self.ref_counts[page] += 1

    def release(self, pages: Iterable[int]) -> None:
        """Remove a use of each page. Of kept pages that become free, the first ones are evicted first."""
        for page in pages:
            assert self.ref_counts[page] > 0, f"page {page} is released but not in use"
            self.ref_counts[page] -= 1
            if self.ref_counts[page] > 0:
                continue
            if page in self._cached:
                self._evictable[page] = None
                self._ages.on_free(page)
            else:
                self._blank.append(page)

    def mark_cached(self, page: int) -> None:
        assert self.ref_counts[page] > 0, f"page {page} is free: its content is not known"
        self._cached.add(page)

    def unmark_cached(self, page: int) -> None:
        self._cached.remove(page)
        if page in self._evictable:
            del self._evictable[page]
            self._blank.append(page)

    def unmark_all_cached(self) -> None:
        self._blank.extend(self._evictable)
        self._evictable.clear()
        self._cached.clear()

    def _evict(self) -> int:
        page, _ = self._evictable.popitem(last=False)
        self._cached.remove(page)
        self._ages.on_evict(page)
        self.on_evict(page)
        return page

    def check_invariants(self) -> None:
        """Assert that every page is either in use, blank or evictable."""
        in_use = {page for page, count in enumerate(self.ref_counts) if count}
        assert min(self.ref_counts) >= 0, "a page is released too often"
        assert len(in_use) + self.num_free == self.num_pages, "pages are lost or counted twice"
        assert in_use | set(self._blank) | set(self._evictable) == set(range(self.num_pages))
        assert self._evictable.keys() <= self._cached, "an evictable page is not worth keeping"
        assert self._cached.isdisjoint(self._blank), "a kept page is blank"

    @property
    def cached_pages(self) -> frozenset[int]:
        return frozenset(self._cached)


class PrefixHit(NamedTuple):
    """A cached prefix of `num_pages` pages; `num_shared` is its length if states were saved after every page.

    `pages` are those of each group, from the first one that is still seen after the prefix to the prefix's
    last.
    """

    num_pages: int
    pages: tuple[list[int], ...]
    num_shared: int = 0


class PrefixCache:
    """Maps (group, digest) to pages. Prefixes must end in one of the saved `states`, if there are any."""

    def __init__(
        self,
        pools: Sequence[PagePool],
        groups: Sequence[KVCacheGroup],
        page_size: int,
        states: RecurrentStateManager | None = None,
    ) -> None:
        self._states = states
        self._pools = pools
        self._groups = groups
        self._page_size = page_size
        self._page_of: list[dict[bytes, int]] = [{} for _ in groups]
        self._key_of: list[dict[int, tuple[int, bytes]]] = [{} for _ in pools]  # page -> group, digest
        # group, digest, page; None while marking is off
        self._marked_pages: list[tuple[int, bytes, int]] | None = None
        for pool, key_of in zip(pools, self._key_of, strict=True):
            pool.on_evict = partial(self._forget, key_of)

    def hash_pages(self, digests: list[bytes], token_ids: IntArray, num_pages: int, salt: str | None) -> None:
        """Extend a sequence's chain of `digests` to its first `num_pages` pages."""
        parent = digests[-1] if digests else _root(salt)
        for begin in range(len(digests) * self._page_size, num_pages * self._page_size, self._page_size):
            content = token_ids[begin : begin + self._page_size].tobytes()
            parent = blake2b(parent + content, digest_size=DIGEST_BYTES).digest()
            digests.append(parent)

    def page_of(self, group: int, digest: bytes) -> int | None:
        return self._page_of[group].get(digest)

    @property
    def is_marking(self) -> bool:
        return self._marked_pages is not None

    @property
    def no_hit(self) -> PrefixHit:
        return PrefixHit(0, tuple([] for _ in self._groups))

    def match(self, digests: list[bytes]) -> PrefixHit:
        """Return the longest cached prefix. Its pages may be free: `touch` them before allocating."""
        shared, count = self._longest(digests, self._holds)
        firsts = [group.first_page(count * self._page_size, self._page_size) for group in self._groups]
        pages = [
            [page_of[digest] for digest in digests[first:count]]
            for page_of, first in zip(self._page_of, firsts, strict=True)
        ]
        return PrefixHit(count, tuple(pages), shared)

    def missing(self, digests: list[bytes], is_elsewhere: Has) -> list[tuple[int, int, bytes]]:
        """Return what to get from elsewhere for the longest prefix: index, group (as in `Has`), digest.

        By index, so the last one is of the last page that is missing.
        """

        def can_get(group: int, digest: bytes) -> bool:
            return self._holds(group, digest) or is_elsewhere(group, digest)

        _, count = self._longest(digests, can_get)
        firsts = [group.first_page(count * self._page_size, self._page_size) for group in self._groups]
        if self._states is not None:
            firsts.append(count - 1)
        return [
            (index, g, digests[index])
            for index in range(count)
            for g, first in enumerate(firsts)
            if index >= first and not self._holds(g, digests[index])
        ]

    def _holds(self, group: int, digest: bytes) -> bool:
        if self._states is not None and group == len(self._groups):
            return digest in self._states.saved
        return digest in self._page_of[group]

    def _longest(self, digests: list[bytes], has: Has) -> tuple[int, int]:
        """Return the length of the longest prefix that is there, without and with the need of a state."""
        shared = count = self._shorten_to_windows(digests, self._match_full(digests, has), has)
        if self._states is not None:
            count = self._shorten_to_states(digests, count, has)
        return shared, count

    def _match_full(self, digests: list[bytes], has: Has) -> int:
        """Return the length of the longest prefix that every group without a window has."""
        count = len(digests)
        for g, group in enumerate(self._groups):
            if group.window is None:
                count = next((i for i in range(count) if not has(g, digests[i])), count)
        return count

    def _shorten_to_windows(self, digests: list[bytes], count: int, has: Has) -> int:
        """Return the longest prefix of at most `count` pages after which every window is cached."""
        windowed = [g for g, group in enumerate(self._groups) if group.window is not None]
        seen = dict.fromkeys(windowed, count)  # pages seen[g] .. count - 1 are cached
        complete = not windowed
        while not complete:
            complete = True
            for g in windowed:
                first = self._groups[g].first_page(count * self._page_size, self._page_size)
                unseen = range(first, min(seen[g], count))
                gap = next((i for i in reversed(unseen) if not has(g, digests[i])), None)
                if gap is None:
                    seen[g] = min(first, seen[g])
                else:  # every window that reaches here from a shorter prefix has the same gap
                    count, complete = gap, False
        return count

    def _shorten_to_states(self, digests: list[bytes], count: int, has: Has) -> int:
        """Return the longest prefix of at most `count` pages that ends in a state and has its windows."""
        while (shorter := self._last_state(digests, count, has)) != count:
            count = self._shorten_to_windows(digests, shorter, has)
        return count

    def _last_state(self, digests: list[bytes], count: int, has: Has) -> int:
        states = len(self._groups)
        return next((n for n in range(count, 0, -1) if has(states, digests[n - 1])), 0)

    def insert(self, group: int, pages: Iterable[tuple[bytes, int]]) -> None:
        """Insert full pages. For content that is already cached the older page remains."""
        number = self._groups[group].pool
        pool, page_of, key_of = self._pools[number], self._page_of[group], self._key_of[number]
        for digest, page in pages:
            if digest in page_of:
                continue
            assert page not in key_of, f"page {page} has two contents"
            page_of[digest] = page
            key_of[page] = group, digest
            pool.mark_cached(page)
            if self._marked_pages is not None:
                self._marked_pages.append((group, digest, page))

    def clear(self) -> None:
        """Forget everything; running sequences keep their pages."""
        for known in (*self._page_of, *self._key_of):
            known.clear()
        for pool in self._pools:
            pool.unmark_all_cached()
        if self._states is not None:
            self._states.clear()
        if self._marked_pages is not None:
            self._marked_pages = []

    def mark(self) -> None:
        """Mark everything that is inserted from now on, to be removed together."""
        self._marked_pages = []

    def evict_marked(self) -> None:
        """Remove marked pages that are still cached, and stop marking."""
        for group, digest, page in self._marked_pages or ():
            number = self._groups[group].pool
            if self._key_of[number].get(page) == (group, digest):
                self._forget(self._key_of[number], page)
                self._pools[number].unmark_cached(page)
        self._marked_pages = None

    def _forget(self, key_of: dict[int, tuple[int, bytes]], page: int) -> None:
        group, digest = key_of.pop(page)
        del self._page_of[group][digest]
        if self._states is not None:
            self._states.evict(digest)

    def check_invariants(self) -> None:
        """Assert that keys and pages are one to one, and that the pools keep exactly these pages."""
        for p, (pool, key_of) in enumerate(zip(self._pools, self._key_of, strict=True)):
            groups = [g for g, group in enumerate(self._groups) if group.pool == p]
            found = {(page, g, digest) for g in groups for digest, page in self._page_of[g].items()}
            assert found == {(page, *key) for page, key in key_of.items()}, "a page has two contents"
            assert pool.cached_pages == key_of.keys(), "pool and cache disagree on what is kept"


def _root(salt: str | None) -> bytes:
    text = b"" if salt is None else b"salt:" + salt.encode()
    return blake2b(text, digest_size=DIGEST_BYTES).digest()


class SampledPageTimes:
    """Measurements over all pools of an engine; `now_s` is set before each plan."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.lifetime, self.idle, self.reuse_gap = (Histogram(PAGE_S) for _ in range(3))


class KVCacheMetricsCollector:
    def __init__(self, times: SampledPageTimes, num_pages: int) -> None:
        self._times = times
        stride = -(-num_pages // _SAMPLE_SIZE)
        self._sample = frozenset(range(0, num_pages, stride)) if num_pages else frozenset[int]()
        self._taken_s: dict[int, float] = {}
        self._free_s: dict[int, float] = {}

    def on_allocate(self, pages: Iterable[int]) -> None:
        for page in self._sample.intersection(pages):
            self._taken_s[page] = self._times.now_s

    def on_free(self, page: int) -> None:
        if page in self._sample:
            self._free_s[page] = self._times.now_s

    def on_reuse(self, page: int) -> None:
        if page in self._free_s:
            self._times.reuse_gap.observe(self._times.now_s - self._free_s.pop(page))

    def on_evict(self, page: int) -> None:
        if page in self._free_s:
            self._times.idle.observe(self._times.now_s - self._free_s.pop(page))
            self._times.lifetime.observe(self._times.now_s - self._taken_s[page])
