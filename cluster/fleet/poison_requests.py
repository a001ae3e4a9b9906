"""Digests of requests under which replicas died: suspect after the first death, poisonous after the second.

This is the online counterpart of the poison search of batch jobs (`cluster/batch/leases.py`). A suspect
request is tried once more as the only suspect on its replica. If that replica dies too, the request is
poisonous and refused for a while. Bounded in number and time. Each gateway has one
(`actors/gateway/isolation.py`).
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, TypeVar

Standing = Literal["clear", "suspect", "poisonous"]
T = TypeVar("T")

TTL_S = 600.0
MAX_RECORDS = 1000  # of suspects, and of poisonous requests
# Deaths after which a request is poisonous even if it outlived its trials, as it may kill late.
MAX_DEATHS = 3


@dataclass(slots=True)
class _Record:
    since_s: float
    replicas: set[str] = field(default_factory=set[str])  # replicas that died under the request
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
        self._poisonous: OrderedDict[bytes, float] = OrderedDict()  # time since which each is poisonous

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

    def record_death(self, digest: bytes, replica: str, *, alone: bool, lived_s: float) -> Standing:
        """Record a death of `replica` `lived_s` after a request began there as the only suspect (`alone`)."""
        self._expire()
        record = self._suspects.pop(digest, None) or _Record(0.0)
        record.replicas.add(replica)
        record.since_s, record.suspect = self._clock(), True
        record.lived_s = max(record.lived_s, lived_s)
        if digest in self._poisonous or alone or len(record.replicas) >= MAX_DEATHS:
            self._poisonous.pop(digest, None)
            self._poisonous[digest] = record.since_s
            _drop_oldest(self._poisonous, self._max_records)
            return "poisonous"
        self._suspects[digest] = record
        _drop_oldest(self._suspects, self._max_records)
        return "suspect"

    def clear_suspicion(self, digest: bytes) -> None:
        """Record that a suspect ran longer than on a replica that died; it need not run alone any more."""
        if (record := self._suspects.get(digest)) is not None:
            record.suspect = False

    def complete(self, digest: bytes) -> None:
        self._suspects.pop(digest, None)

    def _expire(self) -> None:
        oldest_s = self._clock() - self._ttl_s
        while self._suspects and next(iter(self._suspects.values())).since_s < oldest_s:
            self._suspects.popitem(last=False)
        while self._poisonous and next(iter(self._poisonous.values())) < oldest_s:
            self._poisonous.popitem(last=False)


def _drop_oldest(records: OrderedDict[bytes, T], maximum: int) -> None:
    while len(records) > maximum:
        records.popitem(last=False)
