"""Tensor parallelism: which part of the weights a rank holds, and the layers that put parts together.

Heads, the MLP's inner size and the vocabulary are split over ranks; norms and hidden states are whole
everywhere. K/V heads are repeated when there are fewer than ranks. One rank is the same code with collectives
that do nothing. The real collectives are `actors/workers/process_group.py`'s; torch.distributed is not named
here.

Legend: N rows, H hidden, O outputs, V vocabulary (all), U vocabulary of a rank (padded).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ....cluster.errors import ConfigError
from ....drafter.compute.backend import Backend, Projection
from .config import TargetConfig


class Communicator(Protocol):
    """The collectives of the target's ranks, on contiguous tensors of their device."""

    @property
    def rank(self) -> int: ...

    @property
    def world_size(self) -> int: ...

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Sum over the ranks, in place."""
        ...

    def all_gather(self, tensor: Tensor, dim: int = -1) -> Tensor:
        """The ranks' tensors of equal shape, joined along `dim` in the order of ranks."""
        ...

    def broadcast(self, tensor: Tensor, source: int = 0) -> Tensor:
        """The tensor of rank `source`, in place."""
        ...


class SingleRank:
    """The communicator of a target that is not split."""

    rank = 0
    world_size = 1

    def all_reduce(self, tensor: Tensor) -> Tensor:
        return tensor

    def all_gather(self, tensor: Tensor, dim: int = -1) -> Tensor:
        return tensor

    def broadcast(self, tensor: Tensor, source: int = 0) -> Tensor:
        return tensor


@dataclass(frozen=True, slots=True)
class Sharding:
    """One rank's part.

    Attributes:
        heads, kv_heads, inner, vocab: ranges of query heads, K/V heads, MLP columns and token ids.
        vocab_rows: U, equal on all ranks; the last ranks may have fewer token ids than that.
    """

    rank: int
    world_size: int
    heads: slice
    kv_heads: slice
    inner: slice
    vocab: slice
    vocab_rows: int

    @classmethod
    def of(cls, config: TargetConfig, rank: int, world_size: int) -> Sharding:
        """Split a target; ConfigError if it does not divide."""
        heads, kv_heads, inner = config.num_heads, config.num_kv_heads, config.intermediate_size
        _check_divides("num_attention_heads", heads, world_size)
        _check_divides("intermediate_size", inner, world_size)
        if world_size <= kv_heads:
            _check_divides("num_key_value_heads", kv_heads, world_size)
            kv = _part(kv_heads, rank, world_size)
        else:
            if world_size % kv_heads:
                raise _does_not_divide("num_key_value_heads", kv_heads, world_size)
            mine = rank * kv_heads // world_size
            kv = slice(mine, mine + 1)
        rows = -(-config.vocab_size // world_size)
        first = min(rank * rows, config.vocab_size)
        return cls(
            rank,
            world_size,
            heads=_part(heads, rank, world_size),
            kv_heads=kv,
            inner=_part(inner, rank, world_size),
            vocab=slice(first, min(first + rows, config.vocab_size)),
            vocab_rows=rows,
        )

    @property
    def num_heads(self) -> int:
        return self.heads.stop - self.heads.start

    @property
    def num_kv_heads(self) -> int:
        return self.kv_heads.stop - self.kv_heads.start


def _part(size: int, rank: int, world_size: int) -> slice:
    share = size // world_size
    return slice(rank * share, (rank + 1) * share)


def _check_divides(name: str, size: int, world_size: int) -> None:
    if size % world_size:
        raise _does_not_divide(name, size, world_size)


def _does_not_divide(name: str, size: int, world_size: int) -> ConfigError:
    fitting = [n for n in range(1, world_size) if size % n == 0]
    return ConfigError(
        f"tensor_parallel_size={world_size} does not fit the target: its {name} is {size}. "
        f"Use a size that divides it, such as {fitting[-1]}.",
        param="tensor_parallel_size",
    )


def row_linear(
    weight_OH: Tensor, bias_O: Tensor | None, communicator: Communicator, backend: Backend
) -> Projection:
    """A projection back to the hidden state, whose inputs are split; `bias` is given to rank 0 alone."""
    linear = backend.linear(weight_OH, bias_O)
    return linear if communicator.world_size == 1 else _RowLinear(linear, communicator)


class _RowLinear:
    """Partial products are summed."""

    __slots__ = ("_communicator", "_linear")

    def __init__(self, linear: Projection, communicator: Communicator) -> None:
        self._linear = linear
        self._communicator = communicator

    def __call__(self, x_NH: Tensor, residual_NO: Tensor | None = None) -> Tensor:
        y_NO = self._communicator.all_reduce(self._linear(x_NH))
        return y_NO if residual_NO is None else y_NO.add_(residual_NO)


class VocabEmbedding:
    """Rows of token ids; each rank knows its own and the sum has them all."""

    __slots__ = ("_communicator", "_first", "_rows", "_split", "_weight_UH")

    def __init__(self, weight_UH: Tensor, sharding: Sharding, communicator: Communicator) -> None:
        self._weight_UH = weight_UH
        self._first, self._rows = sharding.vocab.start, sharding.vocab_rows
        self._communicator = communicator
        self._split = communicator.world_size > 1

    def __call__(self, token_ids_N: Tensor) -> Tensor:
        if not self._split:
            return self._weight_UH.index_select(0, token_ids_N)
        local_N = token_ids_N - self._first
        foreign_N = (local_N < 0) | (local_N >= self._rows)
        rows_NH = self._weight_UH.index_select(0, local_N.masked_fill_(foreign_N, 0))
        return self._communicator.all_reduce(rows_NH.masked_fill_(foreign_N.unsqueeze(1), 0.0))


class VocabHead:
    """Logits of all token ids, on every rank; or of a rank's own."""

    __slots__ = ("_communicator", "_linear", "_sharding", "_vocab_size")

    def __init__(
        self, linear: Projection, vocab_size: int, sharding: Sharding, communicator: Communicator
    ) -> None:
        self._linear = linear
        self._vocab_size = vocab_size
        self._sharding = sharding
        self._communicator = communicator

    def local(self, x_NH: Tensor) -> tuple[Tensor, int]:
        """Logits of this rank's token ids, and the first of these ids."""
        mine = self._sharding.vocab
        return self._linear(x_NH)[:, : mine.stop - mine.start], mine.start

    def __call__(self, x_NH: Tensor) -> Tensor:
        logits_NV = self._communicator.all_gather(self._linear(x_NH))
        return logits_NV if logits_NV.shape[-1] == self._vocab_size else logits_NV[:, : self._vocab_size]


def smallest(value: int, communicator: Communicator, device: torch.device) -> int:
    """The least of the ranks' values."""
    mine_1 = torch.tensor([value], dtype=torch.int64, device=device)
    return int(communicator.all_gather(mine_1).min())
