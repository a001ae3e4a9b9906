"""Prompt look-up through whole engines: ranks draft the same, tokens are those of plain decoding.

`test_step_operators.py` tests the look-up itself and its loops, `test_suffix.py` constrained answers.
"""

from __future__ import annotations

from pathlib import Path

from manta.actors.targets.loading.rank_loader import load_runner
from support.engines.steps import settings
from support.engines.thread_ranks import ThreadRank, ThreadRanks
from support.oracles.recorded_chains import decode_alone, texts

NGRAM = {"method": "ngram", "num_speculative_tokens": 5, "adaptive": False}
REPEATS = [7, 8, 9, 10] * 6 + [7, 8]


def test_ranks_look_up_the_same_drafts_and_verify_no_more(tiny_qwen3: Path) -> None:
    plain = texts(decode_alone(load_runner(settings(tiny_qwen3))[0], REPEATS, 0, 10))
    spec = {"speculative_config": NGRAM}
    expected = decode_alone(load_runner(settings(tiny_qwen3, **spec))[0], REPEATS, 5, 10)
    assert texts(expected)[: len(plain)] == plain
    assert {0, 5} == {count for _, count, _ in expected[1:]}, "none, or as many as were asked for"
    config = settings(tiny_qwen3, tensor_parallel_size=2, **spec)

    def work(rank: ThreadRank) -> list[tuple[list[int], int, list[float]]]:
        return decode_alone(load_runner(config, rank)[0], REPEATS, 5, 10)

    assert ThreadRanks(2).run(work) == [expected] * 2
