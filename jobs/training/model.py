"""The drafter as a trainable module; parameter names are z-lab's, so its state dict is the checkpoint.

Drafts all blocks of a sequence in one pass. The serving drafter, which pages its
context K/V, is `drafter/dflash/model.py`; the embedding and the head are the target's.

Shapes: B sequences, T context tokens, A anchors per sequence, S block size,
D width, F tapped features, H query heads, G key/value heads, E head width.
"""

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F

from .attention import weighted_sum


@dataclass(frozen=True)
class DrafterShape:
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope_theta: float
    rms_norm_eps: float
    block_size: int
    target_layer_ids: tuple[int, ...]


class TrainableDrafter(nn.Module):
    """Block hidden states from tapped features; apply the target's head to get logits."""

    def __init__(self, shape: DrafterShape) -> None:
        super().__init__()
        self.shape = shape
        width = shape.hidden_size
        self.fc = nn.Linear(len(shape.target_layer_ids) * width, width, bias=False)
        self.hidden_norm = _RmsNorm(width, shape.rms_norm_eps)
        self.layers = nn.ModuleList(_Layer(shape) for _ in range(shape.num_layers))
        self.norm = _RmsNorm(width, shape.rms_norm_eps)
        self.apply(_initialise)

    def forward(
        self, features_BTF: torch.Tensor, blocks_BASD: torch.Tensor, anchors_BA: torch.Tensor
    ) -> torch.Tensor:
        """[B, A, S, D], final norm applied. Context rows at or after a block's anchor are hidden from it."""
        num_tokens, block_size = features_BTF.shape[1], blocks_BASD.shape[2]
        context_BTD = self.hidden_norm(self.fc(features_BTF))
        context_positions_T = torch.arange(num_tokens, device=anchors_BA.device)
        block_positions_BAS = anchors_BA[..., None] + torch.arange(block_size, device=anchors_BA.device)
        visible_BAT = context_visibility(anchors_BA, num_tokens)
        x_BASD = blocks_BASD
        for layer in self.layers:
            x_BASD = layer(x_BASD, context_BTD, block_positions_BAS, context_positions_T, visible_BAT)
        return self.norm(x_BASD)


