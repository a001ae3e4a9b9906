"""A straightforward unbatched DFlash loop on transformers' modules, as one would write it from the paper.

A fair contender, like z-lab's `dflash_generate`: one request at a time, greedy, with K/V of the target and of
the drafter's context in `DynamicCache`s that are cropped to the accepted tokens. Uses none of Manta's
computation, only its reader of drafter files. The tests' oracle is different: it keeps nothing and recomputes
everything.

Legend: T new context rows, S block rows, m taps, H hidden, V vocabulary. Tensors have a leading batch
dimension of 1, as transformers' modules expect.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from manta.cluster.errors import ConfigError
from manta.drafter.compute.checkpoint.safetensors_reader import TensorFolder
from manta.drafter.dflash.config import DrafterConfig, SelectorSize
from manta.drafter.drafter_spec import DraftLayer
from torch import Tensor, nn
from torch.nn import functional
from transformers import DynamicCache, PreTrainedModel, Qwen3Config
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.models.qwen3.modeling_qwen3 import (
    Qwen3DecoderLayer,
    Qwen3RMSNorm,
    Qwen3RotaryEmbedding,
    rotate_half,
)

OPTIONAL = ("embed_tokens.weight", "lm_head.weight", "d2t")


@dataclass(frozen=True, slots=True)
class LoopAnswer:
    """New tokens, number of verify steps, and number of accepted drafts."""

    token_ids: list[int]
    num_steps: int
    num_accepted: int


@torch.inference_mode()
def dflash_loop(
    target: PreTrainedModel, drafter: LoopDrafter, prompt: list[int], max_tokens: int
) -> LoopAnswer:
    """Decode exactly `max_tokens` tokens greedily after `prompt`, ignoring end-of-sequence tokens."""
    target_cache, drafter_cache = DynamicCache(), DynamicCache()
    tokens, end = list(prompt), len(prompt) + max_tokens
    num_steps = num_accepted = 0
    states = _forward(target, tokens, target_cache, logits_to_keep=1)
    tokens.append(int(states.logits[0, -1].argmax()))
    taps = drafter.taps(states.hidden_states)
    while len(tokens) < end:
        num_drafts = min(drafter.config.max_drafts, end - len(tokens) - 1)
        drafts: list[int] = []
        if num_drafts:
            drafts = drafter.drafts(taps, tokens[-1], num_drafts, drafter_cache)
        states = _forward(target, [tokens[-1], *drafts], target_cache)
        chosen = states.logits[0].argmax(-1).tolist()
        accepted = next((i for i, draft in enumerate(drafts) if draft != chosen[i]), num_drafts)
        tokens += chosen[: accepted + 1]
        taps = drafter.taps(states.hidden_states)[:, : accepted + 1]
        _drop_last(target_cache, num_drafts - accepted)
        num_steps, num_accepted = num_steps + 1, num_accepted + accepted
    return LoopAnswer(tokens[len(prompt) :], num_steps, num_accepted)


def _forward(target: PreTrainedModel, token_ids: list[int], cache: DynamicCache, logits_to_keep: int = 0):
    return target(
        input_ids=torch.tensor([token_ids], device=target.device),
        past_key_values=cache,
        use_cache=True,
        output_hidden_states=True,
        logits_to_keep=logits_to_keep,
    )


def _drop_last(cache: DynamicCache, count: int) -> None:
    if count:
        cache.crop(-count)


class LoopDrafter(nn.Module):
    """A drafter made of transformers' Qwen3 modules.

    Args:
        folder: checkpoint in z-lab's or Speculators' format.
        target: provides embedding, head, dtype and device.

    Raises:
        ConfigError: the drafter has parts that these modules do not support.
    """

    def __init__(self, folder: Path, target: PreTrainedModel) -> None:
        super().__init__()
        self.config = config = DrafterConfig.load(folder)
        if beyond := _beyond_qwen3(config):
            raise ConfigError(
                f"{config.file}: the plain loop has no {beyond}. Compare with another contender.",
                param="speculative_config.model",
            )
        backbone = _qwen3_config(config)
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.fc = nn.Linear(hidden * config.num_taps, hidden, bias=False)
        self.hidden_norm, self.norm = Qwen3RMSNorm(hidden, eps), Qwen3RMSNorm(hidden, eps)
        self.layers = nn.ModuleList(Qwen3DecoderLayer(backbone, i) for i in range(config.num_layers))
        self._rope = Qwen3RotaryEmbedding(_qwen3_config(config, config.rope.rotary_dim))
        files = TensorFolder(folder)
        names = [*self.state_dict(), *(name for name in OPTIONAL if name in files.shapes)]
        weights = {name: _cast(files.get(name), target) for name in names}
        own = {name: weights.pop(name, None) for name in OPTIONAL}
        self.load_state_dict(weights, assign=True)  # rotary frequencies stay fp32
        self._selector = None if config.selector is None else _Selector.read(files, config.selector, target)
        self._embedding_VH = _or(own["embed_tokens.weight"], target.get_input_embeddings())
        self._head_VH = _or(own["lm_head.weight"], target.get_output_embeddings())
        scale = config.input_embedding_scale
        if scale is None:  # the target's own scale
            scale = getattr(target.get_input_embeddings(), "scalar_embed_scale", 1.0)
            scale = float(torch.tensor(scale, dtype=target.dtype))
        self._embed_scale = scale
        self._d2t_V = own["d2t"]
        self._mask_H = _cast(_mask_embedding(folder), target) if config.mask_embedding else None

    def taps(self, hidden_states: tuple[Tensor, ...]) -> Tensor:
        """Return the taps [1, T, m * H] of transformers' `hidden_states`, whose entry 0 is the embedding."""
        return torch.cat([hidden_states[i + 1] for i in self.config.target_layer_ids], dim=-1)

    def drafts(self, taps: Tensor, anchor: int, num_drafts: int, cache: DynamicCache) -> list[int]:
        """Return the most likely token of each slot after `anchor`; a selector also uses the previous token.

        Args:
            taps: [1, T, m * H] of the tokens before the anchor that are not in `cache` yet; they are added to
                it.
        """
        y_XH = self.hidden(taps, anchor, num_drafts, cache)
        logits_XV = self.logits(y_XH)
        if self._selector is None:
            return logits_XV.argmax(-1).tolist()
        return self._selector.path(y_XH, logits_XV, anchor)

    def hidden(self, taps: Tensor, anchor: int, num_drafts: int, cache: DynamicCache) -> Tensor:
        """Return the head's input [num_drafts, H] for the slots after `anchor`; see `drafts`."""
        c = self.hidden_norm(self.fc(taps))
        x = self._inputs(anchor, num_drafts)
        begin = cache.get_seq_length()
        context, end = begin + c.shape[1], begin + c.shape[1] + x.shape[1]
        rotation = self._rope(x, torch.arange(begin, end, device=x.device)[None])
        for layer, kind in zip(self.layers, self.config.layers, strict=True):
            assert isinstance(layer, Qwen3DecoderLayer)
            x = _run_layer(layer, x, c, rotation, cache, _mask(kind, context, end, x.device))
        _drop_last(cache, num_drafts + 1)
        return self.norm(x)[0, 1:]

    def logits_after(self, y_XH: Tensor, before_X: Tensor, noise_XV: Tensor | None = None) -> Tensor:
        """Return the logits [X, V] of slots whose previous tokens are `before_X`.

        Args:
            noise_XV: added to the logits to choose a selector's candidates; all others get -inf. Without it
                the selector scores all tokens.
        """
        logits_XV = self.logits(y_XH)
        if self._selector is None:
            return logits_XV
        scores_XV = self._selector.scores(y_XH, logits_XV, before_X)
        if noise_XV is None:
            return scores_XV
        tokens_XC = (logits_XV + noise_XV).topk(self._selector.top_k, dim=-1).indices
        none_XV = torch.full_like(scores_XV, float("-inf"))
        return none_XV.scatter_(1, tokens_XC, scores_XV.gather(1, tokens_XC))

    def _inputs(self, anchor: int, num_drafts: int) -> Tensor:
        """Return the inputs [1, S, H]: the anchor's embedding, then the mask's."""
        device = self._embedding_VH.device
        anchor_H = functional.embedding(torch.tensor(anchor, device=device), self._embedding_VH)
        mask_H = self._mask_H
        if mask_H is None:
            mask_H = self._embedding_VH[self.config.mask_token_id]
        rows = torch.stack((anchor_H, *[mask_H] * num_drafts))[None]
        return rows * self._embed_scale

    def logits(self, y: Tensor) -> Tensor:
        """Return logits [.., V] in the target's vocabulary."""
        z = functional.linear(y, self._head_VH) * self.config.output_multiplier
        if (cap := self.config.logit_softcap) is not None:
            z = cap * torch.tanh(z / cap)
        if not self.config.maps_vocabulary:
            return z
        assert self._d2t_V is not None, "a drafter with its own vocabulary has d2t"
        full = z.new_full((len(z), self.config.vocab_size), float("-inf"))
        return full.index_copy_(1, torch.arange(z.shape[1], device=z.device) + self._d2t_V, z)


