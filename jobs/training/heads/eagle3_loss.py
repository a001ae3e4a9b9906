"""Training loss of an EAGLE-3 head (arXiv:2503.01840): chains that start in the generated part of a sequence.

Chains are unrolled in training, as published ("training-time test"): from the second depth on, a row reads
the head's own output of the previous depth, so that it learns to correct its errors. The tokens are those of
the text. Losses are those of `dflash_loss.py`, by depth instead of by slot.

Shapes: B sequences, T tokens, R = T - 1 rows, N depths, V vocabulary.
"""

import torch

from ..data.continuations import PaddedBatch
from .block_sampling import dpace_weights, weighted_mean
from .chunked_cross_entropy import Teacher, row_losses
from .dflash_loss import length_figures
from .eagle3_module import EagleHead
from .frozen_target import FrozenTarget
from .recipes import EagleSettings


def chain_loss(
    target: FrozenTarget, head: EagleHead, batch: PaddedBatch, settings: EagleSettings
) -> tuple[torch.Tensor, dict[str, float]]:
    """Return the loss of all chains of a batch, weighted by D-PACE, and figures for reports."""
    device = target.device
    tokens_BT = torch.from_numpy(batch.tokens).to(device)
    first_B, length_B = (torch.from_numpy(x).to(device) for x in (batch.first, batch.length))
    num_sequences, num_tokens = tokens_BT.shape
    rows_R = torch.arange(num_tokens - 1, device=device)
    begins_BR = rows_R + 1 >= first_B[:, None]
    features_BTF, target_logits_BTV = target.read(tokens_BT)
    with torch.autocast(device.type, torch.bfloat16):
        chains = head.chains(features_BTF[:, :-1])
    teaching, teacher_MV = settings.teaching, target_logits_BTV.flatten(0, 1)
    offsets_B1 = torch.arange(num_sequences, device=device)[:, None] * num_tokens
    label_loss_BRN, overlap_BRN = torch.zeros(
        2, num_sequences, num_tokens - 1, settings.depth, device=device
    ).unbind()
    counted_BRN = torch.zeros_like(overlap_BRN, dtype=torch.bool)
    losses: list[torch.Tensor] = []
    for depth in range(settings.depth):
        read_BR = (rows_R + 1 + depth).clamp(max=num_tokens - 1).expand(num_sequences, -1)
        with torch.autocast(device.type, torch.bfloat16):
            hidden_BRD = chains.step(target.embed(tokens_BT.gather(1, read_BR)))
        counted_BR = begins_BR & (rows_R + 2 + depth < length_B[:, None])
        counted_BRN[..., depth] = counted_BR
        logits_XV = target.head(hidden_BRD[counted_BR])
        labels_X = tokens_BT.gather(1, (read_BR + 1).clamp(max=num_tokens - 1))[counted_BR]
        shares = teaching.teacher_share, teaching.distance_share
        of_rows = row_losses(
            logits_XV, labels_X, Teacher(teacher_MV, (read_BR + offsets_B1)[counted_BR], *shares)
        )
        loss_BR = hidden_BRD.new_zeros(counted_BR.shape, dtype=torch.float32)
        losses.append(loss_BR.masked_scatter(counted_BR, of_rows.loss_R))
        label_loss_BRN[..., depth][counted_BR] = of_rows.label_loss_R
        overlap_BRN[..., depth][counted_BR] = of_rows.overlap_R
    loss = weighted_mean(torch.stack(losses, dim=-1), dpace_weights(label_loss_BRN), counted_BRN)
    return loss, length_figures(overlap_BRN[begins_BR])
