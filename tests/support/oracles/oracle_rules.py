"""Sampling in plain Python: rules, then temperature and keyed noise, token by token.

No blocks, no pages, no slots: transformers' logits of the whole sequence, and loops over the vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import torch
from manta import SamplingParams
from manta.drafter.step.inputs.gumbel_noise import negative_gumbel, noise_keys


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
