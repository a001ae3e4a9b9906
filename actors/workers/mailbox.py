"""Tensors between a target rank and a drafter: bytes that both processes have mapped.

On a CPU a memory file (memfd), on GPUs of one node memory of the target's GPU that the drafter's process maps
too (CUDA IPC). Who writes says so only when the bytes are there, so nobody ever
waits for a device of a process that may be dead. The target owns the memory: a drafter's death takes nothing
of it away. Used by `drafter_link.py`.
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

Kinds = Sequence[tuple[tuple[int, ...], torch.dtype]]  # shapes and dtypes of tensors that lie together


class Mailbox:
    """Mapped bytes, read and written as tensors.

    Args:
        bytes_B: uint8, on the device of the target.
    """

    def __init__(self, bytes_B: Tensor) -> None:
        self._bytes_B = bytes_B

    @classmethod
    def make(cls, size_bytes: int, device: torch.device) -> tuple[Mailbox, object]:
        """The owner's, and what the other process makes its own of with `open`."""
        if device.type == "cuda":
            from torch.multiprocessing.reductions import reduce_tensor

            bytes_B = torch.empty(size_bytes, dtype=torch.uint8, device=device)
            return cls(bytes_B), reduce_tensor(bytes_B)
        file = os.memfd_create("manta-drafts")
        os.ftruncate(file, size_bytes)
        return cls(_mapped(file, size_bytes)), file

    @classmethod
    def open(cls, ticket: object, size_bytes: int) -> Mailbox:
        """The other process's: a descriptor (closed here) or what rebuilds a tensor over a GPU's memory."""
        if isinstance(ticket, int):
            bytes_B = _mapped(ticket, size_bytes)
            os.close(ticket)
            return cls(bytes_B)
        assert isinstance(ticket, tuple), "made by `make`"
        rebuild, arguments = ticket
        return cls(rebuild(*arguments))

    def views(self, offset: int, kinds: Kinds) -> list[Tensor]:
        """Tensors of these shapes and dtypes, one behind the other."""
        found: list[Tensor] = []
        for shape, dtype in kinds:
            size = math.prod(shape) * dtype.itemsize
            found.append(self._bytes_B[offset : offset + size].view(dtype).view(shape))
            offset += padded(size)
        return found

    def finish(self) -> None:
        """Wait until what was written is there."""
        if self._bytes_B.is_cuda:
            torch.cuda.current_stream().synchronize()


def _mapped(file: int, size_bytes: int) -> Tensor:
    # The map lives as long as the tensor does.
    return torch.frombuffer(mmap.mmap(file, size_bytes), dtype=torch.uint8)


def padded(size_bytes: int) -> int:
    """Room for so many bytes, so that what follows begins well."""
    return -(-size_bytes // _ALIGNMENT) * _ALIGNMENT


class Rounds:
    """Runs of bytes taken in turns and given back in the same order, round and round.

    Args:
        first, size_bytes: of the mailbox.
    """

    def __init__(self, first: int, size_bytes: int) -> None:
        self._first, self._size = first, size_bytes
        self._next = 0
        self._taken: deque[tuple[int, int]] = deque()  # begins and ends

    def take(self, size_bytes: int) -> int | None:
        """Where such a run begins; None if what was taken leaves no room."""
        size_bytes = padded(size_bytes)
        oldest = self._taken[0][0] if self._taken else None
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
        self._taken.append((begin, self._next))
        return self._first + begin

    def give_back(self) -> None:
        """The oldest run."""
        self._taken.popleft()
