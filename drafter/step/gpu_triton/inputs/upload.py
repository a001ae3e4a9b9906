"""Uploads a step's host data to the device in one asynchronous copy.

A step's own integers (`row_layout.pack`) come first, at a fixed address that CUDA graphs read. Changes of
request state follow as pairs of a word index of the arena and its new value (made by
`drafter/step/gpu_triton/request_states.py`); one launch writes them.

    a slot of the ring, pinned      [ step's integers | word value word value .. ]
                 │ one copy, in the stream of the steps
    staging, on the device          [ step's integers | word value word value .. ]
                      └▶ graphs          └▶ one launch: arena[word] = value

A slot is reused once its copy has completed; with four slots and two steps in flight it has. A slot has room
for the admission of a longest sequence; more changes (several long prompts admitted together) take further
rounds in the same step. Used by `actors/targets/runners/gpu_runner.py`.

Legend: M changes.
"""

# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from .row_layout import Ints

_NUM_SLOTS = 4
_CHANGES = 1024  # per program


@dataclass(frozen=True, slots=True)
class _Slot:
    """Memory that the host writes and the device reads, as a tensor and as an array."""

    tensor: Tensor
    array: Ints
    copied: torch.cuda.Event | None  # None if the copy is synchronous

    @classmethod
    def build(cls, size: int, *, on_gpu: bool) -> _Slot:
        tensor = torch.empty(size, dtype=torch.int32, pin_memory=on_gpu)
        return cls(tensor, tensor.numpy(), torch.cuda.Event() if on_gpu else None)


class Upload:
    """Transfers a step's integers and state changes to one device.

    Args:
        arena: int32, written with the changes.
        num_values: number of a step's own integers.
        max_changes: capacity of one round.

    Attributes:
        values: int32 [num_values] on the device, the step's integers; zeros before the first step.
    """

    def __init__(self, arena: Tensor, num_values: int, max_changes: int) -> None:
        self._arena, self._num_values, self._max_changes = arena, num_values, max_changes
        size = num_values + 2 * max_changes
        self._staging = torch.zeros(size, dtype=torch.int32, device=arena.device)
        self.values = self._staging[:num_values]
        self._slots = [_Slot.build(size, on_gpu=arena.is_cuda) for _ in range(_NUM_SLOTS)]
        self._turn = 0

    def send(self, values: Ints, changes_M2: Ints) -> None:
        """Copy a step's integers to `self.values` and write the changes; word indices must be distinct."""
        for begin in range(0, max(len(changes_M2), 1), self._max_changes):
            self._send_round(values, changes_M2[begin : begin + self._max_changes])

    def _send_round(self, values: Ints, changes_M2: Ints) -> None:
        slot, size = self._next_slot(), self._num_values + changes_M2.size
        slot.array[: self._num_values] = values
        slot.array[self._num_values : size] = changes_M2.ravel()
        self._staging[:size].copy_(slot.tensor[:size], non_blocking=True)
        if slot.copied is not None:
            slot.copied.record()
        count = len(changes_M2)
        if count:
            changes = self._staging[self._num_values :]
            _write_words[triton.cdiv(count, _CHANGES),](changes, self._arena, count, CHANGES=_CHANGES)

    def _next_slot(self) -> _Slot:
        slot = self._slots[self._turn]
        self._turn = (self._turn + 1) % _NUM_SLOTS
        if slot.copied is not None and not slot.copied.query():
            slot.copied.synchronize()  # more rounds in flight than slots
        return slot


@triton.jit(do_not_specialize=["count"])
def _write_words(changes, arena, count, CHANGES: tl.constexpr):
    places = tl.program_id(0) * CHANGES + tl.arange(0, CHANGES)
    is_change = places < count
    word = tl.load(changes + 2 * places, mask=is_change, other=0)
    value = tl.load(changes + 2 * places + 1, mask=is_change, other=0)
    tl.store(arena + word, value, mask=is_change)
