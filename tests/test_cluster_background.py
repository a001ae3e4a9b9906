"""Background work: behind all others in everything, in what they leave of the engine, and done in the end."""

from __future__ import annotations

from dataclasses import replace

import pytest
from cluster_checker import (
    Outputs,
    add,
    expected,
    make_info,
    make_request,
    open_engine,
    submit_and_collect,
    vary_background,
)
from hypothesis import event, given, settings
from hypothesis import strategies as st
from manta.cluster.engine import Engine
from manta.cluster.errors import OverloadedError, UnprocessableError
from manta.cluster.plan import SchedulerOutput
from manta.cluster.request import Request
from test_cluster_properties import LAYOUTS, Arrival, arrivals

LONG = {"ignore_eos": True}
PROMPT = tuple(range(2, 22))  # 20 tokens: 5 pages


class Tick:
    """Steps an engine whose executor checks every read."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.outputs = engine, Outputs()

    def step(self) -> dict[str, tuple[int, int]]:
        """Rows and drafts of everybody in the step."""
        plan = self.engine.plan()
        self.engine.check_invariants()
        if plan is None:
            return {}
        rows = self._rows(plan)
        for update in self.engine.commit(submit_and_collect(self.engine, plan)):
            self.outputs.put(update)
        self.engine.check_invariants()
        return rows

    def _rows(self, plan: SchedulerOutput) -> dict[str, tuple[int, int]]:
        names = [self.engine._scheduler.table.sequences[s].request.request_id for s in plan.slots.tolist()]
        return dict(
            zip(names, zip(plan.num_rows.tolist(), plan.num_drafts.tolist(), strict=True), strict=True)
        )


def background(name: str, prompt: object = PROMPT, **fields: object) -> Request:
    return make_request(name, prompt, background=True, **{"max_tokens": 30, **LONG, **fields})


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_an_online_request_takes_the_slot_of_background_work_which_comes_back(policy: str) -> None:
    engine = open_engine(make_info(), max_num_seqs=2, scheduling_policy=policy)
    ours = [background(f"b{i}", priority=-5, seed=i) for i in range(3)]
    for request in ours:
        add(engine, request)
    tick = Tick(engine)
    assert tick.step().keys() == {"b0", "b1"}
    add(engine, make_request("online", max_tokens=3, priority=5, **LONG))
    assert tick.step().keys() == {"online"}
    assert (engine.stats().background_running, engine.stats().background_waiting) == (1, 2)
    assert engine.stats().preemptions == 1
    while engine.has_unfinished:
        tick.step()
    for request in ours:
        assert tick.outputs.tokens[request.request_id] == expected(request, engine._executor.info)[0]


def test_who_has_no_part_in_a_step_pauses_with_slot_and_pages() -> None:
    engine = open_engine(make_info(), max_num_batched_tokens=12)
    add(engine, background("early"))
    add(engine, background("late", PROMPT[::-1], seed=9))
    tick = Tick(engine)
    for _ in range(4):  # "late" is in the middle of its prompt
        tick.step()
    usage = engine.stats().kv_usage
    add(engine, make_request("online", (5, 6, 7), max_tokens=12, **LONG))
    while "online" not in tick.outputs.ends:
        assert tick.step().keys() == {"online"}
        assert engine.stats().kv_usage >= usage or "online" in tick.outputs.ends
    while engine.has_unfinished:
        tick.step()
    assert engine.stats().preemptions == 0
    assert [len(tick.outputs.tokens[name]) for name in ("early", "late")] == [30, 30]


def test_an_online_request_takes_the_pages_of_background_work() -> None:
    engine = open_engine(make_info(num_pages=(16,)), enable_prefix_caching=False)
    for i in range(2):
        add(engine, background(f"b{i}", seed=i))
    tick = Tick(engine)
    tick.step()
    add(engine, make_request("online", PROMPT, max_tokens=30, **LONG))
    steps = [tick.step()]
    assert steps[0].keys() == {"online"}, "entered at once"
    while "online" not in tick.outputs.ends:
        steps.append(tick.step())
    assert all(step.keys() == {"online"} for step in steps)
    assert all(drafts == 4 for step in steps[1:-2] for _, drafts in step.values()), "drafts have pages, too"
    assert engine.stats().preemptions == 2
    while engine.has_unfinished:
        tick.step()


def test_background_work_is_never_refused_and_counts_for_nobodys_limit() -> None:
    engine = open_engine(make_info(), max_num_queued_reqs=1)
    for i in range(20):
        add(engine, background(f"b{i}", seed=i))
    add(engine, make_request("a"))
    with pytest.raises(OverloadedError):
        add(engine, make_request("b"))
    assert (engine.stats().waiting, engine.stats().background_waiting) == (21, 20)


def test_background_work_alone_has_the_whole_engine() -> None:
    """The same plans as of the same requests without the mark."""

    def plans(**fields: object) -> list[dict[str, tuple[int, int]]]:
        engine = open_engine(make_info(), max_num_batched_tokens=40)
        for i in range(12):
            add(engine, make_request(f"r{i}", PROMPT[i:], max_tokens=20, seed=i, **LONG, **fields))
        tick, steps = Tick(engine), []
        while engine.has_unfinished:
            steps.append(tick.step())
        return steps

    assert plans(background=True) == plans()


@pytest.mark.parametrize("layout", LAYOUTS)
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_online_requests_are_served_as_if_they_were_alone(layout: str, data: st.DataObject) -> None:
    """Step by step the same rows. (Without prefixes: background work fills that cache, too.)"""
    groups, page_size = LAYOUTS[layout], data.draw(st.sampled_from((1, 2, 4)))
    info = make_info(
        page_size=page_size,
        num_pages=tuple(
            sum(g.pool == pool for g in groups) * data.draw(st.integers(8, 16)) * 4 // page_size
            for pool in range(1 + max(g.pool for g in groups))
        ),
        page_groups=groups,
        max_model_len=data.draw(st.integers(30, 60)),
        num_speculative_tokens=data.draw(st.integers(0, 6)),
    )
    limits = {
        "max_num_seqs": data.draw(st.integers(1, 6)),
        "max_num_batched_tokens": data.draw(st.integers(1, 40)),
        "scheduling_policy": data.draw(st.sampled_from(("fcfs", "priority"))),
        "enable_prefix_caching": False,
    }
    work = [data.draw(arrivals(i)) for i in range(data.draw(st.integers(1, 10)))]
    mixed, alone = (Tick(open_engine(info, [0.8, 0.5], **limits)) for _ in range(2))
    vary_background(mixed.engine, data.draw(st.integers(0, 999)))
    now, num_mixed, num_paused = 0, 0, 0
    while now <= 6 or alone.engine.has_unfinished or mixed.engine.has_unfinished:
        for arrival in (a for a in work if a.step == now):
            arrive(mixed.engine, arrival)
            if not arrival.request.background:
                arrive(alone.engine, arrival)
        seen, online = mixed.step(), alone.step()
        ours = {name for name in seen if work[int(name[1:])].request.background}
        assert {name: rows for name, rows in seen.items() if name not in ours} == online
        num_mixed += bool(ours and online)
        num_paused += bool(online and not ours and mixed.engine.stats().background_running)
        now += 1
        assert now < 3000, "no progress"
    for name, tokens in alone.outputs.tokens.items():
        assert mixed.outputs.tokens[name] == tokens
    event(f"preempted: {mixed.engine.stats().preemptions > 0}")
    event(f"paused: {num_paused > 0}, joined: {num_mixed > 0}")


def arrive(engine: Engine, arrival: Arrival) -> None:
    try:
        add(engine, replace(arrival.request))
    except UnprocessableError:
        event("too long for the pages")
