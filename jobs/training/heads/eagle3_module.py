"""An EAGLE-3 head (arXiv:2503.01840) as a trainable module, and its loss. Names are the published ones.

One Llama layer over [token embedding, feature of the previous position]; embedding and head are the target's.
It drafts a chain: after the target's newest feature, its own output replaces the feature. Chains are unrolled
in training, as published ("training-time test"), so that it learns to correct its errors. The inference code
is `drafter/eagle3/model.py`.

Row r starts a chain after position r: at depth s it reads token r + 1 + s and predicts the next one. Shapes:
B sequences, T tokens, R = T - 1 rows of each, N depths, D width, F tapped features, H query heads, G
key/value heads, E head width, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import nn

from ....drafter.eagle3.config import Eagle3Config
from ..loop.continuations import PaddedBatch
from .chunked_cross_entropy import Teacher, row_losses
from .dflash_loss import dpace_weights, length_figures, weighted_mean
from .dflash_module import GatedMlp, RmsNorm, Rotary
from .frozen_target import FrozenTarget
from .recipes import EagleSettings


class EagleHead(nn.Module):
    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        self.config = config
        width, eps = config.hidden_size, config.rms_norm_eps
        self.fc = nn.Linear(config.num_taps * width, width, bias=False)
        self.midlayer = _Layer(config)
        self.norm = RmsNorm(width, eps)

    def chains(self, features_BRF: torch.Tensor) -> Chains:
        """Start a chain at every row, from the tapped features of its position."""
        return Chains(self, self.fc(features_BRF))


class Chains:
    """The chains of all rows. At each depth a row attends to earlier rows at depth 0 and to its own chain."""

    def __init__(self, head: EagleHead, hidden_BRD: torch.Tensor) -> None:
        self._head, self._hidden_BRD = head, hidden_BRD
        self._keys: list[torch.Tensor] = []  # per depth, [B, G, R, E]
        self._values: list[torch.Tensor] = []

    def step(self, embedded_BRD: torch.Tensor) -> torch.Tensor:
        """Advance all chains by one token; return hidden states [B, R, D] for the target's head."""
        layer, depth = self._head.midlayer, len(self._keys)
        u_BR2D = torch.cat([layer.input_layernorm(embedded_BRD), layer.hidden_norm(self._hidden_BRD)], dim=-1)
        rows_R = torch.arange(u_BR2D.shape[1], device=u_BR2D.device)
        q_BHRE, key, value = layer.self_attn.project(u_BR2D, rows_R + 1 + depth)
        self._keys.append(key)
        self._values.append(value)
        x_BRD = self._hidden_BRD + layer.self_attn.attend(q_BHRE, self._keys, self._values)
        self._hidden_BRD = x_BRD + layer.mlp(layer.post_attention_layernorm(x_BRD))
        return self._head.norm(self._hidden_BRD)


class _Layer(nn.Module):
    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        width, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = RmsNorm(width, eps)
        self.hidden_norm = RmsNorm(width, eps)
        self.self_attn = _ChainAttention(config)
        self.post_attention_layernorm = RmsNorm(width, eps)
        self.mlp = GatedMlp(width, config.intermediate_size)


class _ChainAttention(nn.Module):
    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        self._config = config
        width, head_dim = config.hidden_size, config.head_dim
        self.q_proj = nn.Linear(2 * width, config.num_heads * head_dim, bias=False)
        self.k_proj = nn.Linear(2 * width, config.num_kv_heads * head_dim, bias=False)
        self.v_proj = nn.Linear(2 * width, config.num_kv_heads * head_dim, bias=False)
        self.o_proj = nn.Linear(config.num_heads * head_dim, width, bias=False)
        self.rotary = Rotary(config.rope)

    def project(
        self, u_BR2D: torch.Tensor, positions_R: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return queries [B, H, R, E], keys and values [B, G, R, E], with rotary embedding."""
        q, k, v = (
            project(u_BR2D).unflatten(-1, (-1, self._config.head_dim))
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = self.rotary(q, positions_R), self.rotary(k, positions_R)
        return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)

    def attend(
        self, q_BHRE: torch.Tensor, keys: list[torch.Tensor], values: list[torch.Tensor]
    ) -> torch.Tensor:
        """Attend to depth 0 of the rows up to the own row, and to later depths of the own row; [B, R, D]."""
        group = self._config.num_heads // self._config.num_kv_heads
        q_BGNRE = (q_BHRE * self._config.head_dim**-0.5).unflatten(1, (-1, group))
        num_rows = q_BHRE.shape[2]
        hidden = torch.full((num_rows, num_rows), float("-inf"), device=q_BHRE.device).triu(1)
        first = q_BGNRE @ keys[0].unsqueeze(2).transpose(-1, -2)
        later = [(q_BGNRE * key.unsqueeze(2)).sum(dim=-1, keepdim=True) for key in keys[1:]]
        scores = torch.cat([first + hidden.to(first.dtype), *later], dim=-1)
        weights = torch.softmax(scores, dim=-1, dtype=scores.dtype)
        out = weights[..., :num_rows] @ values[0].unsqueeze(2)
        for depth, value in enumerate(values[1:]):
            out = out + weights[..., num_rows + depth, None] * value.unsqueeze(2)
        return self.o_proj(out.flatten(1, 2).transpose(1, 2).flatten(2))


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
