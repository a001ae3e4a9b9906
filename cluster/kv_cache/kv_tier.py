"""A tier below the K/V pages: which pages are saved there, and which are read before a request enters.

A page of the tier holds what a page of the cache does, for target and drafter alike, so a page that is read
becomes an ordinary page of the prefix cache, and a request that finds it drafts as well as if it had computed
it. So does a saved state of recurrent layers; here it is a page of one more group. The tier is host memory,
of which this module decides what is where, files, or both. Nothing here is on a step's path:

    a request leaves ─▶ its chain of pages is remembered ─▶ saved while the engine is idle, or when blank
                                                            pages run short and kept ones are evicted soon
    a request waits  ─▶ the tier has more of its prefix ─▶ pages are read ─▶ prefix cache ─▶ it enters

Pages that move are held as a running request holds its pages, so nothing else writes them. A request waits
only as long as computing the prefix would take; requests behind it pass. A read that would take longer than
that, by the speed of those before, is not begun. A page that cannot be read is computed.

Saved pages must have the drafter's context: nothing is saved while it is not written
(`scheduler/drafter_context.py`), nor after the drafter was replaced. The drafter is colocated, so it is ready
whenever the engine is.

Called by `scheduler/` and `engine/engine_core.py`. `NoTier` is for engines without one.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterable
from collections.abc import Sequence as ManyOf
from dataclasses import dataclass, field

from ..pages.page_files import PageFolder
from ..step.limits import SchedulerConfig
from ..step.page_transfer import KVTierInfo, MovedPage, PagesMoved, PageTransfer
from ..step.scheduler_output import SchedulerOutput, StepTimings
from ..step.sequence import Sequence
from .host_pages import HostPages
from .kv_cache_manager import KVCacheManager

logger = logging.getLogger(__name__)

_NUM_AHEAD = 4  # waiting requests whose pages are looked for
_PAGES_PER_SAVE, _BYTES_PER_SAVE = 16, 2**26  # so that a read waits for some milliseconds at most
_FREE_PER_SAVED = 4  # free pages for each that is saved at a time, which is not free meanwhile
_MAX_CHAINS = 256  # that wait to be saved; older ones are forgotten
_BLANK_SHARE = 0.25  # of a pool: with fewer blank pages, kept ones are saved beside the steps
_SAVED_AGAIN_S = 60.0  # until a page that is used again has its time renewed
_MAX_RECENT = 100_000
_PROMPT_ROWS = 32  # least rows of a step whose time says what a row of a prompt costs
_RATE_WEIGHT = 0.2  # of a new measurement
_UNKNOWN_WAIT_S, _LONGEST_WAIT_S = 2.0, 10.0
# A page is kept an hour longer for each 10 ns per byte that computing it again takes: SmolLM2 on two cores
# takes some 20 or more, an 8B model on a GPU a tenth of one.
_KEEP_S = 3600.0 / 10e-9
_LONGEST_KEEP_S = 86400.0
_ORDER_S = 0.01  # by which a page is worth less than the one before it, without which it is of no use


class NoTier:
    """No tier: every page that is evicted is lost. `folder`: of the pages' files; None if there is none."""

    is_busy = False
    folder: PageFolder | None = None

    def offer(self, sequence: Sequence) -> None:
        """Remember the pages of a sequence that leaves its slot, before they are freed."""

    def read_ahead(self, waiting: ManyOf[Sequence], num_running: int, now_s: float) -> None:
        """Begin to read what the first waiting sequences lack; those wait (`Sequence.is_read_for`)."""

    def transfers(self, now_s: float, *, idle: bool) -> list[PageTransfer]:
        """Return the transfers to begin now; `idle`: no request runs or waits."""
        return []

    def on_moved(self, done: PagesMoved) -> None:
        """Take note of a transfer that has ended."""

    def on_completed(self, plan: SchedulerOutput, timings: StepTimings) -> None:
        """Measure what a row of a prompt takes."""

    def stop(self, why: str) -> None:
        """Begin nothing any more."""


