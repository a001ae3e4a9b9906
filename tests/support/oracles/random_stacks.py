"""Stacks of random layers for any backend, with the same numbers in every dtype, and requests' rows at pages.

Legend: N rows, R requests, P pages, H hidden, Q query heads, K kv heads, D head dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle

import numpy as np
import torch
from manta.cluster.pages.kv_cache_groups import KVCacheSpec
from manta.drafter.compute.backend import Backend, PlacedRows
from manta.drafter.compute.block_weights import AttentionShape, BlockWeights, DenseMLP
from manta.drafter.compute.draft_trees import positions_of
from manta.drafter.compute.layers.linear import Activation, RMSNorm
from manta.drafter.compute.layers.rope import RopeConfig, RotaryEmbedding
from manta.drafter.compute.memory.kv_cache import PagedKVCache
from torch import Tensor

EPS, MAX_POSITIONS = 1e-6, 1024
CPU = torch.device("cpu")


class Numbers:
    """Random tensors of numbers that bf16 represents, in a dtype and on a device."""

    def __init__(self, dtype: torch.dtype, device: torch.device = CPU, seed: int = 0) -> None:
        self.dtype, self.device = dtype, device
        self.generator = torch.Generator().manual_seed(seed)

    def tensor(self, *shape: int, scale: float = 1.0) -> Tensor:
        numbers = (scale * torch.randn(shape, generator=self.generator)).bfloat16()
        return numbers.to(self.device, self.dtype)

    def norm(self, size: int, *, is_fp32: bool = False) -> RMSNorm:
        """Return a norm; one in fp32 has weights that bf16 does not represent."""
        weight = 1 + self.tensor(size, scale=0.1)
        return RMSNorm(weight.float() + 2.0**-12 if is_fp32 else weight, EPS)

    def rope(self, head_dim: int, theta: float = 1e4) -> RotaryEmbedding:
        config = RopeConfig(head_dim, theta, "default", {})
        rope = RotaryEmbedding(config, MAX_POSITIONS, torch.bfloat16, self.device)
        rope.cos_TD, rope.sin_TD = rope.cos_TD.to(self.dtype), rope.sin_TD.to(self.dtype)
        return rope


def slots_of(pages_P: np.ndarray, positions: np.ndarray, page_size: int) -> Tensor:
    """Return the slots of a request's positions."""
    return torch.from_numpy(pages_P[positions // page_size] * page_size + positions % page_size)


def placed_rows(
    backend: Backend,
    first: Sequence[int] | np.ndarray,
    counts: Sequence[int] | np.ndarray,
    tables: Sequence[np.ndarray],
    page_size: int,
    device: torch.device = CPU,
    *,
    windows: Sequence[int | None] = (None,),
    paths_ND: np.ndarray | None = None,
) -> PlacedRows:
    """Return requests' rows behind `first` tokens each, by page group: its pages [R, P] and its window."""
    first_R, rows_R = np.asarray(first), np.asarray(counts)
    spans = [np.arange(at, at + count) for at, count in zip(first_R, rows_R, strict=True)]
    positions_N = np.concatenate(spans) if paths_ND is None else positions_of(paths_ND, first_R, rows_R)
    slots = [
        torch.cat([slots_of(pages, span, page_size) for pages, span in zip(table, spans, strict=True)])
        for table in tables
    ]
    batches = tuple(
        backend.attention_batch(first_R, rows_R, table, page_size, device, window, paths_ND)
        for table, window in zip(tables, windows, strict=True)
    )
    return PlacedRows(
        torch.from_numpy(positions_N).to(device), tuple(each.to(device) for each in slots), batches
    )


@dataclass(frozen=True)
class StackShape:
    """Sizes and features of a stack, with one layer for each window.

    Attributes:
        norms_after: what attention and MLP add is normed.
        thetas: of the layers' rotations, in turn.
    """

    heads: tuple[int, int, int] = (4, 2, 64)  # Q, K, D
    hidden: int = 192
    inner: int = 512
    normed: bool = True
    biased: bool = False
    causal: bool = True
    windows: tuple[int | None, ...] = (None, None)
    scale: float = 0.125
    page_size: int = 16
    norms_after: bool = False
    fp32_norms: bool = False
    activation: Activation = "silu"
    thetas: tuple[float, ...] = (1e4,)


class RandomStack:
    """A stack of random layers, and the pages [R, P] of requests."""

    def __init__(
        self,
        backend: Backend,
        dtype: torch.dtype,
        shape: StackShape,
        pages_RP: np.ndarray,
        *,
        taps: tuple[int, ...] = (),
    ) -> None:
        self.backend, self.dtype, self.shape, self.pages_RP = backend, dtype, shape, pages_RP
        self.numbers = Numbers(dtype)
        ropes = [self.numbers.rope(shape.heads[2], theta) for theta in shape.thetas]
        blocks = [
            self._block(rope, window) for rope, window in zip(cycle(ropes), shape.windows, strict=False)
        ]
        self._stack = backend.stack(blocks, self._norm(shape.hidden), taps)

    def _block(self, rope: RotaryEmbedding, window: int | None) -> tuple[AttentionShape, BlockWeights]:
        of = self.shape
        num_q, num_kv, dim = of.heads
        q_norm, k_norm = (self._norm(dim).weight_H if of.normed else None for _ in "qk")
        sizes = (num_q, num_kv, dim, dim)
        shape = AttentionShape(*sizes, q_norm, k_norm, EPS, rope, of.scale, of.causal, window)
        return shape, BlockWeights(
            attention_norm=self._norm(of.hidden),
            qkv=self._linear((num_q + 2 * num_kv) * dim, of.hidden),
            o=self._linear(of.hidden, num_q * dim),
            attention_out_norm=self._norm(of.hidden) if of.norms_after else None,
            mlp_norm=self._norm(of.hidden),
            mlp=DenseMLP(
                gate_up=self._linear(2 * of.inner, of.hidden),
                activation=of.activation,
                down=self._linear(of.hidden, of.inner),
            ),
            mlp_out_norm=self._norm(of.hidden) if of.norms_after else None,
        )

    def _norm(self, size: int) -> RMSNorm:
        return self.numbers.norm(size, is_fp32=self.shape.fp32_norms)

    def _linear(self, outputs: int, inputs: int):
        bias = self.numbers.tensor(outputs) if self.shape.biased else None
        return self.backend.linear(self.numbers.tensor(outputs, inputs, scale=inputs**-0.5), bias)

    def new_cache(self) -> PagedKVCache:
        _, num_kv, dim = self.shape.heads
        size = (len(self.shape.windows), self.pages_RP.size, self.shape.page_size)
        return PagedKVCache(*size, KVCacheSpec(num_kv, dim, dim), self.dtype, "cpu")

    def slots(self, request: int, positions: np.ndarray) -> Tensor:
        return slots_of(self.pages_RP[request], positions, self.shape.page_size)

    def run(
        self,
        x_NH: Tensor,
        cache: PagedKVCache,
        owners: Sequence[int],
        first: Sequence[int],
        counts: Sequence[int],
        paths_ND: np.ndarray | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Return the normed rows and the taps of rows of these requests."""
        table = self.pages_RP[list(owners)]
        rows = placed_rows(self.backend, first, counts, [table], self.shape.page_size, paths_ND=paths_ND)
        return self._stack(x_NH.clone(), rows, cache)
