"""Matrices have the numbers that the formats' own packages read from the same tensors.

compressed-tensors runs here, if installed. Of others, which want GPUs, `data/packed_matrices.safetensors`
holds random matrices in their formats, with the numbers that their code gave (its header says which).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from manta.drafter.compute.checkpoint.loading.quantized_tensors import QuantizedFolder
from manta.drafter.compute.checkpoint.loading.read_quantization import read_quantization
from safetensors import safe_open
from safetensors.torch import save_file
from support.oracles.quantized_checkpoints import FORMATS
from support.paths import TESTS

MODULE = "model.layers.0.mlp.up_proj"
ROWS, COLUMNS = 48, 96
_OTHERS = ("ct_groups", "ct_act_order")  # a mixture of others; the package no longer reads g_idx
COMPRESSED_TENSORS = [
    name
    for name, form in FORMATS.items()
    if (form.config or {}).get("quant_method") == "compressed-tensors" and name not in _OTHERS
]
STORED = safe_open(TESTS / "data" / "packed_matrices.safetensors", "pt")
CONFIGS: dict[str, dict] = json.loads(STORED.metadata()["configs"])
Tensors = Mapping[str, torch.Tensor]


def read(config: object, stored: Tensors, folder: Path) -> torch.Tensor:
    """Return the matrix of these tensors, as the product reads it from a file."""
    named = {f"{MODULE}.{part}": tensor.contiguous() for part, tensor in stored.items()}
    save_file(named, folder / "m.safetensors")
    quantization = read_quantization({"quantization_config": config}, folder, param="model")
    assert quantization is not None
    return QuantizedFolder(folder, quantization, torch.float32).get(f"{MODULE}.weight")


@pytest.mark.parametrize("name", CONFIGS)
def test_matrices_have_the_numbers_of_the_packages(name: str, tmp_path: Path) -> None:
    parts = [each.removeprefix(f"{name}/") for each in STORED.keys() if each.startswith(f"{name}/")]  # noqa: SIM118
    tensors = {part: STORED.get_tensor(f"{name}/{part}") for part in parts}
    values = tensors.pop("values")
    assert torch.equal(read(CONFIGS[name], tensors, tmp_path), values)


@pytest.mark.parametrize("name", COMPRESSED_TENSORS)
def test_matrices_have_the_numbers_of_compressed_tensors(name: str, tmp_path: Path) -> None:
    """From tensors of ours and from those that the package makes of the numbers.

    It computes in the scales' dtype: fp32 here, but for 4-bit floats.
    """
    pytest.importorskip("compressed_tensors", reason="compressed-tensors is not installed")
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationScheme

    form = FORMATS[name]
    assert form.config is not None
    (group,) = form.config["config_groups"].values()
    package = BaseCompressor.get_value_from_registry(form.config["format"])
    scheme = QuantizationScheme.model_validate(group)
    halves = (torch.bfloat16, torch.float16)
    stored = {
        part: tensor.float() if tensor.dtype in halves else tensor
        for part, tensor in form.encoder(MODULE)(np.random.default_rng(5), ROWS, COLUMNS).tensors.items()
    }
    theirs = package.decompress(stored, scheme)
    ours, expected = read(form.config, stored, tmp_path), theirs["weight"]
    assert expected.dtype is torch.float32 or "fp4" in name
    assert torch.equal(ours.to(expected.dtype), expected)
    again = package.compress({**theirs, "weight": ours}, scheme)
    assert torch.equal(read(form.config, again, tmp_path), ours)
