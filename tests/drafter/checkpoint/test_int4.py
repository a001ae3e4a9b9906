"""INT4 experts as published for Kimi K2: what their codes mean, how they are read, sharded and multiplied."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from manta import LLM, SamplingParams
from manta.actors.targets.families import read_model
from manta.actors.targets.model.decoder import Decoder
from manta.actors.targets.model.mlp_weights import RoutedTensors
from manta.actors.targets.model.tensor_parallel import Sharding, SingleRank
from manta.actors.targets.model.weights import TargetWeights, open_checkpoint
from manta.cluster.errors import CheckpointError
from manta.drafter.compute.checkpoint.packed_codes import PackedCodes
from manta.drafter.compute.gpu_triton.moe import moe as gpu_experts
from manta.drafter.compute.layers.moe import ExpertWeights
from safetensors.torch import load_file, save_file
from support.checkpoints.tiny import make_tiny_target, transformers_model
from support.engines.devices import DEVICE
from support.oracles.decoder_requests import Requests, oracle
from torch import Tensor

# moonshotai/Kimi-K2-Thinking's, but for what says nothing of the weights.
KIMI_INT4 = {
    "config_groups": {
        "group_0": {
            "input_activations": None,
            "output_activations": None,
            "targets": ["Linear"],
            "weights": {
                "actorder": None,
                "block_structure": None,
                "dynamic": False,
                "group_size": 32,
                "num_bits": 4,
                "observer": "minmax",
                "observer_kwargs": {},
                "strategy": "group",
                "symmetric": True,
                "type": "int",
            },
        }
    },
    "format": "pack-quantized",
    "ignore": [
        "lm_head",
        "re:.*self_attn.*",
        "re:.*shared_experts.*",
        "re:.*mlp\\.(gate|up|gate_up|down)_proj.*",
    ],
    "kv_cache_scheme": None,
    "quant_method": "compressed-tensors",
    "quantization_status": "compressed",
}
GROUP = 32


def packed(codes_OI: Tensor) -> Tensor:
    """Pack as compressed-tensors' `pack_to_int32`: codes of -8 to 7, eight in a word, the first lowest."""
    rows, columns = codes_OI.shape
    words = torch.zeros(rows, columns // 8, dtype=torch.int64)
    for place in range(8):
        words |= (codes_OI[:, place::8].to(torch.int64) + 8) << (4 * place)
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)


def quantised(weight_OI: Tensor) -> tuple[Tensor, Tensor]:
    groups = weight_OI.unflatten(1, (-1, GROUP))
    scales = (groups.abs().amax(-1, keepdim=True) / 7).bfloat16()
    codes = (groups / scales.float()).round().clamp(-8, 7)
    return codes.flatten(1).to(torch.int8), scales[..., 0]


def publish(saved: Path, folder: Path) -> Path:
    """Write a transformers checkpoint in the form of Kimi K2 Thinking: each expert's matrices packed."""
    tensors: dict[str, Tensor] = {}
    for name, tensor in load_file(saved / "model.safetensors").items():
        if ".mlp.experts." not in name:
            tensors[name] = tensor
            continue
        codes, scales = quantised(tensor)
        tensors |= {f"{name}_packed": packed(codes), f"{name}_scale": scales}
        tensors[f"{name}_shape"] = torch.tensor(tensor.shape)
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    keys = json.loads((saved / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**keys, "quantization_config": KIMI_INT4}))
    return folder


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    return make_tiny_target(
        folder, "deepseek_v3", seed=4, num_hidden_layers=2, first_k_dense_replace=1, moe_intermediate_size=64
    )


