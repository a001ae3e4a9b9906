"""Codes in memory: MXFP4 against transformers' unpacker, and experts in one tensor for all."""

from __future__ import annotations

import pytest
import torch
from manta.drafter.compute.checkpoint.packed_codes import PackedCodes, stack
from manta.drafter.compute.checkpoint.quantized_matrix import QuantizedMatrix
from support.oracles.random_codes import MATRICES, bytes_of, scales
from transformers.integrations.mxfp4 import convert_moe_packed_tensors


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_packed_weights_equal_transformers_unpacked_ones(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    blocks_EOBJ = torch.randint(0, 256, (3, 6, 4, 16), dtype=torch.uint8, generator=generator)
    scales_EOB = torch.randint(0, 139, (3, 6, 4), dtype=torch.uint8, generator=generator)
    packed = PackedCodes.mxfp4(blocks_EOBJ, scales_EOB)
    theirs_EIO = convert_moe_packed_tensors(blocks_EOBJ, scales_EOB, dtype=dtype)
    weights_EOI = packed.dequantized(dtype)
    assert weights_EOI.dtype is dtype and weights_EOI.shape == packed.shape == (3, 6, 128)
    assert torch.equal(weights_EOI, theirs_EIO.transpose(1, 2))
    assert packed.device == torch.device("cpu")


def test_the_low_nibble_comes_first_and_a_scale_is_a_power_of_two() -> None:
    blocks_EOBJ = torch.zeros((1, 1, 1, 16), dtype=torch.uint8)
    blocks_EOBJ[..., 0], blocks_EOBJ[..., 15] = 0xF1, 0x27
    scales_EOB = torch.tensor([[[130]]], dtype=torch.uint8)
    weights_I = PackedCodes.mxfp4(blocks_EOBJ, scales_EOB).dequantized(torch.float32)[0, 0]
    assert weights_I.nonzero().flatten().tolist() == [0, 1, 30, 31]
    assert weights_I[[0, 1, 30, 31]].tolist() == [0.5 * 8, -6.0 * 8, 6.0 * 8, 1.0 * 8]


@pytest.mark.parametrize("name", MATRICES)
def test_stacked_experts_are_their_matrices(name: str) -> None:
    experts = [MATRICES[name](6, 64) for _ in range(3)]
    held = stack(experts, 3)
    assert isinstance(held, PackedCodes) and held.shape == (3, 6, 64)
    for number, expert in enumerate(experts):
        found = held.matrix(number)
        assert found.codes_OI.equal(expert.codes_OI) and found.scales().equal(expert.scales())
        assert held.dequantized(torch.float32)[number].equal(expert.dequantized(torch.float32))
    bits = 4 if held.has_pairs else 8
    assert held.codes.nbytes == 3 * 6 * 64 * bits / 8 and held.num_bytes > held.codes.nbytes


def test_experts_of_which_some_have_zeros_keep_them() -> None:
    plain, other = (QuantizedMatrix("int4", bytes_of(4, 64, 16), scales(4, 2)) for _ in range(2))
    shifted = QuantizedMatrix("int4", other.codes_OI, other.scales_OG, bytes_of(4, 2, 16))
    for experts in ([plain, shifted, other], [shifted, plain, other]):
        held = stack(experts, 3)
        assert isinstance(held, PackedCodes)
        for number, expert in enumerate(experts):
            assert held.dequantized(torch.float32)[number].equal(expert.dequantized(torch.float32))


def test_experts_of_different_forms_are_no_codes() -> None:
    int8, e4m3 = MATRICES["int8 by channel"](4, 64), MATRICES["e4m3"](4, 64)
    numbers = e4m3.dequantized(torch.float32)
    assert stack([int8, e4m3], 2) is None and stack([int8, numbers], 2) is None
    held = stack([numbers, int8], 2)
    assert isinstance(held, torch.Tensor) and held[1].equal(int8.dequantized(torch.float32))
