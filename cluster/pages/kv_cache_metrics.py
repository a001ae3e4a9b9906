"""Measures lifetime, idle time and reuse gap of a sample of pages, for metrics only.

    taken ──▶ full, kept ──▶ free ──▶ reused ──▶ free ──▶ evicted
      │                        └─ reuse gap ─┘    └─ idle ─┤
      └────────────────────── lifetime ────────────────────┘

Pages with content that was never kept are not measured to their end, as nothing of value is lost with them.
Called by `page_pool.py`; the time is the scheduler's.
"""

from __future__ import annotations

from collections.abc import Iterable

from ..metrics.histogram import Histogram
from ..metrics.metric import PAGE_S

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
