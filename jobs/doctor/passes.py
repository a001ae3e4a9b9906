"""Two whole passes of a backend against fp64: a target's and a drafter's, of two random layers each.

Their contexts are computed or written by the backend itself, in whatever order its pages have. Called by
`operators.py`.

    target's pass    prompts, then this step's rows behind them                    causal
    drafter's pass   context K/V of so many tokens, then this step's rows behind   not causal, within a window

Legend: N rows, T positions of a request, H hidden, I inner size, O outputs, J = Q + 2 K heads, Q query heads,
K kv heads, L layers, D head dim.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from ...drafter.compute.backend import AttentionShape, BlockWeights, DenseMLP, Stack
from ...drafter.compute.layers import RMSNorm
from . import references
from .findings import off_by
from .subject import Contexts, Requests, Subject

_NUM_LAYERS = 2


def target_pass(subject: Subject) -> float:
    """The error in units of the last place, of prompts' rows and of those behind them."""
    requests = _requests(subject)
    contexts = Contexts(subject, requests, _NUM_LAYERS)
    model = _RandomModel(subject, contexts.length, causal=True, window=None)
    stack = model.stack()
    known_NH, new_NH = (subject.randn(sum(counts), subject.hidden) for counts in zip(*requests, strict=True))
    found_known_NH, _ = stack(known_NH.clone(), contexts.known_rows(), contexts.cache)
    found_new_NH, _ = stack(new_NH.clone(), contexts.rows(), contexts.cache)
    x, found = (
        zip(_cut(known, requests, 0), _cut(new, requests, 1), strict=True)
        for known, new in ((known_NH, new_NH), (found_known_NH, found_new_NH))
    )
    pairs = zip(map(torch.cat, x), map(torch.cat, found), strict=True)
    return max(off_by(found_TH, model.exact(x_TH)) for x_TH, found_TH in pairs)


def draft_pass(subject: Subject) -> float:
    """Likewise of blocks' rows."""
    requests, of = _requests(subject), subject.attention
    window = subject.place.context // 2
    contexts = Contexts(subject, requests, _NUM_LAYERS)
    model = _RandomModel(subject, contexts.length, causal=False, window=window)
    known, new = (sum(counts) for counts in zip(*requests, strict=True))
    heads = (2, _NUM_LAYERS, of.num_kv_heads, of.head_dim)
    kv_NO, x_NH = (
        subject.randn(known, 2 * _NUM_LAYERS * of.num_kv_heads * of.head_dim),
        subject.randn(new, subject.hidden),
    )
    kv_N2LKD = kv_NO.clone().unflatten(1, heads)
    norm_LD = torch.stack([layer.head_norm_2D[1] for layer in model.layers])
    write = subject.backend.context_writer(norm_LD, subject.eps, of.num_kv_heads)
    write(kv_NO, model.rope, contexts.known_rows(), contexts.cache, 0)
    found_NH, _ = model.stack()(x_NH.clone(), contexts.rows(window), contexts.cache)
    parts = zip(
        _cut(x_NH, requests, 1), _cut(found_NH, requests, 1), _cut(kv_N2LKD, requests, 0), strict=True
    )
    return max(off_by(found, model.exact(x, context)) for x, found, context in parts)


def _requests(subject: Subject) -> Requests:
    """A long context and a short one."""
    return ((subject.place.context, 16), (17, 3))


def _cut(rows: Tensor, requests: Requests, column: int) -> list[Tensor]:
    """Rows of each request: the known ones (0), or this step's (1)."""
    ends = accumulate((request[column] for request in requests), initial=0)
    return [rows[begin:end] for begin, end in pairwise(ends)]


@dataclass(frozen=True, slots=True)
class _Layer:
    """Weights of one; `head_norm_2D` of queries and keys."""

    attention_norm_H: Tensor
    qkv_OH: Tensor
    head_norm_2D: Tensor
    o_HO: Tensor
    mlp_norm_H: Tensor
    gate_up_OH: Tensor
    down_HI: Tensor


