"""gpt-oss as on the Hub: packed experts in shards, published keys, its norms in bf16."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from manta import LLM, SamplingParams
from manta.actors.targets.loading.rank_loader import load_runner
from manta.actors.targets.model.mlp_weights import RoutedTensors
from manta.actors.targets.model.weights import LayerWeights
from manta.drafter.compute.checkpoint.packed_codes import PackedCodes
from manta.drafter.compute.cpu_numba.backend import NumbaBackend
from manta.drafter.compute.layers.linear import RMSNorm
from manta.drafter.compute.layers.moe import ExpertWeights
from safetensors.torch import load_file
from support.checkpoints.gpt_oss_checkpoints import publish
from support.checkpoints.tiny import make_tiny_target
from support.engines.steps import settings
from support.engines.thread_ranks import PROMPTS, tokens_by_steps, tokens_of_ranks
from support.oracles.decoder_requests import weights_of
from support.published.published import CONFIGS, spec_of_config
from transformers import AutoModelForCausalLM, Mxfp4Config, PreTrainedModel

HOW: dict[str, Any] = {
    "dtype": "float32",
    "skip_tokenizer_init": True,
    "max_model_len": 128,
    "num_pages": 40,
    "num_threads": 1,
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_target(tmp_path_factory.mktemp("saved"), "gpt_oss", intermediate_size=128)


@pytest.fixture(scope="module")
def published(saved: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return publish(saved, tmp_path_factory.mktemp("published") / "model")


@pytest.fixture(scope="module")
def theirs(published: Path) -> PreTrainedModel:
    """Return transformers' model of the published checkpoint, with dequantized experts."""
    how = Mxfp4Config(dequantize=True)
    return AutoModelForCausalLM.from_pretrained(published, dtype=torch.float32, quantization_config=how)


def layer_of(folder: Path, rank: int = 0, world_size: int = 1) -> LayerWeights:
    return weights_of(folder, rank=rank, ranks=world_size).layer(1)


def experts_of(folder: Path, rank: int = 0, world_size: int = 1) -> ExpertWeights:
    mlp = layer_of(folder, rank, world_size).mlp
    assert isinstance(mlp, RoutedTensors)
    return mlp.experts


def test_omitted_config_keys_have_transformers_defaults(tmp_path: Path) -> None:
    kept = ("architectures", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    sizes = ("vocab_size", "num_local_experts", "experts_per_token", "max_position_embeddings")
    whole = {key: value for key, value in CONFIGS["gpt-oss-20b"].items() if key != "quantization_config"}
    few = {key: whole[key] for key in (*kept, *sizes)}
    spec = spec_of_config(few, tmp_path)
    assert spec.layers == spec_of_config(whole, tmp_path).layers
    assert spec.dtype == "bfloat16", "the file does not say"


def test_a_published_checkpoint_computes_as_transformers(published: Path, theirs: PreTrainedModel) -> None:
    prompts = [[5, 9, 17, 3, 88, 2, 41, 7, 7, 30, 12], [100, 4]]
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    with LLM(str(published), **HOW) as llm:
        ours = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params)
    for prompt, output in zip(prompts, ours, strict=True):
        ids = torch.tensor([prompt])
        found = theirs.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=24, eos_token_id=None
        )
        assert found[0, len(prompt) :].tolist() == output.outputs[0].token_ids


def test_packed_experts_stay_packed_and_their_rows_are_deinterleaved(
    published: Path, theirs: PreTrainedModel
) -> None:
    experts, right = experts_of(published), theirs.model.layers[1].mlp.experts
    assert isinstance(experts.gate_up, PackedCodes) and isinstance(experts.down, PackedCodes)
    gate_up_EOI = experts.gate_up.dequantized(torch.float32)
    gate_EIH, up_EIH = gate_up_EOI.chunk(2, dim=1)
    assert torch.equal(gate_EIH, right.gate_up_proj[..., 0::2].transpose(1, 2))
    assert torch.equal(up_EIH, right.gate_up_proj[..., 1::2].transpose(1, 2))
    assert torch.equal(experts.down.dequantized(torch.float32), right.down_proj.transpose(1, 2))


