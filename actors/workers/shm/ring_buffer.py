"""Rings of message fragments in shared memory. Waiting and waking is done in `endpoint.py`.

Every counter has a single writing process and a cache line of its own. A fragment is written before the
counter that publishes it, and read before the counter that frees its slot.
"""

from __future__ import annotations

import mmap
import struct
import threading
from collections.abc import Sequence
from dataclasses import dataclass

_LINE_BYTES = 64
_HEADER = struct.Struct("<Q")  # of a fragment: size * 2 + (1 if it is the message's last)


@dataclass(frozen=True, slots=True)
class Layout:
    """Layout of the shared memory, sent to every worker. Only tests change the slot sizes.

    Line 0: engine asleep; line 1: fragments sent down. Then per worker four lines: asleep, fragments read
    from down, fragments sent up, fragments of those read. The slots follow: first down's, then each worker's.
    """

    num_workers: int
    down_slots: int = 4
    down_slot_bytes: int = 256 * 1024
    up_slots: int = 2
    up_slot_bytes: int = 64 * 1024

    def line(self, rank: int, which: int) -> int:
        return 2 + 4 * rank + which

    @property
    def slots_offset(self) -> int:
        return self.line(self.num_workers, 0) * _LINE_BYTES

    def up_offset(self, rank: int) -> int:
        down = self.down_slots * (self.down_slot_bytes + _HEADER.size)
        return self.slots_offset + down + rank * self.up_slots * (self.up_slot_bytes + _HEADER.size)

    @property
    def size_bytes(self) -> int:
        return self.up_offset(self.num_workers)


class SharedMemory:
    """The mapped file: bytes for slots, and one 64-bit word per cache line."""

    def __init__(self, descriptor: int, size_bytes: int) -> None:
        self._map = mmap.mmap(descriptor, size_bytes)
        self.bytes = memoryview(self._map)
        self._words = self.bytes[: size_bytes // 8 * 8].cast("Q")
        self._lock = threading.Lock()

    def read(self, line: int) -> int:
        return self._words[line * 8]

    def write(self, line: int, value: int) -> None:
        self._words[line * 8] = value

    def fence(self) -> None:
        """Order earlier writes before later reads, by a lock's atomic instruction."""
        with self._lock:
            pass

    def close(self) -> None:
        self._words.release()
        self.bytes.release()
        self._map.close()


class ShmRing:
    """A ring of fragments from one writer to its readers. Only its owner writes a counter."""

    @classmethod
    def down(cls, memory: SharedMemory, layout: Layout) -> ShmRing:
        """Return the ring from the engine to all workers."""
        tails = [layout.line(rank, 1) for rank in range(layout.num_workers)]
        return cls(memory, layout.slots_offset, layout.down_slots, layout.down_slot_bytes, 1, tails)

    @classmethod
    def up(cls, memory: SharedMemory, layout: Layout, rank: int) -> ShmRing:
        """Return the ring from a worker to the engine."""
        head, tails = layout.line(rank, 2), [layout.line(rank, 3)]
        return cls(memory, layout.up_offset(rank), layout.up_slots, layout.up_slot_bytes, head, tails)

    def __init__(
        self,
        memory: SharedMemory,
        offset: int,
        num_slots: int,
        slot_bytes: int,
        head: int,
        tails: Sequence[int],
    ) -> None:
        self._memory = memory
        self._offset = offset
        self._num_slots = num_slots
        self._slot_bytes = slot_bytes
        self._head = head
        self._tails = tails

    def fragments(self, message: bytes) -> list[memoryview]:
        view, step = memoryview(message), self._slot_bytes
        return [view[at : at + step] for at in range(0, len(view), step)]

    def has_room(self) -> bool:
        slowest = min(map(self._memory.read, self._tails))
        return self._memory.read(self._head) - slowest < self._num_slots

    def put(self, fragment: memoryview, last: bool) -> None:
        head = self._memory.read(self._head)
        at = self._slot(head)
        _HEADER.pack_into(self._memory.bytes, at, len(fragment) * 2 + last)
        start = at + _HEADER.size
        self._memory.bytes[start : start + len(fragment)] = fragment
        self._memory.fence()
        self._memory.write(self._head, head + 1)

    def has_next(self, reader: int) -> bool:
        return self._memory.read(self._head) > self._memory.read(self._tails[reader])

    def peek(self, reader: int) -> tuple[memoryview, bool]:
        """Return the next fragment, in place, and whether it is its message's last; then call `drop`."""
        self._memory.fence()
        at = self._slot(self._memory.read(self._tails[reader]))
        (head,) = _HEADER.unpack_from(self._memory.bytes, at)
        start = at + _HEADER.size
        return self._memory.bytes[start : start + head // 2], bool(head & 1)

    def drop(self, reader: int) -> None:
        self._memory.fence()
        tail = self._tails[reader]
        self._memory.write(tail, self._memory.read(tail) + 1)

    def _slot(self, index: int) -> int:
        return self._offset + index % self._num_slots * (self._slot_bytes + _HEADER.size)
