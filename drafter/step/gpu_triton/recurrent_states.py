"""Tracks recurrent states on the GPU: the twin of `drafter/step/recurrent_states.py`.

The plan says which request has which state and what to save; the host reads nothing back. How many drafts
were accepted, and so how many records the next pass folds into the state, is known to the device first.

    per step  enter: an admitted request starts from zeros or a copy      separate launches, in plan order
              place: how many of a slot's records are folded              one launch per pass, in its graph
              layers write states, records, and the saves that known rows pass
              save_stood: saves that accepted drafts passed               one launch, if the plan has saves

Copies are rare compared to passes, which read and write every state, so they are not part of a graph. Copies
run in order: the source of one may be overwritten by the next. Used by `actors/targets/runners/gpu_runner.py`
and `step_passes.py`.

Legend: S slots of requests, Z states, R requests of a pass, M saves of each, G requests by their places in
the plan.
"""

# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false

from __future__ import annotations

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray
from torch import Tensor

from ....cluster.step.scheduler_output import SchedulerOutput
from ...compute.memory.recurrent_state_cache import MAX_SAVES, DeviceStateRows, StateMemory
from .inputs.row_layout import DeviceStepRequests, Ints, SlotTables

_MAX_PROGRAMS, _BLOCK = 32, 1024  # programs per layer that copy a state; elements per iteration
_NO_SOURCE = -1


def num_save_values(room: int) -> int:
    """Return the number of integers of `pack_saves`."""
    return 2 * room * MAX_SAVES


def pack_saves(plan: SchedulerOutput, requests_G: NDArray[np.intp], room: int) -> Ints:
    """Pack the positions and states of a pass's saves, int32 [2, room, M]; position 0 means none."""
    saves_2RM = np.zeros((2, room, MAX_SAVES), dtype=np.int32)
    if (saves := plan.saves) is None:
        return saves_2RM
    place_R = np.full(plan.num_requests, -1)
    place_R[requests_G] = np.arange(len(requests_G))
    saves_of_requests = zip(place_R[saves.requests].tolist(), saves.positions, saves.states, strict=True)
    count_R = [0] * len(requests_G)
    for place, position, state in saves_of_requests:
        if place >= 0:
            assert count_R[place] < MAX_SAVES, "a step passes no more positions than are asked for at once"
            saves_2RM[:, place, count_R[place]] = position, state
            count_R[place] += 1
    return saves_2RM


class NoRecurrent:
    """Tracks nothing, for a target without recurrent states; the base class of `DeviceRecurrent`."""

    is_kept = False

    def admit(self, plan: SchedulerOutput) -> None:
        """Initialize the states of admitted requests with zeros or a copy."""

    def build_rows(self, requests: DeviceStepRequests, saves_2RM: Tensor | None) -> DeviceStateRows | None:
        """Return what layers do in a pass, and advance the states to the end of its known rows.

        Args:
            saves_2RM: saves of a pass without drafts, from `pack_saves`.
        """
        return None

    def save_accepted(self, slots_R: Tensor, saves_2RM: Tensor) -> None:
        """Copy the states of decoding requests that passed a position to save."""


NO_RECURRENT = NoRecurrent()


class DeviceRecurrent(NoRecurrent):
    """Tracks the recurrent state of each request slot, and how many tokens each state has consumed.

    Args:
        states_S: int32, state of each slot; written with a plan's admissions.
    """

    is_kept = True

    def __init__(self, memory: StateMemory, states_S: Tensor, tables: SlotTables) -> None:
        self._memory, self._states_S, self._tables = memory, states_S, tables
        self._positions_Z = torch.zeros(memory.num_slots, dtype=torch.int32, device=states_S.device)
        self._parts = [(part, part[0, :1].numel()) for part in memory.tensors]
        programs = min(triton.cdiv(max(size for _, size in self._parts), _BLOCK), _MAX_PROGRAMS)
        self._programs = (programs, memory.num_layers)

    def admit(self, plan: SchedulerOutput) -> None:
        for request in plan.admitted:
            entry = request.state
            if entry is not None and entry.source != entry.state:
                source = _NO_SOURCE if entry.source is None else entry.source
                _admit_states[self._programs](
                    *self._of_parts(),
                    self._positions_Z,
                    source,
                    entry.state,
                    entry.num_tokens,
                    **self._sizes(),
                )

    def build_rows(self, requests: DeviceStepRequests, saves_2RM: Tensor | None) -> DeviceStateRows:
        num_requests = len(requests.slots_R)
        lists_3R = torch.empty(
            3, (num_requests + 3) // 4 * 4, dtype=torch.int32, device=self._positions_Z.device
        )
        slots_R, pending_R, first_R = lists_3R[:, :num_requests].unbind(0)
        _build_rows[num_requests,](
            requests.slots_R, requests.cu_rows_R1, requests.num_drafts_R, self._tables.num_computed,
            self._states_S, self._positions_Z, saves_2RM, 0 if saves_2RM is None else saves_2RM.stride(0),
            slots_R, pending_R, first_R,
            MAX_DRAFTS=self._memory.max_drafts, SAVES=MAX_SAVES, num_warps=1,
        )  # fmt: skip
        return DeviceStateRows(
            slots_R=slots_R,
            cu_rows_R1=requests.cu_rows_R1,
            num_drafts_R=requests.num_drafts_R,
            pending_R=pending_R,
            first_R=first_R,
            saves_2RM=saves_2RM,
            max_rows=requests.max_rows,
            max_drafts=requests.max_drafts,
        )

    def save_accepted(self, slots_R: Tensor, saves_2RM: Tensor) -> None:
        _save_accepted[len(slots_R) * MAX_SAVES, *self._programs](
            *self._of_parts(), self._positions_Z, slots_R, self._tables.num_computed, self._states_S,
            saves_2RM, saves_2RM.stride(0), SAVES=MAX_SAVES, **self._sizes(),
        )  # fmt: skip

    def _of_parts(self) -> list[Tensor]:
        return [part for part, _ in self._parts]

    def _sizes(self) -> dict[str, int]:
        names = ("STATE", "WINDOW", "K", "U", "G", "X")
        sizes = {name: size for name, (_, size) in zip(names, self._parts, strict=True)}
        return {"SLOTS": self._memory.num_slots, "BLOCK": _BLOCK, **sizes}


