"""A tier below the pages: every row reads what it would have computed, whatever moves, fails or is slow.

`CheckingExecutor` knows what each place of the memory holds; here pages move beside the steps as well. The
files themselves: test_page_files.py.
"""

from __future__ import annotations

import os
import random
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, cast

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st
from manta.cluster.errors import UnprocessableError
from manta.cluster.kv_cache.kv_tier import KVTier
from manta.cluster.pages.page_files import PageFolder
from manta.cluster.request.request import Request
from manta.cluster.step.executor import ExecutorInfo
from manta.cluster.step.page_transfer import KVTierInfo, MovedPage, MovesOfRanks, PagesMoved, PageTransfer
from support.engines.cluster_checker import (
    SURVIVAL,
    CheckedEngine,
    CheckingExecutor,
    Held,
    expected,
    make_info,
    make_request,
    open_engine,
)
from support.engines.random_workloads import LAYOUTS, Arrival, arrivals, infos, step

NUM_WORKLOADS = 240 if os.environ.get("MANTA_GRID") == "whole" else 30
Key = tuple[int, bytes]
UNKNOWN = Held(None, (-1,))
Content = list[tuple[tuple[int, int] | None, int | None]]  # by offset: group and digest, drafter


@dataclass(eq=False)
class Tier:
    """Pages by group and digest, of all engines: what `PageFolder` says, and what an executor moves."""

    num_groups: int = 1
    pages: dict[Key, Content] = field(default_factory=dict)
    states: dict[bytes, Held] = field(default_factory=dict)

    def has(self, group: int, digest: bytes) -> bool:
        return (group, digest) in self.pages or (group == self.num_groups and digest in self.states)

    @property
    def page_bytes(self) -> tuple[int, ...]:
        return (64,) * (self.num_groups + 1)


class MovingExecutor(CheckingExecutor):
    """Moves pages between its memory and a tier, each transfer over some steps; some pages do not move.

    Of `tier` are the files, if there are any; `host` is its host memory, by group and place.
    """

    def __init__(
        self, *args: Any, tier: Tier, seed: int, fails: float = 0.0
    ) -> None:  # Any: those of its base
        super().__init__(*args)
        self.tier, self._fails, self._random = tier, fails, random.Random(seed)
        self._under_way: list[tuple[int, PageTransfer]] = []
        self.host: dict[tuple[int, int], tuple[bytes, Any]] = {}
        self.num_loaded = self.num_from_host = self.num_states_loaded = 0

    def move_pages(self, transfer: PageTransfer) -> None:
        self._under_way.append((self._random.randrange(4), transfer))

    def moved_pages(self, wait_s: float) -> list[PagesMoved]:
        ended = [transfer for polls, transfer in self._under_way if not polls]
        self._under_way = [(polls - 1, transfer) for polls, transfer in self._under_way if polls]
        return [self._move(transfer) for transfer in ended]

    def _move(self, transfer: PageTransfer) -> PagesMoved:
        moved = [self._random.random() >= self._fails for _ in transfer.pages]
        assert self.info.kv_tier is not None
        has_files = self.info.kv_tier.folder is not None
        for has_moved, (group, digest, page, _, place) in zip(moved, transfer.pages, strict=True):
            if group == len(self.info.page_groups):
                self._move_state(transfer, has_moved, digest, page, place)
                continue
            pool = self.info.page_groups[group].pool
            places = [(pool, page, offset) for offset in range(self.info.page_size)]
            if not transfer.loads and has_moved:
                content = [(self.held.get(at), self.seen.get(at)) for at in places]
                if place is not None:
                    self.host[group, place] = digest, content
                if has_files:
                    known = self.tier.pages.setdefault((group, digest), content)
                    assert known == content, "a key has two contents"
            elif transfer.loads:
                if place is None:
                    content = self.tier.pages[group, digest]
                else:
                    kept, content = self.host[group, place]
                    assert kept == digest, "a place that is read was given to another page"
                for at, (held, seen) in zip(places, content, strict=True):
                    self.held[at] = held if has_moved and held is not None else (-1, -1)
                    self.seen[at] = seen if seen is not None else -1
                self.num_loaded += has_moved
                self.num_from_host += has_moved and place is not None
        return PagesMoved(transfer.number, tuple(moved), 0.001)

    def _move_state(
        self, transfer: PageTransfer, has_moved: bool, digest: bytes, state: int, place: int | None
    ) -> None:
        assert self.states is not None and self.info.kv_tier is not None
        at = len(self.info.page_groups), -1 if place is None else place
        if not transfer.loads and has_moved:
            held = self.states.held[state]
            if place is not None:
                self.host[at] = digest, held
            if self.info.kv_tier.folder is not None:
                self.tier.states[digest] = held
        elif transfer.loads:
            kept, held = (digest, self.tier.states[digest]) if place is None else self.host[at]
            assert kept == digest, "a place that is read was given to another state"
            self.states.held[state] = held if has_moved else UNKNOWN
            self.num_states_loaded += has_moved

    def _write(self, plan, r, begin, result, written):
        chain = super()._write(plan, r, begin, result, written)
        groups = self.info.page_groups
        moved = [moved for _, transfer in self._under_way for moved in transfer.pages]
        moving = {(groups[each.group].pool, each.page) for each in moved if each.group < len(groups)}
        assert not moving & {place[:2] for place in written}, "a page is written while it moves"
        states = {a.state.state for a in plan.admitted if a.state is not None}
        states |= set() if plan.saves is None else set(plan.saves.states.tolist())
        assert not states & {each.page for each in moved if each.group == len(groups)}
        return chain


