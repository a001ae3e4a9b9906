"""The model families that are served, by what sets them apart.

All are the same pre-norm decoder (`model/decoder.py`): grouped-query attention, rotary positions, gated MLP.
A family says what its config.json leaves unsaid and which tensors it has. A new one of this kind is an entry.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """Hugging Face's rules for one architecture.

    Attributes:
        qk_norm: queries and keys are RMS-normed per head before rotation.
        mlp_bias: config.json may ask for biases in the MLP.
        sliding_window: config.json may give layers a window.
        head_dim: where config.json has none; None = hidden_size / num_attention_heads.
        rms_norm_eps: where config.json has none.
    """

    qk_norm: bool
    mlp_bias: bool
    sliding_window: bool
    head_dim: int | None
    rms_norm_eps: float = 1e-6


FAMILIES = {
    "Qwen3ForCausalLM": Family(qk_norm=True, mlp_bias=False, sliding_window=True, head_dim=128),
    "LlamaForCausalLM": Family(qk_norm=False, mlp_bias=True, sliding_window=False, head_dim=None),
}
