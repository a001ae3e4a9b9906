"""Applies requests' logits rules before temperature, filters and noise.

The definition, in PyTorch, on any device. `drafter/step/sampling/logits_processor_states.py` says which rules
apply in which rows: a row that samples the token at a position sees all tokens before it, drafts included, as
plain decoding would at that position. The same operations are applied to the same values, so speculation
changes no bit. Called by `drafter/step/sampling/sampler.py`.

Order, as in vLLM: allowed tokens, bad words (minimum lengths: `drafter/step/sampling/sampler.py`), bias; then
repetition, frequency and presence penalties; last, where reasoning must end, the forced token.

Legend: N rows, V vocabulary, W rows of a request, A allowed tokens, B biased ones, U distinct tokens before
any of its rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ....cluster.request.request import LogitsProcessorParams


@dataclass(frozen=True, slots=True)
class LogitsRules:
    """Rules that hold in all rows of a request; None if it has none.

    Attributes:
        allowed_A: the only tokens that are possible, int64.
        banned: one-token bad words, int64.
        biased_B, bias_B: tokens (int64), and what is added to their logits (fp32).
    """

    allowed_A: Tensor | None
    banned: Tensor | None
    biased_B: Tensor | None
    bias_B: Tensor | None

    @classmethod
    def of(cls, rules: LogitsProcessorParams, device: torch.device) -> LogitsRules:
        banned = [word[0] for word in rules.bad_words if len(word) == 1]
        biased, bias = [[*each] for each in zip(*rules.logit_bias, strict=True)] or [[], []]
        return cls(
            allowed_A=_ids(rules.allowed_token_ids or (), device),
            banned=_ids(banned, device),
            biased_B=_ids(biased, device),
            bias_B=torch.tensor(bias, dtype=torch.float32, device=device) if bias else None,
        )


@dataclass(frozen=True, slots=True)
class TokenCounts:
    """The tokens before each of a request's rows.

    Attributes:
        ids_U: distinct, int64.
        counts_WU: how often each was generated, fp32.
        seen_WU: whether it occurred at all, in the prompt or generated.
    """

    ids_U: Tensor
    counts_WU: Tensor
    seen_WU: Tensor


@dataclass(frozen=True, slots=True)
class RuledRows:
    """The sampled rows of a request with rules, and what applies there.

    Attributes:
        begin, end: its rows among all sampled rows.
        impossible_2F: (row from `begin` on, token that would complete a bad word); None if there is none.
        seen: None if nothing is penalized.
        forced_2F: (row, only possible token); None if there is none.
    """

    begin: int
    end: int
    rules: LogitsProcessorParams
    fixed: LogitsRules
    impossible_2F: Tensor | None
    seen: TokenCounts | None
    forced_2F: Tensor | None


def apply_rules(logits_NV: Tensor, ruled: Sequence[RuledRows]) -> Tensor:
    """Return the logits in fp32 with all rules applied; edits fp32 logits in place."""
    logits_NV = logits_NV.float()
    for rows in ruled:
        _apply(logits_NV[rows.begin : rows.end], rows)
    return logits_NV


def _apply(logits_WV: Tensor, rows: RuledRows) -> None:
    fixed = rows.fixed
    if fixed.allowed_A is not None:
        allowed_WA = logits_WV[:, fixed.allowed_A]
        logits_WV.fill_(float("-inf"))
        logits_WV[:, fixed.allowed_A] = allowed_WA
    if fixed.banned is not None:
        logits_WV[:, fixed.banned] = float("-inf")
    if rows.impossible_2F is not None:
        logits_WV[rows.impossible_2F[0], rows.impossible_2F[1]] = float("-inf")
    if fixed.biased_B is not None:
        assert fixed.bias_B is not None, "made together"
        logits_WV[:, fixed.biased_B] += fixed.bias_B
    if rows.seen is not None:
        seen_WU = logits_WV[:, rows.seen.ids_U]
        logits_WV[:, rows.seen.ids_U] = penalized(seen_WU, rows.seen, rows.rules)
    if rows.forced_2F is not None:
        logits_WV[rows.forced_2F[0]] = float("-inf")
        logits_WV[rows.forced_2F[0], rows.forced_2F[1]] = 0.0


def penalized(logits_WU: Tensor, seen: TokenCounts, rules: LogitsProcessorParams) -> Tensor:
    """Return the penalized logits [W, U] of seen tokens, fp32."""
    repeated_WU = torch.where(logits_WU > 0, logits_WU / rules.repetition, logits_WU * rules.repetition)
    logits_WU = torch.where(seen.seen_WU, repeated_WU, logits_WU)
    logits_WU = logits_WU - rules.frequency * seen.counts_WU
    return logits_WU - rules.presence * (seen.counts_WU > 0)


def _ids(token_ids: Sequence[int], device: torch.device) -> Tensor | None:
    return torch.tensor(token_ids, dtype=torch.int64, device=device) if token_ids else None
