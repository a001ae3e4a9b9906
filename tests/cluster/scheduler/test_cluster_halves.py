"""Alternating halves or one batch: the faster mode on simulated machines, with the same tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from manta.cluster.request.request import Request
from manta.cluster.scheduler.batch_halves import TwoBatchOverlap
from manta.cluster.simulation.simulated_executor import LinearCost
from manta.cluster.step.scheduler_output import StepTimings
from manta.cluster.step.sequence import Sequence
from support.engines.cluster_checker import (
    CheckedEngine,
    generate,
    make_info,
    make_request,
    open_engine,
    simulated_engine,
)

DRAFTS, SURVIVAL = 7, [0.85**i for i in range(1, 8)]
# Drafting takes about as long as verifying; each row costs, and drafts little; passes take as long over few
# rows as over many, with drafts a seventh of that, and with drafts that are slower.
EQUAL = LinearCost(verify_floor_s=0.004, verify_row_s=0.0001, draft_floor_s=0.001, draft_row_s=0.0001)
ROWS = LinearCost(verify_floor_s=0.001, verify_row_s=0.0002, draft_floor_s=0.0005, draft_row_s=0.00002)
FLAT = LinearCost(verify_floor_s=0.014, draft_floor_s=0.002)
SLOW_DRAFTER = LinearCost(verify_floor_s=0.004, draft_floor_s=0.012)


def serve(
    cost: LinearCost, adaptive: bool, way: Callable[[int], bool] | None = None, *, background: bool = False
) -> tuple[float, dict[str, list[int]]]:
    """Return the seconds from the 100th to the 900th token of each of 8 requests, and the tokens.

    The drafter has its own device. `way` takes the place of what is learned.
    """
    sizes = {"vocab_size": 1000, "max_model_len": 4096, "num_pages": (20_000,)}
    info = make_info(**sizes, num_speculative_tokens=DRAFTS, max_in_flight=2, halves=True)
    spec = {"model": "simulated", "adaptive": adaptive}
    engine = simulated_engine(info, SURVIVAL, cost, max_num_seqs=64, speculative_config=spec)
    if way is not None:
        engine.scheduler.controller.uses_two_batches = way
    fields = {"max_tokens": 1000, "ignore_eos": True, "background": background}
    requests = [make_request(f"r{i}", (2 + i,), seed=i, **fields) for i in range(8)]
    times: dict[int, float] = {}

    def record_time(step: int) -> None:
        times.setdefault(engine.scheduler.counters.generation_tokens // 800, engine.clock())

    tokens = generate(engine, *requests, before_step=record_time)
    return times[9] - times[1], tokens


@pytest.mark.parametrize(
    ("cost", "adaptive", "by_turns"),
    [(EQUAL, True, True), (ROWS, False, True), (FLAT, True, False), (SLOW_DRAFTER, False, False)],
    ids=["equal", "rows", "flat", "slow drafter"],
)
def test_the_faster_mode_is_found_and_kept(cost: LinearCost, adaptive: bool, by_turns: bool) -> None:
    together_s, tokens = serve(cost, adaptive, lambda num_requests: False)
    turns_s, same = serve(cost, adaptive, lambda num_requests: num_requests > 1)
    found_s, again = serve(cost, adaptive)
    assert tokens == same == again
    assert (turns_s < 0.97 * together_s) is by_turns and (together_s < 0.97 * turns_s) is not by_turns
    assert found_s <= 1.04 * min(together_s, turns_s)  # lengths are tried, too


def test_background_work_alone_alternates_as_well() -> None:
    together_s, tokens = serve(EQUAL, False, lambda num_requests: False, background=True)
    found_s, same = serve(EQUAL, False, background=True)
    assert tokens == same and found_s < 0.66 * together_s


Machine = Callable[[int], tuple[float, float]]  # seconds of drafting and verifying, by requests


def steps_of(halves: TwoBatchOverlap, machine: Machine, loads: list[int], noise: float = 0.05) -> list[bool]:
    """Which steps alternated, on a machine whose times vary."""
    random, ways = np.random.default_rng(0), list[bool]()
    for num_requests in loads:
        halved = halves.choose(num_requests)
        turn = halves.plan(num_requests, is_half=halved)
        draft_s, verify_s = machine(num_requests // 2 if halved else num_requests)
        waited_s = max(draft_s - verify_s, 0.0) if halved else draft_s
        timings = StepTimings(draft_s=waited_s, verify_s=verify_s * random.lognormal(0, noise))
        halves.observe(turn, num_requests / (1 + halved), timings.total_s, timings)
        ways.append(halved)
    return ways


def test_a_slower_mode_is_tried_rarely_and_one_that_cannot_win_never() -> None:
    lost = steps_of(TwoBatchOverlap(), lambda n: (0.002, 0.014), [16] * 4000)
    assert 8 <= sum(lost) <= 40
    assert not any(steps_of(TwoBatchOverlap(), lambda n: (0.0001, 0.014), [16] * 1000))


def test_the_mode_follows_a_change_of_costs() -> None:
    halves = TwoBatchOverlap()
    steps_of(halves, lambda n: (0.002, 0.014), [16] * 500)
    steps_of(halves, lambda n: (0.001 * n, 0.001 * n), [16] * 3000)
    assert all(steps_of(halves, lambda n: (0.001 * n, 0.001 * n), [16] * 30))
    steps_of(halves, lambda n: (0.002, 0.014), [16] * 600)
    assert not any(steps_of(halves, lambda n: (0.002, 0.014), [16] * 30))


def test_a_new_load_starts_like_the_nearest_one_and_is_then_measured() -> None:
    def machine(n: int) -> tuple[float, float]:
        return (0.001 * n, 0.001 * n) if n > 8 else (0.004, 0.02)

    halves = TwoBatchOverlap()
    steps_of(halves, machine, [32] * 100)
    assert halves.choose(32) and halves.choose(40) and not halves.choose(1)
    steps_of(halves, machine, [4] * 400)
    assert not halves.choose(4) and halves.choose(32)


def alternating_engine(num_requests: int, **changes: Any) -> CheckedEngine:
    """Return an engine that always alternates."""
    info = make_info(**{"max_model_len": 256, "num_pages": (512,), **changes}, halves=True, max_in_flight=2)
    engine = open_engine(info)
    engine.scheduler.controller.uses_two_batches = lambda num_requests: num_requests > 1
    for i in range(num_requests):
        add(engine, i)
    return engine


def add(engine: CheckedEngine, i: int) -> Request:
    return engine.add(f"r{i}", (2 + i,) * (9 if i > 6 else 1), seed=i, max_tokens=100, ignore_eos=True)


def test_halves_are_disjoint_and_stay_balanced() -> None:
    engine = alternating_engine(0)
    requests = [add(engine, i) for i in range(7)]
    for step in range(60):
        if step == 20:
            engine.abort("r0")
        if step == 25:
            requests += [add(engine, i) for i in (7, 8)]
        engine.step()
        if step > 30 and step % 5 == 0:
            sizes = [flight.plan.num_requests for flight in engine.scheduler.in_flight]
            assert sizes and max(sizes) <= 4, "half of 8"
    engine.check_outputs(*requests[1:])


def test_without_a_drafter_all_requests_run_in_one_batch() -> None:
    engine = alternating_engine(4)
    for _ in range(4):
        engine.step()
    engine.executor.lose_drafter()
    for _ in range(3):
        engine.step()
    assert engine.next_plan().num_requests == 4 and engine.plan() is None


def test_without_enough_pages_the_last_request_is_preempted_in_either_half() -> None:
    engine = alternating_engine(4, num_pages=(40,))
    queues, preempt = engine.scheduler.queues, engine.scheduler.queues.preempt

    def preempt_the_last(sequence: Sequence) -> None:
        assert sequence is queues.running[-1]
        preempt(sequence)

    queues.preempt = preempt_the_last
    engine.run()
    assert engine.stats().preemptions > 0
    assert next(iter(engine.outputs.ends)) == "r0", "who came first ends first"
