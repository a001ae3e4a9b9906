"""What a target is, in data: the decoder runs any `ModelSpec`; a family is a reader of config.json into one.

Plain values, known before a weight is read. A family that needs what is not here yet (latent caches,
recurrent states) adds a field or a kind of mixer or MLP, and the decoder learns to run it.

    ModelSpec ─ layers ─▶ LayerSpec ┬ mixer: Attention
                                    └ mlp: GatedMLP | RoutedMLP | BesideMLP
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from torch import Tensor

from ....drafter.compute.backend import Feature, StackSpec
from ....drafter.compute.experts import ExpertActivation, Router
from ....drafter.compute.layers import Activation
from ....drafter.compute.mxfp4 import BLOCK
from ....drafter.compute.rope import RopeConfig

CheckpointDType = Literal["float32", "bfloat16", "float16"]
# Dimensions of tensors. Ranks share out query heads, K/V heads, inner states and token ids, and of experts
# either their inner states or the experts; not the rest. "value" is of K/V heads' values, "attended" of what
# each query head makes of them; "inner" is a dense MLP's, "shared" that of the
# expert that all rows share, "experts" the router's, whole; "expert_gate_up" are an expert's gate rows, then
# its up rows, "expert_pairs" the same rows taking turns; "_blocks" are those of packed weights
# (`drafter/compute/mxfp4.py`), "block_bytes" what one holds; "one" is one. "value": of K/V heads' values,
# "attended": of what each query head makes of them.
Axis = Literal[
    "hidden",
    "q",
    "kv",
    "value",
    "attended",
    "q_heads",
    "inner",
    "head",
    "vocab",
    "experts",
    "expert",
    "expert_inner",
    "expert_gate_up",
    "expert_pairs",
    "shared",
    "hidden_blocks",
    "expert_inner_blocks",
    "block_bytes",
    "one",
]
# The parts that a layer's experts may be stored as, the usual form first: a tensor for each, or one for all,
# or that packed in MXFP4.
FUSED_EXPERTS = ("experts_gate_up", "experts_down")
PACKED_EXPERTS = (
    "experts_gate_up_blocks",
    "experts_gate_up_scales",
    "experts_down_blocks",
    "experts_down_scales",
)
EXPERT_FORMS = (("expert_gate", "expert_up", "expert_down"), FUSED_EXPERTS, PACKED_EXPERTS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention:
    """Grouped-query attention over paged K/V.

    Attributes:
        head_dim: of queries and keys.
        v_head_dim: of values; at most `head_dim`, as which it is by default.
        scale: of scores.
        rope: None rotates nothing.
        window: how many tokens back a row sees, itself included; None sees all.
        qk_norm: queries and keys are RMS-normed per head before rotation.
        v_norm: values are RMS-normed per head, too, without a weight.
        k_is_v: values are the keys before their norm and rotation: one projection makes both.
        row_norm: both are RMS-normed over all their heads together, before they are told apart.
        gate: what is attended is multiplied by sigmoid(gate x), x as the queries get it.
        bias, out_bias: of the projections to q, k and v; of the one behind attention.
        sinks: each query head has a logit without a value in its softmax.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope: RopeConfig | None
    scale: float
    window: int | None = None
    qk_norm: bool = False
    v_norm: bool = False
    k_is_v: bool = False
    row_norm: bool = False
    gate: bool = False
    bias: bool = False
    out_bias: bool = False
    sinks: bool = False
    v_head_dim: int | None = None

    @property
    def value_dim(self) -> int:
        """Of a head's values."""
        return self.v_head_dim or self.head_dim


