"""A request's timeline: what it waited for, what its steps did, how long it is kept."""

from __future__ import annotations

from typing import Any

from manta.cluster.simulation.simulated_executor import LinearCost
from manta.cluster.step.executor import ExecutorInfo
from support.engines.cluster_checker import (
    SimulatedEngine,
    make_info,
    make_request,
    open_engine,
    simulated_engine,
)

STEP_S = 0.01
LONG = {"ignore_eos": True}


def clocked(info: ExecutorInfo | None = None, **settings: Any) -> SimulatedEngine:
    """Return an engine whose steps take 10 ms, 2 ms of them for drafting."""
    cost = LinearCost(verify_floor_s=0.008, draft_floor_s=0.002)
    sizes = {"max_num_seqs": 8, "max_num_batched_tokens": 64, **settings}
    return simulated_engine(info or make_info(), cost=cost, **sizes)


def test_a_timeline_shows_what_a_request_waited_for_and_for_how_long() -> None:
    engine = clocked(max_num_seqs=1)
    engine.add("first", max_tokens=20, **LONG)
    engine.step()
    engine.clock.wait_until(engine.clock() + 0.003)
    engine.add("second", max_tokens=4, arrival_s=engine.clock(), **LONG)
    engine.run_steps(400)
    (first_life,), (life,) = engine.timelines("first"), engine.timelines("second")
    (stay,) = life.intervals
    assert stay.waited.keys() == {"slots"} and first_life.intervals[0].waited == {}
    assert first_life.ended_s is not None
    assert life.arrival_s + stay.waited["slots"] <= stay.admitted_s == first_life.ended_s


def test_an_extra_prompt_waits_for_pages_and_a_long_one_for_rows() -> None:
    engine = clocked(make_info(num_pages=(10,)), max_num_batched_tokens=16)
    for name in ("a", "b", "c"):
        engine.add(name, range(2, 22), max_tokens=8, cache_salt=name, **LONG)
    engine.run_steps(400)
    waited = [set(engine.timelines(name)[0].intervals[0].waited) for name in "abc"]
    assert waited[0] == set() and "rows" in waited[1] and "pages" in waited[2]


def test_a_timeline_shows_prompt_cache_drafts_and_times() -> None:
    engine = clocked(max_num_batched_tokens=16)
    prompt = tuple(range(2, 22))
    for name in ("warm", "mine"):
        engine.add(name, prompt, max_tokens=12, client_id=f"of-{name}", **LONG)
        engine.run_steps(400)
    (life,) = engine.timelines("of-mine")
    (stay,) = life.intervals
    assert (life.request_id, life.num_prompt_tokens, life.finish_reason) == ("mine", 20, "length")
    assert stay.num_cached == 16 and stay.steps[0].kind == "prefill" and stay.steps[0].num_known == 4
    verify = [step for step in stay.steps if step.kind == "verify"]
    assert verify and all(step.draft_s == 0.002 and step.verify_s == 0.008 for step in verify)
    assert all(abs(step.ended_s - step.planned_s - STEP_S) < 1e-9 for step in verify)
    (warm,) = engine.timelines("warm")
    assert [step.num_known for step in warm.intervals[0].steps[:2]] == [16, 4], "in two chunks"


def test_timelines_are_found_by_the_response_id_and_no_other() -> None:
    engine = open_engine(make_info())
    engine.run(*(make_request(name, max_tokens=2, **LONG) for name in ("r", "r-0", "r-1", "r.1", "rs")))
    assert [life.request_id for life in engine.timelines("r")] == ["r", "r-0", "r-1", "r.1"]
    assert [life.request_id for life in engine.timelines("r-1")] == ["r-1"] and engine.timelines("x") == []


def test_a_running_request_has_a_partial_timeline() -> None:
    engine = clocked()
    engine.add("r", max_tokens=30, **LONG)
    engine.run_steps(3)
    (life,) = engine.timelines("r")
    assert len(life.intervals[0].steps) == 3 and life.ended_s is None and life.intervals[0].why is None
    engine.abort("r")
    (life,) = engine.timelines("r")
    assert (life.finish_reason, life.ended_s, len(life.intervals[0].steps)) == ("abort", engine.clock(), 3)


def test_a_long_timeline_keeps_its_last_steps_and_the_oldest_timelines_are_dropped() -> None:
    info = make_info(num_pages=(512,), max_model_len=2000, num_speculative_tokens=0)
    engine = clocked(info, max_num_seqs=2048, max_num_batched_tokens=2048)  # a journal of 256 steps
    engine.add("long", max_tokens=300, **LONG)
    engine.run_steps(400)
    (stay,) = engine.timelines("long")[0].intervals
    assert stay.num_forgotten == 44 and len(stay.steps) == 256
    for _ in range(41):
        for i in range(100):
            engine.add(f"r{i}", max_tokens=1, **LONG)
        engine.run_steps(400)
    assert engine.timelines("long") == [] and len(engine.timelines("r99")) == 41


def test_a_request_without_the_prefix_cache_neither_reads_nor_writes_it() -> None:
    engine, prompt = open_engine(make_info()), tuple(range(2, 22))

    def cached(name: str, **fields: object) -> int:
        return engine.run(make_request(name, prompt, max_tokens=8, **LONG, **fields)).cached[name]

    assert [cached("a", uses_cache=False), cached("b"), cached("c", uses_cache=False)] == [0, 0, 0]
    assert cached("d") == 16
    engine.check_invariants()
    engine.add("e", prompt, max_tokens=8, uses_cache=False, **LONG)
    engine.run()
    assert engine.stats().kv_usage == 0.0
