"""Log probabilities of generated tokens and of prompts equal transformers', also under speculation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from manta import LLM, SamplingParams
from manta.actors.engine.outputs import PositionLogprobs
from support.checkpoints.tiny import TINY_VOCAB

KNOBS = {
    "greedy": SamplingParams(temperature=0.0, logprobs=3, prompt_logprobs=2),
    "its own alone": SamplingParams(temperature=0.0, logprobs=0, prompt_logprobs=0),
    "sampled": SamplingParams(temperature=1.0, logprobs=20, prompt_logprobs=20),
    "filtered": SamplingParams(temperature=0.7, top_k=3, min_p=0.1, logprobs=5),
    "ruled": SamplingParams(
        temperature=0.7,
        logit_bias=((5, 50.0),),
        frequency_penalty=2.0,
        min_tokens=8,
        logprobs=4,
        prompt_logprobs=1,
    ),
    "not asked": SamplingParams(temperature=1.0),
    "of the prompt alone": SamplingParams(temperature=1.0, prompt_logprobs=4),
    "ended by a token": SamplingParams(temperature=1.0, logprobs=1, stop_token_ids=tuple(range(0, 128, 9))),
    "several at once": SamplingParams(temperature=1.0, logprobs=2, max_tokens=30),
}


@pytest.fixture(scope="module")
def theirs(transformers_logits) -> Callable[[list[int], list[int]], tuple[torch.Tensor, torch.Tensor]]:
    """transformers' log probabilities [tokens, V] of a prompt and an output."""

    def of(prompt: list[int], output: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        logprobs = transformers_logits([*prompt, *output])[:-1].log_softmax(-1)
        return logprobs[: len(prompt) - 1], logprobs[len(prompt) - 1 :]

    return of


def prompts(count: int) -> list[list[int]]:
    random = np.random.default_rng(4)
    return [random.integers(1, TINY_VOCAB - 1, 1 + 11 * i % 41).tolist() for i in range(count)]


def check(
    token_ids: Sequence[int], found: Sequence[PositionLogprobs | None], theirs_TV: torch.Tensor, num_top: int
) -> None:
    assert len(found) == len(token_ids) == len(theirs_TV)
    for token, place, wanted_V in zip(token_ids, found, theirs_TV, strict=True):
        assert place is not None
        assert next(iter(place)) == token, "its own comes first"
        assert place[token].rank == int((wanted_V >= wanted_V[token]).sum())
        likeliest = wanted_V.topk(num_top).indices.tolist()
        assert set(place) == {token, *likeliest}
        assert [i for i in sorted(place, key=lambda i: place[i].rank) if i in likeliest] == likeliest
        ours = torch.tensor([reported.logprob for reported in place.values()])
        torch.testing.assert_close(ours, wanted_V[list(place)], atol=1e-4, rtol=0)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("drafts", [None, 3, 15])
def test_log_probabilities_of_every_token_equal_transformers(
    open_llm: Callable[..., LLM], theirs, engine: dict[str, Any], drafts: int | None
) -> None:
    params = [
        replace(p, seed=9 + i, max_tokens=p.max_tokens and max(p.max_tokens, 24), ignore_eos=True)
        for i, p in enumerate(KNOBS.values())
    ]
    batch = prompts(len(params))
    with open_llm(drafts, **engine) as llm:
        found = llm.generate([{"prompt_token_ids": p} for p in batch], params)
        assert (llm.stats().num_accepted_tokens > 0) == (drafts is not None)
        assert (llm.stats().preemptions > 0) == ("num_pages" in engine)
    for prompt, requested, answer in zip(batch, params, found, strict=True):
        (output,) = answer.outputs
        of_prompt_TV, theirs_TV = theirs(prompt, output.token_ids)
        if requested.prompt_logprobs is None:
            assert answer.prompt_logprobs is None
        else:
            first, *rest = answer.prompt_logprobs
            assert first is None, "nothing foretells it"
            check(prompt[1:], rest, of_prompt_TV, requested.prompt_logprobs)
        if requested.logprobs is None:
            assert output.logprobs is None and output.cumulative_logprob is None
            continue
        check(output.token_ids, output.logprobs, theirs_TV, requested.logprobs)
        total = theirs_TV[range(len(output.token_ids)), output.token_ids].sum()
        torch.testing.assert_close(torch.tensor(output.cumulative_logprob), total, atol=1e-2, rtol=0)


def test_a_cached_prompt_has_the_same_log_probabilities_and_serves_the_next(
    open_llm: Callable[..., LLM], theirs
) -> None:
    """Pages hold no logits: the prompt is computed again, and then its pages are shared, too."""
    prompt, params = prompts(9)[3], SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    telling = replace(params, prompt_logprobs=1, n=2)
    with open_llm(page_size=4) as llm:
        plain, reported, again = (
            llm.generate({"prompt_token_ids": prompt}, p)[0] for p in (params, telling, params)
        )
    for output in (*reported.outputs, *again.outputs):
        assert output.token_ids == plain.outputs[0].token_ids
    assert (plain.metrics.num_cached_tokens, reported.metrics.num_cached_tokens) == (0, 0)
    assert again.metrics.num_cached_tokens > 0
    of_prompt_TV, _ = theirs(prompt, [])
    check(prompt[1:], reported.prompt_logprobs[1:], of_prompt_TV, 1)
