"""Tensor parallelism: the part of the weights that a rank holds, and layers with collectives.

Heads, the MLP's inner size and the vocabulary are split over ranks; norms, routers, latents and hidden states
are replicated. Experts are split by inner size if it divides, else each rank has whole experts. K/V heads are
replicated if there are fewer of them than ranks. A single rank runs the same code with collectives that do
nothing; `actors/workers/comm/process_group.py` has the real ones.

Legend: N rows, H hidden, O outputs, V vocabulary (all), U vocabulary of a rank (padded).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from ....cluster.errors import ConfigError
from ....cluster.pages.kv_cache_groups import KVCacheSpec
from ....cluster.pages.recurrent_state_spec import RecurrentStateSpec
from ....drafter.compute.backend import Backend
from ....drafter.compute.block_weights import Projection, RankSum
from ....drafter.compute.checkpoint.quantized_matrix import Matrix
from ....drafter.compute.memory.peer_buffers import PeerBuffers
from .attention import TargetAttention
from .delta_net import DeltaNet, delta_slices, is_delta_axis
from .mlp_spec import RoutedMLP
from .model_spec import Axis, LayerSpec, ModelSpec


class Communicator(Protocol):
    """Collectives over the target's ranks, on contiguous tensors on their device."""

    @property
    def rank(self) -> int: ...

    @property
    def world_size(self) -> int: ...

    @property
    def peer_buffers(self) -> PeerBuffers | None:
        """The ranks' memory, through which kernels can sum few rows; None: there is none."""
        ...

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Sum over the ranks, in place."""
        ...

    def all_gather(self, tensor: Tensor, dim: int = -1) -> Tensor:
        """Join the ranks' tensors of equal shape along `dim`, in rank order."""
        ...

    def broadcast(self, tensor: Tensor, source: int = 0) -> Tensor:
        """Copy the tensor of rank `source` to all ranks, in place."""
        ...


class SingleRank:
    rank = 0
    world_size = 1
    peer_buffers: PeerBuffers | None = None

    def all_reduce(self, tensor: Tensor) -> Tensor:
        return tensor

    def all_gather(self, tensor: Tensor, dim: int = -1) -> Tensor:
        return tensor

    def broadcast(self, tensor: Tensor, source: int = 0) -> Tensor:
        return tensor


