"""Bias, forbidden tokens and penalties: their meaning, and that speculation changes no token."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from manta import LLM, SamplingParams
from manta.cluster.config import EngineConfig
from manta.cluster.errors import RequestError
from manta.cluster.request.request import LogitsProcessorParams, Request
from manta.cluster.step.executor import ExecutorInfo, RuleLimits
from manta.cluster.step.limits import SchedulerConfig, check_request
from manta.drafter.step.inputs.gumbel_noise import negative_gumbel, noise_keys
from manta.drafter.step.inputs.logits_processors import apply_rules
from manta.drafter.step.sampling.logits_processor_states import RuleStates
from support.checkpoints.tiny import TINY_VOCAB


def ruled(
    logits: Sequence[float], prompt: list[int], output: list[int], params: SamplingParams
) -> list[float]:
    """The logits of the token after `prompt + output`, by vLLM's rules and in their order."""
    found = list(logits)
    banned = {w[-1] for w in params.bad_words_token_ids if list(w[:-1]) == output[len(output) + 1 - len(w) :]}
    for token in range(len(found)):
        if params.allowed_token_ids is not None and token not in params.allowed_token_ids:
            found[token] = -math.inf
        if token in banned or (token in params.stop_token_ids and len(output) < params.min_tokens):
            found[token] = -math.inf
        found[token] += dict(params.logit_bias).get(token, 0.0)
        if token in prompt or token in output:
            penalty = params.repetition_penalty
            found[token] = found[token] / penalty if found[token] > 0 else found[token] * penalty
        found[token] -= params.frequency_penalty * output.count(token)
        found[token] -= params.presence_penalty * (token in output)
    forced = _end_of_reasoning(prompt, output, params)
    return found if forced is None else [0.0 if t == forced else -math.inf for t in range(len(found))]


def _end_of_reasoning(prompt: list[int], output: list[int], params: SamplingParams) -> int | None:
    """The only allowed token, if the thinking budget is used up."""
    start, end = list(params.reasoning_start_token_ids), list(params.reasoning_end_token_ids)
    if params.thinking_token_budget is None:
        return None
    thought, tokens = output, [*prompt, *output]
    if start:
        begins = [i + len(start) for i in range(len(tokens)) if tokens[i : i + len(start)] == start]
        if not begins:
            return None
        thought = tokens[begins[-1] :]
    ended = any(thought[i : i + len(end)] == end for i in range(len(thought)))
    if ended or len(thought) < params.thinking_token_budget:
        return None
    return next(end[k] for k in reversed(range(len(end))) if thought[max(len(thought) - k, 0) :] == end[:k])


def generate(
    logits_of: Callable[[list[int]], torch.Tensor], prompt: list[int], params: SamplingParams
) -> tuple[list[int], list[torch.Tensor]]:
    """The tokens, and the raw log probabilities [V] at each of their positions."""
    output: list[int] = []
    logprobs: list[torch.Tensor] = []
    assert params.seed is not None and params.max_tokens is not None
    while len(output) < params.max_tokens:
        raw = logits_of([*prompt, *output])
        logprobs.append(raw.log_softmax(-1))
        scores = torch.tensor(ruled(raw.tolist(), prompt, output, params))
        if params.temperature > 0:
            position = np.array([len(prompt) + len(output)])
            keys = torch.from_numpy(noise_keys(np.array([params.seed]), position))
            scores -= params.temperature * negative_gumbel(keys[:, :, None], len(raw))[0]
        output.append(int(scores.argmax()))
    return output, logprobs


NUM_TOKENS = 24
RULES = {
    "presence": {"presence_penalty": 2.0},
    "frequency": {"frequency_penalty": 2.0},
    "negative frequency": {"frequency_penalty": -1.5},
    "repetition": {"repetition_penalty": 2.0},
    "bias": {"logit_bias": {5: 3.0, 9: 2.5, 11: -100, 70: 1.5}},
    "allowed": {"allowed_token_ids": tuple(range(1, 60, 2))},
    "thinking": {"thinking_token_budget": 6, "reasoning_end_token_ids": (3, 5, 3, 7)},
    "bad words": {
        "bad_words_token_ids": [*([t] for t in range(1, 40)), *([t, t] for t in range(TINY_VOCAB))]
    },
}
EVERYTHING = {
    "presence_penalty": 0.4,
    "frequency_penalty": 0.3,
    "repetition_penalty": 1.2,
    "logit_bias": {5: 2.0, 9: 1.5, 3: 100},
    "allowed_token_ids": tuple(range(1, 100)),
    "bad_words_token_ids": [[3], [5, 9], [9, 5, 9], [7, 7]],
    "thinking_token_budget": 9,
    "reasoning_end_token_ids": (101, 3, 102),
    "min_tokens": 12,
    "stop_token_ids": (5,),
}
KNOBS = {
    **{
        f"{name} at {t}": SamplingParams(**rule, temperature=t)
        for name, rule in RULES.items()
        for t in (0.0, 0.7, 1.0)
    },
    **{
        f"everything at {t}": SamplingParams(**EVERYTHING, max_tokens=24, temperature=t)
        for t in (0.0, 0.7, 1.0)
    },
    "everything and filters": SamplingParams(**EVERYTHING, max_tokens=24, top_k=9, top_p=0.9, min_p=0.01),
    "none": SamplingParams(),
}


