"""Moves K/V pages between a rank's memory and files, in a thread beside its steps.

A page is one id in the memory of all models that use its pool: the target's planes, then the drafter's. A
saved state of recurrent layers moves like a page.
Transfers are begun between steps and in their order, so every step that was submitted before has ended with
these pages, and until the end is reported nothing else uses them (`cluster/step/page_transfer.py`).

For memory on the host. Called by the executors.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ....cluster.pages.page_files import PageFiles
from ....cluster.step.page_transfer import MovedPage, PagesMoved, PageTransfer


@dataclass(frozen=True, slots=True)
class PageMemory:
    """The memory of pages with the same ids: uint8 [A, P, bytes of a page in a plane], by tensor."""

    planes: tuple[np.ndarray, ...]

    @classmethod
    def of(cls, tensors: Iterable[Tensor]) -> PageMemory:
        """Return the memory of tensors [A, P, ...]; several may be the same memory."""
        memory = {x.data_ptr(): x.flatten(2).view(torch.uint8).numpy() for x in tensors if x.numel()}
        return cls(tuple(memory.values()))

    @property
    def page_bytes(self) -> int:
        return sum(planes.shape[0] * planes.shape[2] for planes in self.planes)

    def buffers(self, page: int) -> list[memoryview]:
        return [memoryview(plane[page]) for planes in self.planes for plane in planes]

    def zero(self, page: int) -> None:
        for planes in self.planes:
            planes[:, page] = 0


class PageMover:
    """Runs transfers one after another, those that requests wait for first.

    Args:
        memory: that of each group's pages, then that of states if there are any.
        settle: writes what steps have left to be written to pages, between steps.

    Attributes:
        folder: the files of this rank.
    """

    def __init__(self, files: PageFiles, memory: Sequence[PageMemory], settle: Callable[[], None]) -> None:
        self.folder = files.folder
        self._files, self._memory, self._settle = files, memory, settle
        self._loads, self._saves = deque[PageTransfer](), deque[PageTransfer]()
        self._ended: list[PagesMoved] = []
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    def begin(self, transfer: PageTransfer) -> None:
        """Begin a transfer, between steps."""
        self._settle()
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="manta-pages", daemon=True)
            self._thread.start()
        with self._changed:
            (self._loads if transfer.loads else self._saves).append(transfer)
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
                self._changed.wait_for(lambda: bool(self._loads or self._saves))
                transfer = (self._loads or self._saves).popleft()
            begin_s = time.monotonic()
            move = self._load if transfer.loads else self._save
            moved = tuple(map(move, transfer.pages))
            ended = PagesMoved(transfer.number, moved, time.monotonic() - begin_s)
            with self._changed:
                self._ended.append(ended)
                self._changed.notify_all()

    def _load(self, page: MovedPage) -> bool:
        memory = self._memory[page.group]
        has_moved = self._files.read(page.group, page.digest, memory.buffers(page.page), page.keep_s)
        if not has_moved:  # masks hide what is finite only: see `PagedKVCache.write`
            memory.zero(page.page)
        return has_moved

    def _save(self, page: MovedPage) -> bool:
        buffers = self._memory[page.group].buffers(page.page)
        return self._files.write(page.group, page.digest, buffers, page.keep_s)
