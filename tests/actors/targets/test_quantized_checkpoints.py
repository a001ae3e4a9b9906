"""Targets with quantized checkpoints compute with the numbers that the formats define, on all ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from manta import LLM, SamplingParams
from manta.actors.targets.loading.resolved_config import resolve_config
from manta.actors.targets.loading.weight_report import WeightCounts, describe_weights
from manta.cluster.config import EngineConfig
from manta.cluster.errors import CheckpointError, ConfigError
from safetensors.torch import load_file, save_file
from support.checkpoints.mtp_targets import make_mtp_target
from support.checkpoints.tiny import make_tiny_drafter, make_tiny_target
from support.engines.steps import settings
from support.engines.thread_ranks import PROMPTS
from support.oracles.decoder_requests import weights_of
from support.oracles.quantized_checkpoints import FORMATS, KINDS, publish, tensors_of
from support.oracles.sampling_cases import WHOLE

FAMILIES = {
    "qwen3": {},
    "gemma3": {"hidden_size": 96},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64},
}
AS_PUBLISHED = {  # in the format of their experts
    "minimax_m2": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "deepseek_v3": {
        **{"moe_intermediate_size": 64, "first_k_dense_replace": 1},
        **{"q_lora_rank": 32, "v_head_dim": 16},
    },
}
HOW = {
    "dtype": "float32",
    "skip_tokenizer_init": True,
    "max_model_len": 128,
    "num_pages": 60,
    "num_threads": 1,
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {
        family: make_tiny_target(tmp_path_factory.mktemp(family), family, num_hidden_layers=2, **changes)
        for family, changes in (FAMILIES | AS_PUBLISHED).items()
    }


@pytest.mark.parametrize(
    ("family", "name"),
    [
        *(
            (family, name)
            for f, family in enumerate(FAMILIES)
            for n, name in enumerate(FORMATS)
            if WHOLE or f == n % len(FAMILIES)
        ),
        ("minimax_m2", "fp8_blocks"),
        ("deepseek_v3", "ct_w4a16"),
    ],
)
def test_every_rank_has_its_part_of_the_numbers_of_the_format(
    saved: dict[str, Path], family: str, name: str, tmp_path: Path
) -> None:
    quantized, plain = publish(saved[family], tmp_path, name)
    for rank, ranks in ((0, 1), (0, 2), (1, 2)):
        found, expected = (weights_of(each, rank=rank, ranks=ranks) for each in (quantized, plain))
        assert found.spec.quantization is not None and expected.spec.quantization is None
        for layer in range(2):
            mine, theirs = (dict(tensors_of(weights.layer(layer))) for weights in (found, expected))
            assert mine.keys() == theirs.keys() and len(mine) > 5
            for part, tensor in mine.items():
                assert torch.equal(tensor, theirs[part]), f"{part} of layer {layer} on rank {rank} of {ranks}"
        assert torch.equal(found.head(), expected.head())


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", KINDS)
def test_outputs_are_the_same_with_and_without_a_quantized_drafter(name: str, tmp_path: Path) -> None:
    target, _ = publish(make_tiny_target(tmp_path / "target", "qwen3"), tmp_path / "quantized", name)
    drafter, _ = publish(make_tiny_drafter(tmp_path / "drafter"), tmp_path / "drafters", name)
    prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)

    def answers(**more: object) -> list[list[int]]:
        with LLM(str(target), **HOW, **more) as llm:
            return [output.outputs[0].token_ids for output in llm.generate(prompts, params)]

    spec = {"model": str(drafter), "num_speculative_tokens": 3, "adaptive": False}
    assert answers(speculative_config=spec) == answers()


@pytest.mark.parametrize(
    "unquantized", [r"layers\.1\.", r"shared_experts?\.", r"experts\.[13]\.", r"(k|v|down)_proj"]
)
def test_modules_in_16_bits_that_config_json_does_not_name_are_read_as_they_are(
    unquantized: str, saved: dict[str, Path], tmp_path: Path
) -> None:
    quantized, plain = publish(saved["deepseek_v3"], tmp_path, "ct_w4a16", unquantized=unquantized)
    found, expected = weights_of(quantized), weights_of(plain)
    for layer in range(2):
        mine, theirs = (dict(tensors_of(weights.layer(layer))) for weights in (found, expected))
        assert mine.keys() == theirs.keys() and len(mine) > 5
        for part, tensor in mine.items():
            assert torch.equal(tensor, theirs[part]), f"{part} of layer {layer}"


@pytest.mark.parametrize("name", ["ct_w4a16", "ct_fp8_channel", "ct_int8", "fp8_blocks"])
def test_a_layer_for_multi_token_prediction_in_16_bits_drafts_for_a_quantized_target(
    name: str, tmp_path: Path
) -> None:
    saved = make_mtp_target(tmp_path / "saved", "glm4_moe", num_hidden_layers=4)
    quantized, _ = publish(saved, tmp_path, name, unquantized=r"layers\.4\.")
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]

    def answers(**more: object) -> list[list[int]]:
        with LLM(str(quantized), **{**HOW, "dtype": "auto"}, **more) as llm:
            return [output.outputs[0].token_ids for output in llm.generate(prompts, params)]

    spec = {"method": "mtp", "num_speculative_tokens": 2, "adaptive": False}
    assert answers(speculative_config=spec) == answers()


def test_a_plan_says_what_is_dequantized_and_what_is_not_used(saved: dict[str, Path], tmp_path: Path) -> None:
    quantized, _ = publish(saved["qwen3"], tmp_path, "modelopt_nvfp4")
    plan = resolve_config(settings(quantized, num_pages=80))
    (said,) = describe_weights(plan, {"target": WeightCounts()})
    assert "target's checkpoint is quantized (modelopt: NVFP4)" in said and "dequantized at load" in said
    of_activations, of_cache = plan.doubts
    assert "activations are not quantized here; 14 stored scales are not used" in of_activations
    assert "K and V are quantized by kv_cache_dtype alone; 2 stored scales" in of_cache
    dynamic, _ = publish(saved["qwen3"], tmp_path / "dynamic", "fp8_blocks")
    (of_activations,) = resolve_config(settings(dynamic, num_pages=80)).doubts
    assert of_activations.endswith("activations are not quantized here.")


def test_biases_of_zeros_that_config_json_does_not_declare_are_ignored(
    saved: dict[str, Path], tmp_path: Path
) -> None:
    """GPTQ's files have a bias for every module; others than zeros are refused."""
    quantized, _ = publish(
        make_tiny_target(tmp_path / "llama", "llama", num_hidden_layers=2), tmp_path, "gptq"
    )
    file = quantized / "model.safetensors"
    tensors = load_file(file)
    biases = {f"model.layers.{layer}.mlp.down_proj.bias": torch.zeros(64) for layer in range(2)}
    save_file({**tensors, **biases}, file)
    weights_of(quantized)
    biases["model.layers.1.mlp.down_proj.bias"][3] = 1.0
    save_file({**tensors, **biases}, file)
    with pytest.raises(CheckpointError, match=r"down_proj\.bias, but config\.json declares none"):
        weights_of(quantized)


