"""Chooses a replica for a request: that of its session, one that has cached its prompt, or the least loaded.

Decides on numbers only; the caller provides the available replicas and their loads (`actors/gateway/`, and
simulations). A choice is recorded when it is made.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from .prefix_index import MAX_BLOCKS, KnownPrefixes

Reason = Literal["session", "prefix", "load"]
REASONS: tuple[Reason, ...] = ("session", "prefix", "load")

# A cached prompt is not worth queueing for: a replica above this load is not considered.
LOAD_FACTOR = 1.5
LOAD_SLACK = 4.0  # requests
# Decay of recent requests, which break ties between equally loaded replicas; half the weight after 70 others.
FADING = 0.99


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
        self._known: dict[str, KnownPrefixes] = {}
        self._recent: dict[str, float] = {}  # recently sent requests, decayed, by replica

    def choose(
        self, loads: Mapping[str, float], chain: Sequence[int], session: str | None = None
    ) -> RouteChoice:
        """Choose among replicas that can take a request, at least one.

        Args:
            loads: current requests of each replica.
            chain: `hash_chain` of the prompt.
            session: requests of a session go to one replica while it is available and not overloaded.
        """
        least = min(loads.values())
        limit = max(LOAD_FACTOR * least, least + LOAD_SLACK)
        candidates = [replica for replica, load in loads.items() if load <= limit]
        known = {replica: self._prefixes(replica).match(chain) for replica in candidates}
        home = None if session is None else home_of(session, loads)
        if home in known:
            return self._record(RouteChoice(home, "session", known[home]), chain)
        longest = max(known.values())
        reason: Reason = "prefix" if longest else "load"
        best_matches = [replica for replica in candidates if known[replica] == longest]
        best = min(
            best_matches, key=lambda replica: (loads[replica], self._recent.get(replica, 0.0), replica)
        )
        return self._record(RouteChoice(best, reason, longest), chain)

    def forget(self, replica: str) -> None:
        """Forget a replica that is gone, with its prefix cache."""
        self._known.pop(replica, None)
        self._recent.pop(replica, None)

    def _prefixes(self, replica: str) -> KnownPrefixes:
        if replica not in self._known:
            self._known[replica] = KnownPrefixes(self._max_blocks)
        return self._known[replica]

    def _record(self, choice: RouteChoice, chain: Sequence[int]) -> RouteChoice:
        self._prefixes(choice.replica).add(chain)
        for replica in self._recent:
            self._recent[replica] *= FADING
        self._recent[choice.replica] = self._recent.get(choice.replica, 0.0) + 1.0
        return choice


def home_of(session: str, replicas: Mapping[str, object]) -> str:
    """Return a session's replica by rendezvous hashing, so that few sessions move between replicas."""

    def weight(replica: str) -> bytes:
        return hashlib.blake2b(f"{session}\0{replica}".encode(), digest_size=8).digest()

    return max(replicas, key=weight)
