"""A DFlash drafter as a trainable module. Parameter names are z-lab's: its state dict is the checkpoint.

Drafts all blocks of a sequence in one pass. DFlash2's convolutions around sublayers and selector start
without effect: identity kernels, and a zero codebook. The inference code is `drafter/dflash/model.py`, which
keeps context K/V in pages, `drafter/compute/blocks.py` and
`drafter/step/sampling/selector.py`; embedding and head are the target's.

Shapes: B sequences, T context tokens, A anchors per sequence, S block size, D width, F tapped features, H
query heads, G key/value heads, E head width or selector rank, C candidates, V vocabulary, R rows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from ....cluster.errors import ConfigError
from ....drafter.compute.layers.rope import RopeConfig
from ....drafter.dflash.config import DrafterConfig, DraftLayer, SelectorSize

SIDES, TAPS = 2, 2  # before and after a sublayer; a row and the one before it


class BlockConvolution(nn.Module):
    """Grouped dynamic convolution: y_t = sum over taps o of (base_o + delta_to) * v_(t-o).

    delta is computed per row and group of channels, base is a parameter per channel; v is 0 before the block.
    """

    def __init__(self, width: int, group_size: int) -> None:
        super().__init__()
        self._groups = width // group_size
        self.base_kernel = nn.Parameter(torch.zeros(SIDES, TAPS, width))
        self.base_kernel.data[:, 0] = 1.0
        self.kernel_projection = nn.Linear(width, SIDES * TAPS * self._groups, bias=False)

    def kernels(self, u_xSD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the kernels before and after the sublayer, [.., S, taps, D], from its normed input."""
        delta = self.kernel_projection(u_xSD).unflatten(-1, (SIDES, TAPS, self._groups, 1))
        base = self.base_kernel.to(delta.dtype).view(SIDES, TAPS, self._groups, -1)
        before, after = (base + delta).flatten(-2).unbind(-3)
        return before, after

    @staticmethod
    def convolve(v_xSD: torch.Tensor, kernels_xSTD: torch.Tensor) -> torch.Tensor:
        earlier_xSD = F.pad(v_xSD[..., :-1, :], (0, 0, 1, 0))
        return kernels_xSTD[..., 0, :] * v_xSD + kernels_xSTD[..., 1, :] * earlier_xSD


class TrainableSelector(nn.Module):
    """Score of token b after token a, given the hidden state y: sum_r A[a]_r (H y)_r G[b]_r."""

    def __init__(self, width: int, vocab_size: int, size: SelectorSize) -> None:
        super().__init__()
        self.size = size
        self.predecessor_codebook = nn.Parameter(torch.randn(vocab_size, size.rank) * 0.5)
        self.successor_codebook = nn.Parameter(torch.zeros(vocab_size, size.rank))
        self.hidden_projection = nn.Linear(width, size.rank, bias=False)

    def scores(self, y_RD: torch.Tensor, before_R: torch.Tensor, after_C: torch.Tensor) -> torch.Tensor:
        """Return the scores of the tokens `after`, following `before`, [R, C], to be added to the logits."""
        gated_RE = F.embedding(before_R, self.predecessor_codebook) * self.hidden_projection(y_RD)
        return F.linear(gated_RE, F.embedding(after_C, self.successor_codebook))


class TrainableDrafter(nn.Module):
    """Computes hidden states of blocks from tapped features; the target's head gives their logits."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        _check_trainable(config)
        self.config = config
        width = config.hidden_size
        self.fc = nn.Linear(config.num_taps * width, width, bias=False)
        self.hidden_norm = RmsNorm(width, config.rms_norm_eps)
        self.layers = nn.ModuleList(_Layer(config, kind) for kind in config.layers)
        self.norm = RmsNorm(width, config.rms_norm_eps)
        self.candidate_selector = (
            None if config.selector is None else TrainableSelector(width, config.vocab_size, config.selector)
        )
        self.apply(_initialize)

    def forward(
        self, features_BTF: torch.Tensor, blocks_BASD: torch.Tensor, anchors_BA: torch.Tensor
    ) -> torch.Tensor:
        """Return hidden states [B, A, S, D] from the target's embeddings of blocks, after the final norm.

        Blocks attend to context before their anchor.
        """
        num_tokens, block_size = features_BTF.shape[1], blocks_BASD.shape[2]
        context_BTD = self.hidden_norm(self.fc(features_BTF))
        context_positions_T = torch.arange(num_tokens, device=anchors_BA.device)
        block_positions_BAS = anchors_BA[..., None] + torch.arange(block_size, device=anchors_BA.device)
        x_BASD = blocks_BASD * (self.config.input_embedding_scale or 1.0)
        for layer in self.layers:
            x_BASD = layer(x_BASD, context_BTD, block_positions_BAS, context_positions_T)
        return self.norm(x_BASD)

    def logits(self, head: Callable[[torch.Tensor], torch.Tensor], hidden_xD: torch.Tensor) -> torch.Tensor:
        """Return logits [.., V] from the target's head, with this drafter's scale and soft cap."""
        config = self.config
        z_xV = head(hidden_xD)
        if config.output_multiplier != 1.0:
            z_xV = z_xV * config.output_multiplier
        cap = config.logit_softcap
        return z_xV if cap is None else torch.tanh(z_xV / cap) * cap


def _check_trainable(config: DrafterConfig) -> None:
    untrained = {
        "a head with its own vocabulary (draft_vocab_size)": config.maps_vocabulary,
        "its own embedding of the mask (mask_embedding.pt)": config.mask_embedding,
        "attention sinks": config.attention_sinks,
        "scaled values (attention_value_scale)": config.attention_value_scale != 1.0,
        "interleaved or partial rotary embedding": config.rope.permutation() is not None,
        "DSpark's heads, or an anchor that predicts": config.samples_anchor or config.markov is not None,
        "convolutions over more than two rows": config.convolutions is not None
        and config.convolutions.num_taps != TAPS,
    }
    for what, is_there in untrained.items():
        if is_there:
            raise ConfigError(
                f"{config.file}: this drafter has {what}, which Manta can serve but not train. Start without "
                "an initial drafter.",
                param="initial",
            )


class RmsNorm(nn.Module):
    """RMSNorm that casts its weight to the activations' dtype; torch's fused norm needs equal dtypes."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self._eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight.to(x.dtype), self._eps)


