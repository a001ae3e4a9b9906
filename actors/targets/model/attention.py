"""Specification of a layer's attention: its tensors and their dimensions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeGuard, get_args

from ....drafter.compute.layers.rope import RopeConfig

# Query heads and K/V heads are sharded over ranks. "q": all query heads; "q_and_gate": query heads, each
# followed by its gate; "value": values of all K/V heads; "attended": attention outputs of all query heads, as
# the output projection takes them; "head": one head. For latent attention (MLA), "q_rank": the queries'
# bottleneck; "latent": the vector from which heads make keys and values; "latent_key": that and the key part
# that all heads share; these three are not sharded. "latent_heads": keys and values of all heads.
_LatentAxis = Literal["q_rank", "latent", "latent_key", "latent_heads"]
AttentionAxis = Literal["q", "q_and_gate", "kv", "value", "attended", "q_heads", "head", _LatentAxis]


@dataclass(frozen=True, slots=True, kw_only=True)
class Latent:
    """Multi-head latent attention (MLA, DeepSeek-V2, arXiv:2405.04434), see `drafter/compute/layers/mla.py`.

    `q_rank`: size of the queries' bottleneck, or None; `nope_dim`: part of a head's queries and keys that is
    not rotated; `eps`: of the norms of both bottlenecks.
    """

    q_rank: int | None
    nope_dim: int
    v_dim: int
    eps: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetAttention:
    """Grouped-query attention over paged K/V.

    Attributes:
        head_dim, v_head_dim: sizes of a head's queries and keys, and of its values (smaller; None: the same).
        rope, window: None for no rotation, or for no window; a window includes the row itself.
        qk_norm, v_norm: RMS-norm per head, of queries and keys before rotation, of values without a weight.
        k_is_v: values are the keys before norm and rotation: one projection makes both.
        row_norm: queries and keys are each RMS-normed over all heads together.
        gate: the attention output is multiplied by sigmoid(gate x), where x is the input of the queries.
        sinks: each query head has a logit without a value in its softmax (attention sink).
        latent: keys and values are made of latents. Then `num_kv_heads` is 1, `v_head_dim` the size of a
            latent, and `head_dim` that plus `rope`'s, which is what is cached per token.
        queries_only: keys and values are those of another model's layer of this geometry.
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
    latent: Latent | None = None
    queries_only: bool = False

    @property
    def value_dim(self) -> int:
        return self.v_head_dim or self.head_dim

    @property
    def tile_dim(self) -> int:
        """Head size of a backend's tiles; that of a latent for latents (the rotated part is separate)."""
        return self.head_dim if self.latent is None else self.value_dim

    @property
    def q_dim(self) -> int:
        """Size of a head's queries, as they are projected."""
        if self.latent is None:
            return self.head_dim
        return self.latent.nope_dim + self.head_dim - self.value_dim

    @property
    def attended_dim(self) -> int:
        """Size of a head's output, as the output projection takes it."""
        return self.value_dim if self.latent is None else self.latent.v_dim

    def qkv_parts(self) -> tuple[str, ...]:
        """Return the parts of the block's first product (MLA: down projections of queries and latents)."""
        if self.latent is not None:
            return "q" if self.latent.q_rank is None else "q_down", "kv_down"
        if self.queries_only:
            return ("q",)
        return "q", "k", "k_as_v" if self.k_is_v else "v"

    def parts(self) -> list[str]:
        qkv = self.qkv_parts()
        norms = ["q_norm"] if self.queries_only else ["q_norm", "k_norm"]
        parts = [*(norms * (self.qk_norm or self.row_norm)), *qkv]
        if self.latent is not None:
            bottleneck = ["q_down_norm", "q_up"] * (self.latent.q_rank is not None)
            parts += [*bottleneck, "kv_down_norm", "kv_up"]
        parts += ["o"] + ["attention_gate"] * self.gate
        parts += [f"{name}_bias" for name in qkv if self.bias] + ["o_bias"] * self.out_bias
        return parts + ["sinks"] * self.sinks


def is_attention_axis(axis: str) -> TypeGuard[AttentionAxis]:
    return axis in get_args(AttentionAxis)


def attention_axis_size(axis: AttentionAxis, mixer: TargetAttention) -> int:
    match axis:
        case "q":
            return mixer.num_heads * mixer.q_dim
        case "q_and_gate":
            return 2 * mixer.num_heads * mixer.head_dim
        case "kv":
            return mixer.num_kv_heads * mixer.head_dim
        case "value":
            return mixer.num_kv_heads * mixer.value_dim
        case "attended":
            return mixer.num_heads * mixer.attended_dim
        case "q_heads":
            return mixer.num_heads
        case "head":
            return mixer.head_dim
        case _:
            return _latent_axis_size(axis, mixer)


def _latent_axis_size(axis: _LatentAxis, mixer: TargetAttention) -> int:
    latent = mixer.latent
    assert latent is not None, "the axis belongs to latent attention"
    match axis:
        case "q_rank":
            assert latent.q_rank is not None, "the axis belongs to a queries' bottleneck"
            return latent.q_rank
        case "latent":
            return mixer.value_dim
        case "latent_key":
            return mixer.head_dim
        case "latent_heads":
            return mixer.num_heads * (latent.nope_dim + latent.v_dim)
