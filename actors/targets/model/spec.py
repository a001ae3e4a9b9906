"""What a target is, in data: the decoder runs any `ModelSpec`; a family is a reader of config.json into one.

Plain values, known before a weight is read. A family that needs what is not here yet adds a field or a kind
of mixer or MLP, and the decoder learns to run it.

    ModelSpec ─ layers ─▶ LayerSpec ┬ mixer: Attention (attention.py) | DeltaNet (delta_net.py)
                                    └ mlp: GatedMLP | RoutedMLP | BesideMLP (feed_forward.py)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from torch import Tensor

from ....cluster.state_shape import StateGeometry
from ....drafter.compute.backend import Feature, StackSpec
from ....drafter.compute.int4 import WORD
from ....drafter.compute.packed import BLOCK
from ....drafter.compute.tensors import FLOATS
from .attention import Attention, AttentionAxis, attention_axis_size, is_attention_axis
from .delta_net import DeltaAxis, DeltaNet, delta_axis_size, delta_parts, is_delta_axis, projections
from .feed_forward import (
    EXPERT_FORMS,
    MLP,
    GatedMLP,
    MLPAxis,
    RoutedMLP,
    is_mlp_axis,
    mlp_axis_size,
    mlp_parts,
)

CheckpointDType = Literal["float32", "bfloat16", "float16"]
# Dimensions of tensors: "one" is one; "_blocks" are those of packed weights (`drafter/compute/packed.py`),
# "block_bytes" what one holds, "_words" what INT4 is stored in.
Axis = (
    Literal["hidden", "vocab", "hidden_blocks", "hidden_words", "block_bytes", "one"]
    | AttentionAxis
    | MLPAxis
    | DeltaAxis
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSpec:
    """One block: x += mixer(norm x), then x += mlp(norm x).

    Attributes:
        sandwich: what is added is normed, too.
        scalar: x is multiplied by a number of the layer behind all that.
    """

    mixer: Attention | DeltaNet
    mlp: MLP
    sandwich: bool = False
    scalar: bool = False

    @property
    def dense(self) -> GatedMLP | None:
        return self.mlp.dense

    @property
    def routed(self) -> RoutedMLP | None:
        return self.mlp.routed

    @property
    def inner_sizes(self) -> frozenset[int]:
        """Of its MLPs' inner states."""
        dense, routed = self.dense, self.routed
        mlps = [dense, routed, None if routed is None else routed.shared]
        return frozenset(mlp.inner_size for mlp in mlps if mlp is not None)


