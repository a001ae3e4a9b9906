"""Acceptance of the pair on prompts it has not seen, with whole blocks.

The target's answers are given; what a drafter would have proposed at every position of
them follows from one pass, because with equal noise the answer does not depend on the
drafts. So these figures are those of an engine that always drafts a whole block.

Shapes: A anchors (one per generated token), S block size, N = S - 1 slots, V vocabulary.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ...cluster.acceptance import mean_acceptance_length
from ...drafter.step.sampling import sample_rows
from ...drafter.step.sampling_batch import SamplingBatch
from .continuations import Question
from .drafter import FrozenTarget
from .model import TrainableDrafter
from .prompts import Prompt
from .repetition import repeated_tokens

OVERALL = "overall"


@dataclass(frozen=True)
class Figures:
    """Of one category at one temperature.

    Attributes:
        repeated_share: of tokens inside an 8-gram the same answer had before.
        fresh_acceptance_length: the mean up to the first such token of each answer, for repetition is easy to
            draft; None where no answer gets so far.
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
    target: FrozenTarget,
    drafter: TrainableDrafter,
    prompts: Sequence[Prompt],
    questions: Sequence[Question],
    answers: Sequence[list[int]],
    mask_id: int,
) -> list[Figures]:
    """Figures per category and, last, overall; all questions of one temperature."""
    rows: dict[str, list[tuple[int, ...]]] = defaultdict(list)
    for prompt, question, answer in zip(prompts, questions, answers, strict=True):
        if len(answer) < 2:
            continue
        lengths = accepted_lengths(target, drafter, question, answer, mask_id)
        repeated = repeated_tokens(answer)
        num_fresh = int(repeated.argmax()) if repeated.any() else len(answer)
        fresh = lengths[: max(0, num_fresh - 1)]
        row = (len(answer), count_steps(lengths), int(repeated.sum()), len(fresh), count_steps(fresh))
        rows[prompt.category].append(row)
        rows[OVERALL].append(row)
    rows[OVERALL] = rows.pop(OVERALL)
    return [_figures(category, questions[0].temperature, of) for category, of in rows.items()]


@torch.no_grad()
def accepted_lengths(
    target: FrozenTarget, drafter: TrainableDrafter, question: Question, answer: Sequence[int], mask_id: int
) -> list[int]:
    """For each answer token but the last as anchor: how many drafts after it stand."""
    device = drafter.fc.weight.device
    first, num_slots = len(question.prompt_ids), drafter.shape.block_size - 1
    tokens_T = torch.tensor([*question.prompt_ids, *answer], device=device)
    anchors_A = torch.arange(first, len(tokens_T) - 1, device=device)
    blocks_AS = torch.full((len(anchors_A), num_slots + 1), mask_id, device=device)
    blocks_AS[:, 0] = tokens_T[anchors_A]
    features, _ = target.read(tokens_T[None])
    with torch.autocast(device.type, torch.bfloat16):
        hidden_ASD = drafter(features, target.embed(blocks_AS[None]), anchors_A[None])[0]
        logits_RV = target.logits(hidden_ASD[:, 1:].flatten(0, 1).to(torch.bfloat16))
    positions_AN = anchors_A[:, None] + torch.arange(1, num_slots + 1, device=device)
    batch = _sampling(question, positions_AN.flatten().cpu().numpy(), device)
    drafts_AN = sample_rows(logits_RV.float(), batch).view_as(positions_AN)
    past_end = torch.full((num_slots,), -1, device=device)
    stands_AN = drafts_AN == torch.cat([tokens_T, past_end])[positions_AN]
    return stands_AN.long().cumprod(dim=-1).sum(dim=-1).tolist()


def count_steps(accepted: Sequence[int]) -> int:
    """Verify steps to walk an answer whose first token is already there."""
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


def _sampling(question: Question, positions: np.ndarray, device: torch.device) -> SamplingBatch:
    count = len(positions)
    return SamplingBatch.build(
        temperature=np.full(count, question.temperature, dtype=np.float32),
        top_k=np.zeros(count, dtype=np.int64),
        top_p=np.ones(count, dtype=np.float32),
        min_p=np.zeros(count, dtype=np.float32),
        seed=np.full(count, question.seed, dtype=np.int64),
        position=positions.astype(np.int64),
        device=device,
    )
