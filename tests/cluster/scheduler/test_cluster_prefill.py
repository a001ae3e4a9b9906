"""Prompts in steps with decoding requests: by how many simulated seconds they delay them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from manta.cluster.scheduler.background_budget import CHUNK, BackgroundBudget
from manta.cluster.speculation.step_cost_model import MAX_GROWTH, StepCostModel, StepLoad
from manta.cluster.step.scheduler_output import SchedulerOutput, StepTimings
from support.engines.cluster_checker import make_info, simulated_engine

PROMPT = 900  # tokens
CPU, LARGE_ON_CPU, GPU = (3e-3, 5e-4), (0.4, 1e-2), (8e-3, 2e-5)  # seconds of a step, and of each of its rows


def cost_of(machine: tuple[float, float]) -> Callable[[SchedulerOutput], StepTimings]:
    step_s, row_s = machine
    noise = np.random.default_rng(0)
    return lambda plan: StepTimings(
        verify_s=(step_s + row_s * plan.num_batched_tokens) * noise.lognormal(0, 0.05)
    )


def delays(machine: tuple[float, float], num_prompts: int) -> tuple[list[float], list[int]]:
    """Seconds and prompt rows of each step in which one request decodes and prompts are computed."""
    info = make_info(num_pages=(4096,), page_size=16, max_model_len=2048, vocab_size=1000)
    engine = simulated_engine(info, (), cost_of(machine), max_num_seqs=8)
    engine.add("decodes", (2,), max_tokens=1000, ignore_eos=True)
    engine.run_steps(20)
    for i in range(num_prompts):
        engine.add(f"prompt {i}", [2 + i] * PROMPT, max_tokens=1)
    step_s, rows = list[float](), list[int]()
    while engine.stats().finished.get("length", 0) < num_prompts:
        begin_s, plan = engine.clock(), engine.run_step()
        assert plan.samples[0], "the decoding request is in every step"
        step_s.append(engine.clock() - begin_s)
        rows.append(plan.num_batched_tokens - plan.num_draft_tokens - 1)
    return step_s, rows


@pytest.mark.parametrize("num_prompts", [1, 3])
def test_prompts_delay_a_decoding_request_little(num_prompts: int) -> None:
    step_s, rows = delays(CPU, num_prompts)
    assert sum(rows) == num_prompts * PROMPT, "no row is computed twice"
    assert max(step_s) < 0.11
    assert sum(step_s) < 1.15 * (3e-3 + 5e-4 * sum(rows)), "nearly as fast as all at once"


def test_with_long_steps_a_prompt_still_gets_most_of_the_time() -> None:
    step_s, _ = delays(LARGE_ON_CPU, 1)
    assert sum(step_s) < 1.4 * (0.4 + 1e-2 * PROMPT), "all at once, and a third more"
    assert max(step_s) < 6 * 0.4


def test_with_cheap_rows_a_prompt_is_computed_in_one_step() -> None:
    _, rows = delays(GPU, 2)
    assert max(rows) > PROMPT and len(rows) <= 3


def test_short_prompts_without_measurable_cost_do_not_admit_a_long_one_in_one_step() -> None:
    costs, load = StepCostModel(), StepLoad(1, 0, 0.0)
    budget = BackgroundBudget(costs, 4096, chunks=True)

    def learn(rows: int, seconds: float) -> None:
        costs.observe(load._replace(prompt_rows=rows), 0, 0, 0.0, seconds, 0)

    for rows, seconds in ((0, 5e-3), (1, 4e-3), (7, 4e-3), (20, 6e-3)):  # within a step's own noise
        learn(rows, seconds)
    assert budget.prompt_rows(load, 0, 20) <= MAX_GROWTH * CHUNK
    learn(40, 4e-3)  # so is the first chunk that counts
    assert budget.prompt_rows(load, 0, 40) <= MAX_GROWTH * 40
    for rows in (320, 4096):  # chunks that are cheap become long
        learn(rows, 5e-3 + 1e-6 * rows)
    assert budget.prompt_rows(load, 0, 4096) == 4096
