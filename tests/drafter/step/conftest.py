"""What tests of a step share: a tiny pair in engines that must agree, and a step's operators."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from manta import LLM
from manta.drafter.step.cpu_numba.step_ops import LOOPS
from manta.drafter.step.sampling.step_ops import DEFINITION, StepOperators
from support.checkpoints.tiny import make_tiny_drafter, make_tiny_target

Logits = Callable[[list[int]], torch.Tensor]
OPERATORS = {"definition": DEFINITION, "loops": LOOPS}
ENGINES: dict[str, dict[str, Any]] = {
    "as shipped": {},
    "chunks of 16 rows": {"max_num_batched_tokens": 16},
    "forced preemption": {"num_pages": 36, "page_size": 4},
    "planned ahead": {"async_scheduling": True, "num_pages": 36, "page_size": 4},
    "defined": {"attention_backend": "torch"},
}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Folders of a tiny target without a tokenizer and of its drafter."""
    folder = tmp_path_factory.mktemp("pair")
    return make_tiny_target(folder / "target", "qwen3", seed=5), make_tiny_drafter(folder / "drafter")


@pytest.fixture(params=ENGINES)
def engine(request: pytest.FixtureRequest) -> dict[str, Any]:
    """Settings that change how steps are cut and computed, and no token."""
    return ENGINES[request.param]


@pytest.fixture(scope="module")
def open_llm(pair: tuple[Path, Path]) -> Callable[..., LLM]:
    """Open an engine of the pair that makes so many drafts, in fp32."""

    def opened(drafts: int | None = None, **settings: Any) -> LLM:
        spec = {"model": str(pair[1]), "num_speculative_tokens": drafts, "adaptive": False}
        given = {"dtype": "float32", "num_threads": 1, "max_num_seqs": 8, "max_model_len": 128, **settings}
        target = str(pair[0])
        return LLM(target, speculative_config=spec if drafts else None, skip_tokenizer_init=True, **given)

    return opened


@pytest.fixture(scope="module")
def transformers_logits(pair: tuple[Path, Path]) -> Logits:
    """transformers' logits [N, V] of the target for a sequence of N tokens."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(pair[0], dtype=torch.float32)

    @torch.inference_mode()
    def logits(token_ids: list[int]) -> torch.Tensor:
        return model(torch.tensor([token_ids])).logits[0]

    return logits


@pytest.fixture(params=OPERATORS)
def operators(request: pytest.FixtureRequest) -> StepOperators:
    """A step's operators: their definition, and the compiled loops."""
    return OPERATORS[request.param]
