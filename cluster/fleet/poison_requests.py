"""Digests of requests under which replicas died: suspect after the first death, poisonous after the second.

This is the online counterpart of the poison search of batch jobs (`cluster/batch/leases.py`). A suspect
request is tried once more. If that replica dies too, and the request was the only suspect there, it is
poisonous and refused for a while, and that death does not count for others; if there were several suspects,
each is tried alone. A client that changes its request each time has a new digest each time, so
deaths are also counted by API key: all requests of a suspect key are tried alone, and those of a poisonous
key are refused. Bounded in number and time. Each gateway has one (`actors/gateway/isolation.py`).
"""

from __future__ import annotations

import time
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

Standing = Literal["clear", "suspect", "poisonous"]

TTL_S = 600.0
MAX_RECORDS = 1000  # of suspects, and of poisonous requests
# Deaths after which a request is poisonous even if it outlived its trials, as it may kill late.
MAX_DEATHS = 3
# Poisonous requests of one key after which the key is poisonous.
MAX_POISONOUS = 3


@dataclass(slots=True)
class _Record:
    since_s: float
    key: str | None
    replicas: set[str] = field(default_factory=set[str])  # that died under it; no other request is to blame
    suspect: bool = True
    lived_s: float = 0.0  # the longest time that it ran on one of them


class DeathRecords:
    """Records deaths of replicas under requests, each until `ttl_s` after its last death."""

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        *,
        ttl_s: float = TTL_S,
        max_records: int = MAX_RECORDS,
    ) -> None:
        self._clock = clock
        self._ttl_s = ttl_s
        self._max_records = max_records
        self._suspects: OrderedDict[bytes, _Record] = OrderedDict()  # oldest first, like the next one
        self._poisonous: OrderedDict[bytes, _Record] = OrderedDict()
        # Replicas whose deaths a poisonous request explains, so that they count for no other.
        self._explained = deque[str](maxlen=max_records)
        self._key_standings: dict[str, Standing] = {}  # computed since the last change of a record

    def __bool__(self) -> bool:
        return bool(self._suspects or self._poisonous)

    def status_of(self, digest: bytes) -> Standing:
        self._expire()
        if digest in self._poisonous:
            return "poisonous"
        record = self._suspects.get(digest)
        return "suspect" if record is not None and record.suspect else "clear"

    def lived_s(self, digest: bytes) -> float:
        """Return the longest time that the request ran on a replica that died, in seconds."""
        record = self._suspects.get(digest)
        return 0.0 if record is None else record.lived_s

    def status_of_key(self, key: str | None) -> Standing:
        """Return a key's standing by its poisonous requests, and by its suspects that no trial has cleared.

        The latter are requests whose clients have left or did not retry. None, no key, is always clear.
        """
        if key is None:
            return "clear"
        self._expire()
        if key not in self._key_standings:
            self._key_standings[key] = self._count_deaths(key)
        return self._key_standings[key]

    def _count_deaths(self, key: str) -> Standing:
        num_poisonous = sum(record.key == key for record in self._poisonous.values())
        if num_poisonous >= MAX_POISONOUS:
            return "poisonous"
        uncleared = [record for record in self._suspects.values() if record.suspect and record.key == key]
        replicas = set[str]().union(*(record.replicas for record in uncleared))
        return "suspect" if num_poisonous or len(replicas) >= MAX_DEATHS else "clear"

    def record_death(
        self,
        digest: bytes,
        replica: str,
        *,
        alone: bool,
        lived_s: float,
        key: str | None = None,
        has_culprit: bool = False,
    ) -> Standing:
        """Record a death of `replica` `lived_s` after a request began there as the only suspect (`alone`).

        `has_culprit`: another request was; the death counts for that one alone.
        `key` is the owner of the request's API key, None if deaths are not counted by key. A replica dies
        once: a request that was sent to it again before its death was known has not killed another.
        """
        self._expire()
        self._key_standings.clear()
        record = self._suspects.pop(digest, None) or _Record(0.0, key)
        is_new = not has_culprit and replica not in record.replicas and replica not in self._explained
        record.replicas.update([replica] if is_new else [])
        record.since_s, record.suspect = self._clock(), True
        record.lived_s = max(record.lived_s, lived_s)
        is_killer = alone and is_new
        if digest in self._poisonous or is_killer or len(record.replicas) >= MAX_DEATHS:
            self._poisonous.pop(digest, None)
            self._poisonous[digest] = record
            _drop_oldest(self._poisonous, self._max_records)
            if is_killer:
                self._explain(replica)
            return "poisonous"
        self._suspects[digest] = record
        _drop_oldest(self._suspects, self._max_records)
        return "suspect"

    def _explain(self, replica: str) -> None:
        """Count a death, which one request has caused, for no other that shared it; these stay suspects."""
        self._explained.append(replica)
        for record in self._suspects.values():
            record.replicas.discard(replica)

    def clear_suspicion(self, digest: bytes) -> None:
        """Record that a suspect ran longer than on a replica that died; it need not run alone any more."""
        if (record := self._suspects.get(digest)) is not None:
            record.suspect = False
            self._key_standings.clear()

    def complete(self, digest: bytes) -> None:
        if self._suspects.pop(digest, None) is not None:
            self._key_standings.clear()

    def _expire(self) -> None:
        oldest_s = self._clock() - self._ttl_s
        for records in (self._suspects, self._poisonous):
            while records and next(iter(records.values())).since_s < oldest_s:
                records.popitem(last=False)
                self._key_standings.clear()


def _drop_oldest(records: OrderedDict[bytes, _Record], maximum: int) -> None:
    while len(records) > maximum:
        records.popitem(last=False)
