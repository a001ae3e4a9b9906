"""The definition of a gated delta rule layer over states in memory, request by request.

    slot's state --fold last pass's accepted drafts--> S --known rows--> S', written --drafts--> records

Called by the block stack in attention's place; `delta_rule.py` defines the rule.

Legend: N rows, O outputs of the layer's projection, C channels, K key heads, V value heads, D key dim, F
value dim, G = V * F.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F

from ..layers.gated_delta_net import DeltaNetShape, split_inputs, states_of
from ..layers.linear import in_fp32
from ..memory.kv_cache import PagedKVCache
from ..memory.recurrent_state_cache import StateMemory
from .attention_metadata import EagerPass
from .delta_rule import Records, chunk, conv_chunk, conv_fold, fold, sigmoid, softplus, unit


class EagerDeltaNet:
    __slots__ = ("_shape",)

    def __init__(self, shape: DeltaNetShape) -> None:
        self._shape = shape

    def __call__(self, mixed_NO: Tensor, step: EagerPass, cache: PagedKVCache, layer: int) -> Tensor:
        shape, kind = self._shape, self._shape.geometry
        states, memory = states_of(step.rows.states, cache)
        x_NC, z_NG, b_NV, a_NV = split_inputs(mixed_NO, kind)
        beta_NV, g_NV = sigmoid(in_fp32(b_NV)), shape.rate_V * softplus(in_fp32(a_NV) + shape.dt_bias_V)
        read_NVF = beta_NV.new_empty(len(mixed_NO), kind.num_value_heads, kind.value_dim)
        saves, begin = list(states.saves), 0
        for number, (slot, num_rows, num_drafts, pending) in enumerate(states.requests()):
            request = _Request(shape, memory, layer, slot, pending)
            first_draft, end = begin + num_rows - num_drafts, begin + num_rows
            at = begin
            while saves and saves[0].request == number:
                save = saves.pop(0)
                known, at = slice(at, begin + save.num_rows), begin + save.num_rows
                read_NVF[known] = request.advance(x_NC[known], g_NV[known], beta_NV[known], save.slot)
            known, drafts = slice(at, first_draft), slice(first_draft, end)
            read_NVF[known] = request.advance(x_NC[known], g_NV[known], beta_NV[known], slot)
            if num_drafts:
                read_NVF[drafts] = request.record(x_NC[drafts], g_NV[drafts], beta_NV[drafts], slot)
            begin = end
        return _gated_norm(read_NVF, z_NG, shape)


class _Request:
    """A request's state in a layer during a pass; pending records are folded on construction."""

    __slots__ = ("_layer", "_memory", "_shape", "_state_VDF", "_window_WC")

    def __init__(
        self, shape: DeltaNetShape, memory: StateMemory, layer: int, slot: int, pending: int
    ) -> None:
        self._shape, self._memory, self._layer = shape, memory, layer
        self._state_VDF, self._window_WC = memory.states_LZVDF[layer, slot], memory.windows_LZWC[layer, slot]
        if pending:
            kept = (memory.k_LZPKD, memory.u_LZPVF, memory.g_LZPV)
            records = Records(*(each[layer, slot] for each in kept))
            self._state_VDF = fold(self._state_VDF, records, pending)
            self._window_WC = conv_fold(self._window_WC, memory.x_LZPC[layer, slot], pending)

    def advance(self, x_NC: Tensor, g_NV: Tensor, beta_NV: Tensor, slot: int) -> Tensor:
        """Run known rows and write the state after them to a slot; return their outputs, [N, V, F]."""
        read_NVF, _, self._state_VDF = self._run(x_NC, g_NV, beta_NV)
        self._window_WC = conv_fold(self._window_WC, x_NC, len(x_NC))
        self._memory.states_LZVDF[self._layer, slot] = self._state_VDF
        self._memory.windows_LZWC[self._layer, slot] = self._window_WC
        return read_NVF

    def record(self, x_NC: Tensor, g_NV: Tensor, beta_NV: Tensor, slot: int) -> Tensor:
        """Run drafts and write their records to the slot; return their outputs."""
        read_NVF, records, _ = self._run(x_NC, g_NV, beta_NV)
        memory, count = self._memory, len(x_NC)
        kept = (memory.k_LZPKD, memory.u_LZPVF, memory.g_LZPV, memory.x_LZPC)
        for each, new in zip(kept, (*records, x_NC), strict=True):
            each[self._layer, slot, :count] = new
        return read_NVF

    def _run(self, x_NC: Tensor, g_NV: Tensor, beta_NV: Tensor) -> tuple[Tensor, Records, Tensor]:
        kind = self._shape.geometry
        y_NC = conv_chunk(x_NC, self._window_WC, self._shape.kernel_CT)
        keys, values = kind.num_key_heads * kind.key_dim, kind.num_value_heads * kind.value_dim
        q_N, k_N, v_N = y_NC.split([keys, keys, values], dim=1)
        q_NKD, k_NKD = (unit(x.unflatten(1, (-1, kind.key_dim))) for x in (q_N, k_N))
        v_NVF = in_fp32(v_N).unflatten(1, (-1, kind.value_dim))
        return chunk(q_NKD * kind.key_dim**-0.5, k_NKD, v_NVF, g_NV, beta_NV, self._state_VDF)


def _gated_norm(read_NVF: Tensor, z_NG: Tensor, shape: DeltaNetShape) -> Tensor:
    """Return rms_w(each head's output) * silu(z), [N, V * F], in fp32, rounded once."""
    normed_NVF = F.rms_norm(read_NVF, read_NVF.shape[-1:], shape.norm_F, shape.eps)
    z_NG, dtype = in_fp32(z_NG), z_NG.dtype
    return (normed_NVF.flatten(1) * (z_NG * sigmoid(z_NG))).to(dtype)
