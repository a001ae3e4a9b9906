"""Parts that Qwen, Llama and Mistral share: the keys of config.json, the tensors' names, and the plain block.

x += o(attention(norm x));  x += down(silu(gate norm x) * up norm x)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import ClassVar, Literal, cast

from pydantic import AliasChoices, Field, field_validator

from .....drafter.compute.checkpoint.hf_config import Count, Depth, HfConfig, Json, wrong
from .....drafter.compute.layers.rope import RopeConfig
from ...model.attention import TargetAttention
from ...model.mlp_spec import GatedMLP
from ...model.model_spec import CheckpointDType, LayerSpec, ModelSpec, TensorRule


class PlainConfig(HfConfig):
    KINDS: ClassVar[tuple[str, ...]] = ("full_attention", "sliding_attention")  # of `layer_types`

    architectures: tuple[str, ...]
    hidden_size: Count
    intermediate_size: Count
    num_hidden_layers: Depth
    num_attention_heads: Count
    num_key_value_heads: Count | None = None
    head_dim: Count | None = None
    vocab_size: Count
    max_position_embeddings: Count
    rms_norm_eps: float = 1e-6
    hidden_act: Literal["silu"] = "silu"
    tie_word_embeddings: bool = False
    sliding_window: Count | None = None
    layer_types: tuple[str, ...] | None = None
    eos_token_id: int | tuple[int, ...] = ()
    checkpoint_dtype: str = Field("float32", validation_alias=AliasChoices("dtype", "torch_dtype"))

    @field_validator("layer_types")
    @classmethod
    def _check_kinds(cls, kinds: tuple[str, ...] | None) -> tuple[str, ...] | None:
        if set(kinds or ()) - set(cls.KINDS):
            raise ValueError(f"must be a list of {' and '.join(cls.KINDS)}")
        return kinds

    def dtype(self) -> CheckpointDType:
        name = self.checkpoint_dtype.removeprefix("torch.")
        return cast(CheckpointDType, name) if name in ("bfloat16", "float16") else "float32"

    def end_tokens(self) -> tuple[int, ...]:
        return self.eos_token_id if isinstance(self.eos_token_id, tuple) else (self.eos_token_id,)

    def kv_heads(self, file: str) -> int:
        heads = self.num_attention_heads
        kv_heads = self.num_key_value_heads or heads
        if heads % kv_heads:
            raise wrong(file, "num_key_value_heads", kv_heads, f"a divisor of num_attention_heads ({heads})")
        return kv_heads

    def head_size(self, file: str, default: int | None = None) -> int:
        size = self.head_dim or default or self.hidden_size // self.num_attention_heads
        if size % 2:
            raise wrong(file, "head_dim", size, "even")
        return size

    def plain_attention(self, file: str, rope: RopeConfig | None, size: int) -> TargetAttention:
        """Return attention with heads of `size`; families replace what differs."""
        return TargetAttention(
            num_heads=self.num_attention_heads,
            num_kv_heads=self.kv_heads(file),
            head_dim=size,
            rope=rope,
            scale=size**-0.5,
        )

    def types(self, file: str, default: tuple[str, ...]) -> tuple[str, ...]:
        kinds = self.layer_types or default
        if len(kinds) != self.num_hidden_layers:
            raise wrong(
                file,
                "layer_types",
                kinds,
                f"one entry for each of num_hidden_layers ({self.num_hidden_layers})",
            )
        return kinds

    def window_of(self, kind: str, file: str) -> int | None:
        if kind == "full_attention":
            return None
        if self.sliding_window is None:
            raise wrong(file, "sliding_window", None, "a positive integer, since layers slide")
        return self.sliding_window


def refuse_rope_scaling(raw: Json, file: str) -> None:
    """Refuse `rope_scaling`, for families with rotations by layer type that never used this key."""
    if scaling := raw.get("rope_scaling"):
        raise wrong(
            file, "rope_scaling", scaling, "absent: rope_parameters holds these settings by type of layers"
        )


_ATTENTION, _MLP = "layers.{layer}.self_attn.", "layers.{layer}.mlp."

TENSORS: Mapping[str, TensorRule] = {
    "embedding": TensorRule(name="embed_tokens.weight", axes=("vocab", "hidden")),
    "final_norm": TensorRule(name="norm.weight", axes=("hidden",)),
    "head": TensorRule(name="lm_head.weight", axes=("vocab", "hidden"), is_beside_body=True),
    "attention_norm": TensorRule(name="layers.{layer}.input_layernorm.weight", axes=("hidden",)),
    "mlp_norm": TensorRule(name="layers.{layer}.post_attention_layernorm.weight", axes=("hidden",)),
    "q": TensorRule(name=_ATTENTION + "q_proj.weight", axes=("q", "hidden")),
    "k": TensorRule(name=_ATTENTION + "k_proj.weight", axes=("kv", "hidden")),
    "v": TensorRule(name=_ATTENTION + "v_proj.weight", axes=("value", "hidden")),
    "o": TensorRule(name=_ATTENTION + "o_proj.weight", axes=("hidden", "attended")),
    "q_bias": TensorRule(name=_ATTENTION + "q_proj.bias", axes=("q",)),
    "k_bias": TensorRule(name=_ATTENTION + "k_proj.bias", axes=("kv",)),
    "v_bias": TensorRule(name=_ATTENTION + "v_proj.bias", axes=("value",)),
    "o_bias": TensorRule(name=_ATTENTION + "o_proj.bias", axes=("hidden",), first_rank=True),
    "attention_gate": TensorRule(name=_ATTENTION + "gate_proj.weight", axes=("q", "hidden")),
    "q_norm": TensorRule(name=_ATTENTION + "q_norm.weight", axes=("head",)),
    "k_norm": TensorRule(name=_ATTENTION + "k_norm.weight", axes=("head",)),
    "gate": TensorRule(name=_MLP + "gate_proj.weight", axes=("inner", "hidden")),
    "up": TensorRule(name=_MLP + "up_proj.weight", axes=("inner", "hidden")),
    "down": TensorRule(name=_MLP + "down_proj.weight", axes=("hidden", "inner")),
    "gate_bias": TensorRule(name=_MLP + "gate_proj.bias", axes=("inner",)),
    "up_bias": TensorRule(name=_MLP + "up_proj.bias", axes=("inner",)),
    "down_bias": TensorRule(name=_MLP + "down_proj.bias", axes=("hidden",), first_rank=True),
}


def read_plain(
    raw: Json,
    file: str,
    config: PlainConfig,
    *,
    head_dim: int | None = None,
    windows: tuple[int | None, ...] | None = None,
    qk_norm: bool = False,
    bias: bool = False,
    out_bias: bool = False,
    mlp_bias: bool = False,
) -> ModelSpec:
    """Return a model of plain blocks that differ only in their windows (None: none has one).

    `head_dim` is the default if config.json has none; None for hidden_size / num_attention_heads.
    """
    size = config.head_size(file, head_dim)
    attention = config.plain_attention(file, RopeConfig.read(raw, size, file), size)
    attention = replace(attention, qk_norm=qk_norm, bias=bias, out_bias=out_bias)
    mlp = GatedMLP(inner_size=config.intermediate_size, bias=mlp_bias)
    layers = [
        LayerSpec(mixer=replace(attention, window=window), mlp=mlp)
        for window in windows or (None,) * config.num_hidden_layers
    ]
    return model_of(config, tuple(layers), TENSORS)


def model_of(
    config: PlainConfig, layers: tuple[LayerSpec, ...], tensors: Mapping[str, TensorRule]
) -> ModelSpec:
    """Return a model without scales and caps beside its layers; families replace what differs."""
    return ModelSpec(
        architecture=config.architectures[0],
        hidden_size=config.hidden_size,
        vocab_size=config.vocab_size,
        layers=layers,
        rms_norm_eps=config.rms_norm_eps,
        tied_head=config.tie_word_embeddings,
        tensors=tensors,
        max_position_embeddings=config.max_position_embeddings,
        dtype=config.dtype(),
        eos_token_ids=config.end_tokens(),
    )


class QwenConfig(PlainConfig):
    """Keys of Qwen 2 and 3: if sliding is enabled, layers from `max_window_layers` on have a window."""

    use_sliding_window: bool = False
    max_window_layers: int | None = None

    def windows(self, file: str) -> tuple[int | None, ...]:
        count = self.num_hidden_layers
        if not self.use_sliding_window or self.sliding_window is None:
            return (None,) * count
        full = count if self.max_window_layers is None else self.max_window_layers
        derived = tuple("sliding_attention" if i >= full else "full_attention" for i in range(count))
        return tuple(self.window_of(kind, file) for kind in self.types(file, derived))
