"""Training loss of a DFlash drafter (arXiv:2602.06036): blocks drawn from sequences, losses of slots.

Slot 0 is the clean anchor at position a; slot k is a mask at a + k and predicts the token at its own
position. The target's features and predictions are stored (`stored_outputs.py`).

Shapes: B sequences, T tokens, A anchors, S block size, N = S - 1 drafted slots, R = B * A * N rows, C
candidates.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from ....cluster.speculation.acceptance_length import expected_acceptance_length
from ..loop.continuations import PaddedBatch
from ..loop.precision import autocast
from ..loop.training_loop import Step
from .chunked_cross_entropy import RowLosses, Teacher, row_losses
from .dflash_module import TrainableDrafter
from .frozen_target import FrozenTarget
from .recipes import DrafterSettings, Teaching
from .stored_outputs import BatchCandidates, BatchOutputs


def block_loss(
    target: FrozenTarget,
    drafter: TrainableDrafter,
    batch: PaddedBatch,
    outputs: BatchOutputs,
    settings: DrafterSettings,
    step: Step,
    seed: int,
) -> tuple[torch.Tensor, dict[str, float]]:
    """Return the loss of random blocks of a batch, weighted by D-PACE, and figures for reports."""
    tokens_BT = torch.from_numpy(batch.tokens).to(target.device)
    block_size = settings.block_sizes[step.index % len(settings.block_sizes)]
    blocks = draw_blocks(
        batch, tokens_BT, settings.num_anchors, block_size, drafter.config.mask_token_id, seed
    )
    candidates = outputs.candidates(drafter.config.vocab_size, seed)
    losses = block_losses(target, drafter, outputs, candidates, blocks, settings.teaching.at(step.progress))
    weights = dpace_weights(losses.label_loss_R.view_as(blocks.labels))
    loss = weighted_mean(losses.loss_R.view_as(blocks.labels), weights, blocks.is_counted)
    return loss, report_figures(blocks, losses)


def draw_blocks(
    batch: PaddedBatch, tokens_BT: torch.Tensor, num_anchors: int, block_size: int, mask_id: int, seed: int
) -> Blocks:
    first_B, length_B = torch.from_numpy(batch.first), torch.from_numpy(batch.length)
    anchors_BA = draw_anchors(first_B, length_B, num_anchors, torch.Generator().manual_seed(seed))
    device = tokens_BT.device
    return cut_blocks(tokens_BT, length_B.to(device), anchors_BA.to(device), block_size, mask_id)


def block_losses(
    target: FrozenTarget,
    drafter: TrainableDrafter,
    outputs: BatchOutputs,
    candidates: BatchCandidates,
    blocks: Blocks,
    teaching: Teaching,
) -> RowLosses:
    """Return the losses of all slots, flattened to rows; with a selector, of its scores of all candidates.

    The engine's selector chooses among few; here all are scored, since sampling noise selects others, too.
    """
    selector, token_ids_C = drafter.candidate_selector, candidates.token_ids_C
    with autocast(target.device):
        hidden_BASD = drafter(outputs.features_BTF, target.embed(blocks.inputs), blocks.anchors)
        hidden_RD = hidden_BASD[..., 1:, :].flatten(0, 2)
        logits_RC = (
            drafter.logits(lambda hidden: target.head(hidden, token_ids_C), hidden_RD) + candidates.bias_C
        )
        scores_RC = logits_RC
        if selector is not None:
            scores_RC = logits_RC + selector.scores(hidden_RD, blocks.before.flatten(), token_ids_C)
    labels_R = candidates.find(blocks.labels.flatten())
    slots_N = torch.arange(1, blocks.labels.shape[-1] + 1, device=target.device)
    rows_R = outputs.rows(blocks.anchors[..., None] + slots_N).flatten()
    shares = teaching.teacher_share, teaching.distance_share
    teacher = Teacher(outputs.teacher_logits(candidates), rows_R, *shares)
    losses = row_losses(scores_RC, labels_R, teacher)
    if selector is None:
        return losses
    unary_R = row_losses(logits_RC, labels_R, teacher).loss_R
    return replace(losses, loss_R=losses.loss_R + teaching.unary_share * unary_R)


def teacher_rows(blocks: Blocks, tokens_BT: torch.Tensor) -> torch.Tensor:
    """Return for each slot its row in the target's logits, [B * A * N]: a + k - 1 for the label at a + k."""
    batch, num_tokens = tokens_BT.shape
    slots_N = torch.arange(blocks.labels.shape[-1], device=tokens_BT.device)
    positions_BAN = (blocks.anchors[..., None] + slots_N).clamp(max=num_tokens - 1)
    offsets_B = torch.arange(batch, device=tokens_BT.device) * num_tokens
    return (positions_BAN + offsets_B[:, None, None]).flatten()


