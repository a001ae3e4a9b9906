"""The choice of how many drafts to make, over made-up machines and drafters."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from manta import LLM, SamplingParams
from manta.cluster.draft_length import DraftLength

MOST = 15
RUNGS = (0, 1, 3, 5, 7, 11, 15)
Machine = Callable[[int, int], float]  # seconds of a step: (requests, drafts each)


def flat(requests: int, drafts: int) -> float:
    """Rows are free: one request on a GPU."""
    return 0.010 + (0.001 if drafts else 0)


def linear(requests: int, drafts: int) -> float:
    """Every row costs: a CPU, or very many requests."""
    rows = requests * (1 + drafts)
    return 1e-4 + 1e-5 * rows + (2e-6 * rows + 5e-5 if drafts else 0)


def dear_drafter(requests: int, drafts: int) -> float:
    return 0.001 + (0.01 if drafts else 0)


def run(
    choice: DraftLength, machine: Machine, chance: float, loads: list[int], seed: int = 0, noise: float = 0.1
) -> list[int]:
    """Drafts of every step; each draft is accepted with `chance` as long as those before it were."""
    random, chosen = np.random.default_rng(seed), []
    for requests in loads:
        drafts = choice.choose(requests)
        accepted = np.minimum(random.geometric(1 - chance, requests) - 1, drafts)
        choice.learn_acceptance(np.full(requests, drafts), accepted)
        choice.learn_time(requests, drafts, machine(requests, drafts) * random.lognormal(0, noise))
        chosen.append(drafts)
    return chosen


def rate(machine: Machine, chance: float, requests: int, drafts: int) -> float:
    """Tokens per second of one request."""
    return sum(chance**i for i in range(drafts + 1)) / machine(requests, drafts)


@pytest.mark.parametrize("requests", [1, 8, 40])
@pytest.mark.parametrize("chance", [0.05, 0.5, 0.75, 0.95])
@pytest.mark.parametrize("machine", [flat, linear, dear_drafter])
def test_the_fastest_number_of_drafts_is_found_and_kept(machine: Machine, chance: float, requests: int):
    chosen = run(DraftLength(MOST), machine, chance, [requests] * 600)
    rates = {k: rate(machine, chance, requests, k) for k in RUNGS}
    late = chosen[400:]
    mean = np.mean([rates[k] for k in late])
    assert mean > 0.93 * max(rates.values()), (mean / max(rates.values()), np.bincount(late))


def test_it_follows_when_acceptance_changes():
    choice = DraftLength(MOST)
    run(choice, linear, 0.95, [8] * 500)
    late = run(choice, linear, 0.2, [8] * 1500, seed=1)[-300:]
    assert np.mean(late) < 4


def test_every_load_has_its_own_answer():
    choice = DraftLength(MOST)
    loads = [1] * 500 + [32] * 500 + [1] * 64
    chosen = run(choice, lambda r, k: flat(r, k) if r == 1 else linear(r, k), 0.8, loads, noise=0.02)
    assert np.mean(chosen[400:500]) > 13 > 9 > np.mean(chosen[900:1000])
    assert np.mean(chosen[1000:]) > 13, "what was learned is not forgotten"


def test_a_step_that_hung_once_is_no_measure():
    choice = DraftLength(MOST)
    run(choice, flat, 0.9, [1] * 300)
    choice.learn_time(1, MOST, 5.0)
    assert choice.choose(1) == MOST


def test_lengths_that_are_never_tried_are_not_forgotten_to_nothing():
    choice = DraftLength(MOST)
    for _ in range(200_000):
        choice.learn_acceptance(np.array([1]), np.array([0]))
    run(choice, dear_drafter, 0.0, [1] * 100)
    assert choice.choose(1) == 0


def test_without_times_all_drafts_are_made():
    """Simulated executors measure nothing; nor do steps with prompts in them."""
    choice = DraftLength(MOST)
    assert {choice.choose(r) for r in range(1, 200)} == {MOST}


@pytest.mark.parametrize("most", [1, 2, 4])
def test_short_blocks_have_short_ladders(most: int):
    assert set(run(DraftLength(most), linear, 0.5, [8] * 300)) <= {0, 1, 3, most}


def test_no_token_depends_on_how_many_are_drafted(tiny_qwen3: Path, tiny_drafter: Path):
    """Long enough that an engine with a random drafter tries several lengths."""
    prompts = [{"prompt_token_ids": [1 + i, 5, 9]} for i in range(8)]
    params = SamplingParams(temperature=1.0, seed=3, max_tokens=400, ignore_eos=True)
    drafted = {}
    for adaptive in (True, False):
        spec = {"model": str(tiny_drafter), "adaptive": adaptive}
        with LLM(str(tiny_qwen3), speculative_config=spec, skip_tokenizer_init=True, dtype="float32") as llm:
            outputs = llm.generate(prompts, params)
            drafted[adaptive] = llm.stats().num_draft_tokens, [o.outputs[0].token_ids for o in outputs]
    assert min(drafted[True][0], drafted[False][0]) > 0
    assert drafted[True][1] == drafted[False][1]