@triton.jit(
    do_not_specialize=["saves_stride"],
    do_not_specialize_on_alignment=["num_drafts", "saves", "state_slots", "pendings", "firsts"],
)
def _build_rows(
    slots,
    cu_rows,
    num_drafts,
    num_computed,
    states,
    positions,
    saves,
    saves_stride,
    state_slots,
    pendings,
    firsts,
    MAX_DRAFTS: tl.constexpr,
    SAVES: tl.constexpr,
):
    request = tl.program_id(0)
    count = tl.load(cu_rows + request + 1) - tl.load(cu_rows + request)
    if count == 0:
        tl.store(state_slots + request, 0)
        tl.store(pendings + request, 0)
        tl.store(firsts + request, 0)
        return
    slot = tl.load(slots + request)
    state, first = tl.load(states + slot), tl.load(num_computed + slot)
    pending = first - tl.load(positions + state)
    # A dummy step may repeat earlier rows: clamp at 0.
    tl.store(pendings + request, tl.minimum(tl.maximum(pending, 0), MAX_DRAFTS))
    tl.store(state_slots + request, state)
    tl.store(firsts + request, first)
    after = first + count - tl.load(num_drafts + request)
    tl.store(positions + state, after)
    if saves is not None:
        for save in range(SAVES):
            position = tl.load(saves + request * SAVES + save)
            if (position > first) & (position <= after):
                tl.store(positions + tl.load(saves + saves_stride + request * SAVES + save), position)


@triton.jit(do_not_specialize=["source", "target", "num_tokens"])
def _admit_states(
    states, windows, k_records, u_records, g_records, x_records, positions, source, target, num_tokens,
    SLOTS: tl.constexpr, BLOCK: tl.constexpr, STATE: tl.constexpr, WINDOW: tl.constexpr, K: tl.constexpr,
    U: tl.constexpr, G: tl.constexpr, X: tl.constexpr,
):  # fmt: skip
    parts, sizes = (states, windows, k_records, u_records, g_records, x_records), (STATE, WINDOW, K, U, G, X)
    _copy_parts(parts, sizes, source, target, SLOTS, BLOCK, 0)
    if (tl.program_id(0) == 0) & (tl.program_id(1) == 0):
        is_copy = source >= 0
        saved_position = tl.load(positions + source, mask=is_copy, other=0)
        tl.store(positions + target, tl.where(is_copy, saved_position, num_tokens))


@triton.jit(do_not_specialize=["saves_stride"], do_not_specialize_on_alignment=["slots", "saves"])
def _save_accepted(
    states, windows, k_records, u_records, g_records, x_records, positions, slots, num_computed,
    states_of_slots, saves, saves_stride,
    SAVES: tl.constexpr, SLOTS: tl.constexpr, BLOCK: tl.constexpr, STATE: tl.constexpr, WINDOW: tl.constexpr,
    K: tl.constexpr, U: tl.constexpr, G: tl.constexpr, X: tl.constexpr,
):  # fmt: skip
    slot = tl.load(slots + tl.program_id(0) // SAVES)
    at = saves + tl.program_id(0)
    position, source = tl.load(at), tl.load(states_of_slots + slot)
    begin = tl.load(positions + source)
    if (position == 0) | (position < begin) | (position > tl.load(num_computed + slot)):
        return
    target = tl.load(at + saves_stride)
    parts, sizes = (states, windows, k_records, u_records, g_records, x_records), (STATE, WINDOW, K, U, G, X)
    _copy_parts(parts, sizes, source, target, SLOTS, BLOCK, 1)
    if (tl.program_id(1) == 0) & (tl.program_id(2) == 0):
        tl.store(positions + target, begin)


@triton.jit
def _copy_parts(parts, sizes, source, target, SLOTS: tl.constexpr, BLOCK: tl.constexpr, AXIS: tl.constexpr):
    """Copy states and windows, and, if there is a source, records of drafts (k, u, g, x)."""
    for part in tl.static_range(2):
        _copy(parts[part], source, target, SLOTS, BLOCK, sizes[part], AXIS)
    if source >= 0:
        for part in tl.static_range(2, 6):
            _copy(parts[part], source, target, SLOTS, BLOCK, sizes[part], AXIS)


@triton.jit
def _copy(
    part,
    source,
    target,
    SLOTS: tl.constexpr,
    BLOCK: tl.constexpr,
    SIZE: tl.constexpr,
    AXIS: tl.constexpr,
):
    """Copy this program's share of a slot's `SIZE` elements of a layer; write zeros without a source."""
    first = tl.program_id(AXIS + 1).to(tl.int64) * SLOTS
    to, from_ = (first + target) * SIZE, (first + source) * SIZE
    for begin in range(tl.program_id(AXIS) * BLOCK, SIZE, tl.num_programs(AXIS) * BLOCK):
        at = begin + tl.arange(0, BLOCK)
        values = tl.load(part + from_ + at, mask=(at < SIZE) & (source >= 0), other=0.0)
        tl.store(part + to + at, values, mask=at < SIZE)