def report_figures(blocks: Blocks, losses: RowLosses) -> dict[str, float]:
    overlap_BAN = losses.overlap_R.view_as(blocks.labels) * blocks.is_counted
    return length_figures(overlap_BAN.flatten(0, 1))


def length_figures(overlap_AN: torch.Tensor) -> dict[str, float]:
    survival = overlap_AN.cumprod(dim=-1).mean(dim=0).tolist()
    length = expected_acceptance_length(survival, len(survival) + 1)
    return {"slot1": survival[0], "mean_acceptance_length": length}


@dataclass(frozen=True)
class Blocks:
    """`inputs` [B, A, S] token ids; `labels` and `is_counted` [B, A, N]; `anchors` [B, A] positions."""

    anchors: torch.Tensor
    inputs: torch.Tensor
    labels: torch.Tensor
    is_counted: torch.Tensor

    @property
    def before(self) -> torch.Tensor:
        return torch.cat([self.inputs[..., :1], self.labels[..., :-1]], dim=-1)


def draw_anchors(
    first_B: torch.Tensor, length_B: torch.Tensor, num_anchors: int, generator: torch.Generator
) -> torch.Tensor:
    """Draw anchors uniformly from positions first .. length - 2, so that each has a label; int64 [B, A]."""
    span_B = (length_B - 1 - first_B).clamp(min=1)
    uniform_BA = torch.rand(len(first_B), num_anchors, generator=generator).to(first_B.device)
    return first_B[:, None] + (uniform_BA * span_B[:, None]).long()


def cut_blocks(
    tokens_BT: torch.Tensor, length_B: torch.Tensor, anchors_BA: torch.Tensor, block_size: int, mask_id: int
) -> Blocks:
    positions_BAS = anchors_BA[..., None] + torch.arange(block_size, device=tokens_BT.device)
    inside_BAS = positions_BAS < length_B[:, None, None]
    clipped = positions_BAS.clamp(max=tokens_BT.shape[1] - 1).flatten(1)
    tokens_BAS = tokens_BT.gather(1, clipped).view_as(positions_BAS)
    inputs_BAS = tokens_BAS.clone()
    inputs_BAS[..., 1:] = mask_id
    return Blocks(anchors_BA, inputs_BAS, tokens_BAS[..., 1:], inside_BAS[..., 1:])


def dpace_weights(cross_entropy_BAN: torch.Tensor, alpha: float = 0.5) -> torch.Tensor:
    """Return the D-PACE weights (arXiv:2605.18810), detached, [B, A, N].

    w_j = sum over m >= j of prod over i <= m of q~_i, where q~ is the drafter's probability of the right
    token, smoothed by `alpha`: the expected number of tokens accepted from the slot on.
    """
    softened = (1 - alpha) * torch.exp(-cross_entropy_BAN.detach()) + alpha
    reached = softened.cumprod(dim=-1)
    return reached.flip(-1).cumsum(dim=-1).flip(-1)


def weighted_mean(
    loss_BAN: torch.Tensor, weights: torch.Tensor, is_counted_BAN: torch.Tensor
) -> torch.Tensor:
    weights = weights * is_counted_BAN
    return (loss_BAN * weights).sum() / weights.sum()
