"""Mailboxes over CUDA IPC between processes: PyTorch's own reduction, over a stand-in for CUDA's memory.

`torch.multiprocessing.reductions` runs as it is, with its checks and its cache of mapped memory. The stand-in
is the storage: its handle has CUDA's 64 bytes after the kind of allocation, names a file that both processes
map, cannot be opened in the process that made it, and is opened with `_new_shared_cuda`'s arguments.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from manta.actors.workers.shm.tensor_mailbox import Mailbox, size_of

KINDS = [((3, 5), torch.int64), ((2, 7), torch.bfloat16), ((4,), torch.float32)]
SIZE, INDEX = 2 * size_of(KINDS), 1
EMPTY = torch.empty


class Untyped:
    device = torch.device("cuda", INDEX)


class CudaStorage:
    """What a `TypedStorage` on a device does when it is shared."""

    folder: ClassVar[Path]
    _untyped_storage = Untyped()

    def __init__(self, num_bytes: int) -> None:
        self._num_bytes = num_bytes

    def _weak_ref(self) -> int:
        return torch.UntypedStorage(1)._weak_ref()

    def _share_cuda_(self) -> tuple[object, ...]:
        handle = b"\x00" + str(os.getpid()).encode().ljust(64)
        return INDEX, handle, self._num_bytes, 0, b"counter", 0, b"event", True

    @classmethod
    def map(cls, owner: int, num_bytes: int) -> torch.UntypedStorage:
        return torch.UntypedStorage.from_file(str(cls.folder / str(owner)), shared=True, nbytes=num_bytes)

    @classmethod
    def _new_shared_cuda(
        cls, device, handle, num_bytes, offset, counter, counter_offset, event, event_sync_required
    ) -> torch.UntypedStorage:
        assert device == INDEX and len(handle) == 65 and event_sync_required is True
        assert (num_bytes, offset, counter_offset) == (SIZE, 0, 0)
        assert (counter, event) == (b"counter", b"event")
        if (owner := int(handle[1:])) == os.getpid():
            raise RuntimeError("CUDA error: invalid device context")
        return cls.map(owner, num_bytes)


class OnDevice(torch.Tensor):
    def _typed_storage(self) -> CudaStorage:
        return CudaStorage(self.numel())


def empty(size: int, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    if device != Untyped.device:  # within PyTorch
        return EMPTY(size, dtype=dtype, device=device)
    assert dtype is torch.uint8
    return EMPTY(0, dtype=dtype).set_(CudaStorage.map(os.getpid(), size)).as_subclass(OnDevice)


@contextmanager
def cuda(folder: Path) -> Iterator[None]:
    CudaStorage.folder = folder
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "empty", empty)
        patch.setattr(torch.cuda, "_lazy_init", lambda: None)
        yield


def run_rank(rank: int, folder: Path, pipe: Connection) -> None:
    with cuda(folder):
        mailbox, ticket = Mailbox.make(SIZE, Untyped.device)
        for view in mailbox.views(0, KINDS):
            view.fill_(rank + 1)
        with pytest.raises(RuntimeError, match="context"):
            Mailbox.open(ticket, SIZE)
        pipe.send(ticket)
        pipe.recv()  # the drafter has written
        pipe.send([view.unique().tolist() for view in mailbox.views(SIZE // 2, KINDS)])


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_a_drafter_maps_the_mailbox_of_each_rank(num_ranks: int, tmp_path: Path) -> None:
    """What a rank writes the drafter reads, and the other way round; no rank sees another's."""
    forked = multiprocessing.get_context("fork")
    pipes = [forked.Pipe() for _ in range(num_ranks)]
    ranks = [
        forked.Process(target=run_rank, args=(rank, tmp_path, theirs))
        for rank, (_, theirs) in enumerate(pipes)
    ]
    try:
        for process in ranks:
            process.start()
        with cuda(tmp_path):
            for rank, (pipe, _) in enumerate(pipes):
                assert pipe.poll(120)
                mailbox = Mailbox.open(pipe.recv(), SIZE)
                assert all((view == rank + 1).all() for view in mailbox.views(0, KINDS))
                for view in mailbox.views(SIZE // 2, KINDS):
                    view.fill_(10 * rank + 7)
        for rank, (pipe, _) in enumerate(pipes):
            pipe.send("written")
            assert pipe.poll(120) and pipe.recv() == [[10 * rank + 7]] * len(KINDS)
    finally:
        for process in ranks:
            process.join(600)
            process.kill()
    assert [process.exitcode for process in ranks] == [0] * num_ranks
