"""Memory of recurrent layers: states, convolution windows, and the records of drafts, by slot.

Beside K/V in pages. A slot here is what `cluster/kv_cache/recurrent_state_manager.py` calls a state: it is
that module's business who has which, and `drafter/step/recurrent_states.py`'s where each stands. A slot is
written by the layers themselves, in every pass that has rows of its request:

    rows of a request in a pass      known tokens | drafts
    what they leave in its slot      the state    | records

Known tokens stand: the state behind the last of them is written. Drafts leave records, of which
the next pass folds the first `pending_R` into the state, before its own rows: as many as stood. So a pass
reads and writes a state once, and a rejected draft leaves nothing. A slot begins with zeros (`reset`) or as
another's copy, records and all (`copy`): whoever reads a slot says how many of its records are folded.

Legend: L layers, Z slots, P most drafts, K key heads, V value heads, D key dim, F value dim, C channels,
W = taps - 1, R requests of a pass, B sequences that begin.
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

Ints = NDArray[np.int64]


class Save(NamedTuple):
    """A state that is copied on its way through a pass.

    Attributes:
        request: the how manieth of the pass.
        num_rows: of its rows, none of them a draft, that the copy has seen.
        slot: where it goes; nobody else's.
    """

    request: int
    num_rows: int
    slot: int


@dataclass(frozen=True, slots=True)
class StateRows:
    """Whose rows a pass has, for layers with states; on the host, in the order of rows.

    Attributes:
        slots_R: distinct.
        num_rows_R: rows of each request, one at least.
        num_drafts_R: how many of them, the last ones, are drafts.
        pending_R: how many drafts of the slot's records stood and are not folded yet.
        saves: by request, then by rows. Behind drafts that stood `StateMemory.copy` does it, later.
    """

    slots_R: Ints
    num_rows_R: Ints
    num_drafts_R: Ints
    pending_R: Ints
    saves: tuple[Save, ...] = ()

    def requests(self) -> Iterator[tuple[int, int, int, int]]:
        """The four numbers of each."""
        numbers = (self.slots_R, self.num_rows_R, self.num_drafts_R, self.pending_R)
        return zip(*(x.tolist() for x in numbers), strict=True)


MAX_SAVES = 3  # of a request in a pass, where devices keep them in tables


@dataclass(frozen=True, slots=True)
class DeviceStateRows:
    """The same where a device drives steps: tensors on it, int32, whose values the host does not know.

    Attributes:
        slots_R: distinct among requests that have rows.
        cu_rows_R1: rows before each request's; those behind the last are padding.
        num_drafts_R, pending_R: as of `StateRows`.
        first_R: absolute position of each request's first row.
        saves_2RM: of each request M = `MAX_SAVES` positions, and the slots that get its state there if its
            known rows pass them; where there are fewer, positions are 0. None: nobody's.
        max_rows, max_drafts: no request has more.
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
        """What the host knows, on a device."""
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
    """See the module's text.

    Args:
        num_layers: recurrent ones.
        geometry: of each of them, on this rank.
        max_drafts: of a request in a step.
        dtype: of the model: windows have it. States and records are fp32.
    """

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

        def zeros(*sizes: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.zeros((num_layers, num_slots, *sizes), dtype=dtype, device=device)

        self.states_LZVDF = zeros(kind.num_value_heads, kind.key_dim, kind.value_dim)
        self.windows_LZWC = zeros(kind.taps - 1, kind.channels, dtype=dtype)
        self.k_LZPKD = zeros(max_drafts, kind.num_key_heads, kind.key_dim)
        self.u_LZPVF = zeros(max_drafts, kind.num_value_heads, kind.value_dim)
        self.g_LZPV = zeros(max_drafts, kind.num_value_heads)
        self.x_LZPC = zeros(max_drafts, kind.channels, dtype=dtype)

    def reset(self, slots_B: Ints) -> None:
        """Before a sequence's first row."""
        where_B = torch.from_numpy(slots_B).to(self.states_LZVDF.device)
        for part in (self.states_LZVDF, self.windows_LZWC):
            part.index_fill_(1, where_B, 0.0)

    def copy(self, sources_B: Ints, targets_B: Ints) -> None:
        """Slots with their records; all sources are read before a target is written."""
        source_B, target_B = (
            torch.from_numpy(x).to(self.states_LZVDF.device) for x in (sources_B, targets_B)
        )
        for part in self.tensors:
            part.index_copy_(1, target_B, part.index_select(1, source_B))

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All, by layer, then by slot: states, windows, and records k, u, g and x."""
        records = (self.k_LZPKD, self.u_LZPVF, self.g_LZPV, self.x_LZPC)
        return self.states_LZVDF, self.windows_LZWC, *records

    @staticmethod
    def bytes_per_slot(
        num_layers: int, geometry: RecurrentStateSpec, max_drafts: int, dtype: torch.dtype
    ) -> int:
        """Records included."""
        size = dtype.itemsize
        return num_layers * (geometry.state_bytes(size) + max_drafts * geometry.record_bytes(size))
