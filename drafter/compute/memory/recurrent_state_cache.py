"""Memory of recurrent layers: states, convolution windows, and the records of drafts, by slot.

A slot here is a state of `cluster/kv_cache/recurrent_state_manager.py`, which assigns them to requests;
`drafter/step/recurrent_states.py` counts the tokens in each. Layers write a slot in every pass that has rows
of its request:

    rows of a request in a pass      known tokens | drafts
    written to its slot              the state    | records

Known tokens are final, so the state after the last of them is written. Drafts leave records; the next pass
folds the first `pending_R` of them, the accepted ones, into the state before its own rows. So a pass reads
and writes a state once, and a rejected draft has no effect. A slot starts with zeros (`reset`) or as a copy
of another, records included (`copy`): readers specify how many records to fold.

Legend: L layers, Z slots, P most drafts, K key heads, V value heads, D key dim, F value dim, C channels, W =
taps - 1, R requests of a pass, B sequences that begin.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ....cluster.pages.recurrent_state_spec import RecurrentStateSpec
from .zeroed_memory import zeros

Ints = NDArray[np.int64]


class Save(NamedTuple):
    """A copy in a free `slot` of a request's state after `num_rows` of its rows, none of them a draft."""

    request: int
    num_rows: int
    slot: int


@dataclass(frozen=True, slots=True)
class StateRows:
    """A pass's rows by request, for layers with states; on the host, in the order of rows.

    Attributes:
        slots_R: distinct.
        num_rows_R, num_drafts_R: rows of each request, at least one; how many of them, the last ones, are
            drafts.
        pending_R: how many records of the slot are accepted and not folded yet.
        saves: by request, then by rows. After accepted drafts `StateMemory.copy` saves instead, later.
    """

    slots_R: Ints
    num_rows_R: Ints
    num_drafts_R: Ints
    pending_R: Ints
    saves: tuple[Save, ...] = ()

    def requests(self) -> Iterator[tuple[int, int, int, int]]:
        numbers = (self.slots_R, self.num_rows_R, self.num_drafts_R, self.pending_R)
        return zip(*(x.tolist() for x in numbers), strict=True)


MAX_SAVES = 3  # of a request in a pass; the size of device tables


@dataclass(frozen=True, slots=True)
class DeviceStateRows:
    """`StateRows` for device-driven steps: int32 tensors with values unknown to the host.

    Attributes:
        slots_R: distinct among requests that have rows.
        cu_rows_R1: rows before each request's; those after the last are padding.
        num_drafts_R, pending_R: see `StateRows`.
        first_R: absolute position of each request's first row.
        saves_2RM: for each request M = `MAX_SAVES` positions, and the slots that get its state there if its
            known rows pass them; unused positions are 0. None: no saves.
        max_rows, max_drafts: upper bounds over requests.
    """

    slots_R: Tensor
    cu_rows_R1: Tensor
    num_drafts_R: Tensor
    pending_R: Tensor
    first_R: Tensor
    saves_2RM: Tensor | None
    max_rows: int
    max_drafts: int

    @classmethod
    def of(cls, rows: StateRows, first_R: Ints, device: torch.device | str) -> DeviceStateRows:
        saves_2RM = np.zeros((2, len(first_R), MAX_SAVES), dtype=np.int32)
        count_R = [0] * len(first_R)
        for request, num_rows, slot in rows.saves:
            saves_2RM[:, request, count_R[request]] = first_R[request] + num_rows, slot
            count_R[request] += 1

        def put(values: NDArray[np.integer]) -> Tensor:
            return torch.from_numpy(values.astype(np.int32)).to(device)

        return cls(
            slots_R=put(rows.slots_R),
            cu_rows_R1=put(np.concatenate(([0], np.cumsum(rows.num_rows_R)))),
            num_drafts_R=put(rows.num_drafts_R),
            pending_R=put(rows.pending_R),
            first_R=put(first_R),
            saves_2RM=put(saves_2RM) if rows.saves else None,
            max_rows=int(rows.num_rows_R.max()),
            max_drafts=int(rows.num_drafts_R.max()),
        )


class StateMemory:
    """States and records (fp32) and windows (the model's dtype) of all recurrent layers, by slot."""

    def __init__(
        self,
        num_layers: int,
        geometry: RecurrentStateSpec,
        num_slots: int,
        max_drafts: int,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        self.num_layers, self.num_slots, self.max_drafts = num_layers, num_slots, max_drafts
        self.geometry = kind = geometry

        def of_slots(*sizes: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return zeros((num_layers, num_slots, *sizes), dtype, device)

        self.states_LZVDF = of_slots(kind.num_value_heads, kind.key_dim, kind.value_dim)
        self.windows_LZWC = of_slots(kind.taps - 1, kind.channels, dtype=dtype)
        self.k_LZPKD = of_slots(max_drafts, kind.num_key_heads, kind.key_dim)
        self.u_LZPVF = of_slots(max_drafts, kind.num_value_heads, kind.value_dim)
        self.g_LZPV = of_slots(max_drafts, kind.num_value_heads)
        self.x_LZPC = of_slots(max_drafts, kind.channels, dtype=dtype)

    def reset(self, slots_B: Ints) -> None:
        where_B = torch.from_numpy(slots_B).to(self.states_LZVDF.device)
        for part in (self.states_LZVDF, self.windows_LZWC):
            part.index_fill_(1, where_B, 0.0)

    def copy(self, sources_B: Ints, targets_B: Ints) -> None:
        """Copy slots with their records; all sources are read before a target is written."""
        source_B, target_B = (
            torch.from_numpy(x).to(self.states_LZVDF.device) for x in (sources_B, targets_B)
        )
        for part in self.tensors:
            part.index_copy_(1, target_B, part.index_select(1, source_B))

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All tensors, by layer, then by slot: states, windows, and records k, u, g and x."""
        records = (self.k_LZPKD, self.u_LZPVF, self.g_LZPV, self.x_LZPC)
        return self.states_LZVDF, self.windows_LZWC, *records

    @staticmethod
    def bytes_per_slot(
        num_layers: int, geometry: RecurrentStateSpec, max_drafts: int, dtype: torch.dtype
    ) -> int:
        size = dtype.itemsize
        return num_layers * (geometry.state_bytes(size) + max_drafts * geometry.record_bytes(size))
