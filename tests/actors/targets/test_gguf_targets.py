"""Targets in GGUF files have the specification and the numbers of the checkpoint that was converted."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFWriter
from manta import LLM, SamplingParams
from manta.actors.targets.families import read_model
from manta.actors.targets.loading.resolved_config import resolve_config
from manta.actors.targets.loading.weight_report import WeightCounts, describe_weights
from manta.actors.targets.model.mlp_spec import MLP, ParallelMlpSpec, RoutedMLP
from manta.actors.targets.model.mlp_weights import RoutedTensors
from manta.actors.targets.model.model_spec import ModelSpec
from manta.actors.targets.model.weights import open_checkpoint
from manta.cluster.errors import CheckpointError
from manta.drafter.compute.checkpoint.gguf.architectures import config_of
from manta.drafter.compute.checkpoint.gguf.gguf_file import GgufFile
from manta.drafter.compute.checkpoint.gguf.gguf_folder import GgufFolder
from manta.drafter.compute.checkpoint.loading.quantized_tensors import QuantizedFolder
from manta.drafter.compute.checkpoint.packed_codes import PackedCodes
from safetensors.torch import load_file
from support.checkpoints.families import DEEPSEEK_YARN
from support.checkpoints.gguf_checkpoints import GGUF_FAMILIES, MIXED, publish_gguf, show
from support.checkpoints.mtp_targets import make_mtp_target
from support.checkpoints.tiny import make_tiny_target, transformers_model
from support.engines.steps import settings
from support.oracles.decoder_requests import weights_of
from support.oracles.quantized_checkpoints import tensors_of

BLOCKS = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 2}  # of all types
CHANGES = {
    "qwen3_moe": {"moe_intermediate_size": 256, "num_experts": 4, "mlp_only_layers": []},
    "gemma3": {"sliding_window_pattern": 2, "query_pre_attn_scalar": 16},
    "gpt_oss": {"swiglu_limit": 7.0, "num_local_experts": 4},
    "glm4_moe": {"moe_intermediate_size": 256, "n_routed_experts": 4},
    "minimax_m2": {"num_local_experts": 4},
    "deepseek_v3": {
        **{"moe_intermediate_size": 256, "n_routed_experts": 4, "first_k_dense_replace": 1},
        "rope_parameters": {**DEEPSEEK_YARN, "mscale": 0.7},
    },
    "gemma4": {
        **{"moe_intermediate_size": 256, "num_experts": 4},
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "qwen3_5": {"mtp_num_hidden_layers": 0},
    "qwen3_5_moe": {"mtp_num_hidden_layers": 0, "num_experts": 4, "moe_intermediate_size": 256},
}


def make(folder: Path, family: str) -> tuple[Path, Path]:
    saved = make_tiny_target(folder / "saved", family, **{**BLOCKS, **CHANGES.get(family, {})})
    return publish_gguf(saved, folder / "published", family, MIXED)


def of_checkpoint(spec: ModelSpec) -> ModelSpec:
    """Return what the checkpoint's form does not change."""
    layers = tuple(replace(layer, mlp=cut_anywhere(layer.mlp)) for layer in spec.layers)
    mtp = spec.mtp
    if mtp is not None:
        mtp = replace(mtp, layer=replace(mtp.layer, mlp=cut_anywhere(mtp.layer.mlp)))
    return replace(spec, quantization=None, dtype="float32", tensors={}, layers=layers, mtp=mtp)


def cut_anywhere(mlp: MLP) -> MLP:
    """Return an MLP whose experts may be cut between any inner states, as those of plain numbers."""
    if isinstance(mlp, ParallelMlpSpec):
        return replace(mlp, routed=replace(mlp.routed, inner_multiple=1))
    return replace(mlp, inner_multiple=1) if isinstance(mlp, RoutedMLP) else mlp


@pytest.mark.parametrize("family", GGUF_FAMILIES)
def test_every_rank_has_its_part_of_the_numbers_that_were_converted(family: str, tmp_path: Path) -> None:
    shown, plain = make(tmp_path, family)
    assert of_checkpoint(read_model(shown)) == of_checkpoint(read_model(plain))
    for rank, ranks in ((0, 1), (0, 2), (1, 2)):
        found, expected = (weights_of(each, rank=rank, ranks=ranks) for each in (shown, plain))
        for layer in range(found.spec.num_layers):
            mine, theirs = (dict(tensors_of(weights.layer(layer))) for weights in (found, expected))
            assert mine.keys() == theirs.keys() and len(mine) > 5
            for part, tensor in mine.items():
                assert torch.equal(tensor, theirs[part]), f"{part} of layer {layer} on rank {rank} of {ranks}"
        assert torch.equal(found.embedding(), expected.embedding())
        assert torch.equal(found.head(), expected.head())
        assert torch.equal(found.final_norm(), expected.final_norm())


