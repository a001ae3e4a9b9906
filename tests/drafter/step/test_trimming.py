"""Steps that verify fewer drafts than were made: host runner, ranks, split drafter.

Trimmed drafts are not computed, are reported, and do not affect the drafter's context. `test_lossless.py`
tests that no token depends on trimming.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from manta.actors.targets.loading.rank_loader import load_runner
from manta.cluster.speculation.draft_trimming import drafts_to_verify
from manta.cluster.step.dummy_steps import dummy_step
from manta.cluster.step.scheduler_output import SchedulerOutput, StepResult, Trim
from manta.drafter.step.cpu_numba.step_ops import LOOPS
from manta.drafter.step.inputs.proposals import Proposals
from manta.drafter.step.sampling.step_ops import DEFINITION
from manta.drafter.step.sampling.verification import take_out
from support.checkpoints.tiny import TINY_VOCAB, make_tiny_drafter
from support.engines.split_pair import Pair
from support.engines.steps import GREEDY, Steps, open_runner, settings
from support.engines.thread_ranks import ThreadRank, ThreadRanks

PROMPTS = [np.random.default_rng(5).integers(1, TINY_VOCAB - 1, n).tolist() for n in (30, 3, 17)]
NARROW = replace(GREEDY, temperature=1.0, top_k=4, seed=9)
SAMPLING = [GREEDY, replace(GREEDY, temperature=0.9, seed=4), NARROW]
NUM_DRAFTS, NUM_STEPS = 5, 8
Execute = Callable[[SchedulerOutput], StepResult]


def random_trim(plan: SchedulerOutput) -> Trim:
    """Trim randomly: in every third step everything, in others to a given number of rows."""
    random, maximum = np.random.default_rng(plan.step), plan.num_batched_tokens
    floats = random.normal(size=(2, NUM_DRAFTS)).astype(np.float32)
    of_requests = random.random((2, plan.num_requests)).astype(np.float32)
    rising = np.cumsum(random.random(maximum + 1)).astype(np.float32) + (0 if plan.step % 3 else 1e6)
    rising[1:] += 0 if plan.step % 3 else 1e9
    return Trim(
        *floats, *of_requests, rising, int(random.integers(1, maximum)) if plan.step % 4 == 1 else None
    )


def generate(execute: Execute, *, trims: bool = True) -> tuple[list[list[int]], list[StepResult]]:
    """Return prompts with their continuations, and the steps' results."""
    steps, results = Steps(len(PROMPTS)), list[StepResult]()
    slots = list(range(len(PROMPTS)))
    admitted = [steps.admit(*request) for request in zip(slots, PROMPTS, SAMPLING, strict=True)]
    found = [list(tokens) for tokens in PROMPTS]
    plan = steps.plan(slots, [0] * 3, [len(p) for p in PROMPTS], admitted=admitted)
    for _ in range(NUM_STEPS):
        results.append(execute(replace(plan, trim=random_trim(plan)) if trims else plan))
        for known, row, count in zip(found, results[-1].token_ids, results[-1].num_tokens, strict=True):
            known += row[:count].tolist()
        drafts = [NUM_DRAFTS, 2, NUM_DRAFTS]
        plan = steps.plan(slots, [len(f) - 1 for f in found], [1 + d for d in drafts], drafts)
    return found, results


class OracleProposer:
    """A proposer that knows the continuation, with varying margins."""

    def __init__(self, texts: list[list[int]]) -> None:
        self._texts = texts

    def propose(self, plan: SchedulerOutput, states: object) -> Proposals:
        maximum = int(plan.num_drafts.max())
        margins = torch.from_numpy(
            np.random.default_rng(plan.step).random((3, maximum), dtype=np.float32) * 9
        )
        drafts = torch.full((3, maximum), -1)
        for r, (n, k) in enumerate(zip(plan.num_computed, plan.num_drafts, strict=True)):
            drafts[r, :k] = torch.tensor(self._texts[r][n + 1 : n + 1 + k])
            margins[r, k:] = torch.nan
        return Proposals(drafts, margins)

    def inject(self, *step: object) -> None:
        """Do nothing: no context is needed."""


def test_trimmed_drafts_are_not_computed_and_change_no_token(tiny_qwen3: Path, tiny_drafter: Path) -> None:
    runner, _ = open_runner(tiny_qwen3, tiny_drafter)
    whole = PROMPTS
    for _ in range(6):  # from proposals to the continuation
        runner.drafts = OracleProposer([tokens + [9] * 64 for tokens in whole])
        whole, _ = generate(runner.execute, trims=False)
    plans, rows, forward = list[SchedulerOutput](), list[int](), runner.model.forward

    def execute(plan: SchedulerOutput) -> StepResult:
        plans.append(plan)
        return runner.execute(plan)

    def spy(token_ids_N: torch.Tensor, *more: object) -> object:
        rows.append(len(token_ids_N))
        return forward(token_ids_N, *more)

    runner.model.forward = spy
    cut, results = generate(execute)
    for whole_text, text in zip(whole, cut, strict=True):
        assert whole_text[: len(text)] == text[: len(whole_text)]
    assert sum(map(len, cut)) < sum(map(len, whole)), "cuts that cost nothing would show nothing"
    for plan, result, num_rows in list(zip(plans, results, rows, strict=True))[1:]:
        num_other_rows, margins = int((plan.num_rows - plan.num_drafts).sum()), result.margins
        assert margins.shape == (3, NUM_DRAFTS) and np.isnan(margins[1, 2:]).all()
        expected = drafts_to_verify(margins, plan.num_drafts, num_other_rows, plan.trim)
        assert result.num_drafts.tolist() == expected.tolist()
        assert num_rows == num_other_rows + expected.sum()
        assert (result.num_tokens <= 1 + expected).all() and result.token_ids.shape == (3, NUM_DRAFTS + 1)
    verified = np.concatenate([result.num_drafts for result in results[1:]])
    assert {0, NUM_DRAFTS} <= set(verified.tolist()) and len(set(verified.tolist())) > 3