@dataclass(frozen=True, slots=True)
class _Selector:
    """DFlash2's selector: chooses among a slot's top tokens given the previous token."""

    hidden_EH: Tensor
    predecessors_VE: Tensor
    successors_VE: Tensor
    top_k: int

    @classmethod
    def read(cls, files: TensorFolder, size: SelectorSize, target: PreTrainedModel) -> _Selector:
        names = ("hidden_projection.weight", "predecessor_codebook", "successor_codebook")
        hidden, before, behind = (_cast(files.get(f"candidate_selector.{name}"), target) for name in names)
        return cls(hidden, before, behind, size.top_k)

    def path(self, y_XH: Tensor, logits_XV: Tensor, anchor: int) -> list[int]:
        before, drafts = anchor, list[int]()
        gates_XE = functional.linear(y_XH, self.hidden_EH)
        for gate_E, (values_C, tokens_C) in zip(
            gates_XE, zip(*logits_XV.topk(self.top_k, dim=-1), strict=True), strict=True
        ):
            scores_C = values_C + self.successors_VE[tokens_C] @ (self.predecessors_VE[before] * gate_E)
            before = int(tokens_C[scores_C.argmax()])
            drafts.append(before)
        return drafts

    def scores(self, y_XH: Tensor, logits_XV: Tensor, before_X: Tensor) -> Tensor:
        """Return the scores [X, V] of all tokens after `before_X`."""
        gates_XE = functional.linear(y_XH, self.hidden_EH)
        return logits_XV + (self.predecessors_VE[before_X] * gates_XE) @ self.successors_VE.T


