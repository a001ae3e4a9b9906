"""Packed four-bit weights, against transformers' unpacker."""

from __future__ import annotations

import pytest
import torch
from manta.drafter.compute.checkpoint.packed_4bit import MXFP4
from transformers.integrations.mxfp4 import convert_moe_packed_tensors


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_packed_weights_equal_transformers_unpacked_ones(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    blocks_EOBJ = torch.randint(0, 256, (3, 6, 4, 16), dtype=torch.uint8, generator=generator)
    scales_EOB = torch.randint(115, 139, (3, 6, 4), dtype=torch.uint8, generator=generator)
    packed = MXFP4(blocks_EOBJ, scales_EOB)
    theirs_EIO = convert_moe_packed_tensors(blocks_EOBJ, scales_EOB, dtype=dtype)
    weights_EOI = packed.dequantised(dtype)
    assert weights_EOI.dtype is dtype and weights_EOI.shape == packed.shape == (3, 6, 128)
    assert torch.equal(weights_EOI, theirs_EIO.transpose(1, 2))
    assert packed.device == torch.device("cpu")


def test_the_low_nibble_comes_first_and_a_scale_is_a_power_of_two() -> None:
    blocks_EOBJ = torch.zeros((1, 1, 1, 16), dtype=torch.uint8)
    blocks_EOBJ[..., 0], blocks_EOBJ[..., 15] = 0xF1, 0x27
    scales_EOB = torch.tensor([[[130]]], dtype=torch.uint8)
    weights_I = MXFP4(blocks_EOBJ, scales_EOB).dequantised(torch.float32)[0, 0]
    assert weights_I.nonzero().flatten().tolist() == [0, 1, 30, 31]
    assert weights_I[[0, 1, 30, 31]].tolist() == [0.5 * 8, -6.0 * 8, 6.0 * 8, 1.0 * 8]