class Sharding:
    """One rank's part of a target; `vocab_rows` (U) is equal on all ranks, the last may have fewer ids."""

    def __init__(self, spec: ModelSpec, rank: int, world_size: int) -> None:
        """Split a target. Raises ConfigError if a size does not divide by `world_size`."""
        for layer in spec.layers:
            _check_layer(layer, world_size)
        self.spec, self.rank, self.world_size = spec, rank, world_size
        self.vocab_rows = -(-spec.vocab_size // world_size)
        first = min(rank * self.vocab_rows, spec.vocab_size)
        self.vocab = slice(first, min(first + self.vocab_rows, spec.vocab_size))

    def heads(self, layer: int) -> slice:
        return _part(self.spec.attention(layer).num_heads, self.rank, self.world_size)

    def kv_heads(self, layer: int) -> slice:
        """Return this rank's K/V heads of a layer; ranks share one if there are fewer heads than ranks."""
        count = self.spec.attention(layer).num_kv_heads
        if self.world_size <= count:
            return _part(count, self.rank, self.world_size)
        head = self.rank * count // self.world_size
        return slice(head, head + 1)

    def num_heads(self, layer: int) -> int:
        return _length(self.heads(layer))

    def num_kv_heads(self, layer: int) -> int:
        return _length(self.kv_heads(layer))

    def kv_geometries(self) -> list[KVCacheSpec]:
        mixers = [(i, layer.mixer) for i, layer in enumerate(self.spec.layers)]
        return [
            KVCacheSpec(
                self.num_kv_heads(i), mixer.head_dim, mixer.value_dim, v_in_k=mixer.latent is not None
            )
            for i, mixer in mixers
            if isinstance(mixer, TargetAttention)
        ]

    def state_geometry(self, layer: int) -> RecurrentStateSpec:
        return self.spec.delta_net(layer).geometry.rank(self.world_size)

    def slices_of(self, axis: Axis, layer: int) -> Sequence[slice]:
        """Return this rank's part of a dimension as one or several slices; none means the whole dimension."""
        mixer = self.spec.layers[layer].mixer
        if isinstance(mixer, DeltaNet) and is_delta_axis(axis):
            return delta_slices(axis, mixer.geometry, self.rank, self.world_size)
        if axis == "expert_gate_up" and (part := self.slice_of("expert_inner", layer)):
            inner = self.spec.axis_size("expert_inner", layer)
            return part, slice(inner + part.start, inner + part.stop)
        part = self.slice_of(axis, layer)
        return () if part is None else (part,)

    def slice_of(self, axis: Axis, layer: int) -> slice | None:
        """Return this rank's part of a dimension that is one slice; None means the whole dimension."""
        match axis:
            case "q":
                return _scaled(self.heads(layer), self.spec.attention(layer).q_dim)
            case "q_and_gate":
                return _scaled(self.heads(layer), 2 * self.spec.attention(layer).head_dim)
            case "kv":
                return _scaled(self.kv_heads(layer), self.spec.attention(layer).head_dim)
            case "value":
                return _scaled(self.kv_heads(layer), self.spec.attention(layer).value_dim)
            case "attended":
                return _scaled(self.heads(layer), self.spec.attention(layer).attended_dim)
            case "latent_heads":
                return _part(self.spec.axis_size(axis, layer), self.rank, self.world_size)
            case "q_heads":
                return self.heads(layer)
            case "vocab":
                return self.vocab
            case "inner" | "shared":
                return _part(self.spec.axis_size(axis, layer), self.rank, self.world_size)
            case "expert":
                return None if self.splits_experts(layer) else self.experts(layer)
            case "expert_inner" | "expert_pairs" | "expert_inner_blocks":
                return self._expert_slice(axis, layer)
            case _:
                return None

    def experts(self, layer: int) -> slice:
        """Return the experts of which this rank has all or a part."""
        count = self.spec.axis_size("expert", layer)
        return slice(0, count) if self.splits_experts(layer) else _part(count, self.rank, self.world_size)

    def splits_experts(self, layer: int) -> bool:
        routed = self.spec.layers[layer].routed
        assert routed is not None, "a layer with experts"
        return _splits(routed, self.world_size)

    def _expert_slice(self, axis: Axis, layer: int) -> slice | None:
        if not self.splits_experts(layer):
            return None
        return _part(self.spec.axis_size(axis, layer), self.rank, self.world_size)


def _check_layer(layer: LayerSpec, world_size: int) -> None:
    mixer, dense, routed = layer.mixer, layer.dense, layer.routed
    if isinstance(mixer, DeltaNet):
        _check_divides("linear_num_key_heads", mixer.geometry.num_key_heads, world_size)
    else:
        _check_divides("num_attention_heads", mixer.num_heads, world_size)
    if dense is not None:
        _check_divides("intermediate_size", dense.inner_size, world_size)
    if routed is not None:
        _check_routed(routed, world_size)
    if isinstance(mixer, DeltaNet):
        return
    if world_size <= mixer.num_kv_heads:
        _check_divides("num_key_value_heads", mixer.num_kv_heads, world_size)
    elif world_size % mixer.num_kv_heads:
        raise _does_not_divide("num_key_value_heads", mixer.num_kv_heads, world_size)


def _check_routed(mlp: RoutedMLP, world_size: int) -> None:
    if mlp.shared is not None:
        _check_divides("shared expert's inner size", mlp.shared.inner_size, world_size)
    if not _splits(mlp, world_size):
        _check_divides("number of experts", mlp.router.num_experts, world_size)


def _splits(mlp: RoutedMLP, world_size: int) -> bool:
    return mlp.inner_size % (world_size * mlp.inner_multiple) == 0


def _length(part: slice) -> int:
    return part.stop - part.start


def _scaled(heads: slice, head_dim: int) -> slice:
    return slice(heads.start * head_dim, heads.stop * head_dim)


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
    weight_OH: Matrix,
    bias_O: Tensor | None,
    communicator: Communicator,
    backend: Backend,
) -> Projection:
    """Return a projection with inputs split over ranks, with an all-reduce. Biases are zero but on rank 0."""
    linear = backend.linear_of_either(weight_OH, bias_O)
    return linear if communicator.world_size == 1 else rank_sum(communicator, linear)


