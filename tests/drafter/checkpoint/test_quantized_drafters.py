"""Quantized drafters are checked, described and read like plain ones with the numbers of their format."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from manta.cluster.errors import CheckpointError, ConfigError
from manta.drafter.compute.checkpoint.loading.quantized_tensors import open_folder
from manta.drafter.dflash.checkpoint import check_drafter
from manta.drafter.dflash.config import DrafterConfig
from manta.drafter.dflash.target_features import TargetFacts
from manta.drafter.eagle3.checkpoint import check_eagle3
from manta.jobs.drafters.common.drafter_files import open_drafter
from manta.jobs.drafters.common.format_conversion import convert_drafter
from manta.jobs.drafters.drafter_summary import summarize_drafter
from manta.jobs.drafters.validate.validate_pair import validate_pair
from safetensors.torch import load_file, save_file
from support.checkpoints import drafters
from support.checkpoints.tiny import TINY_VOCAB, make_tiny_drafter, make_tiny_target
from support.oracles.quantized_checkpoints import FORMATS, publish

FACTS = TargetFacts(hidden_size=64, num_layers=4, vocab_size=TINY_VOCAB, max_model_len=64)
SOME = ("ct_w4a16", "gptq", "modelopt_fp8", "ct_nvfp4")


@pytest.mark.parametrize("name", SOME)
@pytest.mark.parametrize("kind", ["dflash", "eagle3"])
def test_a_drafter_has_the_numbers_of_its_format(kind: str, name: str, tmp_path: Path) -> None:
    if kind == "dflash":
        saved, check = make_tiny_drafter(tmp_path / "saved"), check_drafter
    else:
        saved = drafters.write_drafter(tmp_path / "saved", drafters.sglang())
        check = check_eagle3
    quantized, plain = publish(saved, tmp_path, name)
    config = check(quantized, FACTS)
    assert config.quantization is not None and check(plain, FACTS).quantization is None
    tensors = open_folder(quantized, config.quantization)
    for tensor_name, tensor in load_file(plain / "model.safetensors").items():
        assert torch.equal(tensors.get(tensor_name), tensor), tensor_name


def test_speculators_declare_quantization_next_to_the_layers(tmp_path: Path) -> None:
    config = drafters.eagle3_speculators(quantization_config=FORMATS["ct_w4a16"].config)
    folder = drafters.write_drafter(tmp_path / "saved", config)
    with pytest.raises(CheckpointError, match=r"says compressed-tensors: INT4.*but no matrix is stored so"):
        check_eagle3(folder, FACTS)


@pytest.mark.parametrize("name", SOME)
def test_a_quantized_drafter_is_validated_and_described(name: str, tmp_path: Path) -> None:
    target = make_tiny_target(tmp_path / "target", "qwen3", num_hidden_layers=8)
    saved = make_tiny_drafter(tmp_path / "saved")
    keys = json.loads((saved / "config.json").read_text())
    (saved / "config.json").write_text(json.dumps({**keys, "num_target_layers": 8}))
    quantized, plain = publish(saved, tmp_path, name)
    assert validate_pair(str(quantized), str(target)) == []
    found, expected = (summarize_drafter(open_drafter(str(folder))) for folder in (quantized, plain))
    assert found["num_parameters"] == expected["num_parameters"]
    assert found["weight_bytes"] < 0.6 * expected["weight_bytes"]
    assert set(found["dtypes"]) - set(expected["dtypes"]) in ({"INT4"}, {"F8_E4M3"}, {"FP4"})
    file = quantized / "model.safetensors"
    tensors = load_file(file)
    scale = next(part for part in tensors if part.endswith(("weight_scale", ".scales")))
    save_file({part: tensor for part, tensor in tensors.items() if part != scale}, file)
    assert any(
        scale in finding.message for finding in validate_pair(str(quantized), str(target)) if finding.fatal
    )


def test_a_quantized_drafter_is_not_converted(tmp_path: Path) -> None:
    target = make_tiny_target(tmp_path / "target", "qwen3")
    quantized, _ = publish(make_tiny_drafter(tmp_path / "saved"), tmp_path, "gptq")
    with pytest.raises(
        ConfigError, match=r"is quantized \(gptq: GPTQ INT4 in groups of 32\): convert the unquantized"
    ):
        convert_drafter(str(quantized), str(target), "speculators", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_an_override_with_null_reads_plain_weights(tmp_path: Path) -> None:
    folder = make_tiny_drafter(tmp_path)
    keys = json.loads((folder / "config.json").read_text())
    keys["quantization_config"] = FORMATS["gptq"].config
    (folder / "config.json").write_text(json.dumps(keys))
    with pytest.raises(CheckpointError, match="no matrix is stored so"):
        check_drafter(folder, FACTS)
    assert check_drafter(folder, FACTS, {"quantization_config": None}).quantization is None
    assert DrafterConfig.load(folder).quantization is not None