@dataclass(frozen=True, slots=True, kw_only=True)
class GatedMLP:
    """down(activation(gate x) * up x); `bias`: of all three."""

    inner_size: int
    activation: Activation = "silu"
    bias: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutedMLP:
    """The weighted sum of the experts that a router chooses for a row, each a gated MLP.

    Attributes:
        inner_size: of an expert.
        limit: of the activation `swiglu_clamped`.
        bias: of the experts' products.
        shared: an expert that every row has; of its own size.
        shared_gate: the shared expert is weighed by sigmoid(w x).
        inner_multiple: what a rank's part of the inner size must be a multiple of (a quantisation's block).
    """

    router: Router
    inner_size: int
    activation: ExpertActivation = "silu"
    limit: float | None = None
    bias: bool = False
    shared: GatedMLP | None = None
    shared_gate: bool = False
    inner_multiple: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class BesideMLP:
    """norm(dense(mlp_norm x)) + norm'(routed(norm'' x)): both of one residual (Gemma 4's experts)."""

    dense: GatedMLP
    routed: RoutedMLP


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSpec:
    """One block: x += mixer(norm x), then x += mlp(norm x).

    Attributes:
        sandwich: what is added is normed, too.
        scalar: x is multiplied by a number of the layer behind all that.
    """

    mixer: Attention
    mlp: GatedMLP | RoutedMLP | BesideMLP
    sandwich: bool = False
    scalar: bool = False

    @property
    def dense(self) -> GatedMLP | None:
        """The MLP that every row passes whole; the expert that all rows share is none."""
        match self.mlp:
            case GatedMLP():
                return self.mlp
            case RoutedMLP():
                return None
            case BesideMLP():
                return self.mlp.dense

    @property
    def routed(self) -> RoutedMLP | None:
        match self.mlp:
            case GatedMLP():
                return None
            case RoutedMLP():
                return self.mlp
            case BesideMLP():
                return self.mlp.routed

    @property
    def inner_sizes(self) -> frozenset[int]:
        """Of its MLPs' inner states."""
        dense, routed = self.dense, self.routed
        mlps = [dense, routed, None if routed is None else routed.shared]
        return frozenset(mlp.inner_size for mlp in mlps if mlp is not None)


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorRule:
    """Where a part of the model is in a checkpoint, and how a rank takes it.

    Attributes:
        name: with {layer} for the layer's number, and {expert} where each expert has a tensor; behind the
            checkpoint's own prefix (`weights.py`).
        axes: its dimensions: they say its shape, and which slice is a rank's.
        transform: of the rank's slice, at load, of one expert's where each has a tensor; what it returns in
            fp32 stays fp32.
        first_rank: given to rank 0 alone, since the ranks' results are summed.
        beside_body: named beside the body (the head), not inside it.
        constant: no checkpoint holds it (`name` is empty): all its elements are this, in fp32.
    """

    name: str
    axes: tuple[Axis, ...]
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
    def windows(self) -> tuple[int | None, ...]:
        """Of each layer's attention."""
        return tuple(layer.mixer.window for layer in self.layers)

    def of_backend(self) -> StackSpec:
        """What it asks of a backend."""
        return StackSpec(
            name="target",
            sizes=frozenset({self.hidden_size}).union(*(layer.inner_sizes for layer in self.layers)),
            head_dims=frozenset(layer.mixer.head_dim for layer in self.layers),
            features=self._features(),
        )

    def _features(self) -> frozenset[Feature]:
        """What it has beyond a plain block."""
        mixers = [layer.mixer for layer in self.layers]
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
            "values of another size than keys": any(m.value_dim != m.head_dim for m in mixers),
            "layers whose heads differ": len(heads) > 1,
            "attention sinks": any(mixer.sinks for mixer in mixers),
        }
        return frozenset(feature for feature, there in has.items() if there)

    def layer_parts(self, layer: int) -> list[str]:
        """The parts of a layer, in the words of `tensors`."""
        spec = self.layers[layer]
        qkv = self.qkv_parts(layer)
        biases = [f"{name}_bias" for name in qkv if spec.mixer.bias]
        biases += ["o_bias"] * spec.mixer.out_bias
        norms = ["attention_norm", "mlp_norm"] + ["attention_out_norm", "mlp_out_norm"] * spec.sandwich
        norms += ["q_norm", "k_norm"] * (spec.mixer.qk_norm or spec.mixer.row_norm)
        gates = ["attention_gate"] * spec.mixer.gate
        scalars = ["scalar"] * spec.scalar
        sinks = ["sinks"] * spec.mixer.sinks
        return [*norms, *qkv, "o", *gates, *biases, *sinks, *self._mlp_parts(spec), *scalars]

    def qkv_parts(self, layer: int) -> tuple[str, str, str]:
        """Of queries, keys and values; `k_as_v` reads the keys' rows once more."""
        return "q", "k", "k_as_v" if self.layers[layer].mixer.k_is_v else "v"

    def _mlp_parts(self, layer: LayerSpec) -> list[str]:
        parts: list[str] = []
        if layer.dense is not None:
            parts += ["gate", "up", "down"]
            parts += ["gate_bias", "up_bias", "down_bias"] * layer.dense.bias
        if isinstance(layer.mlp, BesideMLP):
            parts += ["dense_out_norm", "routed_norm", "routed_out_norm"]
        if layer.routed is not None:
            parts += self._routed_parts(layer.routed)
        return parts

    def _routed_parts(self, mlp: RoutedMLP) -> list[str]:
        rule = mlp.router
        parts = ["router"] + ["router_bias"] * rule.bias + ["router_correction"] * rule.correction
        parts += ["router_norm"] * rule.normed_input + ["expert_scale"] * rule.expert_scale
        parts += self.expert_forms[0]
        parts += ["experts_gate_up_bias", "experts_down_bias"] * mlp.bias
        if mlp.shared is not None:
            parts += ["shared_gate", "shared_up", "shared_down"] + ["shared_weight"] * mlp.shared_gate
        return parts

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
        mixer = self.layers[layer].mixer
        match axis:
            case "one":
                return 1
            case "hidden":
                return self.hidden_size
            case "hidden_blocks":
                return self.hidden_size // BLOCK
            case "block_bytes":
                return BLOCK // 2
            case "q":
                return mixer.num_heads * mixer.head_dim
            case "kv":
                return mixer.num_kv_heads * mixer.head_dim
            case "value":
                return mixer.num_kv_heads * mixer.value_dim
            case "attended":
                return mixer.num_heads * mixer.value_dim
            case "q_heads":
                return mixer.num_heads
            case "head":
                return mixer.head_dim
            case "vocab":
                return self.vocab_size
            case "one":
                return 1
            case _:
                return _mlp_axis_size(axis, self.layers[layer])


def _mlp_axis_size(axis: Axis, layer: LayerSpec) -> int:
    if axis == "inner":
        assert layer.dense is not None, "a part of dense MLPs"
        return layer.dense.inner_size
    routed = layer.routed
    assert routed is not None, "a part of routed MLPs"
    match axis:
        case "experts" | "expert":
            return routed.router.num_experts
        case "expert_inner":
            return routed.inner_size
        case "expert_inner_blocks":
            return routed.inner_size // BLOCK
        case "expert_gate_up" | "expert_pairs":
            return 2 * routed.inner_size
        case _:
            assert axis == "shared" and routed.shared is not None, "a part of the shared expert"
            return routed.shared.inner_size