@pytest.mark.parametrize("form", ["saved", "published"])
@pytest.mark.parametrize("world_size", [2, 4])
def test_ranks_have_parts_of_each_expert(form: str, world_size: int, request: pytest.FixtureRequest) -> None:
    folder = request.getfixturevalue(form)
    whole = experts_of(folder)
    parts = [experts_of(folder, rank, world_size) for rank in range(world_size)]
    halves = [plain(part.gate_up).chunk(2, dim=1) for part in parts]
    gate_up = torch.cat([half for pair in zip(*halves, strict=True) for half in pair], dim=1)
    assert torch.equal(gate_up, plain(whole.gate_up))
    assert torch.equal(torch.cat([plain(part.down) for part in parts], dim=2), plain(whole.down))
    assert whole.gate_up_bias_EI is not None
    biases = [part.gate_up_bias_EI.chunk(2, dim=1) for part in parts if part.gate_up_bias_EI is not None]
    assert torch.equal(
        torch.cat([half for pair in zip(*biases, strict=True) for half in pair], dim=1), whole.gate_up_bias_EI
    )


def test_ranks_have_whole_experts_if_blocks_do_not_divide(tmp_path: Path) -> None:
    target = make_tiny_target(tmp_path / "saved", "gpt_oss", intermediate_size=96)
    folder = publish(target, tmp_path / "published")
    whole = experts_of(folder)
    parts = [experts_of(folder, rank, 2) for rank in range(2)]
    assert torch.equal(torch.cat([plain(part.gate_up) for part in parts]), plain(whole.gate_up))
    assert torch.equal(torch.cat([plain(part.down) for part in parts]), plain(whole.down))
    assert [part.first_expert for part in parts] == [0, 4]
    assert experts_of(target, 1, 2).first_expert == 0, "unpacked they divide"
    alone, _ = load_runner(settings(folder, num_pages=80, num_threads=1))
    expected = tokens_by_steps(alone, PROMPTS, 2)
    split = settings(folder, num_pages=80, num_threads=1, tensor_parallel_size=2)
    assert tokens_of_ranks(split, 2) == expected


def test_ranks_have_the_sinks_of_their_heads_and_rank_0_the_biases_of_sums(saved: Path) -> None:
    stored = load_file(saved / "model.safetensors")
    first, second = (layer_of(saved, rank, 2) for rank in range(2))
    assert first.sinks_Q is not None and second.sinks_Q is not None
    assert torch.equal(torch.cat((first.sinks_Q, second.sinks_Q)), stored["model.layers.1.self_attn.sinks"])
    of_experts = (experts_of(saved, rank, 2).down_bias_EH for rank in range(2))
    for of_rank_0, of_rank_1 in ((first.o_bias_H, second.o_bias_H), tuple(of_experts)):
        assert of_rank_0 is not None and of_rank_0.count_nonzero() > 0
        assert of_rank_1 is not None and torch.equal(of_rank_1, torch.zeros_like(of_rank_0))


def plain(weight: torch.Tensor | PackedCodes) -> torch.Tensor:
    return weight.dequantized(torch.float32) if isinstance(weight, PackedCodes) else weight


def test_norms_round_once_as_the_models_own_code_does() -> None:
    """gpt-oss multiplies by norm weights before the cast, Llama after it."""
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssRMSNorm

    generator = torch.Generator().manual_seed(0)
    weight_H = (1 + 0.3 * torch.randn(256, generator=generator)).bfloat16()
    x_NH = torch.randn(64, 256, generator=generator).bfloat16()
    theirs = GptOssRMSNorm(256, 1e-5)
    theirs.weight.data = weight_H.float()  # transformers keeps these in fp32
    assert torch.equal(RMSNorm(weight_H, 1e-5)(x_NH), theirs(x_NH))
    assert torch.equal(NumbaBackend().norm(RMSNorm(weight_H, 1e-5), x_NH), theirs(x_NH))