@dataclass(slots=True)
class _Read:
    """Pages on their way into the cache, for a sequence that waits until `until_s`.

    Attributes:
        num_pages: by which the cached prefix gets longer.
        held: pages, by group, of the prefix that the cache already has, which must stay there.
        followers: sequences that lack the same pages. They wait as well, and are looked up then.
        is_awaited: whether a sequence waits.
    """

    transfer: PageTransfer
    num_pages: int
    held: tuple[list[int], ...]
    sequence: Sequence
    until_s: float
    followers: list[Sequence] = field(default_factory=list[Sequence])
    is_awaited: bool = True

    def let_enter(self) -> None:
        for sequence in (self.sequence, *self.followers):
            sequence.is_read_for = False
        self.followers, self.is_awaited = [], False


class KVTier(NoTier):
    """The tier of one engine.

    Args:
        info: of its folder, other processes may add and delete pages at any time.
    """

    def __init__(self, info: KVTierInfo, manager: KVCacheManager) -> None:
        self._info, self._manager, self.folder = info, manager, info.folder
        self._host = tuple(map(HostPages, info.num_host_pages))  # by group
        self._chains: deque[list[bytes]] = deque()  # digests, to be saved
        # Leading pages of the first chain, and when its save began: the time of use of all its pages, because
        # the first ones would be worth least otherwise.
        self._num_saved, self._chain_s = 0, 0.0
        self._recent: dict[bytes, float] = {}  # when a page was last saved
        self._num_transfers = 0
        self._to_begin: list[PageTransfer] = []
        self._save: PageTransfer | None = None  # under way; at most one is
        self._reads: dict[int, _Read] = {}
        # Seconds of a row of a prompt, and to read a page from host memory and from a file; 0 until measured.
        self._row_s = self._host_read_s = self._file_read_s = 0.0
        self._is_stopped = False

    @property
    def is_busy(self) -> bool:
        """Whether pages move, or may be moved while the engine is idle."""
        return bool(self._save or self._reads or self._to_begin or self._chains)

    # A request leaves.

    def offer(self, sequence: Sequence) -> None:
        if self._is_stopped or not sequence.request.uses_cache or not sequence.digests:
            return
        if len(self._chains) == _MAX_CHAINS:
            self._drop_chain()
        self._chains.append(list(sequence.digests))

    def _drop_chain(self) -> None:
        self._chains.popleft()
        self._num_saved = 0

    def _next_save(self, now_s: float) -> PageTransfer | None:
        while self._chains:
            pages = self._unsaved_pages(self._chains[0], now_s)
            if pages:
                return self._transfer(pages, loads=False)
            self._drop_chain()
        return None

    def _unsaved_pages(self, digests: list[bytes], now_s: float) -> list[MovedPage]:
        """Return the next pages of a chain that the cache still has, and that were not saved lately.

        While they are saved they are not free; so they are few where few are.
        """
        pages = list[MovedPage]()
        num_free = min(pool.num_free for pool in self._manager.pools)
        num_affordable = min(_BYTES_PER_SAVE // sum(self._info.page_bytes), num_free // _FREE_PER_SAVED)
        maximum = max(min(_PAGES_PER_SAVE, num_affordable), 1)
        if not self._num_saved:
            self._chain_s = now_s
        while self._num_saved < len(digests) and len(pages) < maximum:
            index, digest = self._num_saved, digests[self._num_saved]
            self._num_saved += 1
            if now_s - self._recent.get(digest, -_SAVED_AGAIN_S) < _SAVED_AGAIN_S:
                continue
            for group, kept in enumerate(self._manager.movable):
                if (page := kept.page_of(digest)) is not None:
                    pages += self._page_to_save(group, digest, page, index, now_s)
            if len(self._recent) >= _MAX_RECENT:
                self._recent.clear()
            self._recent[digest] = now_s
        return pages

    def _page_to_save(
        self, group: int, digest: bytes, page: int, index: int, now_s: float
    ) -> Iterable[MovedPage]:
        """Yield a page with its place in host memory, unless it is there and there are no files."""
        host, keep_s = self._host[group], self._keep_s(group, index) - (now_s - self._chain_s)
        is_there = host.renew(digest, now_s + keep_s)
        place = None if is_there else host.begin_write(digest, now_s + keep_s)
        if place is not None or self.folder is not None:
            yield MovedPage(group, digest, page, keep_s, place)

    def _keep_s(self, group: int, index: int) -> float:
        num_tokens = self._manager.movable[group].num_computed(index) * self._manager.page_size
        seconds_per_byte = self._row_s * num_tokens / self._info.page_bytes[group]
        return min(_KEEP_S * seconds_per_byte, _LONGEST_KEEP_S) - _ORDER_S * index

    @property
    def _evicts_soon(self) -> bool:
        """Whether kept pages will be evicted soon, and there are enough free ones to save some meanwhile."""
        pools, states = self._manager.pools, self._manager.states
        is_short = any(pool.num_blank < _BLANK_SHARE * pool.num_pages for pool in pools)
        can_save = all(pool.num_free >= _FREE_PER_SAVED for pool in pools)
        if states is not None:
            is_short |= states.num_blank < _BLANK_SHARE * states.num_states
            can_save &= states.num_available > 1
        return is_short and can_save

    # A request waits.

    def read_ahead(self, waiting: ManyOf[Sequence], num_running: int, now_s: float) -> None:
        for read in self._reads.values():
            if now_s >= read.until_s:
                read.let_enter()
        if self._is_stopped:
            return
        num_tokens = 0  # of those that enter before the next one
        for sequence in waiting[:_NUM_AHEAD]:
            num_tokens += len(sequence.token_ids)
            if sequence.was_looked_up or sequence.is_read_for:
                continue
            if (read := self._under_way(sequence)) is not None:
                sequence.is_read_for = True
                read.followers.append(sequence)
            elif self._has_room(num_tokens, num_running):
                sequence.was_looked_up = True
                self._read_for(sequence, now_s)

    def _has_room(self, num_tokens: int, num_running: int) -> bool:
        """Whether sequences of so many tokens could enter, without a page less for those that run."""
        states, no_hit = self._manager.states, self._manager.cache.no_hit
        if states is not None and states.num_available <= 1 + len(self._reads):
            return False
        return self._manager.can_admit(no_hit, num_tokens, num_running + len(self._reads))

    def _read_for(self, sequence: Sequence, now_s: float) -> None:
        """Begin to read the pages of a sequence's prefix that the tier has and the cache lacks."""
        manager = self._manager
        digests = manager.prefix_digests(sequence)
        hit = manager.cache.match(digests)
        for has in (self._has, self._is_in_host):  # files may be slower than computing, and the memory not
            missing = manager.cache.missing(digests, has)
            if not missing:
                return
            num_pages = missing[-1][0] + 1 - hit.num_pages  # by which the hit gets longer
            compute_s = num_pages * manager.page_size * self._row_s
            if not self._row_s or self._read_s(missing) <= compute_s:
                break
        else:
            return
        for kept, held in zip(manager.movable, hit.pages, strict=False):
            kept.hold(held)
        pages = [self._page_to_read(*place, now_s) for place in missing]
        transfer = self._transfer(pages, loads=True)
        wait_s = min(compute_s, _LONGEST_WAIT_S) if self._row_s else _UNKNOWN_WAIT_S
        self._reads[transfer.number] = _Read(transfer, num_pages, hit.pages, sequence, now_s + wait_s)
        sequence.is_read_for = True
        self._to_begin.append(transfer)

    def _page_to_read(self, index: int, group: int, digest: bytes, now_s: float) -> MovedPage:
        page, keep_s = self._manager.movable[group].hold_new(), self._keep_s(group, index)
        return MovedPage(group, digest, page, keep_s, self._host[group].begin_read(digest, now_s + keep_s))

    def _is_in_host(self, group: int, digest: bytes) -> bool:
        return digest in self._host[group]

    def _has(self, group: int, digest: bytes) -> bool:
        return digest in self._host[group] or (self.folder is not None and self.folder.has(group, digest))

    def _read_s(self, missing: Iterable[tuple[int, int, bytes]]) -> float:
        """Return the estimated seconds to read these pages: index, group, digest."""
        in_host = [self._is_in_host(group, digest) for _, group, digest in missing]
        return sum(self._host_read_s if is_in_host else self._file_read_s for is_in_host in in_host)

    def _measure_read(self, pages: ManyOf[MovedPage], seconds: float) -> None:
        num_files = sum(page.place is None for page in pages)
        if not num_files:
            self._host_read_s = _averaged(self._host_read_s, seconds / len(pages))
            return
        seconds -= (len(pages) - num_files) * self._host_read_s
        self._file_read_s = _averaged(self._file_read_s, max(seconds, 0.0) / num_files)

    def _under_way(self, sequence: Sequence) -> _Read | None:
        """Return a read of pages that this sequence needs as well, if there is one."""
        if not self._reads:
            return None
        digests = self._manager.prefix_digests(sequence)
        reads = self._reads.values()
        return next(
            (read for read in reads if read.is_awaited and read.transfer.pages[0].digest in digests), None
        )

    # Pages move.

    def _transfer(self, pages: Iterable[MovedPage], *, loads: bool) -> PageTransfer:
        self._num_transfers += 1
        return PageTransfer(self._num_transfers, loads, tuple(pages))

    def transfers(self, now_s: float, *, idle: bool) -> list[PageTransfer]:
        begun, self._to_begin = self._to_begin, []
        if self._manager.cache.is_marking:
            self._chains.clear()
            self._num_saved = 0
        if (
            self._save is None
            and (idle or self._evicts_soon)
            and (save := self._next_save(now_s)) is not None
        ):
            for moved in save.pages:
                self._manager.movable[moved.group].hold([moved.page])
            self._save = save
            begun.append(save)
        return begun

    def on_moved(self, done: PagesMoved) -> None:
        """Complete a save or a read of pages: of each it is known whether it has moved.

        A page that was read becomes a page of the prefix cache, and the requests that waited for it may
        enter.
        """
        if self._save is not None and done.number == self._save.number:
            for page, has_moved in zip(self._save.pages, done.moved, strict=True):
                self._manager.movable[page.group].drop([page.page])
                if page.place is not None:
                    self._host[page.group].end_write(page.digest, has_moved=has_moved)
                if not has_moved:
                    self._recent.pop(page.digest, None)
            self._save = None
            return
        read, movable = self._reads.pop(done.number), self._manager.movable
        pages = read.transfer.pages
        for page, has_moved in reversed([*zip(pages, done.moved, strict=True)]):  # the last is evicted first
            if has_moved and not self._is_stopped:
                movable[page.group].insert(page.digest, page.page)
            movable[page.group].drop([page.page])
            if page.place is not None:
                self._host[page.group].end_read(page.digest)
        for kept, held in zip(movable, read.held, strict=False):
            kept.drop(held)
        read.let_enter()
        if all(done.moved):
            read.sequence.num_read_tokens = read.num_pages * self._manager.page_size
        self._measure_read(pages, done.seconds)

    def on_completed(self, plan: SchedulerOutput, timings: StepTimings) -> None:
        rows = plan.num_batched_tokens
        if rows >= _PROMPT_ROWS and rows - plan.num_draft_tokens > rows // 2:
            self._row_s = _averaged(self._row_s, timings.total_s / rows)

    def stop(self, why: str) -> None:
        logger.warning("The K/V tier is not used any more: %s.", why)
        self._is_stopped, self.folder = True, None
        self._chains.clear()


def make_tier(config: SchedulerConfig, manager: KVCacheManager) -> NoTier:
    """Return the engine's tier."""
    return NoTier() if config.kv_tier is None else KVTier(config.kv_tier, manager)


def _averaged(average: float, value: float) -> float:
    return value if not average else average + _RATE_WEIGHT * (value - average)