def prompts(count: int) -> list[list[int]]:
    random = np.random.default_rng(3)
    return [random.integers(1, TINY_VOCAB - 1, 2 + 11 * i % 41).tolist() for i in range(count)]


def asked() -> list[tuple[list[int], SamplingParams]]:
    """Return a prompt with each setting, of different lengths, ages and seeds."""
    params = (
        replace(p, seed=50 + i, max_tokens=NUM_TOKENS + i % 5, ignore_eos=True)
        for i, p in enumerate(KNOBS.values())
    )
    return list(zip(prompts(len(KNOBS)), params, strict=True))


def generated(llm: LLM) -> list[list[int]]:
    found = llm.generate([{"prompt_token_ids": p} for p, _ in asked()], [s for _, s in asked()])
    return [o.outputs[0].token_ids for o in found]


@pytest.fixture(scope="module")
def reference(open_llm: Callable[..., LLM]) -> list[list[int]]:
    """Outputs of plain decoding, one request at a time."""
    with open_llm(enable_prefix_caching=False, max_num_seqs=1) as llm:
        return generated(llm)


def test_plain_decoding_equals_the_rules_in_python(transformers_logits, reference: list[list[int]]) -> None:
    for name, (prompt, params), ours in zip(KNOBS, asked(), reference, strict=True):
        if name == "everything and filters":
            continue
        theirs = generate(lambda token_ids: transformers_logits(token_ids)[-1], prompt, params)[0]
        stops = (t in params.stop_token_ids and i >= params.min_tokens for i, t in enumerate(theirs))
        stop = next((i + 1 for i, is_stop in enumerate(stops) if is_stop), None)
        assert ours == theirs[:stop], name


def test_every_rule_has_an_effect(open_llm: Callable[..., LLM], reference: list[list[int]]) -> None:
    """Otherwise the test of all rules would prove nothing."""
    free = [
        SamplingParams(temperature=p.temperature, seed=p.seed, max_tokens=p.max_tokens, ignore_eos=True)
        for _, p in asked()
    ]
    with open_llm() as llm:
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt, _ in asked()], free)
    for name, output, ours in zip(KNOBS, outputs, reference, strict=True):
        assert (output.outputs[0].token_ids == ours) == (name == "none"), name


@pytest.mark.parametrize("drafts", [15, 3, None])
@pytest.mark.one_in(3)
def test_no_token_changes_under_speculation(
    open_llm: Callable[..., LLM], reference: list[list[int]], engine: dict[str, Any], drafts: int | None
) -> None:
    with open_llm(drafts, **engine) as llm:
        got = generated(llm)
    assert [name for name, ours, plain in zip(KNOBS, got, reference, strict=True) if ours != plain] == []
    assert (llm.stats().num_accepted_tokens > 0) == (drafts is not None), "drafts never accepted prove little"
    assert (llm.stats().preemptions > 0) == ("num_pages" in engine)


tokens = st.integers(0, 11)


@given(
    prompt=st.lists(tokens, min_size=1, max_size=6),
    generated=st.lists(tokens, max_size=8),
    drafts=st.lists(tokens, max_size=4),
    words=st.lists(st.lists(tokens, min_size=1, max_size=3), max_size=4),
    thinking=st.none()
    | st.tuples(
        st.integers(0, 5), st.lists(st.integers(0, 3), max_size=2), st.lists(tokens, min_size=1, max_size=3)
    ),
    penalties=st.tuples(st.sampled_from([0.5, 1.0, 1.3]), *[st.sampled_from([-0.5, 0.0, 0.7])] * 2),
    known_before=st.integers(0, 8),
    choices=st.none() | st.lists(st.integers(0, 3), min_size=4, max_size=4),
)
@example([1], [], [5, 9], [[5, 9, 3]], None, (1.0, 0.0, 0.0), 0, [0, 0, 0, 0])
@example([1], [], [4, 9], [], (1, [], [4]), (1.0, 0.0, 0.0), 0, [0, 0, 0, 0])
def test_a_row_sees_the_tokens_of_its_path_and_no_other(
    prompt: list[int],
    generated: list[int],
    drafts: list[int],
    words: list[list[int]],
    thinking: tuple[int, list[int], list[int]] | None,
    penalties: tuple[float, float, float],
    known_before: int,
    choices: list[int] | None,
) -> None:
    """Each row of a chain or tree equals plain decoding's, whatever an earlier step counted."""
    repetition, frequency, presence = penalties
    budget, start, end = thinking or (None, (), ())
    params = SamplingParams(
        bad_words_token_ids=words,  # type: ignore[arg-type]
        repetition_penalty=repetition,
        frequency_penalty=frequency,
        presence_penalty=presence,
        thinking_token_budget=budget,
        reasoning_start_token_ids=tuple(start),
        reasoning_end_token_ids=tuple(end),
    )
    states = RuleStates(torch.device("cpu"))
    states.admit(1, LogitsProcessorParams.of(params, len(prompt)))
    sequence = torch.tensor([[0] * 20, [*prompt, *generated, *drafts, *[7] * 20][:20]])
    begin = len(prompt) + len(generated)
    early = min(len(prompt) + known_before, begin)  # in a step before, fewer were known
    states.rows(sequence, np.array([1]), np.array([early]), np.array([-1]))
    parents = [row if choices is None else choices[row] % (row + 1) for row in range(len(drafts))]
    logits = torch.randn(len(drafts) + 2, 12, generator=torch.Generator().manual_seed(0))
    slots, known = np.array([0] + [1] * (len(drafts) + 1)), np.array([3] + [begin] * (len(drafts) + 1))
    got = apply_rules(logits.clone(), states.rows(sequence, slots, known, np.array([-1, -1, *parents])))
    assert torch.equal(got[0], logits[0]), "a row without rules was changed"
    paths: list[list[int]] = [generated]
    for parent, draft in zip(parents, drafts, strict=True):
        paths.append([*paths[parent], draft])
    for row, path in enumerate(paths, 1):
        wanted = ruled(logits[row].tolist(), prompt, path, params)
        torch.testing.assert_close(got[row], torch.tensor(wanted))