def test_experts_of_gpt_oss_in_mxfp4_stay_packed(tmp_path: Path) -> None:
    sizes = {"intermediate_size": 128, "num_hidden_layers": 2}
    saved = make_tiny_target(tmp_path / "saved", "gpt_oss", swiglu_limit=7.0, **sizes)
    shown, plain = publish_gguf(saved, tmp_path / "published", "gpt_oss", ["MXFP4"])
    for rank, ranks in ((0, 1), (1, 2)):
        found, expected = (weights_of(each, rank=rank, ranks=ranks) for each in (shown, plain))
        for layer in range(2):
            mlp = found.layer(layer).mlp
            assert isinstance(mlp, RoutedTensors) and isinstance(mlp.experts.gate_up, PackedCodes)
            mine, theirs = (dict(tensors_of(weights.layer(layer))) for weights in (found, expected))
            for part, tensor in mine.items():
                assert torch.equal(tensor, theirs[part]), f"{part} of layer {layer} on rank {rank} of {ranks}"


@pytest.mark.parametrize("family", ["glm4_moe", "qwen3_5", "qwen3_5_moe"])
def test_a_layer_for_multi_token_prediction_is_read(family: str, tmp_path: Path) -> None:
    saved = make_mtp_target(tmp_path / "saved", family)
    shown, plain = publish_gguf(saved, tmp_path / "published", family, ["Q8_0", "F16"])
    spec = read_model(shown)
    assert of_checkpoint(spec) == of_checkpoint(read_model(plain)) and spec.mtp is not None
    tensors, expected = open_checkpoint(shown, spec), load_file(plain / "model.safetensors")
    names = [name for name in tensors.shapes if name.startswith(("mtp.", "model.layers.4."))]
    assert len(names) > 12
    for name in names:
        if "experts." not in name:
            assert torch.equal(tensors.get(name).float(), expected[name]), name


def test_matrices_are_read_as_codes_of_the_same_values_whole_and_in_parts(tmp_path: Path) -> None:
    shown, plain = make(tmp_path, "qwen3")
    quantization = read_model(shown).quantization
    assert quantization is not None
    tensors = QuantizedFolder(shown, quantization, torch.float32)
    expected = load_file(plain / "model.safetensors")
    kinds: dict[str, bool] = {}
    for name, dtype in tensors.dtypes.items():
        if expected[name].dim() != 2:
            continue
        width = expected[name].shape[1]
        for part, dim in ((slice(3, 30), 0), (slice(5, 40), 1), (slice(32, width), 1), (None, 0)):
            values = expected[name]
            if part is not None:
                values = values[part] if dim == 0 else values[:, part]
                assert torch.equal(tensors.slice(name, part, dim), values)
            codes = tensors.codes(name, part, dim)
            assert codes is None or torch.equal(codes.dequantized(torch.float32), values)
            kinds[dtype] = codes is not None
        form = quantization.packed_form(name.removesuffix(".weight"))
        assert (form is not None) == kinds[dtype], dtype
    assert {kind for kind, is_packed in kinds.items() if is_packed} >= {
        "Q8_0",
        "Q4_0",
        "Q6_K",
        "Q4_1",
        "Q4_K",
    }


def test_a_split_file_is_one_model(tmp_path: Path) -> None:
    saved = make_tiny_target(tmp_path / "saved", "llama")
    shown, plain = publish_gguf(saved, tmp_path / "published", "llama", split=5)
    named = json.loads((shown / "config.json").read_text())["quantization_config"]["files"]
    assert len(named) > 5 and all(Path(each).is_absolute() and Path(each).exists() for each in named)
    found, expected = weights_of(shown), weights_of(plain)
    assert torch.equal(found.layer(3).qkv_OH, expected.layer(3).qkv_OH)
    assert torch.equal(found.head(), expected.head())


@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen3_moe"])
def test_greedy_tokens_are_those_of_transformers_on_the_dequantized_values(
    family: str, tmp_path: Path
) -> None:
    shown, plain = make(tmp_path, family)
    model, prompts = transformers_model(plain), [[5, 9, 100, 3, 77], list(range(40, 70))]
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    how = {"dtype": "float32", "skip_tokenizer_init": True, "max_model_len": 128, "num_pages": 60}
    with LLM(str(shown), **how, num_threads=1) as llm:
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params)
    for prompt, output in zip(prompts, outputs, strict=True):
        theirs = model.generate(
            torch.tensor([prompt]), max_new_tokens=24, min_new_tokens=24, do_sample=False, pad_token_id=0
        )
        assert output.outputs[0].token_ids == theirs[0, len(prompt) :].tolist()


