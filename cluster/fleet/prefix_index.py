"""Prompt prefixes that a replica has seen recently, as chains of hashes over blocks of their text.

An estimate of its prefix cache, made by the process that routes to it (`router.py`) and has neither its
tokens nor its pages. Hashes are only valid in this process, so a table must not be sent elsewhere.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

BLOCK_BYTES = 128  # about two pages of 16 tokens
MAX_CHAIN = 2048  # blocks; later parts of a prompt do not matter for routing
MAX_BLOCKS = 1 << 16


def hash_chain(text: bytes, salt: str | None = None) -> list[int]:
    """Return a hash for each full block of a prompt, over it and all blocks before.

    Prompts with different salts share nothing.
    """
    chain: list[int] = []
    before = hash(salt)
    for end in range(BLOCK_BYTES, min(len(text), MAX_CHAIN * BLOCK_BYTES) + 1, BLOCK_BYTES):
        before = hash((before, text[end - BLOCK_BYTES : end]))
        chain.append(before)
    return chain


class KnownPrefixes:
    """Prefixes that one replica has seen, dropping the least recently seen ones.

    A block is always seen together with those before it, and these count as seen later. So they are never
    dropped before it, and the known blocks of a chain are always a prefix.
    """

    def __init__(self, max_blocks: int = MAX_BLOCKS) -> None:
        self._max_blocks = max_blocks
        self._seen: OrderedDict[int, None] = OrderedDict()  # least recent first

    def __len__(self) -> int:
        return len(self._seen)

    def match(self, chain: Sequence[int]) -> int:
        """Return how many blocks of a chain are known, from its beginning."""
        low, high = 0, len(chain)
        while low < high:
            middle = (low + high) // 2
            if chain[middle] in self._seen:
                low = middle + 1
            else:
                high = middle
        return low

    def add(self, chain: Sequence[int]) -> None:
        """Record a prompt that is sent to the replica."""
        for block in reversed(chain):
            self._seen[block] = None
            self._seen.move_to_end(block)
        while len(self._seen) > self._max_blocks:
            self._seen.popitem(last=False)
