"""What a target is, in data: the decoder runs any `ModelSpec`; a family is a reader of config.json into one.

Plain values, known before a weight is read. A family that needs what is not here yet (experts, latent caches,
recurrent states, caps) adds a field or a kind of mixer or MLP, and the decoder learns to run it.

    ModelSpec ─ layers ─▶ LayerSpec ┬ mixer: Attention
                                    └ mlp: GatedMLP
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from ....drafter.compute.backend import Feature, StackSpec
from ....drafter.compute.layers import Activation
from ....drafter.compute.rope import RopeConfig

CheckpointDType = Literal["float32", "bfloat16", "float16"]
# Dimensions of tensors. Ranks share out query heads, K/V heads, inner states and token ids, not the rest.
Axis = Literal["hidden", "q", "kv", "q_heads", "inner", "head", "vocab"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention:
    """Grouped-query attention over paged K/V.

    Attributes:
        head_dim: of queries, keys and values.
        scale: of scores.
        window: how many tokens back a row sees, itself included; None sees all.
        qk_norm: queries and keys are RMS-normed per head before rotation.
        bias, out_bias: of the projections to q, k and v; of the one behind attention.
        sinks: each query head has a logit without a value in its softmax.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope: RopeConfig
    scale: float
    window: int | None = None
    qk_norm: bool = False
    bias: bool = False
    out_bias: bool = False
    sinks: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class GatedMLP:
    """down(activation(gate x) * up x); `bias`: of all three."""

    inner_size: int
    activation: Activation = "silu"
    bias: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSpec:
    """One block: x += mixer(norm x), then x += mlp(norm x); `sandwich` norms what is added, too."""

    mixer: Attention
    mlp: GatedMLP
    sandwich: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorRule:
    """Where a part of the model is in a checkpoint, and how a rank takes it.

    Attributes:
        name: with {layer} for the layer's number; behind the checkpoint's own prefix (`weights.py`).
        axes: its dimensions: they say its shape, and which slice is a rank's.
        transform: of the rank's slice, at load; what it returns in fp32 stays fp32.
        first_rank: given to rank 0 alone, since the ranks' results are summed.
        beside_body: named beside the body (the head), not inside it.
    """

    name: str
    axes: tuple[Axis, ...]
    transform: Callable[[Tensor], Tensor] | None = None
    first_rank: bool = False
    beside_body: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """A target.

    Attributes:
        architecture: Hugging Face's class name.
        embed_scale: of the embedding, as the first block gets it; the drafter borrows it without.
        tied_head: the head is the embedding.
        offset_norms: norm weights are stored without the 1 that they are added to.
        tensors: part -> where it is; parts that a layer has not got are not looked for.
        dtype: of the checkpoint.
        eos_token_ids: end-of-sequence tokens, from generation_config.json if it has any.
    """

    architecture: str
    hidden_size: int
    vocab_size: int
    layers: tuple[LayerSpec, ...]
    rms_norm_eps: float
    embed_scale: float = 1.0
    tied_head: bool
    offset_norms: bool = False
    tensors: Mapping[str, TensorRule]
    max_position_embeddings: int
    dtype: CheckpointDType
    eos_token_ids: tuple[int, ...]

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def windows(self) -> tuple[int | None, ...]:
        """Of each layer's attention."""
        return tuple(layer.mixer.window for layer in self.layers)

    @property
    def head_dim(self) -> int:
        """Of all layers."""
        return self.layers[0].mixer.head_dim

    def of_backend(self) -> StackSpec:
        """What it asks of a backend."""
        features: set[Feature] = set()
        if any(layer.sandwich for layer in self.layers):
            features.add("norms behind attention and MLP")
        if any(layer.mlp.activation != "silu" for layer in self.layers):
            features.add("GELU")
        if self.offset_norms:
            features.add("norm weights in fp32")
        if any(layer.mixer.rope != self.layers[0].mixer.rope for layer in self.layers):
            features.add("layers that rotate differently")
        if any(layer.mixer.sinks for layer in self.layers):
            features.add("attention sinks")
        return StackSpec(
            name="target",
            sizes=frozenset({self.hidden_size, *(layer.mlp.inner_size for layer in self.layers)}),
            head_dims=frozenset(layer.mixer.head_dim for layer in self.layers),
            features=frozenset(features),
        )

    def layer_parts(self, layer: int) -> list[str]:
        """The parts of a layer, in the words of `tensors`."""
        spec = self.layers[layer]
        biases = [f"{name}_bias" for name in "qkv" if spec.mixer.bias]
        biases += ["o_bias"] * spec.mixer.out_bias
        biases += [f"{name}_bias" for name in ("gate", "up", "down") if spec.mlp.bias]
        norms = ["attention_norm", "mlp_norm"] + ["attention_out_norm", "mlp_out_norm"] * spec.sandwich
        norms += ["q_norm", "k_norm"] * spec.mixer.qk_norm
        sinks = ["sinks"] * spec.mixer.sinks
        return [*norms, *"qkvo", "gate", "up", "down", *biases, *sinks]

    def axis_size(self, axis: Axis, layer: int) -> int:
        """Of a dimension, whole."""
        mixer, mlp = self.layers[layer].mixer, self.layers[layer].mlp
        match axis:
            case "hidden":
                return self.hidden_size
            case "q":
                return mixer.num_heads * mixer.head_dim
            case "kv":
                return mixer.num_kv_heads * mixer.head_dim
            case "q_heads":
                return mixer.num_heads
            case "inner":
                return mlp.inner_size
            case "head":
                return mixer.head_dim
            case "vocab":
                return self.vocab_size
