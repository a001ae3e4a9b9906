"""Converts a drafter's tensors at load: projections, blocks, convolutions, selector, context K/V.

Transformations that a checkpoint needs (order of rotated rows, scaled values) are applied to the weights
here, not in each pass. Called by `model.py`.

Legend: N rows, H hidden, O outputs, L layers, R keys or values of one, D head dim; the K and V of several
layers are 2 LR outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..compute.backend import Backend
from ..compute.block_weights import (
    AttentionShape,
    BlockWeights,
    Convolution,
    ConvolvedBlock,
    DenseMLP,
    Projection,
)
from ..compute.layers.linear import RMSNorm
from ..compute.layers.rope import RopeConfig, RotaryEmbedding
from ..drafter_spec import DrafterShape, DraftLayer
from ..drafter_weights import DrafterWeights
from ..step.sampling.selector import SelectorCodebooks
from .config import DrafterConfig, SelectorSize

SELECTOR = "candidate_selector"  # prefix of tensor names


def arranged(rope: RopeConfig, weights: DrafterWeights, scale: float = 1.0) -> DrafterWeights:
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

    tensors, codes = dict(weights.tensors), dict(weights.codes)
    for name, matrix in weights.codes.items():
        if name.endswith(rotated):
            codes[name] = matrix.rows(rope.arranged(torch.arange(len(matrix), device=matrix.codes_OI.device)))
        elif name.endswith(scaled) and scale != 1.0:  # rounded twice, so that no code has its value
            tensors[name] = codes.pop(name).dequantized(weights["norm.weight"].dtype)
    return DrafterWeights({name: arranged(name, tensor) for name, tensor in tensors.items()}, codes)


def with_values(config: DrafterShape, weights: DrafterWeights) -> DrafterWeights:
    """Return weights with the rows of v, which are those of k if `k_is_v`, before `arranged` permutes k's."""
    if not config.k_is_v:
        return weights

    def of_values(name: str) -> str:
        return name.replace("k_proj", "v_proj")

    tensors = {of_values(name): tensor for name, tensor in weights.tensors.items()}
    codes = {of_values(name): matrix for name, matrix in weights.codes.items()}
    return DrafterWeights({**tensors, **weights.tensors}, {**codes, **weights.codes})


class QKVWeights:
    """The q, k and v weights of all layers, by page group.

    Plain ones are in one tensor, so that projections share it. Backends repack codes for each projection.
    """

    def __init__(
        self, config: DrafterShape, weights: DrafterWeights, groups: Iterable[Sequence[int]]
    ) -> None:
        self._order = [layer for layers in groups for layer in layers]
        self._weights = weights
        self._qkv_LOH = None
        if not any(_name(i, kind) in weights.codes for i in self._order for kind in "qkv"):
            self._qkv_LOH = self._gathered("weight")
        self._bias_LO = self._gathered("bias") if config.attention_bias else None
        self._num_q = config.num_heads * config.head_dim

    def _gathered(self, part: str) -> Tensor:
        rows = [self._weights[_name(i, kind, part)] for i in self._order for kind in "qkv"]
        return torch.cat(rows).unflatten(0, (len(self._order), -1))

    def of_layer(self, layer: int, backend: Backend) -> Projection:
        place = self._order.index(layer)
        bias_O = None if self._bias_LO is None else self._bias_LO[place]
        if self._qkv_LOH is None:
            qkv_OH = self._weights.joined(*(_name(layer, kind) for kind in "qkv"))
            return backend.linear_of_either(qkv_OH, bias_O)
        return backend.linear_of_either(self._qkv_LOH[place], bias_O)

    def keys_and_values(self, layers: Sequence[int], backend: Backend) -> Projection:
        """Return one projection to all keys of a group's layers, then the values: norms see one slice."""
        first = self._order.index(layers[0])
        group = slice(first, first + len(layers))
        bias = None
        if self._bias_LO is not None:
            bias = self._bias_LO[group, self._num_q :].unflatten(1, (2, -1)).transpose(0, 1).flatten()
        if self._qkv_LOH is None:
            kv_OH = self._weights.joined(*(_name(layer, kind) for kind in "kv" for layer in layers))
            return backend.linear_of_either(kv_OH, bias)
        kv_LRH = self._qkv_LOH[group, self._num_q :]
        return backend.linear_of_blocks(kv_LRH.unflatten(1, (2, -1)).transpose(0, 1), bias)


def _name(layer: int, kind: str, part: str = "weight") -> str:
    return f"layers.{layer}.self_attn.{kind}_proj.{part}"


