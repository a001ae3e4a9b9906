"""A short, unbatched DFlash of our own, straight from the published mathematics: the oracle of the tests.

It uses nothing of the product: dense tensors, one request, loops where a formula has an index, its own
reading of the raw config.json. Slow and plain on purpose.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

MASK32 = 0xFFFFFFFF


@dataclass
class Oracle:
    """A drafter: raw config, raw tensors, and the target's embedding and head [V, H]."""

    config: dict
    tensors: dict
    embedding: torch.Tensor
    head: torch.Tensor
    mask_embedding: torch.Tensor | None = None

    @property
    def is_speculators(self) -> bool:
        return "speculators_model_type" in self.config

    @property
    def backbone(self) -> dict:
        return self.config["transformer_layer_config"] if self.is_speculators else self.config

    @property
    def dflash(self) -> dict:
        return self.config if self.is_speculators else self.config["dflash_config"]

    def tap_indices(self) -> list[int]:
        """Indices into transformers' `hidden_states`, whose entry 0 is the embedding."""
        if self.is_speculators:
            return list(self.config["aux_hidden_state_layer_ids"])
        return [i + 1 for i in self.config["dflash_config"]["target_layer_ids"]]

    def attention_of(self, layer: int) -> tuple[bool, int | None]:
        """(causal within the block, window)."""
        raw, types = self.backbone, self.backbone.get("layer_types")
        sliding = types is not None and types[layer] == "sliding_attention"
        if self.is_speculators:
            causal = sliding and not self.config.get("sliding_window_non_causal", False)
            return causal, raw["sliding_window"] if sliding else None
        stated = raw.get("is_causal")
        if stated is None:
            stated = self.dflash.get("causal")
        if self.dflash.get("use_swa"):
            return bool(stated), self.dflash["swa_window_size"]
        return (sliding if stated is None else stated), (raw["sliding_window"] if sliding else None)

    def context(self, taps: torch.Tensor) -> torch.Tensor:
        """Hidden states [T, m, H] -> C [T, H]."""
        projected = taps.flatten(1) @ self.tensors["fc.weight"].T
        return self._norm(projected, "hidden_norm.weight")

    def logits(self, taps: torch.Tensor, anchor: int, num_masks: int) -> torch.Tensor:
        """Logits [num_masks, V] of the slots behind an anchor at T, given taps of positions 0..T-1."""
        c = self.context(taps)
        block = [anchor] + [self.dflash["mask_token_id"]] * num_masks
        rows = self.tensors.get("embed_tokens.weight", self.embedding)
        x = torch.stack([self._embed(rows, token, slot) for slot, token in enumerate(block)])
        x = x * self.dflash.get("input_embedding_scale", 1.0)
        for i in range(self.backbone["num_hidden_layers"]):
            at = f"layers.{i}"
            x = x + self._attention(at, self._norm(x, f"{at}.input_layernorm.weight"), c, i)
            u = self._norm(x, f"{at}.post_attention_layernorm.weight")
            gate, up = (u @ self.tensors[f"{at}.mlp.{n}_proj.weight"].T for n in ("gate", "up"))
            x = x + (gate * torch.sigmoid(gate) * up) @ self.tensors[f"{at}.mlp.down_proj.weight"].T
        return self._head(self._norm(x, "norm.weight")[1:])

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
        heads, kv_heads, dim = raw["num_attention_heads"], raw["num_key_value_heads"], raw["head_dim"]
        causal, window = self.attention_of(layer)
        both, anchor_at = torch.cat((c, u)), len(c)
        w = {n: self.tensors[f"{at}.self_attn.{n}_proj.weight"] for n in "qkvo"}
        q, k, v = ((u if n == "q" else both) @ w[n].T for n in "qkv")
        out = []
        for h in range(heads):
            g = h // (heads // kv_heads)
            qh = self._norm(q[:, h * dim : (h + 1) * dim], f"{at}.self_attn.q_norm.weight")
            kh = self._norm(k[:, g * dim : (g + 1) * dim], f"{at}.self_attn.k_norm.weight")
            qh, kh = self._rope(qh, anchor_at), self._rope(kh, 0)
            scores = qh @ kh.T / math.sqrt(dim)
            for row in range(len(u)):
                for key in range(len(both)):
                    p, t = anchor_at + row, key
                    if (causal and t > p) or (window is not None and abs(p - t) >= window):
                        scores[row, key] = -math.inf
            out.append(scores.softmax(-1) @ v[:, g * dim : (g + 1) * dim])
        return torch.cat(out, dim=-1) @ w["o"].T

    def _norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        eps = self.backbone.get("rms_norm_eps", 1e-6)
        return x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps) * self.tensors[name]

    def _rope(self, x: torch.Tensor, first: int) -> torch.Tensor:
        dim = int(x.shape[-1] * self.backbone.get("partial_rotary_factor", 1))
        theta = (self.backbone.get("rope_parameters") or self.backbone)["rope_theta"]
        out = x.clone()
        for i in range(dim // 2):
            angle = torch.arange(first, first + len(x)) * theta ** (-2 * i / dim)
            a, b = x[:, i], x[:, i + dim // 2]
            out[:, i] = a * angle.cos() - b * angle.sin()
            out[:, i + dim // 2] = b * angle.cos() + a * angle.sin()
        return out


@dataclass
class Step:
    """What one verified block was: its anchor's position, the drafts, and how many stood."""

    position: int
    drafts: list[int]
    accepted: int


@torch.no_grad()
def decode(target, oracle: Oracle, prompt: list[int], num_tokens: int, block: int, choose=None):
    """DFlash decoding of one request; `target` is a transformers causal LM, run anew over all tokens.

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
            guess = oracle.logits(taps[:n], tokens[n], k)
            drafts = [choose(guess[j], n + 1 + j) for j in range(k)]
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


def mix(x: int) -> int:
    """The noise hash's mixer, in Python integers."""
    x ^= x >> 16
    x = x * 0x21F0AAAD & MASK32
    x ^= x >> 15
    x = x * 0x735A2D97 & MASK32
    return x ^ x >> 15


def noise_bits(seed: int, position: int, token: int) -> int:
    """32 random bits of (seed, position, token)."""
    low, high = seed & MASK32, seed >> 32 & MASK32
    a, b = (mix(mix(mix(low ^ chain) ^ high) ^ position) for chain in (0x243F6A88, 0x13198A2E))
    x = (mix(token) ^ a) * 0x21F0AAAD & MASK32
    x = (x ^ x >> 15 ^ b) * 0x735A2D97 & MASK32
    return x ^ x >> 15


def gumbel(seed: int, position: int, vocab_size: int) -> torch.Tensor:
    """Noise of all tokens at a position, fp64."""
    u = [(noise_bits(seed, position, v) + 0.5) / 2**32 for v in range(vocab_size)]
    return torch.tensor([-math.log(-math.log1p(-x)) for x in u], dtype=torch.float64)
