"""Blocks of every type have the values of llama.cpp's own decoder, bit for bit, and the codes make them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, quants
from hypothesis import given, settings
from hypothesis import strategies as st
from manta.drafter.compute.checkpoint.gguf.block_formats import (
    CODED,
    FLOATS,
    block_sizes,
    codes_of,
    is_read,
    values_of,
)
from manta.drafter.compute.checkpoint.quantized_matrix import BITS

ORACLE = sorted(kind for kind in GGMLQuantizationType if is_read(kind) and kind not in FLOATS)
WITHOUT_ORACLE = {GGMLQuantizationType.Q8_K}  # a type of intermediate results in llama.cpp
SCALES = {  # offsets of fp16 numbers in a block, the other bytes of which may have any value
    "Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,), "Q2_K": (80, 82),
    "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "IQ4_NL": (0,), "IQ4_XS": (0,),
    "TQ1_0": (52,), "TQ2_0": (64,), "IQ1_S": (0,), "IQ2_XXS": (0,), "IQ2_XS": (0,), "IQ2_S": (0,),
    "IQ3_XXS": (0,), "IQ3_S": (0,),
}  # fmt: skip


def random_rows(kind: GGMLQuantizationType, seed: int, rows: int = 3, blocks: int = 4) -> torch.Tensor:
    """Return rows of blocks whose scales are finite and whose other bytes are random, uint8 [rows, bytes]."""
    random = np.random.default_rng(seed)
    raw = random.integers(0, 256, (rows, blocks, block_sizes(kind)[1]), dtype=np.uint8)
    for at in SCALES.get(kind.name, ()):
        numbers = random.standard_normal((rows, blocks)) * 10.0 ** random.integers(-7, 4)
        raw[..., at : at + 2] = numbers.astype(np.float16)[..., None].view(np.uint8)
    if kind is GGMLQuantizationType.MXFP4:
        raw[..., 0] = random.integers(0, 252, (rows, blocks))  # of finite values
    if kind is GGMLQuantizationType.NVFP4:
        raw[..., :4] = random.integers(0, 128, (rows, blocks, 4))
    if kind is GGMLQuantizationType.IQ1_M:  # the scale is made of four nibbles
        raw[..., 55] &= 0x3F
    return torch.from_numpy(raw.reshape(rows, -1))


@pytest.mark.parametrize(
    "kind", [kind for kind in ORACLE if kind not in WITHOUT_ORACLE], ids=lambda k: k.name
)
@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_values_are_those_of_the_reference(kind: GGMLQuantizationType, seed: int) -> None:
    raw = random_rows(kind, seed)
    expected = quants.dequantize(raw.numpy(), kind)
    assert np.isfinite(expected).all()
    found = values_of(kind, raw).numpy()
    assert np.array_equal(found.view(np.uint32), expected.view(np.uint32))


@pytest.mark.parametrize("kind", CODED, ids=lambda k: k.name)
def test_codes_and_their_form_are_those_that_the_table_states(kind: GGMLQuantizationType) -> None:
    form, raw = CODED[kind].form, random_rows(kind, seed=1)
    matrix = codes_of(kind, raw)
    assert matrix.shape == (3, 4 * block_sizes(kind)[0])
    assert (matrix.code, matrix.group) == (form.code, form.group)
    assert int(matrix.codes_OI.max()) < form.num_codes
    tensors: list[torch.Tensor] = []
    matrix.map(lambda tensor: tensors.append(tensor) or tensor)
    shared = sum(tensor.nbytes for tensor in tensors[1:])
    codes = matrix.codes_OI.numel()
    assert shared / codes == form.bytes - BITS[form.code] / 8


def test_values_of_q8_k_are_codes_times_the_scale_of_the_block() -> None:
    scales, codes = torch.rand(2, 3, 1), torch.randint(-128, 128, (2, 3, 256), dtype=torch.int8)
    sums = codes.int().unflatten(-1, (16, 16)).sum(-1).short()  # which products in llama.cpp use
    parts = (scales.view(torch.uint8), codes.view(torch.uint8), sums.view(torch.uint8))
    rows = torch.cat(parts, dim=-1).flatten(1)
    assert torch.equal(values_of(GGMLQuantizationType.Q8_K, rows), (codes.float() * scales).flatten(1))


@pytest.mark.parametrize("name", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "TQ1_0", "TQ2_0", "MXFP4"])
def test_what_the_reference_quantizes_is_read_near_its_values(name: str) -> None:
    kind = GGMLQuantizationType[name]
    weights = np.random.default_rng(5).standard_normal((4, 512)).astype(np.float32)
    found = values_of(kind, torch.from_numpy(quants.quantize(weights, kind))).numpy()
    assert np.corrcoef(found.ravel(), weights.ravel())[0, 1] > (0.6 if name.startswith("TQ") else 0.98)
