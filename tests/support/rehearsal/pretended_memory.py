"""Memory of a pretended GPU: bytes in use, and pinned memory that faults if it is touched too early."""

from __future__ import annotations

import ctypes
import mmap
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

_READ, _ANY, _NONE = mmap.PROT_READ, mmap.PROT_READ | mmap.PROT_WRITE, 0
_YOUNG = 256  # storages whose ends are looked for after each operator; older ones are looked at now and then


class DeviceMemory:
    """Counts bytes as PyTorch's allocator takes them: what a stream or a pool has had at once, it keeps.

    Attributes:
        pool: where captures allocate; None outside of them.
        most_bytes: the most that were in use at once, with the context's.
    """

    def __init__(self, of_context: int) -> None:
        self.pool: object = None
        self.most_bytes = self._of_context = of_context
        self._live: dict[object, int] = defaultdict(int)  # bytes by stream or pool
        self._kept: dict[object, int] = defaultdict(int)
        self._young: dict[int, tuple[StorageWeakRef, int, object]] = {}
        self._old: dict[int, tuple[StorageWeakRef, int, object]] = {}

    def add(self, tensors: Iterable[torch.Tensor], stream: int) -> None:
        """Count what an operator has allocated, and forget what has been freed."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            key = storage._cdata
            if key not in self._young and key not in self._old:
                place = stream if self.pool is None else self.pool
                self._young[key] = (StorageWeakRef(storage), storage.nbytes(), place)
                self._live[place] += storage.nbytes()
        self._forget(self._young)
        for place, count in self._live.items():
            self._kept[place] = max(self._kept[place], count)
        self.most_bytes = max(self.most_bytes, self.used_bytes())
        while len(self._young) > _YOUNG:
            key = next(iter(self._young))
            self._old[key] = self._young.pop(key)

    def used_bytes(self) -> int:
        return self._of_context + sum(self._kept.values())

    def give_back(self, pools: Iterable[object]) -> None:
        """Forget what is kept and not used, but for these pools, which live graphs read."""
        self._forget(self._young)
        self._forget(self._old)
        kept = {pool: self._kept[pool] for pool in pools}
        self._kept = defaultdict(int, {**self._live, **kept})

    def _forget(self, storages: dict[int, tuple[StorageWeakRef, int, object]]) -> None:
        for key in [key for key, (storage, *_) in storages.items() if storage.expired()]:
            _, count, place = storages.pop(key)
            self._live[place] -= count


@dataclass(slots=True)
class _Copy:
    """A copy from or to pinned memory that the device may make at any time until it is seen to be done.

    Attributes:
        number: of its work in its stream.
    """

    stream: int
    number: int
    memory: _Pinned
    to_host: bool


@dataclass(slots=True)
class _Pinned:
    address: int
    pages: mmap.mmap


@dataclass
class PinnedMemory:
    """Pinned memory whose pages the MMU protects while copies that nothing has waited for may use them.

    The host may read memory that a copy reads, and not touch memory that a copy writes: SIGSEGV ends it if it
    does. Copies copy nothing.
    """

    _memories: list[_Pinned] = field(default_factory=list[_Pinned])
    _copies: list[_Copy] = field(default_factory=list[_Copy])

    def allocate(self, size: int, dtype: torch.dtype) -> torch.Tensor:
        """Return values that are zero. Called outside of fake modes."""
        pages = mmap.mmap(-1, max(size * dtype.itemsize, 1))
        values = torch.frombuffer(pages, dtype=torch.uint8)
        self._memories.append(_Pinned(values.data_ptr(), pages))
        return values[: size * dtype.itemsize].view(dtype)

    def begin(self, host: torch.Tensor, stream: int, number: int, *, to_host: bool) -> None:
        """Begin a copy, if it is one from or to pinned memory, by a stream's work of this number."""
        address = host.data_ptr()
        found = [each for each in self._memories if 0 <= address - each.address < len(each.pages)]
        for memory in found:
            self._copies.append(_Copy(stream, number, memory, to_host))
            self._protect(memory)

    def end(self, stream: int, number: int) -> None:
        """End a stream's copies up to this number: the host has seen an event after it."""
        done = [copy for copy in self._copies if copy.stream == stream and copy.number <= number]
        self._copies = [copy for copy in self._copies if copy not in done]
        for copy in done:
            self._protect(copy.memory)

    def _protect(self, memory: _Pinned) -> None:
        kinds = {copy.to_host for copy in self._copies if copy.memory is memory}
        allowed = _NONE if True in kinds else _READ if kinds else _ANY
        libc: Any = ctypes.CDLL(None, use_errno=True)
        size = ctypes.c_size_t(len(memory.pages))
        assert libc.mprotect(ctypes.c_void_p(memory.address), size, allowed) == 0, ctypes.get_errno()
