"""Tensors between a target rank and a drafter, in memory that both processes have mapped.

On a CPU this is a memory file (memfd); on GPUs of one node it is memory of the target's GPU that the
drafter's process also maps (CUDA IPC). A writer announces data only once it has been written, so no process
ever waits for the device of one that may be dead. The target owns the memory, which survives the drafter's
death.
"""

from __future__ import annotations

import math
import mmap
import os
from collections import deque
from collections.abc import Sequence

import torch
from torch import Tensor

_ALIGNMENT = 64

Kinds = Sequence[tuple[tuple[int, ...], torch.dtype]]  # shapes and dtypes of consecutive tensors


class Mailbox:
    """Mapped bytes, read and written as tensors. `bytes_B`: uint8, on the target's device."""

    def __init__(self, bytes_B: Tensor) -> None:
        self._bytes_B = bytes_B

    @classmethod
    def make(cls, size_bytes: int, device: torch.device) -> tuple[Mailbox, object]:
        """Return a mailbox, and the ticket with which the other process calls `open`."""
        if device.type == "cuda":
            from torch.multiprocessing.reductions import reduce_tensor

            bytes_B = torch.empty(size_bytes, dtype=torch.uint8, device=device)
            return cls(bytes_B), reduce_tensor(bytes_B)
        file = os.memfd_create("manta-drafts")
        os.ftruncate(file, size_bytes)
        return cls(_map_file(file, size_bytes)), file

    @classmethod
    def open(cls, ticket: object, size_bytes: int) -> Mailbox:
        """Open a mailbox by a descriptor (closed here), or by how to rebuild a CUDA tensor."""
        if isinstance(ticket, int):
            bytes_B = _map_file(ticket, size_bytes)
            os.close(ticket)
            return cls(bytes_B)
        assert isinstance(ticket, tuple), "not a ticket of make()"
        rebuild, arguments = ticket
        return cls(rebuild(*arguments))

    def views(self, offset: int, kinds: Kinds) -> list[Tensor]:
        """Return consecutive tensors with these shapes and dtypes."""
        views: list[Tensor] = []
        for shape, dtype in kinds:
            size = math.prod(shape) * dtype.itemsize
            views.append(self._bytes_B[offset : offset + size].view(dtype).view(shape))
            offset += padded(size)
        return views

    def finish(self) -> None:
        if self._bytes_B.is_cuda:
            torch.cuda.current_stream().synchronize()


def _map_file(file: int, size_bytes: int) -> Tensor:
    # The tensor keeps the map alive.
    return torch.frombuffer(mmap.mmap(file, size_bytes), dtype=torch.uint8)


def size_of(kinds: Kinds) -> int:
    """Return the bytes that tensors take in a mailbox."""
    return sum(padded(math.prod(shape) * dtype.itemsize) for shape, dtype in kinds)


def padded(size_bytes: int) -> int:
    return -(-size_bytes // _ALIGNMENT) * _ALIGNMENT


class RoundRobinBuffer:
    """A ring of byte ranges, allocated in turn and freed in the same order."""

    def __init__(self, first: int, size_bytes: int) -> None:
        self._first, self._size = first, size_bytes
        self._next = 0
        self._ranges: deque[tuple[int, int]] = deque()  # (begin, end)

    def take(self, size_bytes: int) -> int | None:
        """Return the offset of a new range; None if there is no room."""
        size_bytes = padded(size_bytes)
        oldest = self._ranges[0][0] if self._ranges else None
        begin = self._next
        if oldest is None:
            begin, fits = 0, size_bytes <= self._size
        elif begin > oldest:
            fits = begin + size_bytes <= self._size
            if not fits:
                begin, fits = 0, size_bytes < oldest
        else:
            fits = begin + size_bytes < oldest
        if not fits:
            return None
        self._next = begin + size_bytes
        self._ranges.append((begin, self._next))
        return self._first + begin

    def release(self) -> None:
        self._ranges.popleft()