class Rotary(nn.Module):
    """Rotary embedding in Qwen's half-split layout, at any positions."""

    def __init__(self, rope: RopeConfig) -> None:
        super().__init__()
        self._frequencies_C = rope.frequencies()  # not a buffer: stays fp32 when the model is cast
        self._scale = rope.attention_scale

    def forward(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Rotate x [..., rows, heads, E] to positions [..., rows]."""
        self._frequencies_C = self._frequencies_C.to(x.device)
        angles = positions[..., None].float() * self._frequencies_C
        cos, sin = ((part * self._scale)[..., None, :].to(x.dtype) for part in (angles.cos(), angles.sin()))
        first, second = x.split(x.shape[-1] // 2, dim=-1)
        return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


class _Layer(nn.Module):
    def __init__(self, config: DrafterConfig, kind: DraftLayer) -> None:
        super().__init__()
        width, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = RmsNorm(width, eps)
        self.self_attn = _BlockAttention(config, kind)
        self.post_attention_layernorm = RmsNorm(width, eps)
        self.mlp = GatedMlp(width, config.intermediate_size)
        self.attention_conv: BlockConvolution | None = None
        self.mlp_conv: BlockConvolution | None = None
        if config.convolutions is not None:
            self.attention_conv = BlockConvolution(width, config.convolutions.group_size)
            self.mlp_conv = BlockConvolution(width, config.convolutions.group_size)

    def forward(
        self,
        x_BASD: torch.Tensor,
        context_BTD: torch.Tensor,
        block_positions_BAS: torch.Tensor,
        context_positions_T: torch.Tensor,
    ) -> torch.Tensor:
        def attend(u_BASD: torch.Tensor) -> torch.Tensor:
            return self.self_attn(u_BASD, context_BTD, block_positions_BAS, context_positions_T)

        x_BASD = x_BASD + _between(self.attention_conv, attend, self.input_layernorm(x_BASD))
        return x_BASD + _between(self.mlp_conv, self.mlp, self.post_attention_layernorm(x_BASD))


def _between(
    convolution: BlockConvolution | None, sublayer: Callable[[torch.Tensor], torch.Tensor], u: torch.Tensor
) -> torch.Tensor:
    if convolution is None:
        return sublayer(u)
    before, after = convolution.kernels(u)
    return convolution.convolve(sublayer(convolution.convolve(u, before)), after)


class _BlockAttention(nn.Module):
    """Attention of a block to the context and to itself, with one softmax over both."""

    def __init__(self, config: DrafterConfig, kind: DraftLayer) -> None:
        super().__init__()
        self._config, self._kind = config, kind
        width, head_dim, bias = config.hidden_size, config.head_dim, config.attention_bias
        self.q_proj = nn.Linear(width, config.num_heads * head_dim, bias=bias)
        self.k_proj = nn.Linear(width, config.num_kv_heads * head_dim, bias=bias)
        self.v_proj = nn.Linear(width, config.num_kv_heads * head_dim, bias=bias)
        self.o_proj = nn.Linear(config.num_heads * head_dim, width, bias=bias)
        self.q_norm = RmsNorm(head_dim, config.rms_norm_eps)
        self.k_norm = RmsNorm(head_dim, config.rms_norm_eps)
        self.rotary = Rotary(config.rope)

    def forward(
        self,
        u_BASD: torch.Tensor,
        context_BTD: torch.Tensor,
        block_positions_BAS: torch.Tensor,
        context_positions_T: torch.Tensor,
    ) -> torch.Tensor:
        config = self._config
        batch, anchors, block, _ = u_BASD.shape
        num_tokens = context_BTD.shape[1]
        group = config.num_heads // config.num_kv_heads

        q_BASHE = self._heads(self.q_proj(u_BASD), self.q_norm, block_positions_BAS)
        block_k_BASGE = self._heads(self.k_proj(u_BASD), self.k_norm, block_positions_BAS)
        context_k_BTGE = self._heads(self.k_proj(context_BTD), self.k_norm, context_positions_T)
        block_v_BASGE = self.v_proj(u_BASD).unflatten(-1, (-1, config.head_dim))
        context_v_BTGE = self.v_proj(context_BTD).unflatten(-1, (-1, config.head_dim))

        # [B, G, A, group * S, E]: heads that share K/V become extra rows.
        q = q_BASHE.view(batch, anchors, block, config.num_kv_heads, group, config.head_dim)
        q = q.permute(0, 3, 1, 4, 2, 5).reshape(batch, config.num_kv_heads, anchors, group * block, -1)
        q = q * config.head_dim**-0.5
        block_k = block_k_BASGE.permute(0, 3, 1, 4, 2)  # [B, G, A, E, S]
        block_v = block_v_BASGE.permute(0, 3, 1, 2, 4)  # [B, G, A, S, E]
        context_k = context_k_BTGE.permute(0, 2, 3, 1)  # [B, G, E, T]
        context_v = context_v_BTGE.transpose(1, 2)  # [B, G, T, E]

        context_scores = (q.flatten(2, 3) @ context_k).unflatten(2, (anchors, -1))
        visible_BAxT = context_visibility(block_positions_BAS, num_tokens, self._kind)
        context_scores = context_scores.masked_fill(
            ~visible_BAxT.repeat(1, 1, group if visible_BAxT.shape[2] > 1 else 1, 1)[:, None], float("-inf")
        )
        block_scores = q @ block_k
        if (hidden_SS := block_hidden(block, self._kind, q.device)) is not None:
            block_scores = block_scores.masked_fill(hidden_SS.repeat(group, 1), float("-inf"))
        scores = torch.cat([context_scores, block_scores], dim=-1)
        weights = torch.softmax(scores, dim=-1, dtype=scores.dtype)
        context_weights, block_weights = weights.split([num_tokens, block], dim=-1)
        out = weighted_sum(context_weights.flatten(2, 3), context_v).unflatten(2, (anchors, -1))
        out = out + block_weights @ block_v
        out = out.unflatten(3, (group, block)).permute(0, 2, 4, 1, 3, 5)  # [B, A, S, G, group, E]
        return self.o_proj(out.reshape(batch, anchors, block, -1))

    def _heads(self, projected: torch.Tensor, norm: nn.Module, positions: torch.Tensor) -> torch.Tensor:
        """Return heads [..., rows, heads, E], normed per head and rotated to their position."""
        heads = norm(projected.unflatten(-1, (-1, self._config.head_dim)))
        return self.rotary(heads, positions)


class _WeightedSum(torch.autograd.Function):
    """weights @ values with a gradient that does not transpose the weights, the largest tensor here."""

    # Any: autograd's own context type is not public.
    @staticmethod
    def forward(ctx: Any, weights: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(weights, values)
        return weights @ values

    @staticmethod
    def backward(  # type: ignore[override]  # torch declares *grad_outputs
        ctx: Any, grad: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        weights, values = ctx.saved_tensors
        return grad @ values.transpose(-1, -2), (grad.transpose(-1, -2) @ weights).transpose(-1, -2)


def weighted_sum(weights: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    return _WeightedSum.apply(weights, values)


def context_visibility(positions_BAS: torch.Tensor, num_tokens: int, kind: DraftLayer) -> torch.Tensor:
    """Return the visible context of each block, bool [B, A, 1 or S, T].

    Context is visible strictly before the anchor (its own features do not exist yet), and within a layer's
    window, which differs by row.
    """
    context_T = torch.arange(num_tokens, device=positions_BAS.device)
    visible = context_T < positions_BAS[..., :1, None]
    if kind.window is None:
        return visible
    return visible & (positions_BAS[..., None] - context_T < kind.window)


def block_hidden(block_size: int, kind: DraftLayer, device: torch.device) -> torch.Tensor | None:
    """Return the block's rows hidden from each row, bool [S, S] (query, key); None if all are visible."""
    if not kind.causal and (kind.window is None or kind.window >= block_size):
        return None
    rows_S = torch.arange(block_size, device=device)
    before_SS = rows_S[:, None] - rows_S
    hidden_SS = before_SS < 0 if kind.causal else torch.zeros_like(before_SS, dtype=torch.bool)
    return hidden_SS if kind.window is None else hidden_SS | (before_SS.abs() >= kind.window)


class GatedMlp(nn.Module):
    def __init__(self, width: int, inner_size: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(width, inner_size, bias=False)
        self.up_proj = nn.Linear(width, inner_size, bias=False)
        self.down_proj = nn.Linear(inner_size, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


def _initialize(module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        nn.init.normal_(module.weight, std=0.02)
        if module.bias is not None:
            nn.init.zeros_(module.bias)
    elif isinstance(module, BlockConvolution):  # visited after its projection
        nn.init.zeros_(module.kernel_projection.weight)
