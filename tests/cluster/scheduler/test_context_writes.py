"""The drafter's context is not written while drafts do not pay, and is written again when they do."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from manta.actors.engine.uniproc_executor import InProcessExecutor
from manta.cluster.engine.engine_core import EngineCore
from manta.cluster.request.request import Request
from manta.cluster.scheduler.drafter_context import ContextWriteGate
from manta.cluster.simulation.simulated_executor import LinearCost
from manta.cluster.step.scheduler_output import StepTimings
from support.engines.cluster_checker import (
    SimulatedEngine,
    check_tokens_are_plain,
    make_info,
    make_request,
    open_engine,
    simulated_engine,
)
from support.engines.opened import scheduler_of
from support.engines.steps import settings

LONG = {"ignore_eos": True}
COST = LinearCost(verify_floor_s=0.004, verify_row_s=0.0001, draft_floor_s=0.001, inject_row_s=0.0002)
INFO = make_info(
    vocab_size=1000, max_model_len=8192, num_pages=(2100,), page_size=16, num_speculative_tokens=4
)


class RandomWrites(ContextWriteGate):
    """A writer that stops and resumes at random."""

    def __init__(self, seed: int) -> None:
        super().__init__(may_stop=True)
        self._random = np.random.default_rng(seed)

    @property
    def should_stop(self) -> bool:
        return self.on and bool(self._random.random() < 0.2)

    def may_resume_for(self, *, trial: bool) -> bool:
        return not self.on and bool(self._random.random() < 0.2)


def simulated(hardness: dict[str, float], cost: LinearCost = COST) -> SimulatedEngine:
    """Return an engine with this hardness of requests by kind, with which their names begin."""
    return simulated_engine(
        INFO,
        (0.9, 0.8, 0.7, 0.6),
        cost,
        hardness=lambda name: hardness[name.split()[0]],
        max_num_seqs=4,
        speculative_config={"model": "simulated"},
    )


def test_context_writes_stop_after_long_without_drafts_and_drafts_return_when_they_pay() -> None:
    engine = simulated({"hostile": 90.0, "easy": 1.0})
    for i in range(4):
        engine.add(f"hostile {i}", seed=i, max_tokens=6000, **LONG)
    plans = engine.run_steps(2000)
    assert plans[0].writes_context and not plans[-1].writes_context
    stats = engine.stats()
    assert stats.drafter_rests >= 1
    unwritten = [plan.num_batched_tokens for plan in plans if not plan.writes_context]
    assert stats.drafter_unwritten_tokens == sum(unwritten) > 0.4 * sum(p.num_batched_tokens for p in plans)
    assert len({plan.num_drafts.any() for plan in plans if not plan.writes_context}) == 1
    for i in range(4):
        engine.abort(f"hostile {i}")
        engine.add(f"easy {i}", seed=i, max_tokens=7000, **LONG)
    plans, drafting = engine.run_steps(100), [0]
    for _ in range(40):
        plans = engine.run_steps(100)
        drafting = [np.count_nonzero(plan.num_drafts) for plan in plans]
        if np.mean(drafting) > 3.5:
            break
    assert np.mean(drafting) > 3.5, "all of them draft, those too that had entered without context"
    assert all(plan.writes_context for plan in plans if plan.num_drafts.any())
    assert engine.stats().drafter_refilled_tokens > 0


def test_a_request_may_draft_where_drafts_do_not_pay_unless_others_run() -> None:
    engine = simulated({"hostile": 90.0})
    engine.add("hostile 0", max_tokens=3000, **LONG)
    assert not engine.run_steps(1500)[-1].writes_context
    engine.add("hostile 1", adaptive_drafts=False, max_tokens=3000, **LONG)
    beside = engine.run_steps(200)
    assert np.mean([plan.num_drafts.any() for plan in beside]) < 0.2, "the other one's choice"
    engine.abort("hostile 0")
    engine.run_steps(3)  # the context is computed again
    assert all(plan.num_drafts.tolist() == [4] for plan in engine.run_steps(50))
    engine.abort("hostile 1")
    engine.add("hostile 2", adaptive_drafts=False, max_draft_tokens=2, max_tokens=3000, **LONG)
    engine.run_steps(3)
    assert all(plan.num_drafts.tolist() == [2] for plan in engine.run_steps(50))


def test_an_unsuccessful_trial_recomputes_the_request_and_ends_soon() -> None:
    engine = simulated({"hostile": 90.0})
    engine.add("hostile", max_tokens=4000, **LONG)
    plans = engine.run_steps(3000)
    rests, entered = engine.stats().drafter_rests, sum(len(plan.admitted) for plan in plans) - 1
    assert rests >= 2 and 1 <= entered <= rests, "once for each return"
    first = next(i for i, plan in enumerate(plans) if not plan.writes_context)
    assert np.mean([plan.writes_context for plan in plans[first:]]) < 0.3


def test_writes_that_take_little_time_are_not_stopped() -> None:
    """Such as those of prompt look-up, which has no context."""
    engine = simulated({"hostile": 90.0}, LinearCost(verify_floor_s=0.004, draft_floor_s=0.001))
    engine.add("hostile", max_tokens=4000, **LONG)
    assert all(plan.writes_context for plan in engine.run_steps(1200))


def test_a_trial_waits_until_enough_time_was_saved_and_paying_drafts_do_not_wait() -> None:
    writes = ContextWriteGate(may_stop=True)
    for _ in range(256):
        assert not writes.should_stop
        writes.on_scheduled(useful=False)
        writes.on_completed(StepTimings(verify_s=0.01, inject_s=0.001))
    assert writes.should_stop
    writes.stop()
    assert writes.may_resume_for(trial=False) and not writes.may_resume_for(trial=True)
    for _ in range(1024):
        writes.on_scheduled(useful=False)
    assert writes.may_resume_for(trial=True)


@pytest.mark.parametrize(("pays", "steps"), [(False, 64), (True, 256)])
def test_writes_stop_soon_after_a_trial_unless_its_drafts_pay(pays: bool, steps: int) -> None:
    writes = ContextWriteGate(may_stop=True)
    writes.stop()
    writes.resume(4, trial=True)
    count = 0
    for number in range(400):
        if number == 20:  # a request is recomputed until then
            writes.on_drafts_possible()
        if number == 25 and pays:
            writes.on_scheduled(useful=True)
        writes.on_completed(StepTimings(verify_s=0.01, inject_s=0.001))
        if writes.should_stop:
            break
        writes.on_scheduled(useful=False)
        count += 1
    assert count == (25 if pays else 20) + steps


def test_pages_filled_without_context_are_not_cached_and_earlier_ones_are() -> None:
    engine = open_engine(make_info(num_pages=(256,)))
    before, meanwhile = tuple(range(2, 14)), tuple(range(3, 15))
    engine.run(make_request("before", before, max_tokens=2, **LONG))
    context = engine.scheduler.drafter
    context._stop()
    engine.run(make_request("meanwhile", meanwhile, max_tokens=2, **LONG))
    again = engine.run(make_request("while it rests", meanwhile, max_tokens=2, **LONG))
    assert again.cached["while it rests"] == 8
    context._forget(marked=True)
    context._writes.resume()
    found = engine.run(*(make_request(str(p), p, max_tokens=6, **LONG) for p in (before, meanwhile)))
    assert (found.cached[str(before)], found.cached[str(meanwhile)]) == (8, 0)


@pytest.mark.parametrize("seed", range(6))
def test_no_request_drafts_without_its_context_whenever_writes_stop_and_resume(seed: int) -> None:
    """The checking executor knows which positions were written for the drafter."""
    engine = open_engine(make_info(num_pages=(96,), max_in_flight=1), enable_prefix_caching=bool(seed % 2))
    engine.scheduler.drafter._writes = RandomWrites(seed)
    stem = tuple(range(2, 20))
    requests: list[Request] = []
    for i in range(12):
        fields = {"seed": i, "max_tokens": 36, "background": i % 5 == 4, **LONG}
        requests.append(engine.add(f"r{i}", stem[: 4 + i], **fields))
        engine.run_steps(2)
    engine.check_outputs(*requests)
    stats = engine.stats()
    assert stats.drafter_rests > 1 and stats.drafter_refilled_tokens > 0 and stats.num_drafts > 0


def test_computed_tokens_are_those_of_plain_decoding_whenever_writes_stop_and_resume(
    tiny_qwen3: Path, tiny_drafter: Path
) -> None:
    config = settings(tiny_qwen3, tiny_drafter)
    executor = InProcessExecutor(config)
    engine = EngineCore(config, executor)
    scheduler_of(engine).drafter._writes = RandomWrites(0)
    stats = check_tokens_are_plain(config, executor, engine, 60)
    assert stats.drafter_rests > 1 and stats.drafter_unwritten_tokens > 0 and stats.num_drafts > 0
