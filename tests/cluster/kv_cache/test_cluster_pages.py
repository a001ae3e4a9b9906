"""The page pool and the prefix cache: the order of eviction, and which prefixes are found."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from manta.cluster.kv_cache.prefix_cache import PagePool, PrefixCache
from manta.cluster.pages.kv_cache_groups import KVCacheGroup

PAGE = 4


@pytest.fixture
def pool() -> PagePool:
    return PagePool(6)


@pytest.fixture
def cache(pool: PagePool) -> PrefixCache:
    """A cache over one group without a window."""
    return PrefixCache([pool], [KVCacheGroup()], PAGE)


def tokens(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int32)


def digests_of(cache: PrefixCache, values: np.ndarray, salt: str | None = None) -> list[bytes]:
    digests: list[bytes] = []
    cache.hash_pages(digests, values, len(values) // PAGE, salt)
    return digests


def found(cache: PrefixCache, digests: list[bytes]) -> list[int]:
    """Return the pages of a hit with a single group without a window."""
    count, (pages,), _ = cache.match(digests)
    assert len(pages) == count
    return pages


def test_free_pages_are_reused_before_cached_ones_oldest_first(pool: PagePool) -> None:
    a, b, c = pool.allocate(3)
    evicted: list[int] = []
    pool.on_evict = evicted.append
    for page in (a, b, c):
        pool.mark_cached(page)
    pool.release([b])
    pool.release([c, a])
    pool.check_invariants()
    pool.allocate(3)
    assert evicted == []
    pool.allocate(2)
    assert evicted == [b, c]
    pool.check_invariants()


def test_a_shared_page_is_free_only_after_its_last_user_releases_it(pool: PagePool) -> None:
    (page,) = pool.allocate(1)
    pool.mark_cached(page)
    pool.touch([page])
    pool.release([page])
    assert pool.num_free == 5 and pool.num_evictable([page]) == 0
    pool.release([page])
    assert pool.num_free == 6 and pool.num_evictable([page]) == 1
    pool.touch([page])
    pool.check_invariants()
    assert page not in pool.allocate(5)


def test_releasing_a_free_page_raises(pool: PagePool) -> None:
    (page,) = pool.allocate(1)
    pool.release([page])
    with pytest.raises(AssertionError, match="not in use"):
        pool.release([page])


def test_the_longest_known_prefix_is_found(pool: PagePool, cache: PrefixCache) -> None:
    pages = pool.allocate(2)
    known = digests_of(cache, tokens(1, 2, 3, 4, 5, 6, 7, 8))
    cache.insert(0, zip(known, pages, strict=True))
    cache.check_invariants()
    assert found(cache, digests_of(cache, tokens(1, 2, 3, 4, 5, 6, 7, 8, 9, 9, 9, 9))) == pages
    assert found(cache, digests_of(cache, tokens(1, 2, 3, 4, 5, 6, 7, 9))) == pages[:1]
    assert found(cache, digests_of(cache, tokens(9, 2, 3, 4, 5, 6, 7, 8))) == []


def test_the_same_tokens_after_a_different_prefix_are_another_page(cache: PrefixCache) -> None:
    one, two = digests_of(cache, tokens(1, 2, 3, 4, 1, 2, 3, 4))
    assert one != two


def test_salts_share_no_pages(cache: PrefixCache) -> None:
    same = tokens(1, 2, 3, 4)
    assert len({digests_of(cache, same, salt)[0] for salt in (None, "", "alice", "bob")}) == 4


def test_an_evicted_page_is_not_found(pool: PagePool, cache: PrefixCache) -> None:
    pages = pool.allocate(2)
    digests = digests_of(cache, tokens(1, 2, 3, 4, 5, 6, 7, 8))
    cache.insert(0, zip(digests, pages, strict=True))
    pool.release(reversed(pages))
    pool.allocate(5)  # the deepest page goes first, so the prefix stays useful
    assert found(cache, digests) == pages[:1]
    cache.check_invariants()


def test_duplicate_content_keeps_its_older_page(pool: PagePool, cache: PrefixCache) -> None:
    older, newer = pool.allocate(2)
    (digest,) = digests_of(cache, tokens(1, 2, 3, 4))
    cache.insert(0, [(digest, older), (digest, newer)])
    assert found(cache, [digest]) == [older]
    cache.check_invariants()


def test_a_cleared_cache_finds_nothing_and_its_pages_are_free(pool: PagePool, cache: PrefixCache) -> None:
    used, idle = pool.allocate(2)
    digests = digests_of(cache, tokens(1, 2, 3, 4, 5, 6, 7, 8))
    cache.insert(0, zip(digests, (used, idle), strict=True))
    pool.release([idle])
    cache.clear()
    assert found(cache, digests) == [] and pool.num_free == 5
    pool.release([used])
    pool.check_invariants()
    cache.check_invariants()


@given(
    st.lists(st.tuples(st.sampled_from(["allocate", "share", "release", "keep", "clear"]), st.integers(0, 7)))
)
def test_no_page_is_lost_by_any_sequence_of_operations(operations: list[tuple[str, int]]) -> None:
    pool = PagePool(8)
    cache = PrefixCache([pool], [KVCacheGroup()], PAGE)
    uses: list[int] = []  # one entry per use of a page
    for serial, (operation, which) in enumerate(operations):
        if operation == "allocate" and which <= pool.num_free:
            uses += pool.allocate(which)
        elif operation == "share" and which in pool.cached_pages:
            pool.touch([which])
            uses.append(which)
        elif operation == "release" and which in uses:
            pool.release([which])
            uses.remove(which)
        elif operation == "keep" and which in uses and which not in pool.cached_pages:
            cache.insert(0, [(serial.to_bytes(16, "little"), which)])
        elif operation == "clear":
            cache.clear()
        pool.check_invariants()
        cache.check_invariants()
        assert pool.ref_counts == [uses.count(page) for page in range(8)]