def open_moving(
    info: ExecutorInfo,
    tier: Tier,
    seed: int = 0,
    fails: float = 0.0,
    survival: Any = SURVIVAL,
    *,
    num_host_pages: int = 0,
    has_files: bool = True,
    **config: Any,
) -> CheckedEngine:
    make = partial(MovingExecutor, tier=tier, seed=seed, fails=fails)
    num_groups = len(info.page_groups)
    folder = cast(PageFolder, tier) if has_files else None
    below = KVTierInfo((64,) * (num_groups + 1), (num_host_pages,) * (num_groups + 1), folder)
    return open_engine(replace(info, kv_tier=below), survival, make, **config)


def finish(engine: CheckedEngine) -> None:
    """Save what the tier lacks, as at the end of a server."""
    engine.save_pages()
    engine.check_invariants()
    manager = engine.scheduler.kv_cache_manager
    assert not any(pages.held.total() for pages in manager._group_pages), "pages stay held"
    assert manager.states is None or not manager.states._held, "states stay held"
    tier = engine.scheduler.queues.tier
    assert isinstance(tier, KVTier)
    for host in tier._host:
        host.check_invariants()
        assert not host._written and not host._num_reads.total(), "places stay held"


@pytest.mark.parametrize("layout", LAYOUTS)
@settings(max_examples=NUM_WORKLOADS, deadline=None)
@given(data=st.data())
def test_every_request_reads_what_it_would_have_computed(layout: str, data: st.DataObject) -> None:
    """Engines one after another with one tier, with pools that some workloads exhaust."""
    tier, loaded, states = Tier(len(LAYOUTS[layout])), 0, 0
    in_flight = data.draw(st.sampled_from((1, 2)))
    num_states = data.draw(st.integers(1, 16)) if "states" in layout else None
    info = data.draw(infos(LAYOUTS[layout], max_in_flight=in_flight, num_states=num_states))
    drafters = data.draw(st.sampled_from(({}, {}, {5: "start_drafter"})))
    for number in range(2):
        engine = open_moving(
            info,
            tier,
            seed=data.draw(st.integers(0, 99)),
            fails=data.draw(st.sampled_from((0.0, 0.0, 0.3))),
            num_host_pages=data.draw(st.sampled_from((0, 1, 5, 100))),
            has_files=data.draw(st.sampled_from((True, True, False))),
            max_num_seqs=data.draw(st.integers(1, 8)),
            max_num_batched_tokens=data.draw(st.integers(4, 40)),
        )
        todo = [data.draw(arrivals(i)) for i in range(data.draw(st.integers(1, 8)))]
        _run(engine, todo, {} if number else drafters)
        finish(engine)
        loaded += engine.executor.num_loaded
        event(f"from host memory: {engine.executor.num_from_host > 0}")
        states += engine.executor.num_states_loaded
    event(f"loaded: {loaded > 0}, states: {states > 0}")


def _run(engine: CheckedEngine, todo: list[Arrival], drafters: dict[int, str]) -> None:
    served, aborted, now = dict[str, Request](), set[str](), 0
    waiting = sorted(todo, key=lambda a: a.step)
    while waiting or engine.has_unfinished:
        engine.move_pages(idle=not engine.has_unfinished)
        while waiting and waiting[0].step <= now:
            request = waiting.pop(0).request
            try:
                engine.add_request(request)
                served[request.request_id] = request
            except UnprocessableError:
                event("too long for the pages")
        if now in drafters:
            getattr(engine.executor, drafters[now])()
        step(engine, {a.request.request_id: a for a in todo if a.abort_step == now}, aborted)
        now += 1
        assert now < 3000, "no progress"
    for request_id, request in served.items():
        tokens = expected(request, engine.executor.info, engine.executor.max_rows)[0]
        mine = engine.outputs.tokens.get(request_id, [])
        assert mine == (tokens[: len(mine)] if request_id in aborted else tokens)


