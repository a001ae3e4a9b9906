"""Memory of caches: zero, writable, and taken from the system only where it is used."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from manta.drafter.compute.memory.zeroed_memory import zeros


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="counts resident pages as Linux does")
def test_pages_are_the_systems_until_they_are_written() -> None:
    before = resident_bytes()
    held = zeros((64, 1 << 20), torch.bfloat16, "cpu")
    assert resident_bytes() - before < 2**24
    held[3] = 1.0
    assert 2**20 < resident_bytes() - before < 2**25
    assert held[3].sum() == 1 << 20 and held[4].count_nonzero() == 0 and held.is_contiguous()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize("shape", [(3, 5), (0, 4), (7,)])
def test_shapes_and_dtypes_are_those_of_torch(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    held, expected = zeros(shape, dtype, "cpu"), torch.zeros(shape, dtype=dtype)
    assert held.shape == expected.shape and held.dtype is dtype
    assert held.float().equal(expected.float())
