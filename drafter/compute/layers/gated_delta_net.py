"""Shape and weights of a gated delta rule layer (Gated DeltaNet, arXiv 2412.06464); backends compute it.

    projection --> [q, k, v | z | b | a] --conv--> rule(q, k, v, g(a), beta(b)) --norm, gate(z)--> [N, V * F]

`compute/eager/gated_delta_net.py` defines the layer, `compute/memory/recurrent_state_cache.py` its memory.

Legend: N rows, O outputs of the projection, C channels (q, k and v), T taps, V value heads, F value dim, G =
V * F.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from ....cluster.pages.recurrent_state_spec import RecurrentStateSpec
from ..memory.kv_cache import PagedKVCache
from ..memory.recurrent_state_cache import DeviceStateRows, StateMemory, StateRows


@dataclass(frozen=True, slots=True)
class DeltaNetShape:
    """One layer's delta rule, on one rank; tensors are fp32 and contiguous.

    The last tap of `kernel_CT` is a row's own; a row's g is `rate_V` (negative) * softplus(a + dt_bias);
    `norm_F` and `eps` are of the heads' RMSNorm after the rule.
    """

    geometry: RecurrentStateSpec
    kernel_CT: Tensor
    rate_V: Tensor
    dt_bias_V: Tensor
    norm_F: Tensor
    eps: float


class DeltaNetInputs(NamedTuple):
    """A layer's projection, split into views."""

    x_NC: Tensor
    z_NG: Tensor
    b_NV: Tensor
    a_NV: Tensor


def split_inputs(mixed_NO: Tensor, kind: RecurrentStateSpec) -> DeltaNetInputs:
    sizes = [kind.channels, kind.num_value_heads * kind.value_dim, kind.num_value_heads, kind.num_value_heads]
    return DeltaNetInputs(*mixed_NO.split(sizes, dim=1))


def states_of(
    states: StateRows | DeviceStateRows | None, cache: PagedKVCache
) -> tuple[StateRows, StateMemory]:
    """Return a host-driven pass's rows by request, and the memory."""
    assert isinstance(states, StateRows) and cache.states is not None, "rows and memory of such a model"
    return states, cache.states