def outcome(results: list[StepResult]) -> list[list]:
    """Return the results of steps; without drafts there is no margin."""
    numbers = [
        (r.num_drafts, r.num_tokens, r.token_ids, np.empty(0) if r.margins is None else r.margins.round(2))
        for r in results
    ]
    return [[np.nan_to_num(x, nan=-1.0).tolist() for x in result] for result in numbers]


@pytest.mark.parametrize("second", [False, True], ids=["DFlash", "DFlash2"])
def test_ranks_trim_the_same_drafts(tiny_qwen3: Path, tmp_path: Path, second: bool) -> None:
    """All ranks follow rank 0, although margins differ in their last digits."""
    drafter = make_tiny_drafter(tmp_path, second=second)
    expected = outcome(generate(load_runner(settings(tiny_qwen3, drafter))[0].execute)[1])
    config = settings(tiny_qwen3, drafter, tensor_parallel_size=2)

    def work(rank: ThreadRank) -> list[list]:
        runner, _ = load_runner(config, rank)
        proposer = runner.drafts._proposer

        class Shifted:
            """The rank's proposer, with slightly larger margins on the second rank."""

            inject = proposer.inject

            def propose(self, *step: object) -> Proposals:
                found = proposer.propose(*step)
                if found.margins_RK is not None:
                    found.margins_RK.add_(rank.rank)
                return found

        runner.drafts._proposer = Shifted()
        return outcome(generate(runner.execute)[1])

    assert ThreadRanks(2).run(work) == [expected] * 2


def test_a_split_drafter_receives_what_was_verified(tiny_qwen3: Path, tiny_drafter: Path) -> None:
    """It writes as many context rows as there were, and then drafts like a colocated drafter."""
    _, expected = generate(open_runner(tiny_qwen3, tiny_drafter)[0].execute)
    spec = {"model": str(tiny_drafter), "adaptive": False}
    with closing(Pair(tiny_qwen3, spec, attention_backend="auto")) as pair:
        _, results = generate(pair.execute)
        assert outcome(results) == outcome(expected)
        pair.remote.link.drafts = lambda step, shape: None  # too late
        _, results = generate(pair.execute)
        assert all(np.isnan(r.margins).all() for r in results[1:]), "nobody is sure of what stands there"


def test_a_step_without_context_sends_the_drafter_nothing(tiny_qwen3: Path, tiny_drafter: Path) -> None:
    runner, _ = open_runner(tiny_qwen3, tiny_drafter)
    steps = Steps(4)
    enter = steps.plan([0], [0], [30], admitted=[steps.admit(0, PROMPTS[0])])
    before = runner.drafts._proposer.cache.kv.clone()
    runner.execute(replace(enter, writes_context=False))
    assert runner.drafts._proposer.cache.kv.equal(before)
    runner.execute(enter)
    runner.execute(steps.plan([0], [30], [4], [3]))  # context is written before the next block at the latest
    k_PSKD, _ = runner.drafts._proposer.cache.heads(0)
    assert k_PSKD[0, 0].any(), "the first position"


@pytest.mark.parametrize("seed", range(40))
def test_compiled_trimming_equals_the_definition(seed: int) -> None:
    """Steps have given rows, a rate, or neither; missing margins; few rows that pay, and many."""
    random = np.random.default_rng(seed)
    num_requests, maximum = int(random.integers(1, 40)), int(random.integers(1, 16))
    drafts = random.integers(0, maximum + 1, num_requests)
    plan = dummy_step([5] * num_requests, (1 + drafts).tolist(), drafts.tolist())
    num_rows = plan.num_batched_tokens
    margins = np.abs(random.normal(0, 3, (num_requests, maximum))).astype(np.float32)
    margins[random.random(margins.shape) < 0.05] = np.nan
    margins[random.random(margins.shape) < 0.05] = np.inf
    curves = [random.normal(size=n).astype(np.float32) for n in (maximum, maximum, num_requests)]
    rest = random.random(num_requests) + 0.1, np.cumsum(random.random(num_rows + 1))
    chosen = int(random.integers(1, num_rows + 1)) if seed % 3 == 0 else None
    trim = Trim(*curves, *(f.astype(np.float32) for f in rest), chosen, (0.0, 0.5, 0.1, 2.0)[seed % 4])
    plan = replace(plan, trim=trim)
    found = LOOPS.trim(torch.from_numpy(margins), plan)
    assert found.tolist() == DEFINITION.trim(torch.from_numpy(margins), plan).tolist()
    left = take_out(torch.arange(margins.size).view(margins.shape), torch.from_numpy(found))
    assert (left >= 0).sum(1).tolist() == found.tolist()
