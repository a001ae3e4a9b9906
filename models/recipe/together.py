"""Trains target and drafter together, so that the target's hidden states contain more about later tokens.

A small target trained only on next tokens has little about later tokens in its hidden states, and a small
drafter cannot follow what it memorised. Here the draft loss reaches the target through its tapped features,
and the target's next-token distribution is pulled slightly towards that of the drafter's first slot. The
next-token loss continues as before.

Shapes: B sequences, T tokens, A anchors, N slots, V vocabulary.
"""

from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import nn
from transformers import Qwen3ForCausalLM

from ...jobs.training.heads.chunked_cross_entropy import Teacher, row_losses
from ...jobs.training.heads.dflash_loss import (
    Blocks,
    dpace_weights,
    draw_blocks,
    report_figures,
    teacher_rows,
    weighted_mean,
)
from ...jobs.training.heads.dflash_module import TrainableDrafter
from ...jobs.training.loop.continuations import ContinuationReader, Continuations, PaddedBatch
from ...jobs.training.loop.muon_adamw import HybridOptimizer
from ...jobs.training.loop.precision import autocast
from ...jobs.training.loop.training_loop import Length, Report, Schedule, Step, StepLoss, TrainingLoop


@dataclass(frozen=True)
class TogetherSettings:
    """Settings of training target and drafter together.

    Attributes:
        block_stages: (progress, rows of a block). While the first slots are poor the last ones have no
            weight, and short blocks cost half as much.
        draft_share, pull_share: weights of these losses relative to the next-token loss.
    """

    batch_size: int = 8
    num_anchors: int = 48
    block_stages: tuple[tuple[float, int], ...] = ((0.0, 8), (0.7, 16))
    matrix_lr: float = 3e-3
    other_lr: float = 1e-3
    weight_decay: float = 0.05
    teacher_share: float = 0.5
    draft_share: float = 1.0
    pull_share: float = 1.0
    schedule: Schedule = field(default_factory=lambda: Schedule(warmup_steps=50, decay_from=0.3))


def train_together(
    target: Qwen3ForCausalLM,
    drafter: TrainableDrafter,
    data: Continuations,
    mask_id: int,
    pad_id: int,
    folder: Path,
    budget_s: float,
    device: torch.device,
    report: Report,
    settings: TogetherSettings | None = None,
) -> None:
    """Train both models in place. `data` mixes sequences of the corpus and of the target.

    Afterwards the target answers differently: generate its text again and train the drafter on that alone.
    """
    settings = settings or TogetherSettings()
    pair = nn.ModuleDict({"target": target.float(), "drafter": drafter}).to(device)
    mask_row = torch.tensor([mask_id], device=device)
    # No text contains the mask: the loss would only push its embedding away (`tame_unseen_embedding`).
    target.model.embed_tokens.weight.register_hook(lambda grad: grad.index_fill(0, mask_row, 0.0))
    optimizer = HybridOptimizer(pair, settings.matrix_lr, settings.other_lr, settings.weight_decay)
    reader = ContinuationReader(data, settings.batch_size, pad_id)
    loop = TrainingLoop("together", pair, optimizer, reader, folder, report)

    def compute_loss(step: Step) -> StepLoss:
        batch = reader.next_batch()
        tokens_BT = torch.from_numpy(batch.tokens).to(device)
        block_size = [rows for start, rows in settings.block_stages if step.progress >= start][-1]
        blocks = draw_blocks(batch, tokens_BT, settings.num_anchors, block_size, mask_id, seed=step.index)
        loss, figures = _losses(target, drafter, batch, tokens_BT, blocks, settings)
        return StepLoss(loss, batch.tokens.size, figures)

    loop.run(compute_loss, Length(seconds=budget_s), settings.schedule)


def _losses(
    target: Qwen3ForCausalLM,
    drafter: TrainableDrafter,
    batch: PaddedBatch,
    tokens_BT: torch.Tensor,
    blocks: Blocks,
    settings: TogetherSettings,
) -> tuple[torch.Tensor, dict[str, float]]:
    with autocast(tokens_BT.device):
        states = target.model(tokens_BT, use_cache=False, output_hidden_states=True)
        features = torch.cat([states.hidden_states[i + 1] for i in drafter.config.target_layer_ids], dim=-1)
        p_RV = target.lm_head(states.last_hidden_state.flatten(0, 1))
        inputs_BASD = target.model.embed_tokens(blocks.inputs).detach()
        hidden_BASD = drafter(features, inputs_BASD, blocks.anchors)
        head = target.lm_head.weight.detach()
        q_RV = nn.functional.linear(hidden_BASD[..., 1:, :].flatten(0, 2), head)

    next_loss = _next_token_loss(p_RV, tokens_BT, batch)
    rows_R = teacher_rows(blocks, tokens_BT)
    losses = row_losses(q_RV, blocks.labels.flatten(), Teacher(p_RV.detach(), rows_R, settings.teacher_share))
    weights = dpace_weights(losses.label_loss_R.view_as(blocks.labels))
    draft_loss = weighted_mean(losses.loss_R.view_as(blocks.labels), weights, blocks.is_counted)

    # The target's row at the anchor is compared with the first slot, which has seen the same text.
    first_rows = rows_R.view_as(blocks.labels)[..., 0].flatten()
    slot_rows = torch.arange(len(rows_R), device=rows_R.device).view_as(blocks.labels)[..., 0].flatten()
    slot_teacher = Teacher(q_RV.detach(), slot_rows, share=1.0)
    pull_loss = row_losses(p_RV[first_rows], tokens_BT.flatten()[first_rows], slot_teacher).loss_R.mean()

    loss = next_loss + settings.draft_share * draft_loss + settings.pull_share * pull_loss
    figures = {"next": next_loss.item(), "draft": draft_loss.item(), **report_figures(blocks, losses)}
    return loss, figures


def _next_token_loss(p_RV: torch.Tensor, tokens_BT: torch.Tensor, batch: PaddedBatch) -> torch.Tensor:
    labels_BT = torch.cat([tokens_BT[:, 1:], tokens_BT[:, :1]], dim=1)
    lengths_B = torch.from_numpy(batch.length).to(tokens_BT.device)
    is_counted = torch.arange(tokens_BT.shape[1], device=tokens_BT.device) < lengths_B[:, None] - 1
    loss_BT = row_losses(p_RV, labels_BT.flatten()).loss_R.view_as(labels_BT)
    return loss_BT[is_counted].mean()
