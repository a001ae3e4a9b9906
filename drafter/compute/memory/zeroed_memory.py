"""Large tensors of zeros, such as caches, of which only parts are used soon."""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor


def zeros(shape: Sequence[int], dtype: torch.dtype, device: torch.device | str) -> Tensor:
    """Return a tensor of zeros; in host memory its pages are the system's until they are first written.

    `torch.zeros` writes them all, which costs a second and the memory for each 4 GiB.
    """
    size = prod(shape) * dtype.itemsize
    if torch.device(device).type != "cpu" or not size:
        return torch.zeros(shape, dtype=dtype, device=device)
    pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(pages, dtype=torch.uint8).view(dtype).view(*shape)
