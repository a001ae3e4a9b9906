"""Tests whether this machine computes a row to the same bits regardless of the other rows in the batch.

Measured at start, because it depends on the CPU, the dtype and the libraries. If it holds, greedy and seeded
outputs are identical with speculation on or off and in any batch; otherwise up to near-ties. Used in
`actors/targets/loading/`: `backend_selection.py` (a CPU's dtype), `cpu_autotune.py`,
`warmup.py`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from ...cluster.pages.kv_cache_groups import KVCacheSpec
from .backend import Backend, PlacedRows, Stack
from .block_weights import AttentionShape, BlockWeights, DenseMLP, RoutedExperts
from .layers.linear import RMSNorm
from .layers.moe import ExpertWeights, MoeRouter, RouterWeights
from .layers.rope import RopeConfig, RotaryEmbedding
from .memory.kv_cache import PagedKVCache

_HIDDEN, _INNER, _HEADS, _KV_HEADS = 192, 1280, 4, 2  # large enough that libraries split sums over inputs
_EXPERTS, _EXPERT_INNER = 8, 64
_BLOCK, _PAGE, _PAGES = 16, 16, 64
_COMPANIONS = ((900, 1), (200, 32))  # other requests in the batch: (known tokens, rows)
_LENGTHS = (16, 100, 200, 330, 390, 450, 730)


def rows_are_invariant(
    backend: Backend,
    dtype: torch.dtype,
    device: torch.device | str,
    head_dims: Sequence[int] = (64,),
    *,
    routed: bool = False,
) -> bool:
    """Compare the rows of a block bit by bit: alone, batched with others, and at the end of a prompt.

    `routed` also tests a block with experts beside its MLP.
    """
    kinds = (False, True) if routed else (False,)
    trials = (TrialBlock(backend, dtype, device, dim, routed=kind) for kind in kinds for dim in head_dims)
    return all(trial.passes() for trial in trials)


class TrialBlock:
    """One transformer block with random weights, and pages of random K and V."""

    def __init__(
        self,
        backend: Backend,
        dtype: torch.dtype,
        device: torch.device | str,
        head_dim: int = 64,
        *,
        routed: bool = False,
        hidden: int = _HIDDEN,
        inner: int = _INNER,
    ) -> None:
        self._generator = torch.Generator().manual_seed(0)
        self._backend, self._dtype, self._device = backend, dtype, device
        self._head_dim, self._routed, self._hidden, self._inner = head_dim, routed, hidden, inner
        self._stack = self._make_stack()
        num_requests, geometry = 1 + len(_COMPANIONS), KVCacheSpec(_KV_HEADS, head_dim, head_dim)
        self._cache = PagedKVCache(1, num_requests * _PAGES, _PAGE, geometry, dtype, device)
        self._cache.kv.copy_(self.random(*self._cache.kv.shape))
        self._pages = np.arange(num_requests * _PAGES).reshape(_PAGES, num_requests).T.copy()

    def random(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self._generator).to(device=self._device, dtype=self._dtype)

    def _make_stack(self) -> Stack:
        def norm(size: int) -> RMSNorm:
            return RMSNorm(1 + 0.1 * self.random(size), 1e-6)

        def linear(outputs: int, inputs: int):
            return self._backend.linear(self.random(outputs, inputs) * inputs**-0.5)

        dim = self._head_dim
        rope = RotaryEmbedding(RopeConfig(dim, 1e4, "default", {}), _PAGE * _PAGES, self._dtype, self._device)
        shape = AttentionShape(
            num_heads=_HEADS,
            num_kv_heads=_KV_HEADS,
            head_dim=dim,
            v_head_dim=dim,
            q_norm_D=norm(dim).weight_H,
            k_norm_D=norm(dim).weight_H,
            eps=1e-6,
            rope=rope,
            scale=dim**-0.5,
        )
        dense = DenseMLP(
            gate_up=linear(2 * self._inner, self._hidden), down=linear(self._hidden, self._inner)
        )
        weights = BlockWeights(
            attention_norm=norm(self._hidden),
            qkv=linear((_HEADS + 2 * _KV_HEADS) * dim, self._hidden),
            o=linear(self._hidden, _HEADS * dim),
            mlp_norm=norm(self._hidden),
            mlp=self._with_experts(dense) if self._routed else dense,
        )
        return self._backend.stack([(shape, weights)], norm(self._hidden))

    def _with_experts(self, dense: DenseMLP) -> RoutedExperts:
        router = RouterWeights(
            rule=MoeRouter(num_experts=_EXPERTS, top_k=3, score="softmax"),
            weight_EH=self.random(_EXPERTS, self._hidden) * self._hidden**-0.5,
        )
        experts = ExpertWeights(
            gate_up=self.random(_EXPERTS, 2 * _EXPERT_INNER, self._hidden) * self._hidden**-0.5,
            down=self.random(_EXPERTS, self._hidden, _EXPERT_INNER) * _EXPERT_INNER**-0.5,
        )
        return RoutedExperts(
            route=self._backend.route(router), experts=self._backend.experts(experts), shared=dense
        )

    def passes(self) -> bool:
        return all(self._blocks_agree(length) and self._ends_agree(length) for length in _LENGTHS)

    def _blocks_agree(self, length: int) -> bool:
        """Return whether a block has the same bits whole, row by row, and batched with others."""
        others_NH = self.random(sum(rows for _, rows in _COMPANIONS), self._hidden)
        begins, counts = (list(column) for column in zip(*_COMPANIONS, strict=True))
        x_NH, first = self.random(_BLOCK, self._hidden), length - _BLOCK
        block = self.run(x_NH, [first], [_BLOCK])
        alone = [self.run(x_NH[i : i + 1], [first + i], [1]) for i in range(_BLOCK)]
        in_batch = self.run(torch.cat((x_NH, others_NH)), [first, *begins], [_BLOCK, *counts])
        return torch.equal(block, torch.cat(alone)) and torch.equal(block, in_batch[:_BLOCK])

    def _ends_agree(self, length: int) -> bool:
        """Return whether a prompt's last rows equal those of a block that follows the others."""
        x_NH, first = self.random(length, self._hidden), length - _BLOCK
        prompt = self.run(x_NH, [0], [length])
        return torch.equal(prompt[first:], self.run(x_NH[first:], [first], [_BLOCK]))

    def run(self, x_NH: Tensor, first: list[int], counts: list[int]) -> Tensor:
        """Run `counts` rows for each of the first requests, from position `first` on."""
        positions = [np.arange(at, at + count) for at, count in zip(first, counts, strict=True)]
        slots = [self._pages[r][at // _PAGE] * _PAGE + at % _PAGE for r, at in enumerate(positions)]
        batch = self._backend.attention_batch(
            np.array(first), np.array(counts), self._pages[: len(first)], _PAGE, self._device
        )
        rows = PlacedRows(self._ints(positions), (self._ints(slots),), (batch,))
        return self._stack(x_NH.clone(), rows, self._cache)[0]

    def _ints(self, parts: list[np.ndarray]) -> Tensor:
        return torch.from_numpy(np.concatenate(parts)).to(self._device)
