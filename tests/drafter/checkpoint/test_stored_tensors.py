"""Tensors of a checkpoint are used as stored, or refused by name."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from manta.actors.targets.families import read_model
from manta.actors.targets.model.weights import open_checkpoint
from manta.cluster.errors import CheckpointError
from manta.drafter.compute.checkpoint.safetensors_reader import TensorFolder
from manta.drafter.dflash.checkpoint import check_drafter
from manta.drafter.dflash.target_features import TargetFacts
from manta.drafter.eagle3.checkpoint import check_eagle3
from safetensors.torch import load_file, save_file
from support.checkpoints import drafters
from support.checkpoints.tiny import TINY_VOCAB

FACTS = TargetFacts(
    hidden_size=drafters.HIDDEN,
    num_layers=drafters.TARGET_LAYERS,
    vocab_size=drafters.VOCAB,
    max_model_len=64,
)
EAGLE3_FACTS = TargetFacts(hidden_size=64, num_layers=4, vocab_size=TINY_VOCAB, max_model_len=64)

CHECKS: dict[str, tuple[str, Callable[[Path], object]]] = {
    "target": ("model.layers.1.self_attn.q_proj", lambda folder: open_checkpoint(folder, read_model(folder))),
    "dflash": ("layers.1.self_attn.q_proj", lambda folder: check_drafter(folder, FACTS)),
    "eagle3": ("midlayer.self_attn.q_proj", lambda folder: check_eagle3(folder, EAGLE3_FACTS)),
}


@pytest.fixture
def folders(tiny_qwen3: Path, tmp_path: Path) -> dict[str, Path]:
    """Return one checkpoint of each kind; the drafters have their own vocabulary (`d2t`)."""
    shutil.copytree(tiny_qwen3, tmp_path / "target")
    drafters.write_drafter(tmp_path / "dflash", drafters.z_lab(draft_vocab_size=40))
    drafters.write_drafter(tmp_path / "eagle3", drafters.sglang())
    return {name: tmp_path / name for name in CHECKS}


DTYPES = (
    *(torch.int8, torch.uint8, torch.int32, torch.int64, torch.bool),
    *(torch.float8_e4m3fn, torch.float8_e5m2),
)
SUFFIXES = (
    *(".weight_scale", ".weight_scale_inv", ".weight_scale_2", ".scales", ".weight.scale", ".input_scale"),
    *(".weight_zero_point", ".qzeros", ".SCB", ".weight.absmax", ".weight_global_scale"),
)


@pytest.mark.parametrize("kind", CHECKS)
@pytest.mark.parametrize("stored", [*DTYPES, *SUFFIXES], ids=str)
def test_unsupported_dtypes_and_scales_are_refused_by_name(
    folders: dict[str, Path], kind: str, stored: torch.dtype | str
) -> None:
    name, check = CHECKS[kind]
    check(folders[kind])
    file = folders[kind] / "model.safetensors"
    tensors, weight = load_file(file), f"{name}.weight"
    if isinstance(stored, str):
        tensors[f"{name}{stored}"] = torch.ones(tensors[weight].shape[0], 1)
        words = rf"{re.escape(stored)} is stored with a matrix"
    else:
        tensors[weight] = (tensors[weight] * 100).to(stored)
        words = r"q_proj\.weight is stored as \w+; it must be F32 or BF16"
    save_file(tensors, file)
    with pytest.raises(CheckpointError, match=words):
        check(folders[kind])


@pytest.mark.parametrize("kind", CHECKS)
def test_scales_of_unread_matrices_are_ignored(folders: dict[str, Path], kind: str) -> None:
    """The scales are of a vision tower, of a cache, and of a layer beyond the last."""
    _, check = CHECKS[kind]
    file = folders[kind] / "model.safetensors"
    names = ("vision_tower.layers.0.fc.weight_scale", "model.layers.9.mlp.up_proj.weight_scale_inv")
    save_file({**load_file(file), **{name: torch.ones(1) for name in names}}, file)
    check(folders[kind])


def test_a_float_map_of_tokens_is_refused(folders: dict[str, Path]) -> None:
    file = folders["dflash"] / "model.safetensors"
    found = load_file(file)
    save_file({**found, "d2t": found["d2t"].float()}, file)
    with pytest.raises(CheckpointError, match=r"d2t is stored as F32; it must be I64 or I32"):
        check_drafter(folders["dflash"], FACTS)


def index_of(folder: Path, files: list[str]) -> None:
    names = {f"{i}": file for i, file in enumerate(files)}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))


@pytest.mark.parametrize("indexed", [True, False])
def test_a_tensor_in_two_files_is_refused(tiny_qwen3: Path, tmp_path: Path, indexed: bool) -> None:
    parts = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    for part in parts:
        shutil.copyfile(tiny_qwen3 / "model.safetensors", tmp_path / part)
    if indexed:
        index_of(tmp_path, parts)
    with pytest.raises(CheckpointError, match=r"tensor \S+ is in model-00001\S+ and in model-00002"):
        TensorFolder(tmp_path)


@pytest.mark.parametrize("indexed", [True, False])
def test_a_single_file_takes_precedence_over_shards_as_in_transformers(
    tiny_qwen3: Path, tmp_path: Path, indexed: bool
) -> None:
    from transformers import AutoModelForCausalLM

    folder = tmp_path / "copy"
    shutil.copytree(tiny_qwen3, folder)
    tensors = load_file(folder / "model.safetensors")
    other = "model-00001-of-00001.safetensors"
    save_file({name: tensor + 1 for name, tensor in tensors.items()}, folder / other, {"format": "pt"})
    if indexed:
        index_of(folder, [other])
    theirs = AutoModelForCausalLM.from_pretrained(folder).state_dict()["model.norm.weight"]
    assert torch.equal(TensorFolder(folder).get("model.norm.weight"), theirs)
