"""Matrices of quantized checkpoints: read whole and in parts they have the numbers that their format defines."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from manta.drafter.compute.checkpoint.quantization.quantized_tensors import QuantizedFolder
from manta.drafter.compute.checkpoint.quantization.read_quantization import read_quantization
from quantized_checkpoints import FORMATS, decode
from safetensors.torch import save_file

MODULE = "model.layers.0.mlp.up_proj"
NAME = f"{MODULE}.weight"
ROWS, COLUMNS = 64, 96


def open_one(name: str, folder: Path, dtype: torch.dtype = torch.float32) -> tuple[QuantizedFolder, torch.Tensor]:
    """A folder with one matrix in a format, and the matrix's numbers."""
    form = FORMATS[name]
    matrix = form.encoder(MODULE)(np.random.default_rng(3), ROWS, COLUMNS)
    save_file({f"{MODULE}.{part}": tensor.clone() for part, tensor in matrix.tensors.items()}, folder / "m.safetensors")
    config = form.config
    if config is None:
        assert form.hf_quant_config is not None
        config = {"quant_method": "modelopt", **form.hf_quant_config["quantization"]}
    quantization = read_quantization({"quantization_config": config}, folder, param="model")
    assert quantization is not None
    return QuantizedFolder(folder, quantization, dtype), decode(matrix, ROWS, COLUMNS)


@pytest.mark.parametrize("name", FORMATS)
def test_a_matrix_and_all_its_parts_have_the_numbers_of_the_format(name: str, tmp_path: Path) -> None:
    tensors, expected = open_one(name, tmp_path)
    tensors.check(NAME, (ROWS, COLUMNS))
    tensors.refuse_stray_scales([NAME])
    assert tensors.shapes == {NAME: (ROWS, COLUMNS)}
    assert torch.equal(tensors.get(NAME), expected)
    for part in (slice(0, 32), slice(5, 49), slice(30, 64), slice(23, 25), slice(63, 64)):
        assert torch.equal(tensors.slice(NAME, part), expected[part])
        assert torch.equal(tensors.slice(NAME, part, 1), expected[:, part])


@pytest.mark.parametrize("name", FORMATS)
def test_16_bits_are_rounded_once(name: str, tmp_path: Path) -> None:
    tensors, expected = open_one(name, tmp_path, torch.bfloat16)
    found = tensors.get(NAME)
    assert found.dtype is torch.bfloat16 and torch.equal(found, expected.bfloat16())
