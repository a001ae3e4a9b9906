"""Prompts and sampling parameters of the losslessness tests: each knob alone, and all together."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
from manta.cluster.request.request import SamplingParams

from support.checkpoints.tiny import TINY_VOCAB

if TYPE_CHECKING:
    from manta import LLM  # imports the HTTP protocol, which kernels' tests do without

WHOLE = os.environ.get("MANTA_GRID") == "whole"
NUM_TOKENS = 24 if WHOLE else 18
KNOBS = {
    "greedy": SamplingParams(temperature=0.0),
    "warm": SamplingParams(temperature=0.7),
    "plain": SamplingParams(temperature=1.0),
    "top-k": SamplingParams(temperature=1.0, top_k=5),
    "top-p": SamplingParams(temperature=0.7, top_p=0.8),
    "min-p": SamplingParams(temperature=1.0, min_p=0.05),
    "all": SamplingParams(temperature=1.3, top_k=40, top_p=0.9, min_p=0.01),
    "min-tokens": SamplingParams(
        min_tokens=NUM_TOKENS - 4, max_tokens=NUM_TOKENS, stop_token_ids=tuple(range(1, 30))
    ),
    "rules": SamplingParams(  # each by itself: test_token_rules.py
        presence_penalty=0.4,
        frequency_penalty=0.3,
        repetition_penalty=1.2,
        logit_bias=((5, 2.0), (9, 1.5)),
        allowed_token_ids=tuple(range(100)),
        bad_words_token_ids=((3,), (5, 9), (9, 5, 9)),
        thinking_token_budget=12,
        reasoning_end_token_ids=(101, 9, 101),
        logprobs=1,
        prompt_logprobs=0,
    ),
}


def prompts(count: int) -> list[list[int]]:
    """Prompts of mixed lengths, 1 to about 90 tokens, without end tokens."""
    random = np.random.default_rng(7)
    return [random.integers(1, TINY_VOCAB - 1, 1 + 13 * i % 97).tolist() for i in range(count)]


def params_of(name: str, count: int) -> list[SamplingParams]:
    return [replace(KNOBS[name], seed=100 + i, max_tokens=NUM_TOKENS + i) for i in range(count)]


def tokens_of(llm: LLM, batch: list[list[int]], params: list[SamplingParams]) -> list[list[int]]:
    return [o.outputs[0].token_ids for o in llm.generate([{"prompt_token_ids": p} for p in batch], params)]
