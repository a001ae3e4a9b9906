"""How API keys share what one of them could use up: slots that go to the keys in turn, and budgets of work.

Values and decisions only; `actors/system/key_slots.py` waits on an event loop. A key is `Caller.owner`; None
is a server without keys, whose requests are one key's.
"""

from __future__ import annotations

from collections import Counter, deque
from typing import Generic, TypeVar

T = TypeVar("T")


class KeyTurns(Generic[T]):
    """Chooses which waiting item gets a free slot: the first of the key whose last turn is the longest ago.

    `leaves_room`: a key that holds k slots gets another one only while more than k are free (the dynamic
    threshold of shared switch buffers). So one key alone holds half of the slots, and a key that holds none
    finds one unless as many keys as slots are active. None may hold all.
    """

    def __init__(self, num_slots: int, *, leaves_room: bool = False) -> None:
        self.num_free = num_slots
        self._leaves_room = leaves_room
        self._held: Counter[str | None] = Counter()
        self._waiting: dict[str | None, deque[T]] = {}
        self._last_turn: dict[str | None, int] = {}  # as numbers of turns
        self._num_turns = 0

    def add(self, key: str | None, item: T) -> None:
        self._waiting.setdefault(key, deque()).append(item)

    def remove(self, key: str | None, item: T) -> bool:
        """Remove an item that waits; return False if it has got its slot."""
        items = self._waiting.get(key, ())
        if item not in items:
            return False
        self._waiting[key].remove(item)
        if not self._waiting[key]:
            del self._waiting[key]
        return True

    def take(self) -> T | None:
        """Give a free slot to the key whose turn it is, and return its item; None if there is no such key."""
        ready = [key for key in self._waiting if self._may_take(key)]
        if not ready:
            return None
        key = min(ready, key=lambda key: self._last_turn.get(key, 0))
        item = self._waiting[key].popleft()
        if not self._waiting[key]:
            del self._waiting[key]
        self._num_turns += 1
        self._last_turn[key] = self._num_turns
        self._held[key] += 1
        self.num_free -= 1
        return item

    def release(self, key: str | None) -> None:
        assert self._held[key], "only a slot that is held can be released"
        self._held[key] -= 1
        self._held += Counter()  # drop keys that hold nothing
        self.num_free += 1

    def _may_take(self, key: str | None) -> bool:
        is_limited = self._leaves_room and key is not None
        return self.num_free > (self._held[key] if is_limited else 0)


class KeyBudget:
    """Seconds of work that each key may spend per minute; None may spend any. Times are monotonic seconds.

    A key may begin while it has spent less than its budget, so the last work may exceed it.
    """

    def __init__(self, seconds_per_minute: float) -> None:
        self.seconds_per_minute = seconds_per_minute
        self._spent: dict[str, tuple[float, float]] = {}  # seconds not yet regained, and the time of that

    def spend(self, key: str | None, seconds: float, now_s: float) -> None:
        if key is not None:
            self._spent[key] = self._left(key, now_s) + seconds, now_s

    def wait_s(self, key: str | None, now_s: float) -> float:
        """Return the seconds until the key may begin more work; 0.0 if it may now."""
        if key is None or key not in self._spent:
            return 0.0
        left = self._left(key, now_s)
        if left <= 0.0:
            del self._spent[key]
        return max(0.0, (left - self.seconds_per_minute) * 60.0 / self.seconds_per_minute)

    def _left(self, key: str, now_s: float) -> float:
        spent, at_s = self._spent.get(key, (0.0, now_s))
        return max(0.0, spent - (now_s - at_s) * self.seconds_per_minute / 60.0)
