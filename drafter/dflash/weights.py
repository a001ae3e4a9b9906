"""Converts a drafter's tensors at load: projections, blocks, convolutions, selector, context K/V.

Transformations that a checkpoint needs (order of rotated rows, scaled values) are applied to the weights
here, not in each pass. Called by `model.py`.

Legend: N rows, H hidden, O outputs, L layers, R keys or values of one, D head dim; the K and V of several
layers are 2 LR outputs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..compute.backend import (
    AttentionShape,
    Backend,
    BlockWeights,
    Convolution,
    ConvolvedBlock,
    DenseMLP,
    Projection,
)
from ..compute.layers.linear import RMSNorm
from ..compute.layers.rope import RopeConfig, RotaryEmbedding
from ..drafter_spec import DrafterShape, DraftLayer
from ..step.sampling.selector import SelectorCodebooks
from .config import DrafterConfig, SelectorSize

SELECTOR = "candidate_selector"  # prefix of tensor names


def arranged(rope: RopeConfig, weights: Mapping[str, Tensor], scale: float = 1.0) -> Mapping[str, Tensor]:
    """Return weights with q and k rows permuted for the rotary tables and v rows scaled."""
    if rope.permutation() is None and scale == 1.0:
        return weights
    rotated = tuple(
        f"self_attn.{name}"
        for kind in "qk"
        for name in (f"{kind}_proj.weight", f"{kind}_proj.bias", f"{kind}_norm.weight")
    )
    scaled = ("self_attn.v_proj.weight", "self_attn.v_proj.bias")

    def arranged(name: str, tensor: Tensor) -> Tensor:
        if name.endswith(rotated):
            return rope.arranged(tensor)
        return tensor * scale if name.endswith(scaled) else tensor

    return {name: arranged(name, tensor) for name, tensor in weights.items()}


class QKVWeights:
    """The q, k and v weights of all layers in one tensor, by page group, so that projections share it."""

    def __init__(
        self, config: DrafterShape, weights: Mapping[str, Tensor], groups: Iterable[Sequence[int]]
    ) -> None:
        self._order = [layer for layers in groups for layer in layers]
        self._qkv_LOH = self._gathered(weights, "weight")
        self._bias_LO = self._gathered(weights, "bias") if config.attention_bias else None
        self._num_q = config.num_heads * config.head_dim

    def _gathered(self, weights: Mapping[str, Tensor], part: str) -> Tensor:
        rows = [weights[f"layers.{i}.self_attn.{kind}_proj.{part}"] for i in self._order for kind in "qkv"]
        return torch.cat(rows).unflatten(0, (len(self._order), -1))

    def of_layer(self, layer: int, backend: Backend) -> Projection:
        place = self._order.index(layer)
        return backend.linear(self._qkv_LOH[place], None if self._bias_LO is None else self._bias_LO[place])

    def keys_and_values(self, layers: Sequence[int], backend: Backend) -> Projection:
        """Return one projection to all keys of a group's layers, then the values: norms see one slice."""
        first = self._order.index(layers[0])
        group = slice(first, first + len(layers))
        kv_LRH = self._qkv_LOH[group, self._num_q :]
        bias = None
        if self._bias_LO is not None:
            bias = self._bias_LO[group, self._num_q :].unflatten(1, (2, -1)).transpose(0, 1).flatten()
        return backend.linear_of_blocks(kv_LRH.unflatten(1, (2, -1)).transpose(0, 1), bias)


def make_block(
    config: DrafterShape,
    kind: DraftLayer,
    weights: Mapping[str, Tensor],
    at: str,
    qkv: Projection,
    rope: RotaryEmbedding,
    backend: Backend,
) -> tuple[AttentionShape, BlockWeights]:
    eps, sinks_Q = config.rms_norm_eps, weights.get(f"{at}self_attn.attention_sink_bias")
    shape = AttentionShape(
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        v_head_dim=config.head_dim,
        q_norm_D=weights.get(f"{at}self_attn.q_norm.weight"),
        k_norm_D=weights.get(f"{at}self_attn.k_norm.weight"),
        eps=eps,
        rope=rope,
        scale=config.head_dim**-0.5,
        causal=kind.causal,
        window=kind.window,
        sinks_Q=None if sinks_Q is None else sinks_Q.float(),
    )
    gate_up_IH = torch.cat([weights[f"{at}mlp.{name}_proj.weight"] for name in ("gate", "up")])
    parts = BlockWeights(
        attention_norm=RMSNorm(weights[f"{at}input_layernorm.weight"], eps),
        qkv=qkv,
        o=backend.linear(weights[f"{at}self_attn.o_proj.weight"], weights.get(f"{at}self_attn.o_proj.bias")),
        mlp_norm=RMSNorm(weights[f"{at}post_attention_layernorm.weight"], eps),
        mlp=DenseMLP(
            gate_up=backend.linear(gate_up_IH), down=backend.linear(weights[f"{at}mlp.down_proj.weight"])
        ),
    )
    return shape, parts


def convolved(
    weights: Mapping[str, Tensor], at: str, block: tuple[AttentionShape, BlockWeights], backend: Backend
) -> ConvolvedBlock:
    around = [
        Convolution(
            backend.linear(weights[f"{at}{name}.kernel_projection.weight"]),
            weights[f"{at}{name}.base_kernel"].contiguous(),
        )
        for name in ("attention_conv", "mlp_conv")
    ]
    return ConvolvedBlock(*block, *around)


@dataclass(frozen=True, slots=True)
class Selector:
    """Projection and codebooks that score a row's candidates (`step/sampling/selector.py`)."""

    gates: Projection
    codebooks: SelectorCodebooks


def make_selector(weights: Mapping[str, Tensor], size: SelectorSize, backend: Backend) -> Selector:
    predecessor, successor = (weights[f"{SELECTOR}.{kind}_codebook"] for kind in ("predecessor", "successor"))
    gates = backend.linear(weights[f"{SELECTOR}.hidden_projection.weight"])
    return Selector(gates, SelectorCodebooks(predecessor.contiguous(), successor.contiguous(), size.top_k))


class ContextProjection:
    """The parts that `DFlashDrafter.write_context` needs for a page group's layers, from `first` on.

    `kv` projects C to K and V of these layers in one GEMM; `write` norms, rotates and writes them.
    """

    __slots__ = ("first", "kv", "write")

    def __init__(
        self,
        config: DrafterConfig,
        weights: Mapping[str, Tensor],
        kv: Projection,
        layers: Sequence[int],
        backend: Backend,
    ) -> None:
        self.kv, self.first = kv, layers[0]
        norms_LD = torch.stack([weights[f"layers.{i}.self_attn.k_norm.weight"] for i in layers])
        self.write = backend.context_writer(norms_LD, config.rms_norm_eps, config.num_kv_heads)
