"""Triton version of `compute/eager/gated_delta_net.py`: a layer in three launches, five for long prompts.

    projection ─▶ take_in: convolution, unit length ─▶ rule, by rows or in chunks ─▶ gate_outputs ─▶ result
                  (windows)                            (states, u)                   (drafts' keys, decays)

Rows, state slots and the number of drafts to fold are read on the device (`DeviceStateRows`). Whether a
request runs by rows or in chunks depends only on that request.

Legend: N rows, O outputs of the layer's projection, V value heads, F value dim.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...layers.gated_delta_net import DeltaNetShape
from ...memory.kv_cache import PagedKVCache
from ...memory.recurrent_state_cache import DeviceStateRows
from .chunk_delta_rule import chunk_size, run_chunks
from .conv_and_qk_norm import take_in
from .gated_norm import gate_outputs
from .recurrent_delta_rule import MOST_ROWS, DeltaPass, run_rows


class TritonDeltaNet:
    """The delta rule of one layer; `by_rows`, bits do not depend on the number of rows in a pass."""

    __slots__ = ("_by_rows", "_shape")

    def __init__(self, shape: DeltaNetShape, *, by_rows: bool) -> None:
        self._shape, self._by_rows = shape, by_rows

    def __call__(self, mixed_NO: Tensor, step: Any, cache: PagedKVCache, layer: int) -> Tensor:
        states, memory, kind = step.rows.states, cache.states, self._shape.geometry
        assert isinstance(states, DeviceStateRows) and memory is not None, "rows and memory on a device"
        given = DeltaPass(self._shape, states, memory, layer)
        qkv_NC = take_in(mixed_NO, given)
        shape = (len(mixed_NO), kind.num_value_heads, kind.value_dim)
        read_NVF = torch.empty(shape, dtype=torch.float32, device=mixed_NO.device)
        size = None if self._by_rows else chunk_size(cache.page_size, mixed_NO.dtype)
        run_rows(mixed_NO, qkv_NC, given, read_NVF, all_rows=size is None)
        if size is not None and states.max_rows > MOST_ROWS:
            run_chunks(mixed_NO, qkv_NC, given, read_NVF, size=size)
        return gate_outputs(read_NVF, mixed_NO, qkv_NC, given)
