"""The number of replicas: bounds, monotonicity, stability, starting replicas, and zero."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from manta.cluster.engine.engine_stats import EngineStats
from manta.cluster.errors import ConfigError
from manta.cluster.fleet.autoscaling import (
    FleetLoad,
    ReplicaCount,
    ReplicaStats,
    ReplicaStatsMeter,
    ScalingRules,
)

SLOTS = 8
RULES = ScalingRules()
FULL = ReplicaStats(running=SLOTS, max_num_seqs=SLOTS, kv_usage=0.5)
IDLE = ReplicaStats(max_num_seqs=SLOTS)


def settled(count: ReplicaCount, load: FleetLoad, target: int, *, seconds: int, maximum: int = 100) -> int:
    """Return the desired replicas after a constant load for a time."""
    for now_s in range(seconds + 1):
        target = count.target(load, target, 0, maximum, float(now_s))
    return target


def test_scaling_up_follows_the_load_and_scaling_down_keeps_a_margin() -> None:
    def load(busy: float) -> FleetLoad:
        return FleetLoad(there=4, num_reporting=4, busy=busy)

    soon = [settled(ReplicaCount(RULES), load(busy), 4, seconds=5) for busy in (2.5, 3.0, 3.1, 4.0)]
    late = [settled(ReplicaCount(RULES), load(busy), 4, seconds=185) for busy in (2.5, 1.8, 1.2, 0.1)]
    assert (soon, late) == ([4, 4, 5, 6], [4, 3, 2, 2])
    assert settled(ReplicaCount(RULES), load(0.1), 4, seconds=400) == 1


def test_a_backlog_adds_replicas_only_if_it_drains_slowly_at_the_measured_rate() -> None:
    waits = {"running": 4, "waiting": 6, "max_num_seqs": SLOTS, "waiting_tokens": 6000.0}
    fast = FleetLoad.of([ReplicaStats(**waits, decode_tokens_per_s=6000.0)], 1)
    slow = FleetLoad.of([ReplicaStats(**waits, decode_tokens_per_s=150.0)], 1)  # drafts are not accepted
    assert (fast.backlog_s, slow.backlog_s) == (1.0, 40.0)
    assert settled(ReplicaCount(RULES), fast, 1, seconds=5) == 1
    assert settled(ReplicaCount(ScalingRules(growth=4)), slow, 1, seconds=5) == 3


def test_each_waiting_request_needs_a_slot_if_no_rate_is_known() -> None:
    load = FleetLoad.of([ReplicaStats(running=SLOTS, waiting=2 * SLOTS, max_num_seqs=SLOTS)], 1)
    assert load.busy == 3.0 and load.backlog_s == 0.0


def test_background_work_adds_no_replica_but_keeps_the_last_one() -> None:
    busy = ReplicaStats(max_num_seqs=SLOTS, background=500)
    load = FleetLoad.of([busy, busy], 2)
    assert settled(ReplicaCount(RULES), load, 2, seconds=2000) == 1


def test_pages_determine_the_load_if_they_are_scarcer_than_slots() -> None:
    assert FleetLoad.of([ReplicaStats(running=2, max_num_seqs=SLOTS, kv_usage=0.9)], 1).busy == 0.9


def test_starting_replicas_are_not_requested_twice_and_no_serving_one_is_removed_meanwhile() -> None:
    assert settled(ReplicaCount(RULES), FleetLoad.of([FULL], 1), 1, seconds=600) == 2
    light = FleetLoad(there=3, num_reporting=3, busy=0.3)
    assert settled(ReplicaCount(RULES), light, 6, seconds=200) == 3


def test_idle_models_scale_to_zero_and_the_first_waiting_request_starts_a_replica() -> None:
    quiet = FleetLoad.of([IDLE], 1)
    assert settled(ReplicaCount(RULES), quiet, 1, seconds=599) == 1
    assert settled(ReplicaCount(RULES), quiet, 1, seconds=600) == 0
    assert ReplicaCount(RULES).target(quiet, 1, 1, 4, 1e9) == 1, "not below the fewest"
    count = ReplicaCount(RULES)
    assert count.target(FleetLoad(0), 0, 0, 4, 0.0) == 0
    assert count.target(FleetLoad(0, queued=1), 0, 0, 4, 0.1) == 1
    assert count.target(FleetLoad(0), 1, 0, 4, 0.2) == 1, "it is starting"


def test_a_replica_that_loaded_slowly_has_the_full_idle_time() -> None:
    count = ReplicaCount(ScalingRules(idle_s=10.0))
    for second in range(60):
        assert count.target(FleetLoad(there=0), 1, 0, 4, float(second)) == 1
    idle = FleetLoad(there=1, num_reporting=1)
    assert [count.target(idle, 1, 0, 4, 60.0 + passed) for passed in (0, 9, 10)] == [1, 1, 0]


def test_a_momentary_load_changes_nothing() -> None:
    count, calm = ReplicaCount(RULES), FleetLoad(there=4, num_reporting=4, busy=2.7)
    assert settled(count, calm, 4, seconds=100) == 4
    assert count.target(FleetLoad(there=4, num_reporting=4, busy=4.0), 4, 0, 9, 100.5) == 4
    assert count.target(FleetLoad(there=4, num_reporting=4, busy=0.0), 4, 0, 9, 101.0) == 4


def test_without_replica_stats_nothing_changes() -> None:
    assert settled(ReplicaCount(RULES), FleetLoad.of([], 3), 3, seconds=1000) == 3


loads = st.builds(
    FleetLoad,
    there=st.integers(0, 50),
    num_reporting=st.integers(0, 50),
    busy=st.floats(0, 60),
    backlog_s=st.floats(0, 1e5),
    queued=st.floats(0, 1e4),
    background=st.floats(0, 100),
)


@given(
    st.lists(st.tuples(loads, st.floats(0.1, 500)), min_size=1, max_size=30),
    st.integers(0, 9),
    st.integers(0, 9),
)
def test_the_number_of_replicas_keeps_its_bounds_and_steps(
    moments: list[tuple[FleetLoad, float]], minimum: int, more: int
) -> None:
    count, now_s, maximum = ReplicaCount(RULES), 0.0, max(1, minimum + more)
    target = minimum
    for load, pause_s in moments:
        now_s += pause_s
        wanted = count.target(load, target, minimum, maximum, now_s)
        assert minimum <= wanted <= maximum
        grown = math.ceil(load.there * RULES.growth)
        assert wanted <= max(target, grown, 1, minimum)
        assert wanted >= min(target // 2, maximum)
        target = wanted


@given(st.lists(loads, min_size=1, max_size=20), st.floats(0, 20), st.floats(0, 1e4), st.integers(1, 20))
def test_more_load_never_needs_fewer_replicas(
    history: list[FleetLoad], busy: float, backlog_s: float, target: int
) -> None:
    less, more = ReplicaCount(RULES), ReplicaCount(RULES)
    for i, load in enumerate(history):
        heavier = replace(load, busy=load.busy + busy, backlog_s=load.backlog_s + backlog_s)
        now_s = 100.0 * i
        assert less.target(load, target, 0, 50, now_s) <= more.target(heavier, target, 0, 50, now_s)


@settings(max_examples=30)
@given(st.floats(0.0, 20.0), st.integers(1, 30), st.integers(0, 120))
def test_a_steady_load_scales_up_at_most_once_and_down_at_most_once(
    demand: float, start: int, start_up_s: int
) -> None:
    """The demand is in replicas' worth of slots; the excess waits."""
    count, target = ReplicaCount(RULES), start
    starting: list[int] = []
    there, numbers = start, [start]
    for now_s in range(6000):
        there += sum(ready_s == now_s for ready_s in starting)
        busy = min(demand, there)
        load = FleetLoad(there, there, busy, backlog_s=10.0 * (demand - busy))
        wanted = count.target(load, target, 1, 50, float(now_s))
        if wanted > target:
            starting += [now_s + 1 + start_up_s] * (wanted - target)
        elif wanted < target:
            waiting = sum(ready_s > now_s for ready_s in starting)
            cancelled = min(waiting, target - wanted)
            starting = sorted(starting)[: len(starting) - cancelled]
            there -= target - wanted - cancelled
        target = wanted
        numbers.append(target)
    ups = [after > before for before, after in pairwise(numbers) if after != before]
    assert ups == sorted(ups, reverse=True), "never up after down"
    assert len(set(numbers[-2000:])) == 1, "it has settled"
    assert demand / RULES.load_high <= target + 1e-6


