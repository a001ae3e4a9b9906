"""Moves K/V pages between a rank's memory and the tier below it, in a thread beside its steps.

A page is one id in the memory of all models that use its pool: the target's planes, then the drafter's. A
saved state of recurrent layers moves like a page. In host memory a page is one piece, in a place where it
stays or, on its way to or from a file, in one that all such pages of its group pass through:

    memory of the rank     | .. page 7 .. |  a plane      | .. page 7 .. |  another
                                 │  copies, on a GPU in a stream of their own │
    host memory            [ place 0 | place 1 | .. | the one to pass through ]     pinned, for a GPU
                                 │
    files                  `PageFiles`

The thread waits for the steps that were submitted before a transfer, so these have ended with its pages; no
step waits for the thread. Until the end is reported nothing else uses them (`cluster/step/page_transfer.py`).

Called by the executors.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ....cluster.pages.page_files import PageFiles
from ....cluster.step.page_transfer import KVTierInfo, MovedPage, PagesMoved, PageTransfer

_CHUNK_BYTES = 2**28  # of host memory that is allocated at once: PyTorch rounds pinned ones to a power of two
_END_S = 10.0  # most for a transfer that is under way at the end


def nothing_is_deferred() -> None: ...


@dataclass(frozen=True, slots=True, eq=False)
class PageMemory:
    """The memory of pages with the same ids: uint8 [P, bytes of a page in a plane], by plane."""

    planes: tuple[Tensor, ...]
    sizes: tuple[int, ...]  # bytes of a page in each plane

    @classmethod
    def of(cls, tensors: Iterable[Tensor]) -> PageMemory:
        """Return the memory of tensors [A, P, ...]; one that is there several times counts once."""
        distinct = {each.data_ptr(): each for each in tensors if each.numel()}.values()
        planes = [plane for each in distinct for plane in each.flatten(2).view(torch.uint8).unbind()]
        return cls(tuple(planes), tuple(plane.shape[1] for plane in planes))

    @property
    def page_bytes(self) -> int:
        return sum(self.sizes)

    @property
    def num_pages(self) -> int:
        return len(self.planes[0])

    @property
    def device(self) -> torch.device:
        return self.planes[0].device

    def save(self, page: int, place: Tensor) -> None:
        """Copy a page to host memory, uint8 [page_bytes]."""
        for plane, part in zip(self.planes, place.split(self.sizes), strict=True):
            _copy(plane[page], part)

    def load(self, page: int, place: Tensor) -> None:
        for plane, part in zip(self.planes, place.split(self.sizes), strict=True):
            _copy(part, plane[page])

    def zero(self, page: int) -> None:
        for plane in self.planes:
            plane[page].zero_()


def _copy(source: Tensor, target: Tensor) -> None:
    if source.device == target.device:  # a host; PyTorch would start threads for a large copy
        np.copyto(target.numpy(), source.numpy())
    else:
        target.copy_(source, non_blocking=True)


class _HostMemory:
    """Places for pages of one group, uint8 [bytes of a page] each."""

    def __init__(self, num_places: int, page_bytes: int, *, pinned: bool) -> None:
        self._per_chunk = max(_CHUNK_BYTES // page_bytes, 1)
        counts = [min(self._per_chunk, num_places - i) for i in range(0, num_places, self._per_chunk)]
        self._chunks = [
            torch.empty(count * page_bytes, dtype=torch.uint8, pin_memory=pinned).view(count, page_bytes)
            for count in counts
        ]

    def __getitem__(self, place: int) -> Tensor:
        return self._chunks[place // self._per_chunk][place % self._per_chunk]


class _Copies:
    """Copies beside the steps of a GPU, in a stream of their own. On a host all are synchronous."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def steps_so_far(self) -> torch.cuda.Event | None:
        """Return an event at the end of the submitted steps; None on a host, where they have ended."""
        return None if self._stream is None else _recorded()

    def in_stream(self) -> AbstractContextManager[object]:
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def wait(self) -> None:
        """Wait for the copies so far; called within `in_stream`."""
        if self._stream is not None:
            _recorded().synchronize()


def _recorded() -> torch.cuda.Event:
    event = torch.cuda.Event(blocking=True)  # a thread that waits for it leaves the core to others
    event.record()
    return event