@pytest.mark.parametrize(
    ("field", "value", "remedy"),
    [
        ("presence_penalty", 2.5, "from -2 to 2"),
        ("frequency_penalty", float("nan"), "from -2 to 2"),
        ("repetition_penalty", 0.0, "above 0"),
        ("logit_bias", {3: 101}, "from -100 to 100"),
        ("allowed_token_ids", [], "at least one"),
        ("bad_words", ["a", ""], "non-empty"),
        ("bad_words", ["a"] * 1025, "at most 1024"),
        ("bad_words_token_ids", [[]], "none empty"),
        ("logprobs", 21, "from 0 to 20"),
        ("logprobs", -2, "from 0 to 20"),
        ("thinking_token_budget", -1, "0 or more"),
    ],
)
def test_a_wrong_rule_is_refused_by_name(field: str, value: object, remedy: str) -> None:
    with pytest.raises(RequestError, match=remedy) as caught:
        SamplingParams(**{field: value})  # type: ignore[arg-type]
    assert (caught.value.param or "").startswith(field)


def test_rules_that_the_model_cannot_apply_are_refused_by_name(open_llm: Callable[..., LLM]) -> None:
    with open_llm() as llm:
        for field, value in (
            ("allowed_token_ids", [1, TINY_VOCAB]),
            ("logit_bias", {TINY_VOCAB: 1.0}),
            ("logit_bias", {-1: 1.0}),
            ("bad_words_token_ids", [[1, TINY_VOCAB]]),
            ("bad_words", ["needs a tokenizer"]),
            ("thinking_token_budget", 3),
        ):
            with pytest.raises(RequestError) as caught:
                llm.generate({"prompt_token_ids": [1]}, SamplingParams(**{field: value}))  # type: ignore[arg-type]
            assert caught.value.param == field


@pytest.mark.parametrize(
    ("params", "param"),
    [
        ({"allowed_token_ids": range(5)}, "allowed_token_ids"),
        ({"logit_bias": {1: 1, 2: 1, 3: 1}}, "logit_bias"),
        ({"bad_words_token_ids": [[1], [2]]}, "bad_words"),
        ({"bad_words_token_ids": [[1, 2, 3, 4]]}, "bad_words"),
        ({"reasoning_start_token_ids": (1, 2, 3)}, "reasoning_start_token_ids"),
        ({"reasoning_end_token_ids": (1, 2, 3)}, "reasoning_end_token_ids"),
    ],
)
def test_rules_beyond_an_engines_limits_are_refused_by_name(params: dict[str, object], param: str) -> None:
    limits = RuleLimits(allowed_tokens=4, biased_tokens=2, bad_words=1, bad_word_tokens=3, reasoning_tokens=2)
    info = ExecutorInfo(
        num_pages=(64,),
        page_size=16,
        max_model_len=64,
        vocab_size=100,
        eos_token_ids=(0,),
        num_speculative_tokens=0,
        dtype="float32",
        device="cpu",
        rule_limits=limits,
    )
    config = SchedulerConfig.derive(EngineConfig(model="m"), info)
    fits = SamplingParams(
        allowed_token_ids=(1, 2), logit_bias=((1, 1.0),), bad_words_token_ids=((1, 2, 3),), seed=1
    )
    check_request(Request(request_id="r", prompt_token_ids=(1,), params=fits), config)
    with pytest.raises(RequestError, match="attention_backend") as caught:
        wanted = replace(fits, **params)  # type: ignore[arg-type]
        check_request(Request(request_id="r", prompt_token_ids=(1,), params=wanted), config)
    assert caught.value.param == param
