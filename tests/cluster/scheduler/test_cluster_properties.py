"""Random arrivals, pools and budgets: all requests get their own tokens, and nothing is lost.

`make grid` tries eight times as many.
"""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st
from manta.cluster.errors import UnprocessableError
from manta.cluster.pages.kv_cache_groups import KVCacheGroup
from manta.cluster.request.request import Request
from manta.cluster.step.executor import ExecutorInfo
from support.engines.cluster_checker import (
    CheckedEngine,
    check_histories,
    expected,
    open_engine,
    vary_background,
    vary_halves,
    vary_prefill,
)
from support.engines.random_workloads import LAYOUTS, Arrival, arrivals, infos, step

NUM_WORKLOADS = 240 if os.environ.get("MANTA_GRID") == "whole" else 30
# What becomes of the drafter, before which steps.
DRAFTERS = (
    {},
    {5: ("start_drafter",)},
    {4: ("lose_drafter",), 9: ("start_drafter",)},
    {3: ("start_drafter",), 8: ("lose_drafter", "start_drafter"), 10: ("lose_drafter",)},
)


@st.composite
def workloads(
    draw: st.DrawFn, groups: tuple[KVCacheGroup, ...], *, states: bool
) -> tuple[ExecutorInfo, CheckedEngine, list[Arrival]]:
    halves = draw(st.sampled_from((False, False, True)))
    in_flight = 2 if halves else draw(st.sampled_from((1, 1, 2, 3)))
    num_states = draw(st.integers(1, 16)) if states else None
    info = draw(infos(groups, max_in_flight=in_flight, halves=halves, num_states=num_states))
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
    served, known, aborted, now = dict[str, Request](), dict[str, list[int]](), set[str](), 0
    max_rows, drafters = engine.executor.max_rows, data.draw(st.sampled_from(DRAFTERS))
    waiting = sorted(todo, key=lambda a: a.step)
    while waiting or engine.has_unfinished:
        while waiting and waiting[0].step <= now:
            arrival = waiting.pop(0)
            request, request_id = arrival.request, arrival.request.request_id
            known[request_id] = expected(request, info, max_rows)[0][:-1][: arrival.num_known]
            try:
                engine.add_request(replace(request, output_token_ids=tuple(known[request_id])))
                served[request_id] = request
            except UnprocessableError:
                event("too long for the pages")
        for change in drafters.get(now, ()):
            getattr(engine.executor, change)()
        step(engine, {a.request.request_id: a for a in todo if a.abort_step == now}, aborted)
        now += 1
        assert now < 3000, "no progress"
    for request_id, request in served.items():
        tokens, *end = expected(request, info, max_rows)
        mine = known[request_id] + engine.outputs.tokens.get(request_id, [])
        if request_id in aborted:
            assert mine == tokens[: len(mine)] and request_id not in engine.outputs.ends
        else:
            assert (mine, engine.outputs.ends[request_id]) == (tokens, tuple(end))
    stats = engine.stats()
    assert stats.kv_usage == 0.0 and stats.running == stats.waiting == 0
    assert sum(stats.finished.values()) == len(served)
    check_histories(engine, served, known)
    event(f"preempted: {stats.preemptions > 0}, prefix hits: {stats.prefix_cache_hits > 0}")
    if (states := engine.executor.states) is not None:
        event(f"states saved: {states.num_saved > 0}, found again: {states.num_loaded > 0}")
