"""Which page holds which tokens: full pages found again by their content.

A page's digest covers its tokens and, through its parent's digest, all tokens before them; K/V at a
position depends on exactly these. The salt stands at the root of the chain, so users with different salts
share nothing. Pages of generated tokens count as much as pages of prompts.

    root(salt) ──▶ digest 0 = H(root, tokens 0..15) ──▶ digest 1 = H(digest 0, tokens 16..31) ──▶ ...

Called by the scheduler: `match` before a sequence enters, `insert` when a page is full of computed,
committed tokens. Never trusts a page that is not full.
"""

from __future__ import annotations

from hashlib import blake2b

from .pages import PagePool
from .plan import IntArray

DIGEST_BYTES = 16


class PrefixCache:
    """Digest -> page, for the pages of one pool.

    Args:
        pool: whose pages are found again; tells this cache of evictions.
        page_size: tokens per page.
    """

    def __init__(self, pool: PagePool, page_size: int) -> None:
        self._pool = pool
        self._page_size = page_size
        self._page_of: dict[bytes, int] = {}
        self._digest_of: dict[int, bytes] = {}
        pool.on_evict = self._forget

    def hash_pages(self, digests: list[bytes], token_ids: IntArray, num_pages: int, salt: str | None) -> None:
        """Continue a sequence's chain of `digests` until it covers its first `num_pages` pages."""
        parent = digests[-1] if digests else _root(salt)
        for begin in range(len(digests) * self._page_size, num_pages * self._page_size, self._page_size):
            content = token_ids[begin : begin + self._page_size].tobytes()
            parent = blake2b(parent + content, digest_size=DIGEST_BYTES).digest()
            digests.append(parent)

    def match(self, digests: list[bytes]) -> list[int]:
        """Pages of the longest prefix that is here. They may be free: `share` them before allocating."""
        pages: list[int] = []
        for digest in digests:
            page = self._page_of.get(digest)
            if page is None:
                break
            pages.append(page)
        return pages

    def insert(self, digest: bytes, page: int) -> None:
        """Remember a full page. If its content is here already, the older page stays the one to be found."""
        if digest in self._page_of:
            return
        assert page not in self._digest_of, f"page {page} has two contents"
        self._page_of[digest] = page
        self._digest_of[page] = digest
        self._pool.keep(page)

    def clear(self) -> None:
        """Forget everything; sequences that run keep their pages."""
        self._page_of.clear()
        self._digest_of.clear()
        self._pool.keep_nothing()

    def _forget(self, page: int) -> None:
        del self._page_of[self._digest_of.pop(page)]

    def check_invariants(self) -> None:
        """Digests and pages are one to one, and the pool keeps exactly these pages."""
        assert {page: digest for digest, page in self._page_of.items()} == self._digest_of
        assert self._pool.kept == self._digest_of.keys(), "pool and cache disagree on what is kept"


def _root(salt: str | None) -> bytes:
    text = b"" if salt is None else b"salt:" + salt.encode()
    return blake2b(text, digest_size=DIGEST_BYTES).digest()
