"""Moves of K/V pages between the cache and a tier below it: what the scheduler asks, and what became of it.

The tier is host memory, files, or both: then a page is saved to both, and read from the memory if it is still
there.

A transfer is ordered with the plans: its pages are read or written after all steps that were submitted before
it. Nothing else uses them until its end is reported, so it runs beside later steps.

Made by `cluster/kv_cache/kv_tier.py`, run by `actors/targets/runners/page_mover.py` on every rank.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from ..pages.page_files import PageFolder


@dataclass(frozen=True, slots=True)
class KVTierInfo:
    """The tier below a rank's pages; equal on all ranks but for the folder.

    Attributes:
        page_bytes: of a page of each group.
        num_host_pages: places in host memory for pages of each group.
        folder: None without files.
    """

    page_bytes: tuple[int, ...]
    num_host_pages: tuple[int, ...]
    folder: PageFolder | None


class MovedPage(NamedTuple):
    """A page to move; `keep_s` is added to the time at which it was last used, for its worth in the tier."""

    group: int  # the number of groups: it is the recurrent state at the end of a page
    digest: bytes
    page: int  # id in the group's pool, or of a state
    keep_s: float
    place: int | None = None  # in host memory, among the group's; None: only to or from a file


@dataclass(frozen=True, slots=True)
class PageTransfer:
    """Pages to move.

    Attributes:
        loads: whether pages are filled from the tier; else they are saved there.
    """

    number: int
    loads: bool
    pages: tuple[MovedPage, ...]


@dataclass(frozen=True, slots=True)
class PagesMoved:
    """The end of a transfer; `moved` says of each page whether the tier and the cache both have it now."""

    number: int
    moved: tuple[bool, ...]
    seconds: float


class MovesOfRanks:
    """Transfers under way on several ranks: one has ended when it has on all, and moved what all did.

    Attributes:
        num_awaited: ranks that were asked for a report and have not sent it.
    """

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks, self.num_awaited = num_ranks, 0
        self._ends: dict[int, list[PagesMoved]] = {}

    @property
    def are_under_way(self) -> bool:
        return bool(self._ends)

    def begin(self, transfer: PageTransfer) -> None:
        self._ends[transfer.number] = []

    def on_report(self, ended: Iterable[PagesMoved]) -> None:
        """Take in one rank's report."""
        self.num_awaited -= 1
        for end in ended:
            self._ends[end.number].append(end)

    def take_ended(self) -> list[PagesMoved]:
        """Return the transfers that have ended on all ranks, once."""
        numbers = [number for number, ends in self._ends.items() if len(ends) == self._num_ranks]
        return [_merged(self._ends.pop(number)) for number in numbers]


def _merged(ends: list[PagesMoved]) -> PagesMoved:
    moved = tuple(map(all, zip(*(end.moved for end in ends), strict=True)))
    return PagesMoved(ends[0].number, moved, max(end.seconds for end in ends))


class MovesPages(Protocol):
    """An executor with a tier below its pages (`ExecutorInfo.kv_tier`)."""

    def move_pages(self, transfer: PageTransfer) -> None: ...

    def moved_pages(self, wait_s: float) -> list[PagesMoved]:
        """Return the transfers that have ended; wait up to `wait_s` for one if no step is in flight."""
        ...
