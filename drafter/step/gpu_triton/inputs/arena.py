"""Tables in one allocation of 32-bit words; updates are (word index, value) pairs.

So one copy and one launch (`upload.py`) write any number of entries of any table, whatever the dtype. Used by
`drafter/step/gpu_triton/request_states.py`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from .row_layout import Ints

Indices = NDArray[np.integer] | int

_ALIGNMENT = 32  # words, of every table: a cache line, and more than a kernel's widest load
_NUMPY = {torch.int32: np.int32, torch.int64: np.int64, torch.float32: np.float32}


class Arena:
    """Tables of 32- or 64-bit values in one allocation.

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