@pytest.fixture(scope="module")
def published(saved: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return publish(saved, tmp_path_factory.mktemp("hub") / "published")


def test_logits_equal_transformers_with_dequantized_weights(
    saved: Path, published: Path, tmp_path: Path
) -> None:
    model = transformers_model(saved)
    with torch.no_grad():
        for layer in model.model.layers[1:]:
            for weight in (layer.mlp.experts.gate_up_proj, layer.mlp.experts.down_proj):
                for weight_OI in weight:
                    codes, scales = quantised(weight_OI)
                    weight_OI.copy_((codes.unflatten(1, (-1, GROUP)) * scales.float()[..., None]).flatten(1))
    model.save_pretrained(tmp_path)
    requests = Requests(load_two_layers(published), [30])
    requests.compute({0: 25})
    requests.compute({0: 5})
    expected, _ = oracle(tmp_path, requests.tokens[0])
    torch.testing.assert_close(torch.cat(requests.logits[0]), expected, atol=1e-4, rtol=1e-4)
    assert (oracle(saved, requests.tokens[0])[0] - expected).abs().max() > 0.01, "and not the plain ones'"


def load_two_layers(folder: Path) -> Decoder:
    spec = read_model(folder)
    weights = TargetWeights(folder, spec, Sharding(spec, 0, 1), torch.float32, torch.device("cpu"))
    return Decoder(weights, (0,), 128, SingleRank())


def routed_of(folder: Path, rank: int, ranks: int) -> ExpertWeights:
    spec = read_model(folder)
    sharding, cpu = Sharding(spec, rank, ranks), torch.device("cpu")
    weights = TargetWeights(folder, spec, sharding, torch.float32, cpu, keeps_codes=True)
    mlp = weights.layer(1).mlp
    assert isinstance(mlp, RoutedTensors)
    return mlp.experts


def test_ranks_take_full_groups_of_every_expert_or_full_experts(published: Path) -> None:
    whole = routed_of(published, 0, 1).dequantized(torch.float32)
    gate_EIH, up_EIH = whole.gate_up.chunk(2, dim=1)  # type: ignore[union-attr]
    for rank in (0, 1):  # 64 inner states are two groups
        mine = routed_of(published, rank, 2)
        assert isinstance(mine.gate_up, PackedCodes) and isinstance(mine.down, PackedCodes)
        rows = slice(32 * rank, 32 * rank + 32)
        expected = torch.cat((gate_EIH[:, rows], up_EIH[:, rows]), 1)
        assert torch.equal(mine.gate_up.dequantized(torch.float32), expected)
        assert torch.equal(mine.down.dequantized(torch.float32), whole.down[:, :, rows])  # type: ignore[index]
    last = routed_of(published, 3, 4)  # but by four they do not divide
    assert last.first_expert == 12
    assert torch.equal(last.dequantized(torch.float32).down, whole.down[12:])  # type: ignore[index]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"group_size": 64}, r"gate_proj\.weight_scale has shape \[64, 2\].*\[64, 1\]"),
        ({"num_bits": 8}, r"gate_proj\.weight_packed has shape \[64, 8\].*\[64, 16\]"),
        ({"symmetric": False}, r"gate_proj\.weight_zero_point is missing"),
        ({"strategy": "channel", "group_size": None}, r"weight_scale has shape \[64, 2\].*\[64, 1\]"),
    ],
)
def test_another_packing_than_the_files_have_is_refused(
    published: Path, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    raw = json.loads((published / "config.json").read_text())
    raw["quantization_config"]["config_groups"]["group_0"]["weights"] |= changes
    (tmp_path / "config.json").write_text(json.dumps(raw))
    (tmp_path / "model.safetensors").symlink_to(published / "model.safetensors")
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(tmp_path, read_model(tmp_path))


def test_undeclared_packed_files_are_refused(published: Path, tmp_path: Path) -> None:
    raw = json.loads((published / "config.json").read_text())
    del raw["quantization_config"]
    (tmp_path / "config.json").write_text(json.dumps(raw))
    (tmp_path / "model.safetensors").symlink_to(published / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"experts\.0\.gate_proj\.weight is missing"):
        open_checkpoint(tmp_path, read_model(tmp_path))


@pytest.mark.usefixtures("on_the_device")
@pytest.mark.parametrize("kept", ["auto", "fp8"])
def test_experts_stay_packed_on_a_gpu_and_change_no_token(
    kept: str, published: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def tokens(backend: str) -> list[list[int]]:
        with LLM(
            str(published),
            skip_tokenizer_init=True,
            dtype="float32",
            num_threads=1,
            attention_backend=backend,
            kv_cache_dtype=kept,
            device=DEVICE.type,
            page_size=16,
            max_num_seqs=2,
            max_model_len=32,
        ) as llm:
            prompts = [{"prompt_token_ids": ids} for ids in ([3, 5, 8], [13, 21])]
            answers = llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True))
            return [answer.outputs[0].token_ids for answer in answers]

    expected = tokens("torch")
    multiply, found = gpu_experts.multiply_tiles, set[type]()

    def watched(x: Tensor, weights: Tensor | PackedCodes, *rest: Any, **more: Any) -> Tensor:
        found.add(type(weights))
        return multiply(x, weights, *rest, **more)

    monkeypatch.setattr(gpu_experts, "multiply_tiles", watched)
    assert tokens("triton") == expected
    assert found == {PackedCodes}
