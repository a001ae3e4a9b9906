"""Gated delta rule layers with our own kernels: a prompt, a block with accepted drafts, further rows.

Sizes are those of supported models on a GPU, and small ones in Triton's interpreter.

Legend: N rows, O outputs of the layer's product, C channels, T taps, V value heads, F value dim, Z slots.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor

from ....cluster.pages.kv_cache_groups import KVCacheSpec
from ....cluster.pages.recurrent_state_spec import RecurrentStateSpec
from ....drafter.compute.backend import Backend, PlacedRows
from ....drafter.compute.eager.backend import EagerBackend
from ....drafter.compute.layers.gated_delta_net import DeltaNetShape
from ....drafter.compute.memory.kv_cache import PagedKVCache
from ....drafter.compute.memory.recurrent_state_cache import DeviceStateRows, Save, StateMemory, StateRows
from .checks import Case, Check, checks_of_served, off_by
from .subject import KernelInputs, MachineKind

_HALF, _FP32 = 16, 512  # bounds in units of the last place
_KINDS = {
    "two value heads a key": RecurrentStateSpec(16, 32, 128, 128, 4),  # Qwen3.5-9B, 35B-A3B, Coder-Next
    "three value heads a key": RecurrentStateSpec(16, 48, 128, 128, 4),  # Qwen3.5-27B
}
_SMALL = {
    "two value heads a key": RecurrentStateSpec(1, 2, 16, 16, 4),
    "three value heads a key": RecurrentStateSpec(1, 3, 16, 8, 4),
}
_PROMPT, _DRAFTS, _ACCEPTED, _REST = 40, 5, 3, 2


def delta_checks(machine: MachineKind, *, quick: bool) -> Iterator[Check]:
    kinds = _KINDS if machine.device.type == "cuda" else _SMALL
    cases = [Case(name, partial(_error, kind=kind), _HALF, _FP32) for name, kind in kinds.items()]
    yield from checks_of_served("own delta rule", machine, cases, quick=quick)


class DeltaLayer:
    """A layer over state memory, with each slot's length; passes end with `padding` zeroed rows."""

    def __init__(
        self,
        backend: Backend,
        shape: DeltaNetShape,
        memory: StateMemory,
        page_size: int,
        *,
        layer: int = 0,
        padding: int = 0,
    ) -> None:
        self.memory = memory
        self._backend, self._attend = backend, backend.delta_net(shape)
        self._is_on_device = not isinstance(backend, EagerBackend)
        self._dtype, self._device = memory.windows_LZWC.dtype, memory.windows_LZWC.device
        self._cache = PagedKVCache(1, 1, page_size, KVCacheSpec(1, 8, 8), self._dtype, self._device, memory)
        self._layer, self._padding = layer, padding
        self.first_Z, self._pending_Z = np.zeros((2, memory.num_slots), dtype=np.int64)

    def run(self, given: Sequence[tuple[int, Tensor, int]], saves: tuple[Save, ...] = ()) -> Tensor:
        """Run a pass of (slot, rows [N, O], drafts among them); a request without rows is padding."""
        if not self._is_on_device:
            given = [each for each in given if len(each[1])]
        slots, counts, drafts = np.array([(slot, len(x), count) for slot, x, count in given]).T
        states: StateRows | DeviceStateRows
        states = StateRows(slots, counts, drafts, self._pending_Z[slots], saves)
        if self._is_on_device:
            states = DeviceStateRows.of(states, self.first_Z[slots], self._device)
        placed = PlacedRows(torch.zeros(0), (), (), states=states)
        padding = [torch.full_like(given[0][1][:1], torch.nan)] * self._padding
        mixed_NO = torch.cat([*(x for _, x, _ in given), *padding]).to(self._device, self._dtype)
        out_NG = self._attend(mixed_NO, self._backend.begin(placed), self._cache, self._layer)
        num_rows = int(counts.sum())
        assert not out_NG[num_rows:].any(), "padding rows must be zero"
        self._pending_Z[slots] = 0
        self.first_Z[slots] += counts - drafts
        return out_NG[:num_rows]

    def accept(self, slot: int, count: int) -> None:
        self._pending_Z[slot] = count
        self.first_Z[slot] += count


def _error(inputs: KernelInputs, kind: RecurrentStateSpec) -> float:
    """Compare a sequence with rejected drafts in a block with one pass over the accepted rows."""
    definition = inputs.definition()
    (layer, rows_NO), (exact, exact_NO) = (_random(each, kind) for each in (inputs, definition))
    known = _PROMPT + 1 + _ACCEPTED
    block_NO = torch.cat((rows_NO[_PROMPT:known], -rows_NO[: _DRAFTS - _ACCEPTED]))
    found = [layer.run([(1, rows_NO[:_PROMPT], 0)])]
    found.append(layer.run([(1, block_NO, _DRAFTS)])[: 1 + _ACCEPTED])
    layer.accept(1, _ACCEPTED)
    found.append(layer.run([(1, rows_NO[known:], 0)]))
    return off_by(torch.cat(found), exact.run([(1, exact_NO, 0)]))


def _random(inputs: KernelInputs, kind: RecurrentStateSpec) -> tuple[DeltaLayer, Tensor]:
    """Make a layer with a state that decays within a few rows, and rows for it."""
    heads, wide = kind.num_value_heads, inputs.wide
    shape = DeltaNetShape(
        kind,
        kernel_CT=wide(inputs.randn(kind.channels, kind.taps)),
        rate_V=-wide(inputs.randn(heads)).abs(),
        dt_bias_V=wide(inputs.randn(heads)) - 2.0,
        norm_F=wide(inputs.norm_weight(kind.value_dim)),
        eps=inputs.eps,
    )
    memory = StateMemory(1, kind, 2, _DRAFTS, inputs.dtype, inputs.machine.device)
    width = kind.channels + heads * (kind.value_dim + 2)
    rows_NO = inputs.randn(_PROMPT + 1 + _ACCEPTED + _REST, width)
    return DeltaLayer(inputs.backend, shape, memory, inputs.candidate.page_size), rows_NO
