"""A short, unbatched DFlash from the published mathematics: the oracle of the tests.

It uses nothing of the product: dense tensors, one request, loops where a formula has an index, its own
reading of the raw config.json. Slow and plain on purpose.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from transformers import Qwen3Config
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from support.checkpoints.drafters import head_dim_of, kv_heads_of

MASK32 = 0xFFFFFFFF


@dataclass
class Oracle:
    """A drafter: raw config, raw tensors, and the target's embedding and head [V, H]."""

    config: dict
    tensors: dict
    embedding: torch.Tensor
    head: torch.Tensor
    mask_embedding: torch.Tensor | None = None
    _known: dict[tuple[int, int, int], tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)

    @property
    def is_speculators(self) -> bool:
        return "speculators_model_type" in self.config

    @property
    def backbone(self) -> dict:
        return self.config["transformer_layer_config"] if self.is_speculators else self.config

    @property
    def dflash(self) -> dict:
        return self.config.get("dflash_config", self.config)

    @property
    def is_assistant(self) -> bool:
        return self.config.get("architectures") == ["MuseGlimmerAssistantModel"]

    @property
    def is_dspark(self) -> bool:
        kinds = {"Qwen3DSparkModel", "Gemma4DSparkModel", "DSparkDraftModel"}
        return self.config.get("speculators_model_type") == "dspark" or not kinds.isdisjoint(
            self.config.get("architectures") or ()
        )

    @property
    def is_gemma4(self) -> bool:
        return self.config.get("architectures") == ["Gemma4DSparkModel"]

    @property
    def samples_anchor(self) -> bool:
        """Whether the anchor's row predicts the first token, and so on; else the first mask's does."""
        return self.config.get("sample_from_anchor", self.is_dspark)

    def tap_indices(self) -> list[int]:
        """Indices into transformers' `hidden_states`, whose entry 0 is the embedding."""
        if self.is_assistant:
            return [i + 1 for i in self.config["target_layer_ids"]]
        if self.is_speculators:
            return list(self.config["aux_hidden_state_layer_ids"])
        return [i + 1 for i in self.dflash["target_layer_ids"]]

    def attention_of(self, layer: int) -> tuple[bool, int | None]:
        """(causal within the block, window)."""
        raw, types = self.backbone, self.backbone.get("layer_types")
        sliding = types is not None and types[layer] == "sliding_attention"
        if self.is_assistant:
            return False, raw["sliding_window"] if sliding else None
        if self.is_speculators:
            second = self.config["speculators_model_type"] == "dflash2"
            causal = sliding and not self.config.get("sliding_window_non_causal", second)
            return causal, raw["sliding_window"] if sliding else None
        stated = raw.get("is_causal")
        if stated is None:
            stated = self.dflash.get("causal", self.dflash.get("causal_head"))
        if self.dflash.get("use_swa"):
            return bool(stated), self.dflash["swa_window_size"]
        return (sliding if stated is None else stated), (raw["sliding_window"] if sliding else None)

    def context(self, taps: torch.Tensor) -> torch.Tensor:
        """Hidden states [T, m, H] -> C [T, H]."""
        fc, norm = "fc.weight", "hidden_norm.weight"
        if self.is_assistant:
            fc, norm = "encoder.fc.weight", "encoder.output_norm_enc.weight"
        return self._norm(taps.flatten(1) @ self.tensors[fc].T, norm)

    def logits(self, taps: torch.Tensor, anchor: int, num_masks: int) -> torch.Tensor:
        """Logits [num_masks, V] of the slots after an anchor at T, given taps of positions 0..T-1."""
        return self._head(self.hidden(taps, anchor, num_masks))

    def drafts(
        self, taps: torch.Tensor, anchor: int, num_masks: int, choose, edit=None, rank=None
    ) -> list[int]:
        """The slots' tokens, each by `choose(scores [V], slot)`; with a selector one after the other, out of
        the slot's best tokens by `rank(logits [V], slot)`, by the token before; the likeliest if absent.
        A Markov head's bias is for the best 64 by `rank`; without it for all.
        `edit(logits [V], slot)` comes first."""
        y = self.hidden(taps, anchor, num_masks)
        z, second = self._head(y), "candidate_selector"
        z = z if edit is None else torch.stack([edit(z[k], k) for k in range(num_masks)])
        if "markov_head.markov_w1.weight" in self.tensors:
            return self._markov_path(z, anchor, choose, rank)
        if f"{second}.predecessor_codebook" not in self.tensors:
            return [choose(z[k], k) for k in range(num_masks)]
        a, g = (self.tensors[f"{second}.{kind}_codebook"] for kind in ("predecessor", "successor"))
        h = y @ self.tensors[f"{second}.hidden_projection.weight"].T
        tokens = [anchor]
        for k in range(num_masks):
            scores = torch.full_like(z[k], -math.inf)
            ranks = z[k] if rank is None else rank(z[k], k)
            for b in ranks.argsort(descending=True)[: self.dflash["selector_top_k"]].tolist():
                scores[b] = z[k, b] + (a[tokens[-1]] * h[k] * g[b]).sum()
            tokens.append(choose(scores, k))
        return tokens[1:]

    def _markov_path(self, z: torch.Tensor, anchor: int, choose, rank) -> list[int]:
        w1, w2 = (self.tensors[f"markov_head.markov_{name}.weight"] for name in ("w1", "w2"))
        ids = torch.arange(len(w2)) + self.tensors.get("d2t", 0)
        tokens = [anchor]
        for k in range(len(z)):
            scores = z[k].clone()
            scores[ids] += w2 @ w1[tokens[-1]]
            if rank is not None:
                scores[rank(z[k], k).argsort(descending=True)[64:]] = -math.inf
            tokens.append(choose(scores, k))
        return tokens[1:]

    def confidences(self, taps: torch.Tensor, anchor: int, drafts: list[int]) -> list[float] | None:
        """The chance that each draft is accepted, by the confidence head if there is one."""
        if "confidence_head.proj.weight" not in self.tensors:
            return None
        y, found = self.hidden(taps, anchor, len(drafts)), []
        weight, bias = (self.tensors[f"confidence_head.proj.{name}"] for name in ("weight", "bias"))
        for k, before in enumerate([anchor, *drafts[:-1]]):
            features = y[k]
            if weight.shape[1] > len(features):
                features = torch.cat((features, self.tensors["markov_head.markov_w1.weight"][before]))
            found.append(float(torch.sigmoid((weight[0] * features).sum() + bias[0])))
        return found

    def hidden(self, taps: torch.Tensor, anchor: int, num_masks: int) -> torch.Tensor:
        """Normed hidden states [num_masks, D] of the same slots; of DSpark's block one is the anchor's.

        Kept for later calls with the same taps, which are kept, too.
        """
        key = (id(taps), anchor, num_masks)
        if key not in self._known:
            self._known[key] = (taps, self._hidden(taps, anchor, num_masks))
        return self._known[key][1]

    def _hidden(self, taps: torch.Tensor, anchor: int, num_masks: int) -> torch.Tensor:
        c = self.context(taps)
        block = [anchor] + [self.dflash["mask_token_id"]] * (num_masks - self.samples_anchor)
        rows = self.tensors.get("embed_tokens.weight", self.embedding)
        x = torch.stack([self._embed(rows, token, slot) for slot, token in enumerate(block)])
        x = x * self.dflash.get("input_embedding_scale", 1.0)
        for i in range(self.backbone["num_hidden_layers"]):
            at = f"layers.{i}"
            u = self._norm(x, f"{at}.input_layernorm.weight")
            if self.is_gemma4:
                x = self._gemma4_layer(at, x, u, c, i)
                continue
            x = x + self._around(
                f"{at}.attention_conv", u, lambda v, at=at, i=i: self._attention(at, v, c, i)
            )
            u = self._norm(x, f"{at}.post_attention_layernorm.weight")
            x = x + self._around(f"{at}.mlp_conv", u, lambda v, at=at: self._mlp(at, v))
        return self._norm(x, "norm.weight")[0 if self.samples_anchor else 1 :]

    def _gemma4_layer(
        self, at: str, x: torch.Tensor, u: torch.Tensor, c: torch.Tensor, layer: int
    ) -> torch.Tensor:
        """DeepSpec's Gemma4DSparkDecoderLayer: what each part adds is normed, and the sum is scaled."""
        x = x + self._norm(self._attention(at, u, c, layer), f"{at}.post_attention_layernorm.weight")
        u = self._norm(x, f"{at}.pre_feedforward_layernorm.weight")
        x = x + self._norm(self._mlp(at, u), f"{at}.post_feedforward_layernorm.weight")
        return x * self.tensors[f"{at}.layer_scalar"]

    def _mlp(self, at: str, u: torch.Tensor) -> torch.Tensor:
        gate, up = (u @ self.tensors[f"{at}.mlp.{n}_proj.weight"].T for n in ("gate", "up"))
        if self.is_gemma4:
            wave = torch.tanh(math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3))
            gate = gate * (1 + wave) / 2
        else:
            gate = gate * torch.sigmoid(gate)
        return (gate * up) @ self.tensors[f"{at}.mlp.down_proj.weight"].T

    def _around(self, name: str, u: torch.Tensor, sublayer) -> torch.Tensor:
        """The sublayer, between two convolutions if there are any; both get their kernels from u."""
        if f"{name}.base_kernel" not in self.tensors:
            return sublayer(u)
        base = self.tensors[f"{name}.base_kernel"]
        delta = (u @ self.tensors[f"{name}.kernel_projection.weight"].T).view(len(u), *base.shape[:2], -1)
        return self._convolve(sublayer(self._convolve(u, base[0], delta[:, 0])), base[1], delta[:, 1])

    def _convolve(self, v: torch.Tensor, base: torch.Tensor, delta: torch.Tensor) -> torch.Tensor:
        group_of = torch.arange(v.shape[1]) // (v.shape[1] // delta.shape[2])
        out = torch.zeros_like(v)
        for t in range(len(v)):
            for o in range(min(len(base), t + 1)):
                out[t] += (base[o] + delta[t, o, group_of]) * v[t - o]
        return out

    def _embed(self, rows: torch.Tensor, token: int, slot: int) -> torch.Tensor:
        return self.mask_embedding if slot > 0 and self.mask_embedding is not None else rows[token]

    def _head(self, y: torch.Tensor) -> torch.Tensor:
        z = y @ self.tensors.get("lm_head.weight", self.head).T
        z = z * self.dflash.get("output_multiplier", 1.0)
        cap = self.dflash.get("final_logit_softcapping")
        z = cap * torch.tanh(z / cap) if cap else z
        if "d2t" not in self.tensors:
            return z
        full = torch.full((len(z), len(self.embedding)), -math.inf)
        for i, offset in enumerate(self.tensors["d2t"].tolist()):
            full[:, i + offset] = z[:, i]
        return full

    def _attention(self, at: str, u: torch.Tensor, c: torch.Tensor, layer: int) -> torch.Tensor:
        raw = self.backbone
        heads, kv_heads, dim = raw["num_attention_heads"], kv_heads_of(raw), head_dim_of(raw)
        scale = 1.0 if self.is_gemma4 else 1 / math.sqrt(dim)
        causal, window = self.attention_of(layer)
        both, anchor_at = torch.cat((c, u)), len(c)
        named = {n: "k" if n == "v" and raw.get("attention_k_eq_v") else n for n in "qkvo"}
        w = {n: self.tensors[f"{at}.self_attn.{name}_proj.weight"] for n, name in named.items()}
        bias = {n: self.tensors.get(f"{at}.self_attn.{n}_proj.bias", 0.0) for n in "qkvo"}
        q, k, v = ((u if n == "q" else both) @ w[n].T + bias[n] for n in "qkv")
        v = v * self.dflash.get("attention_value_scale", 1.0)
        if self.is_gemma4:
            v = self._unit(v.unflatten(-1, (kv_heads, dim))).flatten(1)
        sinks = self.tensors.get(f"{at}.self_attn.attention_sink_bias")
        p, t = torch.arange(anchor_at, len(both))[:, None], torch.arange(len(both))
        hidden = ((t > p) & causal) | ((p - t).abs() >= (len(both) if window is None else window))
        out = []
        for h in range(heads):
            g = h // (heads // kv_heads)
            qh = self._norm(q[:, h * dim : (h + 1) * dim], f"{at}.self_attn.q_norm.weight")
            kh = self._norm(k[:, g * dim : (g + 1) * dim], f"{at}.self_attn.k_norm.weight")
            qh, kh = self._rope(qh, anchor_at), self._rope(kh, 0)
            scores = qh @ kh.T * scale
            scores[hidden] = -math.inf
            total = scores.exp().sum(-1, keepdim=True) + (0.0 if sinks is None else sinks[h].exp())
            out.append(scores.exp() / total @ v[:, g * dim : (g + 1) * dim])
        return torch.cat(out, dim=-1) @ w["o"].T + bias["o"]

    def _norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return self._unit(x) * self.tensors[name]

    def _unit(self, x: torch.Tensor) -> torch.Tensor:
        eps = self.backbone.get("rms_norm_eps", 1e-6)
        return x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps)

    def _rope(self, x: torch.Tensor, first: int) -> torch.Tensor:
        dim = int(x.shape[-1] * self.backbone.get("partial_rotary_factor", 1))
        out, interleaved = x.clone(), self.backbone.get("is_neox_style") is False
        frequencies, scale = self._frequencies(dim)
        for i in range(dim // 2):
            angle = torch.arange(first, first + len(x)).double() * frequencies[i]
            cos, sin = (scale * f(angle).to(x.dtype) for f in (torch.cos, torch.sin))
            one, other = (2 * i, 2 * i + 1) if interleaved else (i, i + dim // 2)
            a, b = x[:, one], x[:, other]
            out[:, one] = a * cos - b * sin
            out[:, other] = b * cos + a * sin
        return out

    def _frequencies(self, dim: int) -> tuple[torch.Tensor, float]:
        """Radians per position of each pair, and the factor on cosine and sine; transformers scales them."""
        raw = self.backbone
        rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
        rope = rope.get("full_attention", rope)
        theta = rope.get("rope_theta") or raw["rope_theta"]
        kind = rope.get("rope_type", rope.get("type", "default"))
        if kind == "default":
            return theta ** (-torch.arange(0, dim, 2).double() / dim), 1.0
        stated = {**rope, "rope_type": kind, "rope_theta": theta}
        return ROPE_INIT_FUNCTIONS[kind](Qwen3Config(head_dim=dim, rope_parameters=stated))


@dataclass
class Step:
    """One verified block: its anchor's position, the drafts, and the number of accepted ones."""

    position: int
    drafts: list[int]
    accepted: int


@torch.no_grad()
def decode(target, oracle: Oracle, prompt: list[int], num_tokens: int, block: int, choose=None):
    """DFlash decoding of one request; `target` is a transformers causal LM, run over all tokens in every
    step.

    Args:
        choose: (logits [V], absolute position) -> token; greedy if absent.

    Returns:
        The `num_tokens` new tokens, and the steps.
    """
    choose = choose or (lambda logits, _: int(logits.argmax()))
    tokens, steps = list(prompt), []
    taps, logits = _forward(target, oracle, tokens)
    tokens.append(choose(logits[-1], len(tokens)))
    while len(tokens) < len(prompt) + num_tokens:
        n = len(tokens) - 1
        k = min(block - 1, len(prompt) + num_tokens - len(tokens) - 1)
        drafts = []
        if k > 0:
            drafts = oracle.drafts(taps[:n], tokens[n], k, lambda z, j: choose(z, n + 1 + j))  # noqa: B023
        taps, logits = _forward(target, oracle, tokens + drafts)
        chosen = [choose(logits[n + j], n + 1 + j) for j in range(k + 1)]
        accepted = 0
        while accepted < k and drafts[accepted] == chosen[accepted]:
            accepted += 1
        steps.append(Step(n, drafts, accepted))
        tokens += chosen[: accepted + 1]
    return tokens[len(prompt) :], steps


def _forward(target, oracle: Oracle, tokens: list[int]):
    out = target(torch.tensor([tokens]), output_hidden_states=True, use_cache=False)
    states = [out.hidden_states[i][0] for i in oracle.tap_indices()]
    return torch.stack(states, dim=1), out.logits[0]


def mix(x: Any) -> Any:
    """The noise hash's mixer, of Python's integers or an array of 64 bits."""
    x = x ^ x >> 16
    x = x * 0x21F0AAAD & MASK32
    x = x ^ x >> 15
    x = x * 0x735A2D97 & MASK32
    return x ^ x >> 15


def noise_bits(seed: int, position: int, token: Any) -> Any:
    """32 random bits of (seed, position, token); of one token, or an array of tokens."""
    low, high = seed & MASK32, seed >> 32 & MASK32
    a, b = (mix(mix(mix(low ^ chain) ^ high) ^ position) for chain in (0x243F6A88, 0x13198A2E))
    x = (mix(token) ^ a) * 0x21F0AAAD & MASK32
    x = (x ^ x >> 15 ^ b) * 0x735A2D97 & MASK32
    return x ^ x >> 15


def gumbel(seed: int, position: int, vocab_size: int) -> torch.Tensor:
    """Noise of all tokens at a position, fp64."""
    bits = noise_bits(seed, position, np.arange(vocab_size, dtype=np.uint64))
    return torch.from_numpy(-np.log(-np.log1p(-(bits + 0.5) / 2**32)))
