"""The shipped pair: files, losslessness on real text, and a useful acceptance."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from manta import LLM, SamplingParams
from manta.actors.engine.outputs import RequestOutput
from manta.actors.tokenization.tokenizer import Tokenizer
from manta.drafter.compute.batch_invariance import rows_are_invariant
from manta.drafter.compute.cpu_numba.backend import NumbaBackend
from manta.drafter.compute.cpu_numba.cpu_features import bf16_instructions
from support.paths import DATA, MODELS

NUM_TOKENS = 48


def prompt_texts(tokenizer: Tokenizer, count: int) -> list[list[int]]:
    """Token ids of `count` prompts, spread over all categories."""
    lines = (MODELS / "prompts.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines[:: len(lines) // count]][:count]
    return [
        tokenizer.encode(tokenizer.apply_chat_template(row["messages"]), add_special_tokens=False)
        if "messages" in row
        else tokenizer.encode(row["prompt"])
        for row in rows
    ]


def params(temperature: float, count: int) -> list[SamplingParams]:
    return [SamplingParams(temperature=temperature, seed=i, max_tokens=NUM_TOKENS) for i in range(count)]


def run(
    pair: tuple[Path, Path],
    prompts: list[list[int]],
    temperature: float,
    dtype: str,
    backend: str = "auto",
    *,
    speculate: bool,
) -> list[RequestOutput]:
    settings = {"dtype": dtype, "attention_backend": backend, "num_threads": 1}
    # On a busy machine the adaptive policy may find that drafts do not pay, and test nothing.
    spec = {"model": str(pair[1]), "adaptive": False} if speculate else None
    with LLM(str(pair[0]), speculative_config=spec, **settings) as llm:
        return llm.generate([{"prompt_token_ids": p} for p in prompts], params(temperature, len(prompts)))


def tokens(outputs: list[RequestOutput]) -> list[list[int]]:
    return [o.outputs[0].token_ids for o in outputs]


@pytest.fixture(scope="module")
def prompts(shipped_pair: tuple[Path, Path]) -> list[list[int]]:
    return prompt_texts(Tokenizer.load(shipped_pair[0]), 12)


@pytest.fixture(scope="module")
def greedy(shipped_pair: tuple[Path, Path], prompts: list[list[int]]) -> list[RequestOutput]:
    """With speculation."""
    return run(shipped_pair, prompts, 0.0, "float32", speculate=True)


def test_the_pair_is_small_and_in_the_published_formats(shipped_pair: tuple[Path, Path]) -> None:
    target, drafter = shipped_pair
    weights = [path.stat().st_size for folder in shipped_pair for path in folder.glob("*.safetensors")]
    assert len(weights) == 2 and sum(weights) <= 40e6
    assert json.loads((target / "config.json").read_text())["architectures"] == ["Qwen3ForCausalLM"]
    config = json.loads((drafter / "config.json").read_text())
    assert config["architectures"] == ["DFlashDraftModel"] and config["block_size"] == 16
    assert all("PSF" in (folder / "README.md").read_text() for folder in shipped_pair)


def test_prompts_are_many_and_of_every_category() -> None:
    rows = [json.loads(line) for line in (MODELS / "prompts.jsonl").read_text().splitlines()]
    assert len(rows) >= 200 and len({row["id"] for row in rows}) == len(rows)
    assert len({row["category"] for row in rows}) >= 4


def test_greedy_equals_transformers_generate(
    shipped_pair: tuple[Path, Path], prompts: list[list[int]], greedy: list[RequestOutput]
) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(shipped_pair[0], dtype=torch.float32)
    ids = torch.tensor(prompts[:1])
    theirs = model.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=NUM_TOKENS
    )
    assert theirs[0, len(prompts[0]) :].tolist() == tokens(greedy)[0]


def test_greedy_answers_equal_the_recorded_ones(greedy: list[RequestOutput]) -> None:
    """A change that alters them must say so. A step's best two logits differ by more than 0.01."""
    golden = json.loads((DATA / "golden_tokens.json").read_text(encoding="utf-8"))
    assert tokens(greedy) == golden


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_speculation_changes_no_token_and_saves_steps(
    shipped_pair: tuple[Path, Path],
    prompts: list[list[int]],
    greedy: list[RequestOutput],
    temperature: float,
) -> None:
    few = prompts[:6]
    plain = run(shipped_pair, few, temperature, "float32", speculate=False)
    drafted = run(shipped_pair, few, temperature, "float32", speculate=True) if temperature else greedy[:6]
    assert tokens(drafted) == tokens(plain)
    steps = sum(o.metrics.num_steps for o in drafted)
    per_step = 1 + sum(o.metrics.num_accepted_tokens for o in drafted) / steps
    assert per_step > 1.5, "fp32 on fixed prompts and seeds: the same on every machine but for near-ties"


@pytest.mark.parametrize(("backend", "temperature"), [("compiled", 0.0), ("compiled", 1.0), ("torch", 1.0)])
def test_speculation_changes_no_token_in_bf16_if_products_do_not_depend_on_the_batch(
    shipped_pair: tuple[Path, Path], prompts: list[list[int]], backend: str, temperature: float
) -> None:
    if backend == "compiled" and bf16_instructions() is None:
        pytest.skip("this CPU has no products of bf16")
    if backend == "torch" and not rows_are_invariant(NumbaBackend(), torch.bfloat16, "cpu"):
        pytest.skip("oneDNN's products of bf16 depend on the batch on this CPU")
    few = prompts[:6]
    plain = run(shipped_pair, few, temperature, "bfloat16", backend, speculate=False)
    drafted = run(shipped_pair, few, temperature, "bfloat16", backend, speculate=True)
    assert tokens(drafted) == tokens(plain)
