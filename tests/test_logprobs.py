"""Log probabilities of generated tokens: transformers', of the model's distribution, under speculation."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from manta import LLM, SamplingParams
from manta.actors.outputs import CompletionOutput
from tiny import TINY_VOCAB, make_tiny_drafter, make_tiny_target

KNOBS = {
    "greedy": SamplingParams(temperature=0.0, logprobs=3),
    "its own alone": SamplingParams(temperature=0.0, logprobs=0),
    "sampled": SamplingParams(temperature=1.0, logprobs=20),
    "filtered": SamplingParams(temperature=0.7, top_k=3, min_p=0.1, logprobs=5),
    "ruled": SamplingParams(
        temperature=0.7, logit_bias=((5, 50.0),), frequency_penalty=2.0, min_tokens=8, logprobs=4
    ),
    "not asked": SamplingParams(temperature=1.0),
    "ended by a token": SamplingParams(temperature=1.0, logprobs=1, stop_token_ids=tuple(range(0, 128, 9))),
    "several at once": SamplingParams(temperature=1.0, logprobs=2, max_tokens=30),
}
ENGINES = {
    "as shipped": {},
    "chunks of 16 rows": {"max_num_batched_tokens": 16},
    "forced preemption": {"num_pages": 36, "page_size": 4},
    "planned ahead": {"async_scheduling": True, "num_pages": 36, "page_size": 4},
}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("pair")
    return make_tiny_target(folder / "target", "qwen3", seed=5), make_tiny_drafter(folder / "drafter")


@pytest.fixture(scope="module")
def theirs(pair: tuple[Path, Path]) -> object:
    """Log probabilities [tokens, V] of an output, by transformers."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(pair[0], dtype=torch.float32)

    @cache
    @torch.inference_mode()
    def of(prompt: tuple[int, ...], output: tuple[int, ...]) -> torch.Tensor:
        logits = model(torch.tensor([[*prompt, *output]])).logits[0, len(prompt) - 1 : -1]
        return logits.log_softmax(-1)

    return of


def prompts(count: int) -> list[list[int]]:
    random = np.random.default_rng(4)
    return [random.integers(1, TINY_VOCAB - 1, 2 + 11 * i % 41).tolist() for i in range(count)]


def check(output: CompletionOutput, theirs_TV: torch.Tensor, num_top: int) -> None:
    assert output.logprobs is not None and len(output.logprobs) == len(output.token_ids) == len(theirs_TV)
    for token, place, wanted_V in zip(output.token_ids, output.logprobs, theirs_TV, strict=True):
        assert next(iter(place)) == token, "its own comes first"
        assert place[token].rank == int((wanted_V >= wanted_V[token]).sum())
        likeliest = wanted_V.topk(num_top).indices.tolist()
        assert set(place) == {token, *likeliest}
        assert [i for i in sorted(place, key=lambda i: place[i].rank) if i in likeliest] == likeliest
        ours = torch.tensor([found.logprob for found in place.values()])
        torch.testing.assert_close(ours, wanted_V[list(place)], atol=1e-4, rtol=0)


@pytest.mark.parametrize("drafts", [None, 3, 15])
@pytest.mark.parametrize("engine", ENGINES)
def test_log_probabilities_are_transformers_for_every_token_that_comes_out(
    pair: tuple[Path, Path], theirs, engine: str, drafts: int | None
) -> None:
    params = [
        replace(p, seed=9 + i, max_tokens=p.max_tokens and max(p.max_tokens, 24), ignore_eos=True)
        for i, p in enumerate(KNOBS.values())
    ]
    batch = prompts(len(params))
    spec = {"model": str(pair[1]), "num_speculative_tokens": drafts, "adaptive": False}
    with LLM(
        str(pair[0]),
        speculative_config=spec if drafts else None,
        skip_tokenizer_init=True,
        **{"dtype": "float32", "num_threads": 1, "max_num_seqs": 8, "max_model_len": 128, **ENGINES[engine]},
    ) as llm:
        found = llm.generate([{"prompt_token_ids": p} for p in batch], params)
        assert (llm.stats().num_accepted_tokens > 0) == (drafts is not None)
        assert (llm.stats().preemptions > 0) == ("num_pages" in ENGINES[engine])
    for prompt, asked, answer in zip(batch, params, found, strict=True):
        (output,) = answer.outputs
        if asked.logprobs is None:
            assert output.logprobs is None and output.cumulative_logprob is None
            continue
        theirs_TV = theirs(tuple(prompt), tuple(output.token_ids))
        check(output, theirs_TV, asked.logprobs)
        total = theirs_TV[range(len(output.token_ids)), output.token_ids].sum()
        torch.testing.assert_close(torch.tensor(output.cumulative_logprob), total, atol=1e-2, rtol=0)