@dataclass(frozen=True, slots=True)
class Transform:
    """A function of a tensor with its first arguments given; equal to another one of the same arguments."""

    function: Callable[..., Tensor]
    arguments: tuple[Any, ...]  # Any: of whatever the function takes

    def __call__(self, rows: Tensor) -> Tensor:
        return self.function(*self.arguments, rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorRule:
    """Where a part of the model is in a checkpoint, and how a rank takes it.

    Attributes:
        name: with {layer} for the layer's number, and {expert} where each expert has a tensor; behind the
            checkpoint's own prefix (`weights.py`).
        axes: its dimensions: they say its shape, and which slice is a rank's.
        stored: dtypes that a checkpoint may store it in, in safetensors' words.
        transform: of the rank's slice, at load, of one expert's where each has a tensor; what it returns in
            fp32 stays fp32.
        first_rank: given to rank 0 alone, since the ranks' results are summed.
        beside_body: named beside the body (the head), not inside it.
        constant: no checkpoint holds it (`name` is empty): all its elements are this, in fp32.
    """

    name: str
    axes: tuple[Axis, ...]
    stored: tuple[str, ...] = FLOATS
    constant: float | None = None
    transform: Callable[[Tensor], Tensor] | None = None
    first_rank: bool = False
    beside_body: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """A target.

    Attributes:
        architecture: Hugging Face's class name.
        out_norm_eps: of the norms of what a block adds; None: `rms_norm_eps`, like all others.
        embed_scale: of the embedding, as the first block gets it; the drafter borrows it without.
        embed_norm: the embedding is RMS-normed, without a weight, as the first block gets it; likewise.
        tied_head: the head is the embedding.
        logit_multiplier, logit_cap: of the target's logits, in this order: cap tanh(multiplier z / cap), None
            caps nothing; the drafter borrows the head without.
        fp32_norms: norms' weights stay in fp32, whatever the dtype.
        tensors: part -> where it is; parts that a layer has not got are not looked for, and of several
            `EXPERT_FORMS` the checkpoint has one.
        dtype: of the checkpoint.
        fp8_block: rows and columns that share a scale, where the checkpoint holds matrices in FP8; they are
            computed with in `dtype`.
        eos_token_ids: end-of-sequence tokens, from generation_config.json if it has any.
    """

    architecture: str
    hidden_size: int
    vocab_size: int
    layers: tuple[LayerSpec, ...]
    rms_norm_eps: float
    out_norm_eps: float | None = None
    embed_scale: float = 1.0
    embed_norm: bool = False
    tied_head: bool
    logit_multiplier: float = 1.0
    logit_cap: float | None = None
    fp32_norms: bool = False
    tensors: Mapping[str, TensorRule]
    max_position_embeddings: int
    dtype: CheckpointDType
    fp8_block: tuple[int, int] | None = None
    eos_token_ids: tuple[int, ...]

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def attentions(self) -> tuple[Attention, ...]:
        """Of the layers that have K/V, in their order."""
        return tuple(layer.mixer for layer in self.layers if isinstance(layer.mixer, Attention))

    @property
    def delta_nets(self) -> tuple[DeltaNet, ...]:
        """Of the layers that have a state instead, in their order."""
        return tuple(layer.mixer for layer in self.layers if isinstance(layer.mixer, DeltaNet))

    @property
    def windows(self) -> tuple[int | None, ...]:
        """Of each layer that has K/V."""
        return tuple(mixer.window for mixer in self.attentions)

    @property
    def states(self) -> tuple[int, StateGeometry] | None:
        """How many layers have states, and of which geometry, all ranks together; None where none has."""
        mixers = self.delta_nets
        return (len(mixers), mixers[0].geometry) if mixers else None

    def of_backend(self) -> StackSpec:
        """What it asks of a backend."""
        return StackSpec(
            name="target",
            sizes=frozenset({self.hidden_size}).union(*(layer.inner_sizes for layer in self.layers)),
            head_dims=frozenset(mixer.tile_dim for mixer in self.attentions),
            features=self._features(),
        )

    def _features(self) -> frozenset[Feature]:
        """What it has beyond a plain block."""
        mixers = self.attentions
        mlps = [mlp for layer in self.layers for mlp in (layer.dense, layer.routed) if mlp is not None]
        heads = {(mixer.num_heads, mixer.num_kv_heads, mixer.head_dim, mixer.value_dim) for mixer in mixers}
        has: dict[Feature, bool] = {
            "norms behind attention and MLP": any(layer.sandwich for layer in self.layers),
            "routed experts": any(layer.routed for layer in self.layers),
            "GELU": any(mlp.activation == "gelu_tanh" for mlp in mlps),
            "norm weights in fp32": self.fp32_norms,
            "normed values": any(mixer.v_norm for mixer in mixers),
            "scaled residuals": any(layer.scalar for layer in self.layers),
            "layers that rotate differently": any(mixer.rope != mixers[0].rope for mixer in mixers),
            "layers without rotation": any(mixer.rope is None for mixer in mixers),
            "gate behind attention": any(mixer.gate for mixer in mixers),
            "norm of whole queries and keys": any(mixer.row_norm for mixer in mixers),
            "values of another size than keys": any(
                mixer.value_dim != mixer.head_dim for mixer in mixers if mixer.latent is None
            ),
            "layers whose heads differ": len(heads) > 1,
            "attention sinks": any(mixer.sinks for mixer in mixers),
            "latent attention": any(mixer.latent for mixer in mixers),
            "recurrent states": bool(self.delta_nets),
        }
        return frozenset(feature for feature, there in has.items() if there)

    def layer_parts(self, layer: int) -> list[str]:
        """The parts of a layer, in the words of `tensors`."""
        spec = self.layers[layer]
        norms = ["attention_norm", "mlp_norm"] + ["attention_out_norm", "mlp_out_norm"] * spec.sandwich
        match spec.mixer:
            case Attention():
                mixer = spec.mixer.parts()
            case DeltaNet():
                mixer = delta_parts(self.tensors)
        return [*norms, *mixer, *mlp_parts(spec.mlp, self.expert_forms), *(["scalar"] * spec.scalar)]

    def qkv_parts(self, layer: int) -> tuple[str, ...]:
        """Of the block's first product: see `Attention.qkv_parts`; or what a delta rule takes in."""
        mixer = self.layers[layer].mixer
        return projections(self.tensors) if isinstance(mixer, DeltaNet) else mixer.qkv_parts()

    @property
    def expert_forms(self) -> list[tuple[str, ...]]:
        """Those of `EXPERT_FORMS` that the family knows names for."""
        return [form for form in EXPERT_FORMS if self.tensors.keys() >= set(form)]

    def in_form(self, form: tuple[str, ...]) -> ModelSpec:
        """This model, as a checkpoint that holds its experts so."""
        others = {part for other in self.expert_forms if other != form for part in other}
        tensors = {part: rule for part, rule in self.tensors.items() if part not in others}
        return replace(self, tensors=tensors)

    def axis_size(self, axis: Axis, layer: int) -> int:
        """Of a dimension, whole."""
        match axis:
            case "one":
                return 1
            case "hidden":
                return self.hidden_size
            case "hidden_blocks":
                return self.hidden_size // BLOCK
            case "hidden_words":
                return self.hidden_size // WORD
            case "block_bytes":
                return BLOCK // 2
            case "vocab":
                return self.vocab_size
            case _ if is_attention_axis(axis):
                return attention_axis_size(axis, self.attention(layer))
            case _ if is_delta_axis(axis):
                return delta_axis_size(axis, self.delta_net(layer).geometry)
            case _:
                assert is_mlp_axis(axis), "there is no other kind"
                return mlp_axis_size(axis, self.layers[layer].mlp)

    def attention(self, layer: int) -> Attention:
        """Of a layer that has one."""
        mixer = self.layers[layer].mixer
        assert isinstance(mixer, Attention), "a layer with attention"
        return mixer

    def delta_net(self, layer: int) -> DeltaNet:
        """Of a layer that has one."""
        mixer = self.layers[layer].mixer
        assert isinstance(mixer, DeltaNet), "a layer with a delta rule"
        return mixer
