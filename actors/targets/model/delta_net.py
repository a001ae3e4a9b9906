"""Gated delta net layers (arXiv:2412.06464): specification, tensors, and how ranks shard and fuse them.

`drafter/compute/layers/gated_delta_net.py` describes the computation. A rank has whole key heads, with their
value heads.

    a checkpoint's projections, by rows          a rank's, fused into one product
    delta_qkv  delta_z  delta_b  delta_a         q k v z b a, each for its heads
    delta_qkvz (q k v z of a key head, then of the next), delta_ba likewise      transformed into the same

Legend: O outputs, H hidden, C channels (q, k and v), T taps, V value heads, F value dim.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeGuard, get_args

from torch import Tensor

from ....cluster.pages.recurrent_state_spec import RecurrentStateSpec
from ....drafter.compute.layers.gated_delta_net import DeltaNetShape

# Dimensions of its tensors. "delta_channels": all channels of the convolution; "delta_values", "delta_heads":
# values of all value heads, and their number; "delta_qkvz", "delta_ba": q, k, v, z and b, a grouped by key
# head; "delta_value": values of one head; "delta_taps": taps of the convolution.
DeltaAxis = Literal[
    "delta_channels", "delta_values", "delta_heads", "delta_qkvz", "delta_ba", "delta_value", "delta_taps"
]
_PROJECTIONS = (("delta_qkv", "delta_z", "delta_b", "delta_a"), ("delta_qkvz", "delta_ba"))
_OTHERS = ("delta_conv", "delta_rate", "delta_dt_bias", "delta_norm", "delta_out")


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaNet:
    """Gated delta rule after a short convolution, with a recurrent state; `geometry` is over all ranks."""

    geometry: RecurrentStateSpec


@dataclass(frozen=True, slots=True)
class DeltaTensors:
    """A rank's tensors other than the projections, all fp32."""

    kernel_CT: Tensor
    rate_V: Tensor
    dt_bias_V: Tensor
    norm_F: Tensor

    def shape(self, geometry: RecurrentStateSpec, eps: float) -> DeltaNetShape:
        return DeltaNetShape(geometry, self.kernel_CT, self.rate_V, self.dt_bias_V, self.norm_F, eps)


def read_delta(tensor_of: Callable[[str], Tensor]) -> DeltaTensors:
    return DeltaTensors(*(tensor_of(part).contiguous() for part in _OTHERS[:-1]))


def projections(names: Iterable[str]) -> tuple[str, ...]:
    """Return the projections that a family has, in their order in the fused product."""
    names = frozenset(names)
    return next(parts for parts in _PROJECTIONS if names >= set(parts))


def delta_parts(names: Iterable[str]) -> list[str]:
    return [*projections(names), *_OTHERS]


def is_delta_axis(axis: str) -> TypeGuard[DeltaAxis]:
    return axis in get_args(DeltaAxis)


def delta_axis_size(axis: DeltaAxis, geometry: RecurrentStateSpec) -> int:
    values = geometry.num_value_heads * geometry.value_dim
    match axis:
        case "delta_channels":
            return geometry.channels
        case "delta_values":
            return values
        case "delta_heads":
            return geometry.num_value_heads
        case "delta_qkvz":
            return geometry.channels + values
        case "delta_ba":
            return 2 * geometry.num_value_heads
        case "delta_value":
            return geometry.value_dim
        case "delta_taps":
            return geometry.taps


def delta_slices(
    axis: DeltaAxis, geometry: RecurrentStateSpec, rank: int, world_size: int
) -> Sequence[slice]:
    """Return a rank's part of a dimension as one or three slices; none means the whole dimension."""
    if axis in ("delta_value", "delta_taps"):
        return ()
    sizes = [delta_axis_size(axis, geometry)]
    if axis == "delta_channels":
        keys = geometry.num_key_heads * geometry.key_dim
        sizes = [keys, keys, geometry.num_value_heads * geometry.value_dim]
    slices, begin = list[slice](), 0
    for size in sizes:
        share = size // world_size
        slices.append(slice(begin + rank * share, begin + (rank + 1) * share))
        begin += size
    return slices
