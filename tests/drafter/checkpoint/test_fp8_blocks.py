"""FP8 matrices with a scale per block are read whole, in slices, and as a target's weights."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from manta.actors.targets.families import read_model
from manta.actors.targets.model.decoder import Decoder
from manta.actors.targets.model.tensor_parallel import Sharding, SingleRank
from manta.actors.targets.model.weights import TargetWeights, open_checkpoint
from manta.cluster.errors import CheckpointError
from manta.drafter.compute.checkpoint.quantization.quantized_tensors import QuantizedFolder
from manta.drafter.compute.checkpoint.quantization.read_quantization import read_quantization
from safetensors.torch import load_file, save_file
from support.checkpoints.tiny import make_tiny_target

BLOCK = (24, 40)  # divides nothing that is cut
PLAIN = ("gate.weight", "e_score_correction_bias", "lm_head.weight", "embed_tokens.weight", "norm.weight")


def in_blocks(weight_OI: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return values in e4m3, and scales that map each block's maximum to e4m3's."""
    rows, columns = (-(-size // step) for size, step in zip(weight_OI.shape, BLOCK, strict=True))
    scales, values = torch.empty(rows, columns), torch.empty_like(weight_OI)
    for r in range(rows):
        for c in range(columns):
            at = (slice(r * BLOCK[0], (r + 1) * BLOCK[0]), slice(c * BLOCK[1], (c + 1) * BLOCK[1]))
            scales[r, c] = weight_OI[at].abs().max() / 448
            values[at] = weight_OI[at] / scales[r, c]
    return values.to(torch.float8_e4m3fn), scales


def numbers_of(values_OI: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    found = torch.empty(values_OI.shape)
    for o in range(found.shape[0]):
        for i in range(found.shape[1]):
            found[o, i] = values_OI[o, i].float() * scales[o // BLOCK[0], i // BLOCK[1]]
    return found


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Write a MiniMax in FP8, and one with the dequantized numbers."""
    whole = make_tiny_target(tmp_path_factory.mktemp("whole"), "minimax_m2", num_hidden_layers=2)
    packed = tmp_path_factory.mktemp("packed")
    keys = json.loads((whole / "config.json").read_text())
    keys["quantization_config"] = {"quant_method": "fp8", "weight_block_size": list(BLOCK)}
    (packed / "config.json").write_text(json.dumps(keys))
    plain = load_file(whole / "model.safetensors")
    stored: dict[str, torch.Tensor] = {}
    for name, tensor in plain.items():
        if name.endswith(PLAIN):
            stored[name] = tensor
        else:
            stored[name], stored[f"{name}_scale_inv"] = in_blocks(tensor)
            plain[name] = numbers_of(stored[name], stored[f"{name}_scale_inv"])
    save_file(stored, packed / "model.safetensors")
    save_file(plain, whole / "model.safetensors")
    return packed, whole


def test_slices_need_not_end_with_a_block(tmp_path: Path) -> None:
    values, scales = in_blocks(torch.randn(60, 90, generator=torch.Generator().manual_seed(0)))
    expected = numbers_of(values, scales)
    stored = {"m.weight": values, "m.weight_scale_inv": scales, "m.bias": scales[0].clone()}
    save_file(stored, tmp_path / "model.safetensors")
    config = {"quant_method": "fp8", "weight_block_size": list(BLOCK)}
    quantization = read_quantization({"quantization_config": config}, tmp_path, param="model")
    assert quantization is not None
    folder = QuantizedFolder(tmp_path, quantization, torch.float32)
    folder.check("m.weight", (60, 90))
    assert torch.equal(folder.get("m.weight"), expected) and torch.equal(folder.get("m.bias"), scales[0])
    for part in (slice(0, 24), slice(5, 49), slice(30, 60), slice(23, 25)):
        assert torch.equal(folder.slice("m.weight", part), expected[part])
        assert torch.equal(folder.slice("m.weight", part, 1), expected[:, part])
    assert QuantizedFolder(tmp_path, quantization, torch.bfloat16).get("m.weight").dtype is torch.bfloat16


@pytest.mark.parametrize("ranks", [1, 2])
def test_an_fp8_target_equals_its_dequantized_one(pair: tuple[Path, Path], ranks: int) -> None:
    spec = read_model(pair[0])
    for rank in range(ranks):
        found, expected = (
            TargetWeights(
                folder, read_model(folder), Sharding(spec, rank, ranks), torch.float32, torch.device("cpu")
            )
            for folder in pair
        )
        for layer in range(spec.num_layers):
            mine, theirs = found.layer(layer), expected.layer(layer)
            assert torch.equal(mine.qkv_OH, theirs.qkv_OH) and torch.equal(mine.o_HO, theirs.o_HO)
            assert torch.equal(mine.mlp.experts.gate_up, theirs.mlp.experts.gate_up)
            assert torch.equal(mine.mlp.experts.down, theirs.mlp.experts.down)
            assert torch.equal(mine.mlp.router.weight_EH, theirs.mlp.router.weight_EH)


def test_an_fp8_target_is_also_loaded_in_bf16(pair: tuple[Path, Path]) -> None:
    spec = read_model(pair[0])
    weights = TargetWeights(pair[0], spec, Sharding(spec, 0, 1), torch.bfloat16, torch.device("cpu"))
    model = Decoder(weights, (), 64, SingleRank())
    assert model.dtype is torch.bfloat16 and weights.layer(0).qkv_OH.dtype is torch.bfloat16


def test_undeclared_fp8_is_refused(pair: tuple[Path, Path], tmp_path: Path) -> None:
    keys = json.loads((pair[1] / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(keys))
    tensors = load_file(pair[0] / "model.safetensors")
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(
        CheckpointError,
        match=r"q_proj.weight is stored as F8_E4M3.*quantized in a way that config.json does not name",
    ):
        open_checkpoint(tmp_path, read_model(tmp_path))


def test_scales_of_other_blocks_are_refused(pair: tuple[Path, Path], tmp_path: Path) -> None:
    keys = json.loads((pair[0] / "config.json").read_text())
    keys["quantization_config"]["weight_block_size"] = [128, 128]
    (tmp_path / "config.json").write_text(json.dumps(keys))
    (tmp_path / "model.safetensors").symlink_to(pair[0] / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"_scale_inv has shape \[3, 2\].*\[1, 1\]"):
        open_checkpoint(tmp_path, read_model(tmp_path))
