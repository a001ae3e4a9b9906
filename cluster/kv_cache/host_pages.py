"""Which pages of a group a tier keeps in host memory, by digest, and in which place. Ids only, no memory.

Every rank has the same places (`actors/targets/runners/page_mover.py`), so the scheduler decides for all of
them what is written where, and knows what is there. If no place is free, the page that is worth least gives
up its own. Its worth is that of `page_files.py`: the time of its last use plus the seconds for which it is
worth more than others.

Used by `kv_tier.py`.
"""

from __future__ import annotations

from collections import Counter
from heapq import heappop, heappush, heapreplace


class HostPages:
    """The pages of one group."""

    def __init__(self, num_places: int) -> None:
        self._num_places = num_places
        self._free = list(range(num_places - 1, -1, -1))
        self._place_of: dict[bytes, int] = {}
        self._worth_s: dict[bytes, float] = {}
        self._heap: list[tuple[float, bytes]] = []  # an entry for each page, with a worth that may have grown
        self._written: dict[bytes, tuple[int, float]] = {}  # place and worth of pages on their way here
        self._num_reads = Counter[bytes]()

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._place_of

    def renew(self, digest: bytes, worth_s: float) -> bool:
        """Record a use of a page; return whether it is here."""
        if digest not in self._place_of:
            return False
        self._worth_s[digest] = max(self._worth_s[digest], worth_s)
        return True

    def begin_write(self, digest: bytes, worth_s: float) -> int | None:
        """Return a place for a page that is not here; None if every page here is worth more, or is read."""
        place = self._free.pop() if self._free else self._evict(worth_s)
        if place is not None:
            self._written[digest] = place, worth_s
        return place

    def end_write(self, digest: bytes, *, has_moved: bool) -> None:
        place, worth_s = self._written.pop(digest)
        if not has_moved:
            self._free.append(place)
            return
        self._place_of[digest], self._worth_s[digest] = place, worth_s
        heappush(self._heap, (worth_s, digest))

    def begin_read(self, digest: bytes, worth_s: float) -> int | None:
        """Return the place of a page, which stays there until the read ends; None if it is not here."""
        if not self.renew(digest, worth_s):
            return None
        self._num_reads[digest] += 1
        return self._place_of[digest]

    def end_read(self, digest: bytes) -> None:
        self._num_reads[digest] -= 1

    def _evict(self, worth_s: float) -> int | None:
        """Forget the page that is worth least and return its place, unless it is worth more than this."""
        heap, read = self._heap, list[tuple[float, bytes]]()
        place = None
        while place is None and heap and heap[0][0] < worth_s:
            known_s, digest = heap[0]
            if known_s < self._worth_s[digest]:
                heapreplace(heap, (self._worth_s[digest], digest))
            elif self._num_reads[digest]:
                read.append(heappop(heap))
            else:
                heappop(heap)
                del self._worth_s[digest], self._num_reads[digest]
                place = self._place_of.pop(digest)
        for entry in read:
            heappush(heap, entry)
        return place

    def check_invariants(self) -> None:
        """Assert that every place is free, written, or has one page."""
        written = [place for place, _ in self._written.values()]
        places = [*self._free, *self._place_of.values(), *written]
        assert sorted(places) == list(range(self._num_places)), "a place is lost or has two pages"
        assert sorted(digest for _, digest in self._heap) == sorted(self._place_of), "the heap lacks a page"
        assert self._worth_s.keys() == self._place_of.keys()
