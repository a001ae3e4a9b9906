"""Acceptance of a pair on held-out prompts, with all drafts made in every step.

The target's answers are given. A drafter's proposals at every position of them
(`jobs/training/heads/offline_proposals.py`) can be computed afterwards, because with equal noise the answer
does not depend on the drafts. So these figures are those of an engine that always drafts a whole block.

Shapes: T tokens, A anchors (one per generated token), N drafts of each.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ...cluster.records.repetition import num_fresh_tokens, repeated_tokens
from ...cluster.speculation.acceptance_length import mean_acceptance_length
from ...jobs.training.heads.frozen_target import FrozenTarget
from ...jobs.training.heads.offline_proposals import OfflineProposals, accepted_at
from ...jobs.training.loop.continuations import ContinuationRequest
from .prompt_selection import Prompt

OVERALL = "overall"


@dataclass(frozen=True)
class Figures:
    """The figures of one category at one temperature.

    Attributes:
        repeated_share: share of the tokens that are repeated (`cluster/records/repetition.py`).
        fresh_acceptance_length: mean acceptance length up to the first such token of each answer, because
            repetition is easy to draft. None if no answer has a step before it.
    """

    category: str
    temperature: float
    num_prompts: int
    num_tokens: int
    num_steps: int
    mean_acceptance_length: float | None
    repeated_share: float
    fresh_acceptance_length: float | None


def evaluate(
    proposals: OfflineProposals,
    target: FrozenTarget,
    prompts: Sequence[Prompt],
    questions: Sequence[ContinuationRequest],
    answers: Sequence[list[int]],
) -> list[Figures]:
    """Return the figures per category and, last, overall. All questions have the same temperature."""
    rows: dict[str, list[tuple[int, ...]]] = defaultdict(list)
    for prompt, question, answer in zip(prompts, questions, answers, strict=True):
        if len(answer) < 2:
            continue
        lengths = accepted_lengths(proposals, target, question, answer)
        fresh = lengths[: max(0, num_fresh_tokens(answer) - 1)]
        num_repeated = int(repeated_tokens(answer).sum())
        row = (len(answer), count_steps(lengths), num_repeated, len(fresh), count_steps(fresh))
        rows[prompt.category].append(row)
        rows[OVERALL].append(row)
    rows[OVERALL] = rows.pop(OVERALL)
    return [_figures(category, questions[0].temperature, of) for category, of in rows.items()]


def accepted_lengths(
    proposals: OfflineProposals, target: FrozenTarget, question: ContinuationRequest, answer: Sequence[int]
) -> list[int]:
    """Return how many drafts after each answer token but the last are accepted."""
    tokens_T = torch.tensor([*question.prompt_ids, *answer], device=target.device)
    anchors_A = torch.arange(len(question.prompt_ids), len(tokens_T) - 1, device=target.device)
    features_BTF, _ = target.read(tokens_T[None])
    return accepted_at(proposals, features_BTF[0], question, tokens_T, anchors_A)


def count_steps(accepted: Sequence[int]) -> int:
    """Return the number of verify steps of an answer whose first token is already there."""
    steps, position = 0, 0
    while position < len(accepted):
        steps, position = steps + 1, position + accepted[position] + 1
    return steps


def _figures(category: str, temperature: float, rows: Iterable[tuple[int, ...]]) -> Figures:
    table = np.array(list(rows))
    tokens, steps, repeated, fresh, fresh_steps = (int(total) for total in table.sum(axis=0))
    # The first token of an answer comes from the prompt's own pass; every step adds one that was not drafted.
    accepted = tokens - len(table) - steps
    return Figures(
        category=category,
        temperature=temperature,
        num_prompts=len(table),
        num_tokens=tokens,
        num_steps=steps,
        mean_acceptance_length=mean_acceptance_length(steps, accepted),
        repeated_share=repeated / tokens,
        fresh_acceptance_length=mean_acceptance_length(fresh_steps, fresh - fresh_steps),
    )
