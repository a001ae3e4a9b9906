"""Sampling with speculation follows the target's own distribution: chi-square on a tiny vocabulary.

The expected distribution comes from transformers; the counts from thousands of seeds through the whole
engine, drafts included.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from manta import LLM, SamplingParams
from support.checkpoints.tiny import make_tiny_drafter, make_tiny_target
from support.oracles.sampling_rows import chi_square_p

VOCAB = 24
PROMPT = [3, 14, 15, 9, 2, 6, 5]
NUM_SEEDS = 4000


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("tiny-vocabulary")
    target = make_tiny_target(folder / "target", "qwen3", seed=3, vocab_size=VOCAB)
    return target, make_tiny_drafter(folder / "drafter", seed=4, vocab_size=VOCAB)


@pytest.fixture(scope="module")
def samples(pair: tuple[Path, Path]) -> np.ndarray:
    """Return the first three tokens for many seeds, int [NUM_SEEDS, 3]."""
    params = [SamplingParams(seed=s, max_tokens=3, ignore_eos=True) for s in range(NUM_SEEDS)]
    with LLM(
        str(pair[0]),
        speculative_config={"model": str(pair[1]), "num_speculative_tokens": 2, "adaptive": False},
        skip_tokenizer_init=True,
        dtype="float32",
        max_num_seqs=64,
        num_threads=1,
    ) as llm:
        outputs = llm.generate([{"prompt_token_ids": PROMPT}] * NUM_SEEDS, params)
        assert llm.stats().num_accepted_tokens > 0
    return np.array([o.outputs[0].token_ids for o in outputs])


def distribution(target: Path, prefixes: list[list[int]]) -> np.ndarray:
    """Return the target's next-token probabilities by transformers, float [len(prefixes), VOCAB]."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    with torch.inference_mode():
        logits = model(torch.tensor(prefixes)).logits[:, -1].double()
    return torch.softmax(logits, dim=-1).numpy()


def test_first_tokens_follow_the_target(pair: tuple[Path, Path], samples: np.ndarray) -> None:
    (p,) = distribution(pair[0], [PROMPT])
    assert chi_square_p(np.bincount(samples[:, 0], minlength=VOCAB), p * NUM_SEEDS) > 1e-4


@pytest.mark.parametrize("position", [1, 2])
def test_later_tokens_follow_the_target_given_their_prefix(
    pair: tuple[Path, Path], samples: np.ndarray, position: int
) -> None:
    prefixes, counts = np.unique(samples[:, :position], axis=0, return_counts=True)
    p = distribution(pair[0], [PROMPT + list(map(int, prefix)) for prefix in prefixes])
    expected = (p * counts[:, None]).sum(axis=0)
    assert chi_square_p(np.bincount(samples[:, position], minlength=VOCAB), expected) > 1e-4


def test_a_wrong_distribution_is_detected(pair: tuple[Path, Path], samples: np.ndarray) -> None:
    (p,) = distribution(pair[0], [PROMPT])
    warmer = p**0.8 / (p**0.8).sum()
    assert chi_square_p(np.bincount(samples[:, 0], minlength=VOCAB), warmer * NUM_SEEDS) < 1e-4