def rank_sum(communicator: Communicator, project: Projection | None = None) -> RankSum:
    return RankSum(communicator.all_reduce, communicator.peer_buffers, project)


def vocab_embedding(
    rows: Callable[[Tensor], Tensor], sharding: Sharding, communicator: Communicator
) -> Callable[[Tensor], Tensor]:
    """Return the look-up of token ids, by a look-up of a rank's; with several it is vocabulary-parallel."""
    return rows if communicator.world_size == 1 else _VocabEmbedding(rows, sharding, communicator)


class _VocabEmbedding:
    """Vocabulary-parallel embedding: each rank looks up its own ids, and an all-reduce adds the rows."""

    __slots__ = ("_communicator", "_first", "_num_rows", "_rows")

    def __init__(
        self, rows: Callable[[Tensor], Tensor], sharding: Sharding, communicator: Communicator
    ) -> None:
        self._rows, self._first, self._num_rows = rows, sharding.vocab.start, sharding.vocab_rows
        self._communicator = communicator

    def __call__(self, token_ids_N: Tensor) -> Tensor:
        local_N = token_ids_N - self._first
        other_ranks_N = (local_N < 0) | (local_N >= self._num_rows)
        rows_NH = self._rows(local_N.masked_fill_(other_ranks_N, 0))
        return self._communicator.all_reduce(rows_NH.masked_fill_(other_ranks_N.unsqueeze(1), 0.0))


class VocabHead:
    """Vocabulary-parallel head: logits of all token ids on every rank, or only of a rank's own.

    Attributes:
        linear: the head of a rank's own token ids.
    """

    __slots__ = ("_communicator", "_sharding", "_vocab_size", "linear")

    def __init__(
        self, linear: Projection, vocab_size: int, sharding: Sharding, communicator: Communicator
    ) -> None:
        self.linear = linear
        self._vocab_size = vocab_size
        self._sharding = sharding
        self._communicator = communicator

    def local(self, x_NH: Tensor) -> tuple[Tensor, int]:
        """Return the logits of this rank's token ids, and the first of these ids."""
        vocab = self._sharding.vocab
        return self.linear(x_NH)[:, : vocab.stop - vocab.start], vocab.start

    def __call__(self, x_NH: Tensor) -> Tensor:
        logits_NV = self._communicator.all_gather(self.linear(x_NH))
        return logits_NV if logits_NV.shape[-1] == self._vocab_size else logits_NV[:, : self._vocab_size]


def smallest(
    find: Callable[[], Sequence[int]], count: int, communicator: Communicator, device: torch.device
) -> tuple[int, ...]:
    """Return the smallest of what the ranks find, by place, by one collective.

    If `find` raises a ConfigError on one rank, all ranks raise one: no rank waits for another that gave up.

    Args:
        find: finds `count` values.
    """
    values, error = [0] * count, None
    try:
        values = list(find())
    except ConfigError as raised:
        error = raised
    assert len(values) == count, "every rank shows as many values"
    mine_1V = torch.tensor([[int(error is None), *values]], dtype=torch.int64, device=device)
    works, *found = communicator.all_gather(mine_1V, dim=0).amin(0).tolist()
    if error is not None:
        raise error
    if not works:
        raise ConfigError("Another rank of the target cannot be loaded; its error says why.")
    return tuple(found)
