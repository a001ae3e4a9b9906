"""No token depends on a policy, however mad: drafts, trims, and none at all, by chance from step to step."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from manta import LLM, SamplingParams
from manta.cluster.speculation.draft_length_policy import DecodeBatch, DraftChoice, DraftLengthPolicy
from manta.cluster.speculation.step_cost_model import StepLoad
from manta.cluster.step.scheduler_output import FloatArray, SchedulerOutput, Trim

PROMPTS = [{"prompt_token_ids": [1 + i, 5, 9, *range(20, 20 + 3 * i)]} for i in range(6)]
PARAMS = [
    SamplingParams(temperature=i % 2 * 0.9, top_p=0.95, seed=i, max_tokens=30 + 5 * i, ignore_eos=True)
    for i in range(6)
]


class MadPolicy(DraftLengthPolicy):
    """Whatever comes to mind."""

    random = np.random.default_rng(0)

    def choose(self, batch: DecodeBatch, load: StepLoad) -> DraftChoice:
        random = self.random
        most = int(random.integers(0, self._max_drafts + 1)) if random.random() < 0.8 else 0
        drafts_R = random.integers(0, np.minimum(batch.limits_R, most), endpoint=True).astype(np.int32)
        return DraftChoice(drafts_R, most)

    def trim(
        self, choice: DraftChoice, plan: SchedulerOutput, load: StepLoad, weights_R: FloatArray
    ) -> Trim | None:
        random, num_requests = self.random, plan.num_requests
        if not plan.num_drafts.any() or random.random() < 0.2:
            return None
        seconds_N = np.sort(random.uniform(0.1, 3, plan.num_batched_tokens + 1))
        return Trim(
            bias_K=random.normal(0, 3, self._max_drafts).astype(np.float32),
            slope_K=random.normal(0, 3, self._max_drafts).astype(np.float32),
            bias_R=random.normal(0, 3, num_requests).astype(np.float32),
            weights_R=(random.uniform(0, 9, num_requests) * plan.samples).astype(np.float32),
            seconds_N=seconds_N.astype(np.float32),
            rate=float(random.uniform(0, 9)),
        )


def tokens(
    pair: tuple[Path, Path], *, speculate: bool, **settings: object
) -> tuple[list[list[int]], int, int]:
    """And how many drafts were verified in how many steps."""
    spec = {"model": str(pair[1])} if speculate else None
    with LLM(str(pair[0]), speculative_config=spec, skip_tokenizer_init=True, **settings) as llm:
        outputs, stats = llm.generate(PROMPTS, PARAMS), llm.stats()
        return [o.outputs[0].token_ids for o in outputs], stats.num_draft_tokens, stats.steps


@pytest.mark.parametrize(("backend", "dtype"), [("torch", "float32"), ("auto", "auto")])
def test_a_mad_policy_changes_no_token(
    backend: str, dtype: str, tiny_qwen3: Path, tiny_drafter: Path, monkeypatch: pytest.MonkeyPatch
):
    settings = {"dtype": dtype, "attention_backend": backend, "num_threads": 1}
    plain, _, _ = tokens((tiny_qwen3, tiny_drafter), speculate=False, **settings)
    monkeypatch.setattr("manta.cluster.scheduler.step_controller.DraftLengthPolicy", MadPolicy)
    mad, num_drafts, num_steps = tokens((tiny_qwen3, tiny_drafter), speculate=True, **settings)
    assert num_drafts > num_steps, "it drafts"
    assert mad == plain