@pytest.mark.parametrize(
    ("word", "name"),
    [
        ("awq", "awq"),
        ("awq_marlin", "awq"),
        ("gptq_marlin", "gptq"),
        ("compressed-tensors", "ct_w4a16"),
        ("modelopt", "modelopt_nvfp4"),
        ("auto-round", "auto_round_gptq"),
        ("fp8", "fp8_blocks"),
        ("fp8", "fbgemm_fp8"),
    ],
)
def test_the_name_of_its_own_format_changes_nothing(tmp_path: Path, word: str, name: str) -> None:
    """As vLLM's command lines have it; also of a drafter."""
    target, plain = publish(make_tiny_target(tmp_path / "saved", "qwen3"), tmp_path / "target", name)
    drafter, _ = publish(make_tiny_drafter(tmp_path / "small"), tmp_path / "drafter", name)
    given = {"model": str(target), "quantization": word, "device": "cpu", **HOW}
    spec = {"model": str(drafter), "quantization": word}
    plan = resolve_config(EngineConfig.from_dict({**given, "speculative_config": spec}))
    named = plan.config.speculative_config
    assert named is not None and (plan.config.quantization, named.quantization) == (None, None)
    other = "gptq" if name == "awq" else "awq"
    with pytest.raises(ConfigError, match=f"quantization='{other}': the checkpoint is quantized as "):
        resolve_config(EngineConfig.from_dict({**given, "quantization": other}))
    if word != "fp8":
        with pytest.raises(ConfigError, match="the checkpoint is not quantized"):
            resolve_config(EngineConfig.from_dict({**given, "model": str(plain)}))
