"""Whatever arrives, whatever the pools and budgets: all requests get their own tokens, nothing is lost.

`make grid` tries four times as many.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace

import pytest
from cluster_checker import (
    EOS,
    VOCAB,
    Outputs,
    add,
    check_lives,
    expected,
    make_info,
    make_request,
    open_engine,
    vary_background,
    vary_halves,
    vary_prefill,
)
from hypothesis import event, given, settings
from hypothesis import strategies as st
from manta.cluster.engine.engine_core import EngineCore
from manta.cluster.errors import UnprocessableError
from manta.cluster.pages.kv_cache_groups import KVCacheGroup, count_pools
from manta.cluster.request.request import Request
from manta.cluster.step.executor import ExecutorInfo

NUM_WORKLOADS = 240 if os.environ.get("MANTA_GRID") == "whole" else 60
LAYOUTS = {
    "one group": (KVCacheGroup(),),
    "full and window": (KVCacheGroup(), KVCacheGroup(window=20)),
    "windows only": (KVCacheGroup(window=3), KVCacheGroup(window=8)),
    "full and window, with states": (KVCacheGroup(), KVCacheGroup(window=20)),
    "two pools": (KVCacheGroup(), KVCacheGroup(window=7), KVCacheGroup(1, window=13), KVCacheGroup(1)),
}
STEMS = tuple(tuple((7 * i + j) % (VOCAB - 2) + 2 for j in range(24)) for i in range(2))
# What becomes of the drafter, before which steps.
DRAFTERS = (
    {},
    {5: ("start_drafter",)},
    {4: ("lose_drafter",), 9: ("start_drafter",)},
    {3: ("start_drafter",), 8: ("lose_drafter", "start_drafter"), 10: ("lose_drafter",)},
)


@dataclass(frozen=True)
class Arrival:
    """A request, when it arrives, and when (if ever) it is aborted: before a step or within it.

    Another engine has generated its first `num_known` tokens, if there are more.
    """

    request: Request
    step: int
    abort_step: int | None
    abort_in_flight: bool
    num_known: int


@st.composite
def arrivals(draw: st.DrawFn, index: int) -> Arrival:
    stem = draw(st.sampled_from(STEMS))
    prompt = stem[: draw(st.integers(1, len(stem)))] + tuple(draw(st.lists(st.integers(2, 4), max_size=4)))
    max_tokens = draw(st.one_of(st.none(), st.integers(1, 20)))
    request = make_request(
        f"r{index}",
        prompt,
        seed=draw(st.integers(-(2**63), 2**63 - 1)),
        max_tokens=max_tokens,
        min_tokens=draw(st.integers(0, max_tokens or 8)),
        ignore_eos=draw(st.sampled_from((True, True, False))),
        stop_token_ids=draw(st.sampled_from(((), (), (5,), (9, EOS[0]), EOS))),
        priority=draw(st.integers(-1, 1)),
        cache_salt=draw(st.sampled_from((None, None, "alice"))),
        max_draft_tokens=draw(st.sampled_from((None, None, 0, 1, 3, 9))),
        background=draw(st.sampled_from((False, False, True))),
    )
    abort = draw(st.one_of(st.none(), st.none(), st.integers(0, 15)))
    num_known = draw(st.sampled_from((0, 0, 1, 5, 12)))
    return Arrival(request, draw(st.integers(0, 6)), abort, draw(st.booleans()), num_known)


@st.composite
def workloads(
    draw: st.DrawFn, groups: tuple[KVCacheGroup, ...], *, states: bool
) -> tuple[ExecutorInfo, EngineCore, list[Arrival]]:
    page_size, halves = draw(st.sampled_from((1, 2, 4))), draw(st.sampled_from((False, False, True)))
    info = make_info(
        page_size=page_size,
        num_pages=tuple(
            sum(g.pool == pool for g in groups) * draw(st.integers(8, 20)) * 4 // page_size
            for pool in range(count_pools(groups))
        ),
        page_groups=groups,
        max_model_len=draw(st.integers(30, 60)),
        num_speculative_tokens=draw(st.integers(0, 6)),
        max_in_flight=2 if halves else draw(st.sampled_from((1, 1, 2, 3))),
        halves=halves,
        num_states=draw(st.integers(1, 16)) if states else None,
    )
    survival = sorted(draw(st.lists(st.floats(0, 1), max_size=6)), reverse=True)
    chunked = draw(st.booleans())
    engine = open_engine(
        info,
        survival,
        max_num_seqs=draw(st.integers(1, 8)),
        max_num_batched_tokens=draw(st.integers(1, 40) if chunked else st.integers(28, 64)),
        enable_chunked_prefill=chunked,
        enable_prefix_caching=draw(st.sampled_from((True, True, False))),
        scheduling_policy=draw(st.sampled_from(("fcfs", "priority"))),
    )
    vary_background(engine, draw(st.integers(0, 999)))
    vary_halves(engine, draw(st.integers(0, 999)))
    vary_prefill(engine, draw(st.integers(0, 999)))
    count = draw(st.integers(1, 10))
    return info, engine, [draw(arrivals(i)) for i in range(count)]


@pytest.mark.parametrize("layout", LAYOUTS)
@settings(max_examples=NUM_WORKLOADS, deadline=None)
@given(data=st.data())
def test_every_request_gets_its_own_tokens_and_nothing_is_lost(layout: str, data: st.DataObject) -> None:
    info, engine, todo = data.draw(workloads(LAYOUTS[layout], states="states" in layout))
    outputs, served, known, aborted, now = Outputs(), {}, {}, set(), 0
    max_rows, drafters = engine._executor.max_rows, data.draw(st.sampled_from(DRAFTERS))
    waiting = sorted(todo, key=lambda a: a.step)
    while waiting or engine.has_unfinished:
        while waiting and waiting[0].step <= now:
            arrival = waiting.pop(0)
            request, request_id = arrival.request, arrival.request.request_id
            known[request_id] = expected(request, info, max_rows)[0][:-1][: arrival.num_known]
            try:
                add(engine, replace(request, output_token_ids=tuple(known[request_id])))
                served[request_id] = request
            except UnprocessableError:
                event("too long for the pages")
        for change in drafters.get(now, ()):
            getattr(engine._executor, change)()
        step(engine, outputs, {a.request.request_id: a for a in todo if a.abort_step == now}, aborted)
        now += 1
        assert now < 3000, "no progress"
    for request_id, request in served.items():
        tokens, *end = expected(request, info, max_rows)
        mine = known[request_id] + outputs.tokens.get(request_id, [])
        if request_id in aborted:
            assert mine == tokens[: len(mine)] and request_id not in outputs.ends
        else:
            assert (mine, outputs.ends[request_id]) == (tokens, tuple(end))
    stats = engine.stats()
    assert stats.kv_usage == 0.0 and stats.running == stats.waiting == 0
    assert sum(stats.finished.values()) == len(served)
    check_lives(engine, outputs, served, known)
    event(f"preempted: {stats.preemptions > 0}, prefix hits: {stats.prefix_cache_hits > 0}")
    if (states := engine._executor.states) is not None:
        event(f"states saved: {states.num_saved > 0}, found again: {states.num_loaded > 0}")


def step(engine: EngineCore, outputs: Outputs, leaving: dict[str, Arrival], aborted: set[str]) -> None:
    """One step, with aborts before it and while it (and the next ones) are in flight."""

    def leave(in_flight: bool) -> None:
        for request_id, arrival in leaving.items():
            if arrival.abort_in_flight is in_flight and engine.abort(request_id):
                aborted.add(request_id)
                assert not engine.abort(request_id), "an abort happens once"
        engine.check_invariants()

    leave(in_flight=False)
    scheduler, executor = engine._scheduler, engine._executor
    while scheduler.num_in_flight < executor.info.max_in_flight and (plan := engine.plan()) is not None:
        engine.check_invariants()
        executor.submit(plan)
    if not scheduler.num_in_flight:
        return
    leave(in_flight=True)
    for update in engine.commit(executor.collect()):
        outputs.put(update)
    engine.check_invariants()
