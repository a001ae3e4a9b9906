"""Moves K/V pages between a rank's memory and files, in a thread beside its steps.

A page is one id in the memory of all models that use its pool: the target's planes, then the drafter's.
Transfers are begun between steps and in their order, so every step that was submitted before has ended with
these pages, and until the end is reported nothing else uses them (`cluster/step/page_transfer.py`).

For memory on the host. Called by the executors.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ....cluster.pages.kv_cache_groups import KVCacheGroup
from ....cluster.pages.page_files import PageFiles
from ....cluster.step.page_transfer import MovedPage, PagesMoved, PageTransfer
from ....drafter.compute.memory.kv_cache import PagedKVCache


@dataclass(frozen=True, slots=True)
class PageMemory:
    """The memory of one pool's pages: that of each model, uint8 [A, P + 1, bytes of a page in a plane]."""

    planes: tuple[np.ndarray, ...]

    @classmethod
    def of(cls, caches: Sequence[PagedKVCache]) -> PageMemory:
        """Return the memory of these caches, which have the same page ids; some may share it."""
        memory = {cache.kv.data_ptr(): cache.kv.flatten(2).view(torch.uint8).numpy() for cache in caches}
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
        pools: the memory of each pool.

    Attributes:
        folder: the files of this rank.
    """

    def __init__(
        self, files: PageFiles, pools: tuple[PageMemory, ...], groups: Sequence[KVCacheGroup]
    ) -> None:
        self.folder = files.folder
        self._files, self._memory = files, tuple(pools[group.pool] for group in groups)
        self._loads, self._saves = deque[PageTransfer](), deque[PageTransfer]()
        self._ended: list[PagesMoved] = []
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    def begin(self, transfer: PageTransfer) -> None:
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
