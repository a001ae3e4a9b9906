"""Chooses a replica for a request: that of its session, one that has cached its prompt, or the least loaded.

Decides on numbers only; the caller provides the available replicas and their loads (`actors/gateway/`, and
simulations). A choice is recorded when it is made. Prompt prefixes that a replica has seen are chains of
hashes over blocks of their text: an estimate of its prefix cache without its tokens and pages. Hashes are
only valid in this process.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

Reason = Literal["session", "prefix", "load"]
REASONS: tuple[Reason, ...] = ("session", "prefix", "load")

# A cached prompt is not worth queueing for: a replica above this load is not considered.
LOAD_FACTOR = 1.5
LOAD_SLACK = 4.0  # requests
# Decay of recent requests, which break ties between equally loaded replicas; half the weight after 70 others.
FADING = 0.99
BLOCK_BYTES = 128  # about two pages of 16 tokens
MAX_CHAIN = 2048  # blocks; later parts of a prompt do not matter for routing
MAX_BLOCKS = 1 << 16


@dataclass(frozen=True, slots=True)
class RouteChoice:
    """The chosen replica, the reason, and how many blocks of the prompt it is believed to have cached."""

    replica: str
    reason: Reason
    known_blocks: int


class Router:
    """Routes the requests of one model; remembers `max_blocks` prompt blocks of each replica."""

    def __init__(self, max_blocks: int = MAX_BLOCKS) -> None:
        self._max_blocks = max_blocks
        self._known: dict[str, PrefixIndex] = {}
        self._recent: dict[str, float] = {}  # recently sent requests, decayed, by replica

    def choose(
        self, loads: Mapping[str, float], chain: Sequence[int], session: str | None = None
    ) -> RouteChoice:
        """Choose among replicas that can take a request, at least one; `loads` are their current requests.

        Requests of a session go to one replica while it is available and not overloaded. `chain` is the
        prompt's `hash_chain`.
        """
        minimum = min(loads.values())
        limit = max(LOAD_FACTOR * minimum, minimum + LOAD_SLACK)
        candidates = [replica for replica, load in loads.items() if load <= limit]
        known = {replica: self._prefixes(replica).match(chain) for replica in candidates}
        home = None if session is None else rendezvous_replica(session, loads)
        if home in known:
            return self._record(RouteChoice(home, "session", known[home]), chain)
        longest = max(known.values())
        reason: Reason = "prefix" if longest else "load"
        best_matches = [replica for replica in candidates if known[replica] == longest]
        best = min(
            best_matches, key=lambda replica: (loads[replica], self._recent.get(replica, 0.0), replica)
        )
        return self._record(RouteChoice(best, reason, longest), chain)

    def remove_replica(self, replica: str) -> None:
        self._known.pop(replica, None)
        self._recent.pop(replica, None)

    def _prefixes(self, replica: str) -> PrefixIndex:
        if replica not in self._known:
            self._known[replica] = PrefixIndex(self._max_blocks)
        return self._known[replica]

    def _record(self, choice: RouteChoice, chain: Sequence[int]) -> RouteChoice:
        self._prefixes(choice.replica).add(chain)
        for replica in self._recent:
            self._recent[replica] *= FADING
        self._recent[choice.replica] = self._recent.get(choice.replica, 0.0) + 1.0
        return choice


def rendezvous_replica(session: str, replicas: Mapping[str, object]) -> str:
    """Return a session's replica by rendezvous hashing, so that few sessions move between replicas."""

    def weight(replica: str) -> bytes:
        return hashlib.blake2b(f"{session}\0{replica}".encode(), digest_size=8).digest()

    return max(replicas, key=weight)


def hash_chain(text: bytes, salt: str | None = None) -> list[int]:
    """Return a hash for each full block of a prompt, over it and all blocks before; salts share nothing."""
    chain: list[int] = []
    before = hash(salt)
    for end in range(BLOCK_BYTES, min(len(text), MAX_CHAIN * BLOCK_BYTES) + 1, BLOCK_BYTES):
        before = hash((before, text[end - BLOCK_BYTES : end]))
        chain.append(before)
    return chain


class PrefixIndex:
    """Prefixes that one replica has seen, dropping the least recently seen ones.

    A block counts as seen before those that precede it, so the known blocks of a chain are always a prefix.
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
        for block in reversed(chain):
            self._seen[block] = None
            self._seen.move_to_end(block)
        while len(self._seen) > self._max_blocks:
            self._seen.popitem(last=False)
