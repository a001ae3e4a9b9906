"""Prompt look-up through whole engines: tokens equal plain decoding's, repeated text is drafted correctly.

`test_step_operators.py` tests the look-up itself and its loops; `test_lossless.py` has cells of the grid.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from manta import LLM, SamplingParams, StructuredOutputsParams
from manta.actors.targets.loading.rank_loader import load_runner
from support.checkpoints.text_pair import make_text_pair
from support.engines.steps import Steps, settings
from support.engines.thread_ranks import ThreadRank, ThreadRanks
from support.oracles.schemas import held_by

NGRAM = {"method": "ngram", "num_speculative_tokens": 5, "adaptive": False}
REPEATS = [7, 8, 9, 10] * 6 + [7, 8]


def outcomes(runner, num_drafts: int) -> list[tuple[list[int], int]]:
    """Return the tokens of each step of one request, and the number of verified drafts."""
    steps, known, found = Steps(2), len(REPEATS), []
    plan = steps.plan([0], [0], [known], admitted=[steps.admit(0, REPEATS)])
    for _ in range(10):
        result = runner.execute(plan)
        tokens = result.token_ids[0, : result.num_tokens[0]].tolist()
        found.append((tokens, int(result.num_drafts[0])))
        known += len(tokens)
        plan = steps.plan([0], [known - 1], [1 + num_drafts], [num_drafts])
    return found


def texts(found: list[tuple[list[int], int]]) -> list[int]:
    return [token for tokens, _ in found for token in tokens]


def test_ranks_look_up_the_same_drafts_and_verify_no_more(tiny_qwen3: Path) -> None:
    plain = texts(outcomes(load_runner(settings(tiny_qwen3))[0], 0))
    spec = {"speculative_config": NGRAM}
    expected = outcomes(load_runner(settings(tiny_qwen3, **spec))[0], 5)
    assert texts(expected)[: len(plain)] == plain
    assert {0, 5} == {count for _, count in expected[1:]}, "none, or as many as were asked for"
    config = settings(tiny_qwen3, tensor_parallel_size=2, **spec)

    def work(rank: ThreadRank) -> list[tuple[list[int], int]]:
        return outcomes(load_runner(config, rank)[0], 5)

    assert ThreadRanks(2).run(work) == [expected] * 2


@pytest.mark.parametrize("adaptive", [False, True])
def test_constrained_answers_equal_plain_decoding(tmp_path: Path, adaptive: bool) -> None:
    """One answer repeats itself, and drafts are adaptive."""
    target, _ = make_text_pair(tmp_path)
    held = StructuredOutputsParams(regex="(ab){12}[a-z]*"), held_by({"enum": ["yes yes yes", "no no no no"]})
    params = [SamplingParams(temperature=0.0, max_tokens=40)]
    params += [SamplingParams(seed=3, max_tokens=40, structured_outputs=each) for each in held]
    found = []
    for spec in (None, {**NGRAM, "adaptive": adaptive}):
        how = {"dtype": "float32", "num_threads": 1, "max_model_len": 256, "speculative_config": spec}
        with LLM(str(target), **how) as llm:
            answers = llm.generate(["a b a b a b", "say ab", "yes or no"], params)
            found.append([answer.outputs[0].token_ids for answer in answers])
            stats = llm.stats()
    assert found[0] == found[1]
    assert adaptive or stats.num_accepted_tokens > 0