class _RmsNorm(nn.Module):
    """The weight follows the activations' type: torch has no fused norm for a mixture."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self._eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight.to(x.dtype), self._eps)


def context_visibility(anchors_BA: torch.Tensor, num_tokens: int) -> torch.Tensor:
    """bool [B, A, T]: strictly before the anchor, whose own features do not exist yet."""
    return torch.arange(num_tokens, device=anchors_BA.device) < anchors_BA[..., None]


class _Layer(nn.Module):
    def __init__(self, shape: DrafterShape) -> None:
        super().__init__()
        self.input_layernorm = _RmsNorm(shape.hidden_size, shape.rms_norm_eps)
        self.self_attn = _BlockAttention(shape)
        self.post_attention_layernorm = _RmsNorm(shape.hidden_size, shape.rms_norm_eps)
        self.mlp = _GatedMlp(shape)

    def forward(
        self,
        x_BASD: torch.Tensor,
        context_BTD: torch.Tensor,
        block_positions_BAS: torch.Tensor,
        context_positions_T: torch.Tensor,
        visible_BAT: torch.Tensor,
    ) -> torch.Tensor:
        attended_BASD = self.self_attn(
            self.input_layernorm(x_BASD), context_BTD, block_positions_BAS, context_positions_T, visible_BAT
        )
        x_BASD = x_BASD + attended_BASD
        return x_BASD + self.mlp(self.post_attention_layernorm(x_BASD))


class _BlockAttention(nn.Module):
    """One softmax over two score matrices: the shared context, and the block itself (bidirectional)."""

    def __init__(self, shape: DrafterShape) -> None:
        super().__init__()
        self._shape = shape
        width, head_dim = shape.hidden_size, shape.head_dim
        self.q_proj = nn.Linear(width, shape.num_heads * head_dim, bias=False)
        self.k_proj = nn.Linear(width, shape.num_kv_heads * head_dim, bias=False)
        self.v_proj = nn.Linear(width, shape.num_kv_heads * head_dim, bias=False)
        self.o_proj = nn.Linear(shape.num_heads * head_dim, width, bias=False)
        self.q_norm = _RmsNorm(head_dim, shape.rms_norm_eps)
        self.k_norm = _RmsNorm(head_dim, shape.rms_norm_eps)

    def forward(
        self,
        u_BASD: torch.Tensor,
        context_BTD: torch.Tensor,
        block_positions_BAS: torch.Tensor,
        context_positions_T: torch.Tensor,
        visible_BAT: torch.Tensor,
    ) -> torch.Tensor:
        shape = self._shape
        batch, anchors, block, _ = u_BASD.shape
        num_tokens = context_BTD.shape[1]
        group = shape.num_heads // shape.num_kv_heads

        q_BASHE = self._heads(self.q_proj(u_BASD), self.q_norm, block_positions_BAS)
        block_k_BASGE = self._heads(self.k_proj(u_BASD), self.k_norm, block_positions_BAS)
        context_k_BTGE = self._heads(self.k_proj(context_BTD), self.k_norm, context_positions_T)
        block_v_BASGE = self.v_proj(u_BASD).unflatten(-1, (-1, shape.head_dim))
        context_v_BTGE = self.v_proj(context_BTD).unflatten(-1, (-1, shape.head_dim))

        # [B, G, A, group * S, E]: heads that share K/V lie beside each other as extra rows.
        q = q_BASHE.view(batch, anchors, block, shape.num_kv_heads, group, shape.head_dim)
        q = q.permute(0, 3, 1, 4, 2, 5).reshape(batch, shape.num_kv_heads, anchors, group * block, -1)
        q = q * shape.head_dim**-0.5
        block_k = block_k_BASGE.permute(0, 3, 1, 4, 2)  # [B, G, A, E, S]
        block_v = block_v_BASGE.permute(0, 3, 1, 2, 4)  # [B, G, A, S, E]
        context_k = context_k_BTGE.permute(0, 2, 3, 1)  # [B, G, E, T]
        context_v = context_v_BTGE.transpose(1, 2)  # [B, G, T, E]

        context_scores = (q.flatten(2, 3) @ context_k).unflatten(2, (anchors, -1))
        context_scores = context_scores.masked_fill(~visible_BAT[:, None, :, None, :], float("-inf"))
        scores = torch.cat([context_scores, q @ block_k], dim=-1)
        weights = torch.softmax(scores, dim=-1, dtype=scores.dtype)
        context_weights, block_weights = weights.split([num_tokens, block], dim=-1)
        out = weighted_sum(context_weights.flatten(2, 3), context_v).unflatten(2, (anchors, -1))
        out = out + block_weights @ block_v
        out = out.unflatten(3, (group, block)).permute(0, 2, 4, 1, 3, 5)  # [B, A, S, G, group, E]
        return self.o_proj(out.reshape(batch, anchors, block, -1))

    def _heads(self, projected: torch.Tensor, norm: nn.Module, positions: torch.Tensor) -> torch.Tensor:
        """[..., rows, heads, E], normed per head and rotated to its position."""
        heads = norm(projected.unflatten(-1, (-1, self._shape.head_dim)))
        return rotate(heads, positions, self._shape.rope_theta)


class _GatedMlp(nn.Module):
    def __init__(self, shape: DrafterShape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


def rotate(x: torch.Tensor, positions: torch.Tensor, theta: float) -> torch.Tensor:
    """Rotary embedding in Qwen's half-split layout; x [..., rows, heads, E], positions [..., rows]."""
    half = x.shape[-1] // 2
    frequencies = theta ** (-torch.arange(half, device=x.device, dtype=torch.float32) / half)
    angles = positions[..., None].float() * frequencies
    cos, sin = angles.cos()[..., None, :].to(x.dtype), angles.sin()[..., None, :].to(x.dtype)
    first, second = x.split(half, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def _initialise(module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        nn.init.normal_(module.weight, std=0.02)