PROMPT = tuple(range(2, 20)) * 3
INFO = make_info(max_model_len=128)


def answered(tier: Tier, info: ExecutorInfo = INFO, **config: Any) -> CheckedEngine:
    """An engine that has answered one request and saved its pages."""
    engine = open_moving(info, tier)
    engine.run(make_request("first", PROMPT, max_tokens=12, ignore_eos=True, **config))
    finish(engine)
    return engine


def test_another_engine_reads_the_prefix_and_drafts_as_after_a_hit_in_memory() -> None:
    tier = Tier()
    first = answered(tier)
    again = make_request("again", PROMPT, max_tokens=12, ignore_eos=True, seed=1)
    warm = first.run(again)
    other = open_moving(INFO, tier)
    cold = other.run(again)
    assert cold.tokens == warm.tokens and cold.cached["again"] == warm.cached["again"] == 52
    assert other.stats().num_accepted_tokens > 0
    counts = other.stats()
    assert (counts.tier_queries, counts.tier_hits, counts.prefix_cache_hits) == (54, 52, 52)
    assert [stay.num_read for stay in other.timelines("again")[0].intervals] == [52]
    assert first.stats().tier_hits == 0


def test_a_state_of_recurrent_layers_is_read_with_the_pages_before_it_or_alone() -> None:
    tier, info = Tier(), replace(INFO, num_states=8)
    first = answered(tier, info)
    again = make_request("again", PROMPT, max_tokens=12, ignore_eos=True, seed=1)
    other = open_moving(info, tier)
    cold = other.run(again)
    assert cold.tokens == first.run(again).tokens and cold.cached["again"] == 52
    assert other.executor.num_states_loaded == 1 and other.stats().tier_hits == 52
    states = other.scheduler.kv_cache_manager.states
    assert states is not None
    states.clear()
    once_more = replace(again, request_id="once more")
    assert other.run(once_more).cached["once more"] == 52 and other.executor.num_states_loaded == 2


def test_keys_do_not_read_one_anothers_pages() -> None:
    tier = Tier()
    answered(tier, cache_salt="alice")
    other = open_moving(INFO, tier)
    for salt in (None, "bob", "alice"):
        name = f"of {salt}"
        other.run(make_request(name, PROMPT, max_tokens=4, cache_salt=salt))
        assert other.outputs.cached[name] == (52 if salt == "alice" else 0)


def test_pages_that_cannot_be_read_are_computed() -> None:
    tier = Tier()
    answered(tier)
    other = open_moving(INFO, tier, fails=1.0)
    request = other.add("again", PROMPT, max_tokens=12)
    other.check_outputs(request)
    assert other.outputs.cached["again"] == 0 and other.stats().tier_hits == 0


def test_requests_behind_one_that_waits_for_pages_pass_it_and_it_waits_no_longer_than_computing_takes() -> (
    None
):
    tier = Tier()
    answered(tier)
    other = open_moving(INFO, tier)
    other.executor.moved_pages = lambda wait_s: []  # a disk that does not answer
    slow, quick = (
        other.add(name, prompt, max_tokens=4) for name, prompt in (("slow", PROMPT), ("quick", (9, 9)))
    )
    for _ in range(8):
        other.step()
    assert other.outputs.tokens.keys() == {"quick"} and other.has_unfinished
    other.executor.clock.wait_until(2.1)
    other.check_outputs(slow, quick)


def test_nothing_is_read_if_computing_is_faster() -> None:
    tier = Tier()
    answered(tier)
    other = open_moving(INFO, tier)
    tier_of = other.scheduler.queues.tier
    assert isinstance(tier_of, KVTier)
    tier_of._row_s, tier_of._file_read_s = 1e-6, 1e-3
    other.run(make_request("again", PROMPT, max_tokens=4))
    assert other.outputs.cached["again"] == 0


def test_host_memory_is_read_where_computing_is_faster_than_files() -> None:
    tier = Tier()
    engine = open_moving(INFO, tier, num_host_pages=5)
    engine.run(make_request("first", PROMPT, max_tokens=12))
    finish(engine)
    tier_of = engine.scheduler.queues.tier
    assert isinstance(tier_of, KVTier) and len(tier.pages) > 5
    tier_of._row_s, tier_of._file_read_s, tier_of._host_read_s = 1e-6, 1e-3, 1e-9
    engine.reset_prefix_cache()
    engine.run(make_request("again", PROMPT, max_tokens=4))
    assert engine.outputs.cached["again"] == engine.stats().tier_hits == 5 * INFO.page_size


