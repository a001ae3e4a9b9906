"""A step's transfers: one copy of host data to the device, and one copy of its outcome to the host.

    a slot of the ring, pinned      [ step's integers | word value word value .. ]
                 │ one copy, in the stream of the steps
    staging, on the device          [ step's integers | word value word value .. ]
                      └▶ graphs          └▶ one launch: arena[word] = value
    outcome, on the device          [ times | tokens | numbers of verified drafts | margins ]
                 │ one copy, after the step's last kernel
    a slot of the ring, pinned      [ times | tokens | numbers of verified drafts | margins ]

A step's own integers (`row_layout.pack`) are at a fixed address that CUDA graphs read. Changes of request
state follow as pairs of a word index of the arena and its new value (made by
`drafter/step/gpu_triton/request_states.py`). A slot is reused once its copy has completed; with four slots
and two steps in flight it has. A slot has room for the admission of a longest sequence; more changes (several
long prompts admitted together) take further rounds in the same step.

The outcome has tokens, numbers of verified drafts, margins and times. The copy of a few KB follows a step's
last kernel in the same stream, and the host does not wait for it. On another stream the next step would have
to wait for it just as well, as a graph writes its outcome to the memory of the last one. Times are written by
the device, so that parts of a step can be timed inside a CUDA graph: events would be graph nodes that the
host queries one by one.

Used by `actors/targets/runners/gpu_runner.py`.

Legend: M changes, R requests, W most tokens of a request, D = W - 1 drafts.
"""

# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import ArrayLike, NDArray
from torch import Tensor
from triton.language.extra import cuda

from .row_layout import Ints

MAX_IN_FLIGHT = 4
NUM_TIMES = 5  # the start, and the ends of at most four parts
_NUM_SLOTS = 4
_CHANGES = 1024  # per program
_ALIGNMENT = 32  # words, of every table: a cache line, and more than a kernel's widest load
_NUMPY = {torch.int32: np.int32, torch.int64: np.int64, torch.float32: np.float32}

Indices = NDArray[np.integer] | int


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
        self._slot_index = 0

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
        slot = self._slots[self._slot_index]
        self._slot_index = (self._slot_index + 1) % _NUM_SLOTS
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


