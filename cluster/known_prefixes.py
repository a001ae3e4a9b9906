"""Which beginnings of prompts a replica has seen lately, as chains of hashes over blocks of their text.

A guess at what its prefix cache holds, made by who routes to it (`routing.py`) and has neither its tokens nor
its pages. Hashes are of this process: nothing of a table may travel.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

BLOCK_BYTES = 128  # about two pages of 16 tokens
MAX_CHAIN = 2048  # blocks; what comes later in a prompt decides nothing
MAX_BLOCKS = 1 << 16


def hash_chain(text: bytes, salt: str | None = None) -> list[int]:
    """A hash for each full block of a prompt, over it and all before it.

    Args:
        text: the prompt, however it is written, as long as equal beginnings are written alike.
        salt: prompts of other salts share nothing.
    """
    chain: list[int] = []
    before = hash(salt)
    for end in range(BLOCK_BYTES, min(len(text), MAX_CHAIN * BLOCK_BYTES) + 1, BLOCK_BYTES):
        before = hash((before, text[end - BLOCK_BYTES : end]))
        chain.append(before)
    return chain


class KnownPrefixes:
    """What one replica has seen; the least recently seen is forgotten first.

    A block is always seen together with those before it, and they count as seen later: so they are never
    forgotten before it, and a chain is known up to one place and not beyond.
    """

    def __init__(self, max_blocks: int = MAX_BLOCKS) -> None:
        self._max_blocks = max_blocks
        self._seen: OrderedDict[int, None] = OrderedDict()  # least recent first

    def __len__(self) -> int:
        return len(self._seen)

    def match(self, chain: Sequence[int]) -> int:
        """How many blocks of a chain are known, from its beginning."""
        low, high = 0, len(chain)
        while low < high:
            middle = (low + high) // 2
            if chain[middle] in self._seen:
                low = middle + 1
            else:
                high = middle
        return low

    def add(self, chain: Sequence[int]) -> None:
        """A prompt goes to the replica."""
        for block in reversed(chain):
            self._seen[block] = None
            self._seen.move_to_end(block)
        while len(self._seen) > self._max_blocks:
            self._seen.popitem(last=False)