def make_block(
    config: DrafterShape,
    kind: DraftLayer,
    weights: DrafterWeights,
    at: str,
    qkv: Projection,
    rope: RotaryEmbedding,
    backend: Backend,
) -> tuple[AttentionShape, BlockWeights]:
    """Return a layer's attention and weights as backends take them; `at` is the prefix of its tensors' names.

    `qkv` is its projection, which may share memory with those of other layers.
    """
    eps, sinks_Q = config.rms_norm_eps, weights.get(f"{at}self_attn.attention_sink_bias")
    q_norm_D, k_norm_D = (weights.get(f"{at}self_attn.{name}_norm.weight") for name in "qk")

    def norm(name: str) -> RMSNorm:
        return RMSNorm(norm_weight(config, weights[f"{at}{name}_layernorm.weight"]), eps)

    after_attention = norm("post_attention")  # of the residual, or in Gemma 4 of what is added to it
    shape = AttentionShape(
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        v_head_dim=config.head_dim,
        q_norm_D=None if q_norm_D is None else norm_weight(config, q_norm_D),
        k_norm_D=None if k_norm_D is None else norm_weight(config, k_norm_D),
        eps=eps,
        rope=rope,
        scale=1.0 if config.gemma4 else config.head_dim**-0.5,
        causal=kind.causal,
        window=kind.window,
        v_norm=config.gemma4,
        sinks_Q=None if sinks_Q is None else sinks_Q.float(),
    )
    gate_up_IH = weights.joined(*(f"{at}mlp.{name}_proj.weight" for name in ("gate", "up")))

    def linear(name: str, bias_O: Tensor | None = None) -> Projection:
        return backend.linear_of_either(weights.matrix(f"{at}{name}.weight"), bias_O)

    parts = BlockWeights(
        attention_norm=norm("input"),
        qkv=qkv,
        o=linear("self_attn.o_proj", weights.get(f"{at}self_attn.o_proj.bias")),
        attention_out_norm=after_attention if config.gemma4 else None,
        mlp_norm=norm("pre_feedforward") if config.gemma4 else after_attention,
        mlp=DenseMLP(
            gate_up=backend.linear_of_either(gate_up_IH),
            down=linear("mlp.down_proj"),
            activation="gelu_tanh" if config.gemma4 else "silu",
        ),
        mlp_out_norm=norm("post_feedforward") if config.gemma4 else None,
        scalar=weights[f"{at}layer_scalar"].item() if config.gemma4 else None,
    )
    return shape, parts


def norm_weight(config: DrafterShape, weight: Tensor) -> Tensor:
    """Return a norm's weight as it is multiplied: Gemma 4 multiplies before it rounds."""
    return weight.float() if config.gemma4 else weight


def convolved(
    weights: DrafterWeights, at: str, block: tuple[AttentionShape, BlockWeights], backend: Backend
) -> ConvolvedBlock:
    around = [
        Convolution(
            backend.linear_of_either(weights.matrix(f"{at}{name}.kernel_projection.weight")),
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


def make_selector(weights: DrafterWeights, size: SelectorSize, backend: Backend) -> Selector:
    predecessor, successor = (weights[f"{SELECTOR}.{kind}_codebook"] for kind in ("predecessor", "successor"))
    gates = backend.linear_of_either(weights.matrix(f"{SELECTOR}.hidden_projection.weight"))
    return Selector(gates, SelectorCodebooks(predecessor.contiguous(), successor.contiguous(), size.top_k))


class _NormedValues:
    """A projection to all keys, then the values, of which each head's are RMS-normed without a weight."""

    __slots__ = ("_eps", "_head_dim", "_project")

    def __init__(self, project: Projection, head_dim: int, eps: float) -> None:
        self._project, self._head_dim, self._eps = project, head_dim, eps

    def __call__(self, c_NH: Tensor) -> Tensor:
        kv_NO = self._project(c_NH)
        v_NJD = kv_NO[:, kv_NO.shape[1] // 2 :].unflatten(-1, (-1, self._head_dim))
        v_NJD.copy_(torch.nn.functional.rms_norm(v_NJD, (self._head_dim,), None, self._eps))
        return kv_NO


class ContextProjection:
    """The parts that `DFlashDrafter.write_context` needs for a page group's layers, from `first` on.

    `kv` projects C to K and V of these layers in one GEMM; `write` norms, rotates and writes them.
    """

    __slots__ = ("first", "kv", "write")

    def __init__(
        self,
        config: DrafterConfig,
        weights: DrafterWeights,
        kv: Projection,
        layers: Sequence[int],
        backend: Backend,
    ) -> None:
        self.kv: Callable[[Tensor], Tensor] = kv
        if config.gemma4:
            self.kv = _NormedValues(kv, config.head_dim, config.rms_norm_eps)
        self.first = layers[0]
        norms_LD = torch.stack(
            [norm_weight(config, weights[f"layers.{i}.self_attn.k_norm.weight"]) for i in layers]
        )
        self.write = backend.context_writer(norms_LD, config.rms_norm_eps, config.num_kv_heads)
