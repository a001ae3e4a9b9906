"""Reference counts of K/V pages, and the order in which free ones are used. Ids only, no memory.

A free page with content worth keeping (`mark_cached`) stays intact until nothing else is free: blank pages
are used first, then kept ones, least recently used first. `cluster/kv_cache/prefix_cache.py` knows what a
page holds, `cluster/kv_cache/kv_cache_manager.py` which sequence uses it.

The pool also measures lifetime, idle time and reuse gap of a sample of its pages, for metrics only:

    taken ──▶ full, kept ──▶ free ──▶ reused ──▶ free ──▶ evicted
      │                        └─ reuse gap ─┘    └─ idle ─┤
      └────────────────────── lifetime ────────────────────┘

Pages with content that was never kept are not measured to their end, as nothing of value is lost with them.
The time is the scheduler's.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence

from ..metrics.metric import PAGE_S, Histogram


def pages_for(num_tokens: int, page_size: int) -> int:
    """Return the pages that `num_tokens` tokens fill, including a partial last one."""
    return -(-num_tokens // page_size)


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


_SAMPLE_SIZE = 512  # sampled pages per pool, approximately


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
