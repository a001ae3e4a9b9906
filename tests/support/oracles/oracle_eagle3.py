"""A short, unbatched EAGLE-3 from the published code: the oracle of the tests.

It uses nothing of the product: dense tensors, one request, no cache, its own reading of the raw config.json.
Positions are the published ones: the row of (token i + 1, feature of i) is at i. Slow and simple.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch


@dataclass
class Eagle3Oracle:
    """A drafter: raw config, raw tensors by their names in the file, and the target's embedding and head."""

    config: dict
    tensors: dict
    embedding: torch.Tensor
    head: torch.Tensor

    @property
    def block(self) -> dict:
        return self.config.get("transformer_layer_config", self.config)

    def tap_indices(self, num_layers: int) -> list[int]:
        """Indices into transformers' `hidden_states`, whose entry 0 is the embedding."""
        inside = (self.config.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
        if inside:  # SGLang's: the output of block i
            return [i + 1 for i in inside]
        beside = self.config.get("eagle_aux_hidden_state_layer_ids")
        return list(beside or (2, num_layers // 2, num_layers - 3))  # vLLM's: what enters block i

    def chain(self, taps: torch.Tensor, tokens: list[int], num: int, choose) -> tuple[list[int], list]:
        """Drafts after `tokens` (n + 1), given taps [n, m, H] of all but the last; and each one's logits.

        Args:
            choose: (logits [V], absolute position) -> token.
        """
        assert len(taps) == len(tokens) - 1
        flat = taps.flatten(1)
        if self.config.get("norm_before_fc"):
            flat = self._norm(flat, "input_norm.weight")
        hidden, ids = flat @ self._tensor("fc.weight").T, list(tokens[1:])
        drafts, logits = [], []
        for _ in range(num):
            x = self._layer(ids, hidden)
            logits.append(self._logits(self._norm(x[-1:], "norm.weight"))[0])
            drafts.append(choose(logits[-1], len(tokens) + len(drafts)))
            hidden, ids = torch.cat((hidden, x[-1:])), [*ids, drafts[-1]]
        return drafts, logits

    def _tensor(self, name: str) -> torch.Tensor:
        for at in ("", "model."):
            for each in (name, name.replace("layers.0.", "midlayer.")):
                if at + each in self.tensors:
                    return self.tensors[at + each].to(self.embedding.dtype)
        raise KeyError(name)

    def _layer(self, ids: list[int], hidden: torch.Tensor) -> torch.Tensor:
        """Residual after the layer [T, H] of rows (token, hidden)."""
        rows = self.tensors.get("embed_tokens.weight", self.embedding).to(hidden.dtype)
        token = self._norm(rows[ids], "layers.0.input_layernorm.weight")
        normed = self._norm(hidden, "layers.0.hidden_norm.weight")
        residual = normed if self.config.get("norm_before_residual") else hidden
        x = residual + self._attention(torch.cat((token, normed), dim=-1))
        u = self._norm(x, "layers.0.post_attention_layernorm.weight")
        gate, up = (u @ self._tensor(f"layers.0.mlp.{n}_proj.weight").T for n in ("gate", "up"))
        return x + (gate * torch.sigmoid(gate) * up) @ self._tensor("layers.0.mlp.down_proj.weight").T

    def _attention(self, both: torch.Tensor) -> torch.Tensor:
        raw, at = self.block, "layers.0.self_attn"
        heads, kv_heads, dim = (raw[k] for k in ("num_attention_heads", "num_key_value_heads", "head_dim"))
        q, k, v = (both @ self._tensor(f"{at}.{n}_proj.weight").T + self._bias(n) for n in "qkv")
        hidden = torch.full((len(both), len(both)), -math.inf, dtype=both.dtype).triu(1)
        out = []
        for h in range(heads):
            g = h // (heads // kv_heads)
            qh, kh, vh = (x[:, i * dim : (i + 1) * dim] for x, i in ((q, h), (k, g), (v, g)))
            if raw.get("model_type") == "qwen3":
                qh, kh = self._norm(qh, f"{at}.q_norm.weight"), self._norm(kh, f"{at}.k_norm.weight")
            scores = self._rope(qh) @ self._rope(kh).T / math.sqrt(dim) + hidden
            out.append(scores.softmax(-1) @ vh)
        return torch.cat(out, dim=-1) @ self._tensor(f"{at}.o_proj.weight").T + self._bias("o")

    def _bias(self, name: str) -> torch.Tensor:
        if not self.block.get("attention_bias"):
            return torch.zeros((), dtype=self.embedding.dtype)
        return self._tensor(f"layers.0.self_attn.{name}_proj.bias")

    def _rope(self, x: torch.Tensor) -> torch.Tensor:
        dim, theta = x.shape[-1], self.block.get("rope_theta", 10000.0)
        out = x.clone()
        for i in range(dim // 2):
            angle = torch.arange(len(x)).double() * theta ** (-2 * i / dim)
            cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
            a, b = x[:, i], x[:, i + dim // 2]
            out[:, i], out[:, i + dim // 2] = a * cos - b * sin, b * cos + a * sin
        return out

    def _norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        eps = self.block.get("rms_norm_eps", 1e-6)
        return x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps) * self._tensor(name)

    def _logits(self, y: torch.Tensor) -> torch.Tensor:
        head = self.tensors.get("lm_head.weight", self.head).to(y.dtype)
        z = y @ head.T
        if "d2t" not in self.tensors:
            return z
        full = torch.full((len(z), len(self.embedding)), -math.inf, dtype=z.dtype)
        full[:, torch.arange(z.shape[1]) + self.tensors["d2t"]] = z
        return full


@torch.no_grad()
def chains(target, oracle: Eagle3Oracle, tokens: list[int], anchors: list[int], num: int, choose) -> dict:
    """Drafts and logits of a chain after each of these positions of a sequence, by position."""
    out = target(torch.tensor([tokens]), output_hidden_states=True, use_cache=False)
    indices = oracle.tap_indices(target.config.num_hidden_layers)
    taps = torch.stack([out.hidden_states[i][0] for i in indices], dim=1).to(oracle.embedding.dtype)
    return {n: oracle.chain(taps[:n], tokens[: n + 1], num, choose) for n in anchors}
