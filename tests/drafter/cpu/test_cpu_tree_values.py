"""Values of draft trees, which vectors add to the sums of AMX tiles."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from manta.drafter.compute.cpu_fused.qkv_heads import BLOCK
from manta.drafter.compute.cpu_fused.tiles.amx_tiles import begin_attention, combine
from manta.drafter.compute.cpu_fused.tiles.isa_dispatch import has_tiles
from manta.drafter.compute.cpu_fused.tiles.simd_vectors import add_values
from numba import njit
from torch import Tensor

ROWS, KEYS, DIM = 16, 3 * BLOCK, 96


@njit
def in_tiles(blocks, weights, sums):
    begin_attention()
    combine(blocks, np.int64(KEYS // BLOCK), np.int64(0), weights, np.int64(2 * KEYS), sums, np.int64(DIM))


@njit
def in_vectors(lines, shifts, weights, sums):
    for row in range(ROWS):
        for block in range(KEYS // BLOCK):
            key, place = block * BLOCK, weights + 2 * (row * KEYS + block * BLOCK)
            add_values(lines + 8 * key, shifts + 4 * key, place, sums + 4 * row * DIM, np.int64(DIM // 16))


def in_pairs(v_KD: Tensor) -> Tensor:
    """Return blocks of 16 keys in the order of `qkv_heads.py`: [D / 16] [8 pairs, 16, 2]."""
    return v_KD.view(-1, 8, 2, DIM // 16, 16).permute(0, 3, 1, 4, 2).contiguous()


@pytest.mark.skipif(not has_tiles(), reason="this CPU has no tiles")
@pytest.mark.parametrize("seed", range(4))
def test_vectors_add_values_in_other_places_with_the_bits_of_tiles(seed: int) -> None:
    """Sums of fp32; a weight in four is 0, as those of unseen keys."""
    random = torch.Generator().manual_seed(seed)
    v_KD = (4 * torch.randn(KEYS, DIM, generator=random)).bfloat16()
    p_RK = (
        torch.rand(ROWS, KEYS, generator=random) * (torch.rand(ROWS, KEYS, generator=random) > 0.25)
    ).bfloat16()
    places_K = torch.randperm(KEYS, generator=random)
    blocks, elsewhere = in_pairs(v_KD), in_pairs(v_KD[places_K.argsort()])
    size = 2 * BLOCK * DIM
    addresses = blocks.data_ptr() + size * np.arange(KEYS // BLOCK)
    block_K, t_K = (places_K // BLOCK).numpy(), (places_K % BLOCK).numpy()
    lines, shifts = elsewhere.data_ptr() + size * block_K + 64 * (t_K // 2), (16 * (t_K % 2)).astype(np.int32)
    expected, found = torch.empty(ROWS, DIM), torch.zeros(ROWS, DIM)
    in_tiles(addresses.ctypes.data, p_RK.data_ptr(), expected.data_ptr())
    in_vectors(lines.ctypes.data, shifts.ctypes.data, p_RK.data_ptr(), found.data_ptr())
    torch.testing.assert_close(expected, p_RK.float() @ v_KD.float(), rtol=1e-5, atol=1e-5)
    assert torch.equal(found, expected)
