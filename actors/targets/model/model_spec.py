"""A target as data: the decoder runs any `ModelSpec`, and each family reads its config.json into one.

For a family with a new feature, add a field or a kind of mixer or MLP here and implement it in the decoder.

    ModelSpec ─ layers ─▶ LayerSpec ┬ mixer: TargetAttention (attention.py) | DeltaNet (delta_net.py)
                                    └ mlp: GatedMLP | RoutedMLP | ParallelMlpSpec (mlp_spec.py)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from torch import Tensor

from ....cluster.pages.recurrent_state_spec import RecurrentStateSpec
from ....drafter.compute.backend import Feature, ModelStackSpec
from ....drafter.compute.checkpoint.packed_codes import BLOCK
from ....drafter.compute.checkpoint.quantization.checkpoint_quantization import CheckpointQuantization
from ....drafter.compute.checkpoint.safetensors_reader import FLOATS
from .attention import AttentionAxis, TargetAttention, attention_axis_size, is_attention_axis
from .delta_net import DeltaAxis, DeltaNet, delta_axis_size, delta_parts, is_delta_axis, projections
from .mlp_spec import (
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
# Dimensions of tensors. "one" has size 1. "_blocks" count blocks of MXFP4
# (`drafter/compute/checkpoint/packed_codes.py`), "block_bytes" the bytes of one block.
Axis = (
    Literal["hidden", "two_hidden", "backbone", "two_backbone", "vocab", "clusters", "all_tokens"]
    | Literal["hidden_blocks", "block_bytes", "one"]
    | AttentionAxis
    | MLPAxis
    | DeltaAxis
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSpec:
    """One block: x += mixer(norm x); x += mlp(norm x); x *= scalar. `sandwich`: addends are normed, too."""

    mixer: TargetAttention | DeltaNet
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
        dense, routed = self.dense, self.routed
        mlps = [dense, routed, None if routed is None else routed.shared]
        return frozenset(mlp.inner_size for mlp in mlps if mlp is not None)


@dataclass(frozen=True, slots=True)
class Transform:
    """A function of a tensor with its first arguments bound; equal to another one with equal arguments."""

    function: Callable[..., Tensor]
    arguments: tuple[Any, ...]  # Any: whatever the function takes

    def __call__(self, rows: Tensor) -> Tensor:
        return self.function(*self.arguments, rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorRule:
    """Location of a tensor in a checkpoint, and how a rank reads it.

    Attributes:
        name: after the checkpoint's own prefix (`weights.py`), with {layer} and, if each has one, {expert}.
        axes: its dimensions, which determine its shape and a rank's slice.
        stored: dtypes in which a checkpoint may store it, as safetensors names them.
        transform: applied at load to the rank's slice (of one expert).
        is_fp32: read and kept in fp32, whatever the computing dtype.
        first_rank: zero except on rank 0, since the ranks' results are summed.
        is_beside_body: named outside of the body's prefix (the head).
        constant: not in the checkpoint (`name` is empty): every element has this value, in fp32.
    """

    name: str
    axes: tuple[Axis, ...]
    stored: tuple[str, ...] = FLOATS
    constant: float | None = None
    transform: Callable[[Tensor], Tensor] | None = None
    is_fp32: bool = False
    first_rank: bool = False
    is_beside_body: bool = False


# Parts of a layer for multi-token prediction beside its block, in `ModelSpec.tensors` of its own model; and
# those of an assistant.
MTP_PARTS = (
    *("mtp_embed_norm", "mtp_hidden_norm", "mtp_combine"),
    *("pre_projection", "post_projection", "centroids", "token_ordering"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class MtpSpec:
    """A target's layer, or layers, for multi-token prediction (MTP), with their tensors' names (`mtp.py`).

    Attributes:
        layer: its block; equal for all layers.
        prefix: of the block's tensors, instead of "layers.{layer}."; with a {layer} if there may be several.
        embed_norm, hidden_norm, combine, final_norm: names of the other tensors.
        is_beside_body: whether all of them are named outside of the body's prefix.
        num_layers: how many published checkpoints have.
        renamed: last components of the block's names that differ from those of the target's blocks.
    """

    layer: LayerSpec
    prefix: str
    embed_norm: str
    hidden_norm: str
    combine: str
    final_norm: str
    is_beside_body: bool = False
    num_layers: int = 1
    renamed: Mapping[str, str] = field(default_factory=dict[str, str])

    @classmethod
    def after_body(cls, layer: LayerSpec, prefix: str, final_norm: str) -> MtpSpec:
        """Return DeepSeek-V3's layout, in which all tensors have the block's prefix."""
        return cls(
            layer=layer,
            prefix=prefix,
            embed_norm=f"{prefix}enorm.weight",
            hidden_norm=f"{prefix}hnorm.weight",
            combine=f"{prefix}eh_proj.weight",
            final_norm=prefix + final_norm,
        )

    def model(self, target: ModelSpec, num_layers: int) -> ModelSpec:
        """Return a model of these layers alone; `layer_parts` are those of their blocks."""
        norm = target.tensors["attention_norm"].transform

        def own(name: str, *axes: Axis, transform: Callable[[Tensor], Tensor] | None = norm) -> TensorRule:
            return TensorRule(name=name, axes=axes, transform=transform, is_beside_body=self.is_beside_body)

        tensors = {part: self._renamed(rule) for part, rule in target.tensors.items()} | {
            "final_norm": own(self.final_norm, "hidden"),
            "mtp_embed_norm": own(self.embed_norm, "hidden"),
            "mtp_hidden_norm": own(self.hidden_norm, "hidden"),
            "mtp_combine": own(self.combine, "hidden", "two_hidden", transform=None),
        }
        return replace(target, layers=(self.layer,) * num_layers, tensors=tensors, mtp=None)

    def _renamed(self, rule: TensorRule) -> TensorRule:
        if not rule.name.startswith(_BLOCK):
            return rule
        name = rule.name.removeprefix(_BLOCK)
        for theirs, ours in self.renamed.items():
            name = name.replace(theirs, ours)
        return replace(rule, name=self.prefix + name, is_beside_body=self.is_beside_body)


_BLOCK = "layers.{layer}."  # the prefix of a block's tensors


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """The specification of a target.

    Attributes:
        architecture: Hugging Face's class name.
        out_norm_eps: epsilon of the norms of what a block adds (`sandwich`); None for `rms_norm_eps`.
        embed_scale, embed_norm: factor, or RMSNorm without a weight, of the embedding before the first block.
        logit_multiplier, logit_cap: logits are cap tanh(multiplier z / cap); None for no cap. The drafter
            borrows embedding and head without any of these.
        fp32_norms: norm weights stay in fp32, whatever the dtype.
        tensors: part -> where it is. Parts that a layer lacks are not looked up, and of several
            `EXPERT_FORMS` the checkpoint has one.
        dtype: dtype of the checkpoint.
        eos_token_ids: end-of-sequence tokens, from generation_config.json if it has any.
        mtp: the layer for multi-token prediction that checkpoints of the family may have.
        backbone_size: hidden size of the target for which an assistant drafts; None for targets.
        clusters: of the vocabulary of an assistant, how many there are, and of how many the tokens are
            possible; None without.
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
    quantization: CheckpointQuantization | None = None
    eos_token_ids: tuple[int, ...]
    mtp: MtpSpec | None = None
    backbone_size: int | None = None
    clusters: tuple[int, int] | None = None

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def attentions(self) -> tuple[TargetAttention, ...]:
        return tuple(layer.mixer for layer in self.layers if isinstance(layer.mixer, TargetAttention))

    @property
    def delta_nets(self) -> tuple[DeltaNet, ...]:
        return tuple(layer.mixer for layer in self.layers if isinstance(layer.mixer, DeltaNet))

    @property
    def windows(self) -> tuple[int | None, ...]:
        """Sliding window of each layer with K/V; None for full attention."""
        return tuple(mixer.window for mixer in self.attentions)

    @property
    def states(self) -> tuple[int, RecurrentStateSpec] | None:
        """Number and geometry of layers with recurrent states, over all ranks together; None without any."""
        mixers = self.delta_nets
        return (len(mixers), mixers[0].geometry) if mixers else None

    def with_window(self, window: int) -> ModelSpec:
        """Return the model with attention to the last `window` tokens at most."""
        mixers = (self.attention(i) for i in range(self.num_layers))
        windows = (replace(mixer, window=min(mixer.window or window, window)) for mixer in mixers)
        layers = (replace(layer, mixer=mixer) for layer, mixer in zip(self.layers, windows, strict=True))
        return replace(self, layers=tuple(layers))

    def stack_spec(self) -> ModelStackSpec:
        """Return what a backend must support to compute this model's layers."""
        return ModelStackSpec(
            name="target",
            sizes=frozenset({self.hidden_size}).union(*(layer.inner_sizes for layer in self.layers)),
            head_dims=frozenset(mixer.tile_dim for mixer in self.attentions),
            features=self._features(),
        )

    def _features(self) -> frozenset[Feature]:
        """Return what the layers need of a backend beyond plain attention and MLP."""
        mixers = self.attentions
        mlps = [mlp for layer in self.layers for mlp in (layer.dense, layer.routed) if mlp is not None]
        heads = {(mixer.num_heads, mixer.num_kv_heads, mixer.head_dim, mixer.value_dim) for mixer in mixers}
        present: dict[Feature, bool] = {
            "norms after attention and MLP": any(layer.sandwich for layer in self.layers),
            "routed experts": any(layer.routed for layer in self.layers),
            "GELU": any(mlp.activation == "gelu_tanh" for mlp in mlps),
            "norm weights in fp32": self.fp32_norms,
            "normed values": any(mixer.v_norm for mixer in mixers),
            "scaled residuals": any(layer.scalar for layer in self.layers),
            "layers that rotate differently": any(mixer.rope != mixers[0].rope for mixer in mixers),
            "layers without rotation": any(mixer.rope is None for mixer in mixers),
            "gate after attention": any(mixer.gate for mixer in mixers),
            "norm of whole queries and keys": any(mixer.row_norm for mixer in mixers),
            "values of another size than keys": any(
                mixer.value_dim != mixer.head_dim for mixer in mixers if mixer.latent is None
            ),
            "layers whose heads differ": len(heads) > 1,
            "attention sinks": any(mixer.sinks for mixer in mixers),
            "latent attention": any(mixer.latent for mixer in mixers),
            "recurrent states": bool(self.delta_nets),
        }
        return frozenset(feature for feature, is_present in present.items() if is_present)

    def layer_parts(self, layer: int) -> list[str]:
        spec = self.layers[layer]
        norms = ["attention_norm", "mlp_norm"] + ["attention_out_norm", "mlp_out_norm"] * spec.sandwich
        match spec.mixer:
            case TargetAttention():
                mixer = spec.mixer.parts()
            case DeltaNet():
                mixer = delta_parts(self.tensors)
        return [*norms, *mixer, *mlp_parts(spec.mlp, self.expert_forms), *(["scalar"] * spec.scalar)]

    def qkv_parts(self, layer: int) -> tuple[str, ...]:
        mixer = self.layers[layer].mixer
        return projections(self.tensors) if isinstance(mixer, DeltaNet) else mixer.qkv_parts()

    @property
    def expert_forms(self) -> list[tuple[str, ...]]:
        return [form for form in EXPERT_FORMS if self.tensors.keys() >= set(form)]

    def in_form(self, form: tuple[str, ...]) -> ModelSpec:
        """Return this model for a checkpoint that stores its experts in this form."""
        others = {part for other in self.expert_forms if other != form for part in other}
        tensors = {part: rule for part, rule in self.tensors.items() if part not in others}
        return replace(self, tensors=tensors)

    def axis_size(self, axis: Axis, layer: int) -> int:
        match axis:
            case "one":
                return 1
            case "hidden":
                return self.hidden_size
            case "two_hidden":
                return 2 * self.hidden_size
            case "backbone" | "two_backbone":
                assert self.backbone_size is not None, "the axes belong to assistants"
                return self.backbone_size * (1 if axis == "backbone" else 2)
            case "clusters":
                assert self.clusters is not None, "the axis belongs to assistants"
                return self.clusters[0]
            case "hidden_blocks":
                return self.hidden_size // BLOCK
            case "block_bytes":
                return BLOCK // 2
            case "vocab" | "all_tokens":
                return self.vocab_size
            case _ if is_attention_axis(axis):
                return attention_axis_size(axis, self.attention(layer))
            case _ if is_delta_axis(axis):
                return delta_axis_size(axis, self.delta_net(layer).geometry)
            case _:
                assert is_mlp_axis(axis), "all other axes belong to MLPs"
                return mlp_axis_size(axis, self.layers[layer].mlp)

    def attention(self, layer: int) -> TargetAttention:
        mixer = self.layers[layer].mixer
        assert isinstance(mixer, TargetAttention), "the layer has no attention"
        return mixer

    def delta_net(self, layer: int) -> DeltaNet:
        mixer = self.layers[layer].mixer
        assert isinstance(mixer, DeltaNet), "the layer has no delta net"
        return mixer
