"""No token depends on the policy: random drafts and trimming from step to step."""

from __future__ import annotations

from pathlib import Path

import pytest
from manta import LLM, SamplingParams
from support.engines.random_policy import RandomPolicy

PROMPTS = [{"prompt_token_ids": [1 + i, 5, 9, *range(20, 20 + 3 * i)]} for i in range(6)]
PARAMS = [
    SamplingParams(temperature=i % 2 * 0.9, top_p=0.95, seed=i, max_tokens=30 + 5 * i, ignore_eos=True)
    for i in range(6)
]


def tokens(
    pair: tuple[Path, Path], *, speculate: bool, **settings: object
) -> tuple[list[list[int]], int, int]:
    """Also return how many drafts were verified in how many steps."""
    spec = {"model": str(pair[1])} if speculate else None
    with LLM(str(pair[0]), speculative_config=spec, skip_tokenizer_init=True, **settings) as llm:
        outputs, stats = llm.generate(PROMPTS, PARAMS), llm.stats()
        return [o.outputs[0].token_ids for o in outputs], stats.num_draft_tokens, stats.steps


@pytest.mark.parametrize(("backend", "dtype"), [("torch", "float32"), ("auto", "auto")])
def test_a_random_policy_changes_no_token(
    backend: str, dtype: str, tiny_qwen3: Path, tiny_drafter: Path, monkeypatch: pytest.MonkeyPatch
):
    settings = {"dtype": dtype, "attention_backend": backend, "num_threads": 1}
    plain, _, _ = tokens((tiny_qwen3, tiny_drafter), speculate=False, **settings)
    monkeypatch.setattr("manta.cluster.scheduler.step_controller.DraftLengthPolicy", RandomPolicy)
    mad, num_drafts, num_steps = tokens((tiny_qwen3, tiny_drafter), speculate=True, **settings)
    assert num_drafts > num_steps, "it drafts"
    assert mad == plain