def test_without_files_evicted_pages_are_read_from_host_memory() -> None:
    info = make_info(num_pages=(40,), max_model_len=128)
    engine = open_moving(info, Tier(), num_host_pages=100, has_files=False)
    others = [make_request(f"r{i}", (3 + i,) * 100, max_tokens=2) for i in range(3)]
    engine.run(make_request("first", PROMPT, max_tokens=2))
    finish(engine)
    for other in others:
        engine.run(other)
    engine.run(make_request("again", PROMPT, max_tokens=2))
    finish(engine)
    assert engine.outputs.cached["again"] == engine.stats().tier_hits == 52 and not engine.executor.tier.pages


def test_a_read_is_measured_by_where_its_pages_come_from() -> None:
    tier = KVTier(KVTierInfo((64,), (2,), None), open_moving(INFO, Tier()).scheduler.kv_cache_manager)
    of_host, of_file = MovedPage(0, b"a", 1, 0.0, 0), MovedPage(0, b"b", 2, 0.0)
    tier._measure_read([of_host] * 2, 0.2)
    tier._measure_read([of_host, of_file, of_file], 2.1)
    assert (tier._host_read_s, tier._file_read_s) == (0.1, 1.0)


def test_pages_are_saved_beside_the_steps_only_when_blank_ones_are_few() -> None:
    tier = Tier()
    engine = open_moving(make_info(num_pages=(32,), max_model_len=128), tier)
    engine.add("long", (5, 6), max_tokens=90, ignore_eos=True)
    engine.add("short", PROMPT[:16], max_tokens=2, ignore_eos=True)
    while "short" not in engine.outputs.ends:
        engine.step()
    for _ in range(3):
        engine.step()
    assert not tier.pages and engine.scheduler.kv_cache_manager.pools[0].num_blank > 10
    while "long" not in engine.outputs.ends:
        engine.step()
    assert tier.pages


def test_of_more_requests_than_are_remembered_the_last_ones_are_saved_whole(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("manta.cluster.kv_cache.kv_tier._MAX_CHAINS", 2)
    tier = Tier()
    engine = open_moving(make_info(num_pages=(200,), max_model_len=128), tier)
    prompts = [(3 + i,) * 96 for i in range(4)]
    engine.run(make_request("r0", prompts[0], max_tokens=2))
    engine.move_pages(idle=True)  # a part of the first
    engine.run(*(make_request(f"r{i}", prompts[i], max_tokens=2) for i in (1, 2, 3)))
    finish(engine)
    other = open_moving(make_info(num_pages=(200,), max_model_len=128), tier)
    other.run(*(make_request(f"r{i}", prompts[i], max_tokens=2) for i in (2, 3)))
    assert [other.outputs.cached[f"r{i}"] for i in (2, 3)] == [92, 92]


def test_pages_without_the_drafters_context_are_not_saved() -> None:
    tier = Tier()
    engine = open_moving(INFO, tier)
    engine.scheduler.drafter._stop()
    engine.run(make_request("first", PROMPT, max_tokens=4))
    finish(engine)
    assert not tier.pages


@pytest.mark.parametrize("has_files", [True, False])
def test_at_its_end_an_engine_saves_what_another_start_can_read(has_files: bool) -> None:
    tier = Tier()
    engine = open_moving(INFO, tier, num_host_pages=0 if has_files else 99, has_files=has_files)
    engine.run(make_request("first", PROMPT, max_tokens=4))
    engine.close()
    assert bool(tier.pages) == has_files and not engine.executor.host


def test_after_the_drafter_was_replaced_the_tier_is_neither_written_nor_read() -> None:
    tier = Tier()
    answered(tier)
    known = dict(tier.pages)
    other = open_moving(INFO, tier)
    assert other.page_folder is not None
    other.executor.start_drafter()
    other.run(make_request("again", PROMPT, max_tokens=4), make_request("new", PROMPT[5:], max_tokens=4))
    finish(other)
    assert other.outputs.cached["again"] == 0 and tier.pages == known
    assert other.page_folder is None, "a router would expect hits"


def test_a_transfer_has_ended_when_it_has_on_all_ranks_with_what_all_moved() -> None:
    moves = MovesOfRanks(2)
    moves.begin(PageTransfer(7, True, ()))
    moves.num_awaited = 2
    moves.on_report([PagesMoved(7, (True, True, False), 0.5)])
    assert moves.take_ended() == [] and moves.are_under_way and moves.num_awaited == 1
    moves.on_report([PagesMoved(7, (True, False, False), 0.25)])
    assert moves.take_ended() == [PagesMoved(7, (True, False, False), 0.5)] and not moves.are_under_way