def test_a_plan_names_the_types_of_the_file(tmp_path: Path) -> None:
    saved = make_tiny_target(tmp_path / "saved", "llama")
    shown, _ = publish_gguf(saved, tmp_path / "published", "llama", ["Q8_0", "Q4_0"])
    plan = resolve_config(settings(shown, num_pages=80))
    (said,) = describe_weights(plan, {"target": WeightCounts()})
    assert "target's checkpoint is quantized (gguf: Q4_0, Q8_0)" in said
    assert plan.doubts == ()


def rewritten(file: Path, change: Callable[[bytes], bytes]) -> None:
    content = file.read_bytes()
    assert change(content) != content
    file.write_bytes(change(content))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ((b"\0\0llama", b"\0\0mamba"), "general.architecture='mamba' must be one of llama, "),
        ((b"blk.1.attn_q.weight", b"blk.1.attn_z.weight"), r"blk\.1\.attn_z\.weight is no tensor of llama"),
        ((b"blk.1.attn_q.weight", b"blk.1.attn_q.wright"), r"blk\.1\.attn_q\.wright is no tensor of llama"),
        ((b"blk.1.attn_q.weight", b"blk.7.attn_q.weight"), r"1\.self_attn\.q_proj\.weight is missing"),
        ((b"token_embd.weight", b"token_embt.weight"), r"has no token_embd\.weight"),
        ((b"llama.block_count", b"llama.block_coun_"), r"llama\.block_count is missing; it must be a pos"),
    ],
)  # fmt: skip
def test_what_is_not_supported_is_refused_by_name(
    change: tuple[bytes, bytes], says: str, tmp_path: Path
) -> None:
    saved = make_tiny_target(tmp_path / "saved", "llama")
    shown, _ = publish_gguf(saved, tmp_path / "published", "llama")
    file = tmp_path / "published" / "model.gguf"
    rewritten(file, lambda content: content.replace(*change))
    with pytest.raises(CheckpointError, match=says):
        config_of(GgufFile(file))
        weights_of(shown)


@pytest.mark.parametrize(
    ("family", "change", "says"),
    [
        ("gpt_oss", (b"blk.0.ffn_up_exps.weight", b"blk.7.ffn_up_exps.weight"), r"needs blk\.0\.ffn_up_exps"),
        ("deepseek_v3", (b"blk.1.attn_v_b.weight", b"blk.6.attn_v_b.weight"), r"needs blk\.1\.attn_v_b"),
        ("qwen3_5", (b"group_count\4\0\0\0\4", b"group_count\4\0\0\0\7"), "linear_num_value_heads"),
        ("qwen3_moe", (b"expert_count\4\0\0\0\4", b"expert_count\4\0\0\0\5"), r"expert_count=5 must be the"),
    ],
)  # fmt: skip
def test_tensors_that_do_not_belong_together_are_refused(
    family: str, change: tuple[bytes, bytes], says: str, tmp_path: Path
) -> None:
    shown, _ = make(tmp_path, family)
    file = tmp_path / "published" / "model.gguf"
    rewritten(file, lambda content: content.replace(*change))
    with pytest.raises(CheckpointError, match=says):
        config_of(GgufFile(file))
        shutil.rmtree(shown)
        weights_of(show(file, shown))


def test_scales_that_are_no_numbers_are_refused(tmp_path: Path) -> None:
    saved = make_tiny_target(tmp_path / "saved", "llama")
    shown, _ = publish_gguf(saved, tmp_path / "published", "llama")
    path = tmp_path / "published" / "model.gguf"
    offset = GgufFile(path).tensors["blk.2.ffn_up.weight"].offset
    rewritten(path, lambda content: content[:offset] + b"\xff\x7f" + content[offset + 2 :])
    with pytest.raises(
        CheckpointError, match=r"layers\.2\.mlp\.up_proj\.weight holds scales that are no finite"
    ):
        weights_of(shown).layer(2)


def test_a_type_without_a_decoder_is_refused(tmp_path: Path) -> None:
    writer = GGUFWriter(tmp_path / "model.gguf", "llama")
    writer.add_tensor("token_embd.weight", np.zeros((4, 18), np.uint8), raw_dtype=GGMLQuantizationType.Q1_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(CheckpointError, match=r"stores token_embd\.weight as Q1_0, which is not supported"):
        GgufFolder(tmp_path, GgufFile(tmp_path / "model.gguf"))
