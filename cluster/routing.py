"""Which replica of a model gets a request: its session's, the one that knows its prompt, or the least loaded.

Decides on numbers alone; who may be chosen and how loaded each is, the caller says (`actors/gateway/`, and
simulations). A choice is booked when it is made.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from .known_prefixes import MAX_BLOCKS, KnownPrefixes

Reason = Literal["session", "prefix", "load"]
REASONS: tuple[Reason, ...] = ("session", "prefix", "load")

# A replica that knows a prompt is not worth a queue: beyond this it counts as more loaded than the least.
LOAD_FACTOR = 1.5
LOAD_SLACK = 4.0  # requests
# Of equally loaded replicas the one that got least lately; a request counts half after 70 others.
FADING = 0.99


@dataclass(frozen=True, slots=True)
class Choice:
    """Where a request goes, why, and how many blocks of its prompt are known there."""

    replica: str
    reason: Reason
    known_blocks: int


class Router:
    """Routes the requests of one model.

    Args:
        max_blocks: of prompts remembered for each replica.
    """

    def __init__(self, max_blocks: int = MAX_BLOCKS) -> None:
        self._max_blocks = max_blocks
        self._known: dict[str, KnownPrefixes] = {}
        self._recent: dict[str, float] = {}  # requests lately sent to each

    def choose(self, loads: Mapping[str, float], chain: Sequence[int], session: str | None = None) -> Choice:
        """Choose among replicas that can take a request, at least one.

        Args:
            loads: of each, in requests that are there.
            chain: `hash_chain` of the prompt.
            session: requests of one session go to one replica as long as it is there and not overloaded.
        """
        least = min(loads.values())
        limit = max(LOAD_FACTOR * least, least + LOAD_SLACK)
        able = [replica for replica, load in loads.items() if load <= limit]
        known = {replica: self._prefixes(replica).match(chain) for replica in able}
        home = None if session is None else home_of(session, loads)
        if home in known:
            return self._book(Choice(home, "session", known[home]), chain)
        longest = max(known.values())
        reason: Reason = "prefix" if longest else "load"
        knowing = [replica for replica in able if known[replica] == longest]
        best = min(knowing, key=lambda replica: (loads[replica], self._recent.get(replica, 0.0), replica))
        return self._book(Choice(best, reason, longest), chain)

    def forget(self, replica: str) -> None:
        """The replica is gone, and its prefix cache with it."""
        self._known.pop(replica, None)
        self._recent.pop(replica, None)

    def _prefixes(self, replica: str) -> KnownPrefixes:
        if replica not in self._known:
            self._known[replica] = KnownPrefixes(self._max_blocks)
        return self._known[replica]

    def _book(self, choice: Choice, chain: Sequence[int]) -> Choice:
        self._prefixes(choice.replica).add(chain)
        for replica in self._recent:
            self._recent[replica] *= FADING
        self._recent[choice.replica] = self._recent.get(choice.replica, 0.0) + 1.0
        return choice


def home_of(session: str, replicas: Mapping[str, object]) -> str:
    """The replica of a session: when one comes or goes only the sessions that it takes or had move."""

    def weight(replica: str) -> bytes:
        return hashlib.blake2b(f"{session}\0{replica}".encode(), digest_size=8).digest()

    return max(replicas, key=weight)
