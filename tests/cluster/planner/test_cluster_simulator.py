"""The simulated executor: the same tokens with any drafts, and the configured acceptance."""

from __future__ import annotations

import time

import pytest
from manta.cluster.config import EngineConfig
from manta.cluster.engine.engine_stats import EngineStats
from manta.cluster.errors import ConfigError
from manta.cluster.simulation.simulated_executor import LinearCost, SimulatedExecutor
from manta.cluster.step.clock import MACHINE_CLOCK
from support.engines.cluster_checker import (
    SimulatedEngine,
    generate,
    make_info,
    make_request,
    simulated_engine,
)

INFO = make_info(vocab_size=50_000, max_model_len=2048, num_pages=(8192,), num_speculative_tokens=7)


def simulate(survival: list[float]) -> tuple[dict[str, list[int]], EngineStats]:
    engine = simulated_engine(INFO, survival, max_num_seqs=32)
    fields = {"max_tokens": 400, "ignore_eos": True}
    tokens = generate(engine, *(make_request(str(i), (i,), seed=i, **fields) for i in range(32)))
    return tokens, engine.stats()


def test_acceptance_follows_the_curve_and_tokens_do_not_depend_on_it() -> None:
    survival = [0.9, 0.7, 0.5, 0.3, 0.2, 0.1, 0.05]
    tokens, stats = simulate(survival)
    measured = [count / stats.num_drafts for count in stats.accepted_per_pos]
    assert measured == pytest.approx(survival, abs=0.04)
    plain, plain_stats = simulate([])
    assert tokens == plain and plain_stats.num_accepted_tokens == 0
    assert stats.steps < plain_stats.steps / 2


def test_different_seeds_and_positions_have_different_tokens() -> None:
    tokens, _ = simulate([])
    seen = [tuple(values[:50]) for values in tokens.values()]
    assert len(set(seen)) == 32 and all(len(set(values)) > 45 for values in seen)


@pytest.mark.parametrize("survival", [[0.5, 0.6], [1.2], [-0.1]])
def test_an_invalid_acceptance_curve_is_refused(survival: list[float]) -> None:
    with pytest.raises(ConfigError, match="never rise"):
        SimulatedExecutor(INFO, survival)


def test_an_engine_has_its_executors_clock() -> None:
    executor = SimulatedExecutor(INFO, cost=LinearCost(verify_floor_s=0.5))
    engine = SimulatedEngine(EngineConfig(model="simulated"), executor)
    engine.add("r", max_tokens=3, max_draft_tokens=0, ignore_eos=True)
    assert len(engine.run_steps(9)) == 3 and engine.clock is executor.clock and engine.clock() == 1.5


def test_on_the_machines_clock_a_simulated_step_takes_the_time_of_its_cost() -> None:
    cost = LinearCost(verify_floor_s=0.02)
    engine = SimulatedEngine(
        EngineConfig(model="simulated"), SimulatedExecutor(INFO, cost=cost, clock=MACHINE_CLOCK)
    )
    engine.add("r", max_tokens=1)
    begin_s = time.monotonic()
    engine.run_step()
    assert time.monotonic() >= begin_s + 0.02
