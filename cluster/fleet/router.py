"""Chooses a replica for a request: that of its session, one that has or can read its prompt's K/V, or the
least loaded.

Decides on numbers only; the caller provides the available replicas and their loads (`actors/gateway/`, and
simulations). A choice is recorded when it is made. Prompt prefixes that a replica has seen are chains of
hashes over blocks of their text: an estimate of its prefix cache without its tokens and pages. Hashes are
only valid in this process.

Replicas with the same tier (`kv_cache/kv_tier.py`) read pages that any of them saved, so what one has seen
counts for the others, too, but less. Requests of a session stay in its tier when its replica is gone.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

Reason = Literal["session", "prefix", "tier", "load"]

# A cached prompt is not worth queueing for: a replica above this load is not considered.
LOAD_FACTOR = 1.5
LOAD_SLACK = 4.0  # requests
# Decay of recent requests, which break ties between equally loaded replicas; half the weight after 70 others.
FADING = 0.99
BLOCK_BYTES = 128  # about two pages of 16 tokens
MAX_CHAIN = 2048  # blocks; later parts of a prompt do not matter for routing
MAX_BLOCKS = 1 << 16
# Of a block that is read from a tier, in blocks that are cached: reading took 0.01 to 0.15 of computing.
TIER_WORTH = 0.85
MAX_LEFT_TIERS = 4  # remembered without a replica, which a restart may bring back
MAX_SESSIONS = 1 << 16  # whose tier is remembered


@dataclass(frozen=True, slots=True)
class RouteChoice:
    """The chosen replica, the reason, and how many blocks of the prompt it is believed to have or read."""

    replica: str
    reason: Reason
    known_blocks: int


class Router:
    """Routes the requests of one model; remembers `max_blocks` prompt blocks of each replica and tier."""

    def __init__(self, max_blocks: int = MAX_BLOCKS) -> None:
        self._max_blocks = max_blocks
        self._known: dict[str, PrefixIndex] = {}
        self._tier_of: dict[str, str] = {}  # by replica
        self._kept: dict[str, PrefixIndex] = {}  # by tier, those without a replica in the order of their end
        self._tier_of_session: OrderedDict[int, str] = OrderedDict()  # by hash, least recent first
        self._recent: dict[str, float] = {}  # recently sent requests, decayed, by replica

    def choose(
        self, loads: Mapping[str, float], chain: Sequence[int], session: str | None = None
    ) -> RouteChoice:
        """Choose among replicas that can take a request, at least one; `loads` are their current requests.

        Requests of a session go to one replica while it is available and not overloaded, then to another of
        its tier. `chain` is the prompt's `hash_chain`.
        """
        minimum = min(loads.values())
        limit = max(LOAD_FACTOR * minimum, minimum + LOAD_SLACK)
        candidates = [replica for replica, load in loads.items() if load <= limit]
        matches = {replica: self._match(replica, chain) for replica in candidates}
        home = None if session is None else rendezvous_replica(session, self._of_session(session, loads))
        if home in matches:
            choice = RouteChoice(home, "session", matches[home].known)
        else:
            most = max(match.worth for match in matches.values())
            best = min(
                (replica for replica, match in matches.items() if match.worth == most),
                key=lambda replica: (loads[replica], self._recent.get(replica, 0.0), replica),
            )
            choice = RouteChoice(best, matches[best].reason, matches[best].known)
        self._record(choice.replica, chain, session)
        return choice

    def set_tier(self, replica: str, tier: str | None) -> None:
        """Say which tier a replica reads and writes; replicas that share one give the same name."""
        if tier is None:
            self._tier_of.pop(replica, None)
            return
        self._tier_of[replica] = tier
        if tier not in self._kept:
            self._kept[tier] = PrefixIndex(self._max_blocks)

    def remove_replica(self, replica: str) -> None:
        self._known.pop(replica, None)
        self._recent.pop(replica, None)
        if (tier := self._tier_of.pop(replica, None)) is not None:
            self._kept[tier] = self._kept.pop(tier)
        left = [tier for tier in self._kept if tier not in self._tier_of.values()]
        for tier in left[:-MAX_LEFT_TIERS]:
            del self._kept[tier]

    def _match(self, replica: str, chain: Sequence[int]) -> _Match:
        cached, tier = self._prefixes(replica).match(chain), self._tier_of.get(replica)
        return _Match(cached, 0 if tier is None else max(self._kept[tier].match(chain) - cached, 0))

    def _of_session(self, session: str, replicas: Mapping[str, float]) -> Mapping[str, float]:
        """Return the replicas of the tier that had the session last; all if there are none."""
        tier = self._tier_of_session.get(hash(session))
        there = {name: load for name, load in replicas.items() if tier and self._tier_of.get(name) == tier}
        return there or replicas

    def _prefixes(self, replica: str) -> PrefixIndex:
        if replica not in self._known:
            self._known[replica] = PrefixIndex(self._max_blocks)
        return self._known[replica]

    def _record(self, replica: str, chain: Sequence[int], session: str | None) -> None:
        self._prefixes(replica).add(chain)
        if (tier := self._tier_of.get(replica)) is not None:
            self._kept[tier].add(chain)
        if session is not None and tier is not None:
            self._tier_of_session[hash(session)] = tier
            self._tier_of_session.move_to_end(hash(session))
            if len(self._tier_of_session) > MAX_SESSIONS:
                self._tier_of_session.popitem(last=False)
        for each in self._recent:
            self._recent[each] *= FADING
        self._recent[replica] = self._recent.get(replica, 0.0) + 1.0


@dataclass(frozen=True, slots=True)
class _Match:
    """Blocks of a prompt that a replica is believed to have cached, and those behind them in its tier."""

    cached: int
    kept: int

    @property
    def known(self) -> int:
        return self.cached + self.kept

    @property
    def worth(self) -> float:
        return self.cached + TIER_WORTH * self.kept

    @property
    def reason(self) -> Reason:
        return "tier" if self.kept else "prefix" if self.cached else "load"


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