@pytest.mark.parametrize(
    ("wrong", "field"),
    [
        ({"load_low": 0.9}, "load_low"),
        ({"load_high": 1.5}, "load_low"),
        ({"drain_s": 0}, "drain_s"),
        ({"up_after_s": -1}, "up_after_s"),
        ({"growth": 1}, "growth"),
        ({"idle_s": "600"}, "idle_s"),
        ({"down_after_s": math.nan}, "down_after_s"),
    ],
)
def test_invalid_rules_are_refused_by_name(wrong: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError, match=field) as caught:
        ScalingRules(**wrong)
    assert caught.value.param == field


def seconds(execute: float) -> dict[str, float]:
    return {"schedule": 0.0, "execute": execute, "commit": 0.0}


def test_replica_stats_cover_recent_online_requests() -> None:
    meter = ReplicaStatsMeter(SLOTS)
    assert meter.update(EngineStats()).decode_tokens_per_s == 0.0
    figures = meter.update(
        EngineStats(
            running=4, waiting=7, background_running=1, background_waiting=5, kv_usage=0.8, steps=100,
            generation_tokens=2000, finished={"stop": 15, "length": 5}, num_drafts=500,
            num_accepted_tokens=1500, step_seconds=seconds(4.0),
        )
    )  # fmt: skip
    assert (figures.running, figures.waiting, figures.background) == (3, 2, 6)
    assert figures.kv_usage == pytest.approx(0.6)
    assert (figures.decode_tokens_per_s, figures.waiting_tokens) == (500.0, 200.0)
    assert (figures.mean_acceptance_length, figures.step_s) == (4.0, 0.04)
    before = {"steps": 100, "generation_tokens": 2000, "finished": {"stop": 20}}
    idle = meter.update(
        EngineStats(**before, num_drafts=500, num_accepted_tokens=1500, step_seconds=seconds(4.0))
    )
    assert idle.decode_tokens_per_s == 500.0, "idle time is not work"
    slow = {"steps": 200, "generation_tokens": 2400, "finished": {"stop": 20}, "num_drafts": 900}
    worse = meter.update(EngineStats(**slow, num_accepted_tokens=1500, step_seconds=seconds(44.0)))
    assert worse.decode_tokens_per_s == pytest.approx(10.0), "what is long ago is forgotten"
    assert worse.mean_acceptance_length == 1.0
    assert set(worse.as_dict()) >= {"waiting_tokens", "kv_usage", "decode_tokens_per_s", "background"}