class Arena:
    """Tables of 32- or 64-bit values in one allocation; updates are (word index, value) pairs.

    So one copy and one launch (`Upload`) write any number of entries of any table, whatever the dtype. Used
    by `drafter/step/gpu_triton/request_states.py`.

    Args:
        tables: shape and dtype by name.

    Attributes:
        words: int32, the whole allocation, initially zero.
        tables: views by name.
    """

    def __init__(
        self, tables: Mapping[str, tuple[tuple[int, ...], torch.dtype]], device: torch.device | str
    ) -> None:
        self._first: dict[str, int] = {}
        size = 0
        for name, (shape, dtype) in tables.items():
            self._first[name] = size
            size += -(-math.prod(shape) * dtype.itemsize // 4 // _ALIGNMENT) * _ALIGNMENT
        assert size < 2**31, "a word's number is an int32"
        self.words = torch.zeros(size, dtype=torch.int32, device=device)
        self.tables = {
            name: self._words_of(name, shape, dtype).view(dtype).view(shape)
            for name, (shape, dtype) in tables.items()
        }

    def _words_of(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        first = self._first[name]
        return self.words[first : first + math.prod(shape) * dtype.itemsize // 4]

    def entries(self, name: str, indices: tuple[Indices, ...], values: ArrayLike) -> tuple[Ints, Ints]:
        """Return the word indices and values (int32) equivalent to `table[indices] = values`.

        Args:
            indices: one per dimension; broadcast to the values' shape.
            values: converted to the table's dtype.
        """
        table = self.tables[name]
        numbers = np.atleast_1d(np.asarray(values, _NUMPY[table.dtype]))
        each = numbers.itemsize // 4
        places = sum(np.asarray(i, np.int64) * s for i, s in zip(indices, table.stride(), strict=True))
        places_M1 = np.broadcast_to(places, numbers.shape).reshape(-1, 1)
        words = self._first[name] + each * places_M1 + np.arange(each)
        return words.ravel().astype(np.int32), np.ascontiguousarray(numbers).ravel().view(np.int32)


@dataclass(frozen=True, slots=True)
class StepOutput:
    """Views of consecutive int32 values.

    Attributes:
        times: int64 [NUM_TIMES], nanoseconds: the start of the first part and the end of each part.
        reads_1: int64, `Backend.expert_reads` after the last part, if the target has experts.
        rows_RW1: int32 [R, W + 1], the new tokens of each request padded with -1; the last column is their
            number.
        num_drafts_R: int32, verified drafts; not written if no request drafts.
        margins_RD: fp32, margins of the drafts; nan where there is none.
        trees_RE: int32, values of the requests' trees (`../draft_trees.py`); E is 0 without them.
    """

    times: Tensor
    reads_1: Tensor
    rows_RW1: Tensor
    num_drafts_R: Tensor
    margins_RD: Tensor
    trees_RE: Tensor

    @staticmethod
    def num_values(num_requests: int, width: int, num_of_tree: int = 0) -> int:
        """Return the number of values, rounded up to 16 bytes so that another outcome may follow."""
        return 2 * (NUM_TIMES + 1) + (num_requests * (2 * width + 1 + num_of_tree) + 3) // 4 * 4

    @classmethod
    def views_of(cls, values: Tensor, num_requests: int, width: int, num_of_tree: int = 0) -> StepOutput:
        """Return views of the first of these values; `num_of_tree`: E."""
        r, maximum, begin = num_requests, width - 1, 2 * (NUM_TIMES + 1)
        sizes = (begin, r * (width + 1), r, r * maximum, r * num_of_tree)
        head, rows, drafts, margins, trees, _ = values.split((*sizes, len(values) - sum(sizes)))
        times, reads_1 = head.view(torch.int64).split((NUM_TIMES, 1))
        margins_RD = margins.view(torch.float32).view(r, maximum)
        return cls(times, reads_1, rows.view(r, -1), drafts, margins_RD, trees.view(r, num_of_tree))


@dataclass(frozen=True, slots=True)
class PendingResult:
    """Host memory that values are copied to; `copied` is None where copies are synchronous."""

    values: Tensor
    copied: torch.cuda.Event | None

    @property
    def is_done(self) -> bool:
        return self.copied is None or self.copied.query()

    def wait(self) -> Tensor:
        if self.copied is not None:
            self.copied.synchronize()
        return self.values


class ResultCopier:
    """Copies outcomes to the host.

    Args:
        num_values: most values of a step.

    Attributes:
        values: int32 [num_values] on the device.
    """

    def __init__(self, num_values: int, device: torch.device) -> None:
        on_gpu = device.type == "cuda"
        self.values = torch.zeros(num_values, dtype=torch.int32, device=device)
        self._arrivals = [
            PendingResult(
                torch.empty(num_values, dtype=torch.int32, pin_memory=on_gpu),
                torch.cuda.Event() if on_gpu else None,
            )
            for _ in range(MAX_IN_FLIGHT)
        ]
        self._next = 0

    def copy_to_host(self, num_values: int) -> PendingResult:
        """Start to copy the first values. Their host memory is reused after `MAX_IN_FLIGHT` steps."""
        arrival = self._arrivals[self._next]
        self._next = (self._next + 1) % MAX_IN_FLIGHT
        arrival.values[:num_values].copy_(self.values[:num_values], non_blocking=True)
        if arrival.copied is not None:
            arrival.copied.record()
        return arrival


def stamp(times: Tensor, index: int) -> None:
    """Write the device clock in nanoseconds to `times` (int64) at `index`.

    On a CPU (Triton's interpreter) the host's clock is used.
    """
    if times.is_cuda:
        _stamp[1,](times, index, num_warps=1)
    else:
        times[index].fill_(time.perf_counter_ns())


@triton.jit(do_not_specialize=["index"])
def _stamp(times, index):
    tl.store(times + index, cuda.globaltimer())