class _RandomModel:
    """Layers of a subject's sizes, as its backend computes them and as fp64 does."""

    def __init__(self, subject: Subject, length: int, *, causal: bool, window: int | None) -> None:
        of, hidden, inner = subject.attention, subject.hidden, subject.inner
        self._subject, self._causal, self._window = subject, causal, window
        self.rope = subject.rope(length)
        q_size = of.num_heads * of.head_dim
        self.layers = [
            _Layer(
                attention_norm_H=subject.norm_weight(hidden),
                qkv_OH=subject.weight(q_size + 2 * of.num_kv_heads * of.head_dim, hidden),
                head_norm_2D=subject.norm_weight(2, of.head_dim),
                o_HO=subject.weight(hidden, q_size),
                mlp_norm_H=subject.norm_weight(hidden),
                gate_up_OH=subject.weight(2 * inner, hidden),
                down_HI=subject.weight(hidden, inner),
            )
            for _ in range(_NUM_LAYERS)
        ]
        self._final_norm_H = subject.norm_weight(hidden)

    def stack(self) -> Stack:
        return self._subject.backend.stack(
            [self._block(layer) for layer in self.layers], self._norm(self._final_norm_H)
        )

    def _norm(self, weight_H: Tensor) -> RMSNorm:
        return RMSNorm(weight_H, self._subject.eps)

    def _block(self, layer: _Layer) -> tuple[AttentionShape, BlockWeights]:
        of, linear = self._subject.attention, self._subject.backend.linear
        shape = AttentionShape(
            num_heads=of.num_heads,
            num_kv_heads=of.num_kv_heads,
            head_dim=of.head_dim,
            v_head_dim=of.head_dim,
            q_norm_D=layer.head_norm_2D[0],
            k_norm_D=layer.head_norm_2D[1],
            eps=self._subject.eps,
            rope=self.rope,
            scale=of.scale,
            causal=self._causal,
            window=self._window,
        )
        return shape, BlockWeights(
            attention_norm=self._norm(layer.attention_norm_H),
            qkv=linear(layer.qkv_OH),
            o=linear(layer.o_HO),
            mlp_norm=self._norm(layer.mlp_norm_H),
            mlp=DenseMLP(gate_up=linear(layer.gate_up_OH), down=linear(layer.down_HI)),
        )

    def exact(self, x_NH: Tensor, context_T2LKD: Tensor | None = None) -> Tensor:
        """Normed states [N, H] of a request's rows in fp64.

        Args:
            context_T2LKD: keys, not normed yet, and values of the positions before them; none if absent.
        """
        x_NH = x_NH.double()
        for i, layer in enumerate(self.layers):
            x_NH = self._exact_layer(x_NH, layer, None if context_T2LKD is None else context_T2LKD[:, :, i])
        return references.rms_norm(x_NH, self._final_norm_H, self._subject.eps)

    def _exact_layer(self, x_NH: Tensor, layer: _Layer, context_T2KD: Tensor | None) -> Tensor:
        of, eps = self._subject.attention, self._subject.eps
        normed_NH = references.rms_norm(x_NH, layer.attention_norm_H, eps)
        qkv_NJD = references.linear(normed_NH, layer.qkv_OH).unflatten(1, (-1, of.head_dim))
        q_NQD, k_TKD, v_TKD = qkv_NJD.split([of.num_heads, of.num_kv_heads, of.num_kv_heads], dim=1)
        if context_T2KD is not None:
            before_TKD, before_v_TKD = context_T2KD.double().unbind(1)
            k_TKD, v_TKD = torch.cat((before_TKD, k_TKD)), torch.cat((before_v_TKD, v_TKD))
        positions_T = torch.arange(len(k_TKD), device=x_NH.device)
        q_norm_D, k_norm_D = layer.head_norm_2D
        k_TKD = references.rotate(references.rms_norm(k_TKD, k_norm_D, eps), self.rope, positions_T)
        q_NQD = references.rms_norm(q_NQD, q_norm_D, eps)
        q_NQD = references.rotate(q_NQD, self.rope, positions_T[len(k_TKD) - len(q_NQD) :])
        attended_NQD = references.attend(
            q_NQD, k_TKD, v_TKD, of.scale, causal=self._causal, window=self._window
        )
        x_NH = x_NH + references.linear(attended_NQD.flatten(1), layer.o_HO)
        gate_up_NO = references.linear(references.rms_norm(x_NH, layer.mlp_norm_H, eps), layer.gate_up_OH)
        return x_NH + references.linear(references.gate(gate_up_NO, "silu"), layer.down_HI)