class PageMover:
    """Runs transfers one after another, those that requests wait for first. It has memory once it is started.

    Args:
        files: of this rank; None if the tier has none.
        memory: that of each group's pages, then that of states if there are any.
        settle: writes what steps have left to be written to pages, between steps.

    Attributes:
        info: what the tier has room for.
    """

    def __init__(
        self,
        info: KVTierInfo,
        files: PageFiles | None,
        memory: Sequence[PageMemory],
        settle: Callable[[], None] = nothing_is_deferred,
    ) -> None:
        self.info, self._files, self._memory = info, files, memory
        self._settle = settle
        self._copies = _Copies(memory[0].device)
        self._host: Sequence[_HostMemory] = ()
        # Each with an event at the end of the steps before it.
        self._loads, self._saves = (deque[tuple[PageTransfer, torch.cuda.Event | None]]() for _ in range(2))
        self._ended: list[PagesMoved] = []
        self._changed, self._is_closed = threading.Condition(), False
        self._thread = threading.Thread(target=self._run, name="manta-pages", daemon=True)

    def start(self) -> None:
        """Allocate the host memory, which takes a while if it is pinned, and start the thread."""
        pinned = self._memory[0].device.type == "cuda"
        self._host = tuple(
            _HostMemory(num_places + 1, memory.page_bytes, pinned=pinned)
            for num_places, memory in zip(self.info.num_host_pages, self._memory, strict=True)
        )
        self._thread.start()

    def close(self) -> None:
        """End the thread, after the transfer that is under way."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        self._thread.join(_END_S)

    def begin(self, transfer: PageTransfer) -> None:
        """Begin a transfer, in the thread of the steps; it follows those that were submitted."""
        self._settle()
        begun = transfer, self._copies.steps_so_far()
        with self._changed:
            (self._loads if transfer.loads else self._saves).append(begun)
            self._changed.notify_all()

    def take_ended(self, wait_s: float) -> list[PagesMoved]:
        """Return the transfers that have ended since the last call; wait up to `wait_s` for one."""
        with self._changed:
            if not self._ended and wait_s:
                self._changed.wait_for(lambda: bool(self._ended), wait_s)
            ended, self._ended = self._ended, []
        return ended

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: bool(self._loads or self._saves or self._is_closed))
                if self._is_closed:
                    return
            self._move_next()

    @torch.inference_mode()
    def _move_next(self) -> None:
        with self._changed:
            transfer, steps = (self._loads or self._saves).popleft()
        if steps is not None:
            steps.synchronize()
        begin_s = time.monotonic()
        with self._copies.in_stream():
            moved = tuple(map(self._load if transfer.loads else self._save, transfer.pages))
            self._copies.wait()
        ended = PagesMoved(transfer.number, moved, time.monotonic() - begin_s)
        with self._changed:
            self._ended.append(ended)
            self._changed.notify_all()

    def _load(self, page: MovedPage) -> bool:
        memory, place = self._memory[page.group], self._place(page)
        has_moved = page.place is not None or self._read(page, place)
        if has_moved:
            memory.load(page.page, place)
        else:  # masks hide what is finite only: see `PagedKVCache.write`
            memory.zero(page.page)
        return has_moved

    def _read(self, page: MovedPage, place: Tensor) -> bool:
        """Read a page from its file, through the place that the page before it has left by now."""
        self._copies.wait()
        return self._files is not None and self._files.read(
            page.group, page.digest, [place.numpy().data], page.keep_s
        )

    def _save(self, page: MovedPage) -> bool:
        files, is_placed, place = self._files, page.place is not None, self._place(page)
        is_kept = files is not None and files.renew(page.group, page.digest, page.keep_s)
        if is_kept and not is_placed:
            return True
        self._memory[page.group].save(page.page, place)
        self._copies.wait()
        if files is not None and not is_kept:
            is_kept = files.write(page.group, page.digest, [place.numpy().data], page.keep_s)
        return is_kept or is_placed

    def _place(self, page: MovedPage) -> Tensor:
        last = self.info.num_host_pages[page.group]
        return self._host[page.group][last if page.place is None else page.place]