def _beyond_qwen3(config: DrafterConfig) -> str | None:
    """Return a part of the drafter that transformers' Qwen3 lacks, or None."""
    has = {
        "convolutions": config.convolutions is not None,
        "attention sinks": config.attention_sinks,
        "scaled values": config.attention_value_scale != 1.0,
        "interleaved rotary pairs": config.rope.interleaved,
        "tensors by transformers' names": config.layout == "assistant",
        "DSpark's heads": config.samples_anchor or config.markov is not None,
    }
    return next((name for name, is_there in has.items() if is_there), None)


def _run_layer(
    layer: Qwen3DecoderLayer,
    x: Tensor,
    c: Tensor,
    rotation: tuple[Tensor, Tensor],
    cache: DynamicCache,
    mask: Tensor | None,
) -> Tensor:
    """Run a Qwen3 layer: queries of rows x [1, S, H], keys also of new context rows c [1, T, H]."""
    attention, (cos, sin) = layer.self_attn, rotation
    heads = (-1, attention.head_dim)
    u = layer.input_layernorm(x)
    rows = torch.cat((c, u), dim=1)
    q = attention.q_norm(attention.q_proj(u).unflatten(-1, heads)).transpose(1, 2)
    k = attention.k_norm(attention.k_proj(rows).unflatten(-1, heads)).transpose(1, 2)
    v = attention.v_proj(rows).unflatten(-1, heads).transpose(1, 2)
    q = _rotate(q, cos[:, -u.shape[1] :], sin[:, -u.shape[1] :])
    k, v = cache.update(_rotate(k, cos, sin), v, attention.layer_idx)
    attended, _ = sdpa_attention_forward(attention, q, k, v, mask, scaling=attention.scaling, is_causal=False)
    x = x + attention.o_proj(attended.flatten(2))
    return x + layer.mlp(layer.post_attention_layernorm(x))


def _rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    rotary_dim = cos.shape[-1]
    if rotary_dim < heads.shape[-1]:
        return torch.cat((_rotate(heads[..., :rotary_dim], cos, sin), heads[..., rotary_dim:]), dim=-1)
    return heads * cos[:, None] + rotate_half(heads) * sin[:, None]


def _mask(kind: DraftLayer, context: int, end: int, device: torch.device) -> Tensor | None:
    """Return the mask [1, 1, S, end], True where a row sees a key; None if it sees all."""
    if not kind.causal and kind.window is None:
        return None
    rows, keys = torch.arange(context, end, device=device)[:, None], torch.arange(end, device=device)
    seen = keys <= rows if kind.causal else torch.ones_like(keys <= rows)
    if kind.window is not None:
        seen = seen & ((rows - keys).abs() < kind.window)
    return seen[None, None]


def _qwen3_config(config: DrafterConfig, rotary_dim: int = 0) -> Qwen3Config:
    """Return the configuration for layers, or for a rotary embedding of `rotary_dim` dimensions (0: all)."""
    left = ("max_position_embeddings", *(["partial_rotary_factor"] if rotary_dim else []))
    rope = {name: value for name, value in config.rope.scaling.items() if name not in left}
    return Qwen3Config(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads,
        num_key_value_heads=config.num_kv_heads,
        head_dim=rotary_dim or config.head_dim,
        rms_norm_eps=config.rms_norm_eps,
        attention_bias=config.attention_bias,
        max_position_embeddings=config.rope.scaling.get("max_position_embeddings") or 32768,
        rope_parameters={**rope, "rope_type": config.rope.kind, "rope_theta": config.rope.theta},
    )


def _cast(tensor: Tensor, target: PreTrainedModel) -> Tensor:
    """Move to the target's device; floating-point tensors also get its dtype."""
    return tensor.to(target.device, target.dtype if tensor.is_floating_point() else None)


def _or(own: Tensor | None, lender: nn.Module | None) -> Tensor:
    """Return the drafter's own matrix, or the target's."""
    lent = own if own is not None or lender is None else lender.weight
    assert isinstance(lent, Tensor), "a causal language model has an embedding and a head"
    return lent


def _mask_embedding(folder: Path) -> Tensor:
    found = torch.load(folder / "mask_embedding.pt", map_location="cpu", weights_only=True)
    return (next(iter(found.values())) if isinstance(found, dict) else found).reshape(-1)
